"""The table of what common machines train: its cells, and the documents that show it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offload.tools.forecast import size_table
from offload.tools.forecast.forecaster import forecast
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.size_table import SizeTable, make_table

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def small() -> SizeTable:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(size_table, "_GPUS", {16: "rtx4080-1ssd", 24: "rtx4090-1ssd"})
        patch.setattr(size_table, "_HOST_GIB", (32, 128))
        patch.setattr(size_table, "_SIZES", ("350M", "1.1B", "3B", "7B"))
        patch.setattr(size_table, "_SEQUENCE", 1024)
        return make_table()


def test_a_cell_is_the_forecast_of_that_machine(small: SizeTable) -> None:
    (cell,) = (
        c for c in small.cells if (c.gpu_gb, c.host_gib, c.drives, c.lora) == (24, 128, 1, False)
    )
    asked = {"sequence": 1024, "activations": "recompute", "on": "rtx4090-1ssd"}
    assert cell.largest == "7B"  # that profile has 128 GiB and one drive
    told = forecast(ForecastRequest.of(cell.largest, **asked))
    assert told.timing is not None and cell.step_s == pytest.approx(told.timing.step_s)


def test_more_of_anything_never_trains_less(small: SizeTable) -> None:
    size = {name: number for number, name in enumerate(("350M", "1.1B", "3B", "7B"))}
    found = {
        (c.gpu_gb, c.host_gib, c.drives, c.lora): size.get(c.largest or "", -1) for c in small.cells
    }
    assert len(found) == 2 * 2 * 3 * 2 and max(found.values()) == 3
    for (gpu, host, drives, lora), largest in found.items():
        for other in ((24, host), (gpu, 128)):
            assert found[(*other, drives, lora)] >= largest
        assert found[gpu, host, max(1, drives), lora] >= largest
    assert found[16, 32, 0, False] < found[16, 32, 1, False], "a drive helps"
    assert found[16, 32, 0, False] < found[16, 32, 0, True], "adapters take less"


def test_a_quick_cell_is_quick(small: SizeTable) -> None:
    for cell in small.cells:
        assert cell.quick_step_s is None or cell.quick_step_s <= 60


@pytest.mark.parametrize("line", ["| GPU | RAM | no SSD |", "no GPU has run this yet"])
def test_the_text_has_what_a_reader_needs(small: SizeTable, line: str) -> None:
    assert line in str(small)
    assert str(small).count("| 16 GB | 32 GB |") == 2


def test_documents_show_the_table_that_was_made() -> None:
    made = (ROOT / "docs/sizes.md").read_text()
    rows = re.findall(r"^\| \d+ GB \| \d+ GB \|.*\|$", made, re.M)
    assert len(rows) == 2 * 16, "all machines, of any step and of quick ones"
    shown = re.findall(r"^\| \d+ GB \| \d+ GB \|.*\|$", (ROOT / "README.md").read_text(), re.M)
    assert shown == rows[16:], "README has the quick ones, as they are"
    assert "Predicted from published figures" in made
