"""One run, told by all that tell of it: the same number has one name, and one name one number."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import batch, loss_of, make

import offload
from offload.params import units
from offload.telemetry import run_file
from offload.telemetry.iterations import iterations_of
from offload.telemetry.words import MOVES, key_numbers, show_part, show_seconds, show_share
from offload.tools import cli
from offload.tools.html_report import make_page

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]
STEPS = 6


class Cells(HTMLParser):
    """A parser that collects the text of a page, and the cells of its tables and cards by row."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text = ""
        self.rows: list[list[str]] = []
        self._is_in_cell = False
        self.feed(page)

    def handle_starttag(self, name: str, attributes: Any) -> None:
        if name in ("tr", "dt"):
            self.rows.append([])
        self._is_in_cell = name in ("th", "td", "dt", "dd")
        if self._is_in_cell:
            self.rows[-1].append("")

    def handle_endtag(self, name: str) -> None:
        self._is_in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._is_in_cell:
            self.rows[-1][-1] += data

    def named(self, name: str) -> list[list[str]]:
        return [row[1:] for row in self.rows if row and row[0] == name]


class Scalars:
    """A stand-in for TensorBoard's writer: it keeps what was written last."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.seen[tag] = value


class Told:
    """All that is told of one run of a prepared model."""

    def __init__(self, folder: Path) -> None:
        self.model = make("gpt")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        offload.prepare(self.model, self.optimizer, host_memory=140 << 10, nvme=folder)
        out, writer = io.StringIO(), Scalars()
        line: Any = offload.progress(
            range(STEPS), self.optimizer, file=out, log_to=writer, log_every=STEPS + 1
        )
        for seed in line:
            loss_of(self.model, batch(seed)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.line, self.logged = out.getvalue().splitlines()[-1], writer.seen
        self.report = offload.report(self.optimizer)
        self.path = folder / "run.json"
        self.report.save_trace(self.path)
        self.run = run_file.load(self.path)
        self.page = Cells(make_page([self.run], ["run.json"]))


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    made = Told(tmp_path)
    yield made
    offload.close(made.model)


def test_key_numbers_are_those_of_every_teller(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told.report.iterations
    assert found.is_whole and found.steps == STEPS and found.stall_share is not None
    names = ["seconds an iteration", "share of the ceiling", "waiting", "hit rate"]
    assert [name for name, _, _ in key_numbers(found)] == names
    for name, text, note in key_numbers(found):
        assert told.page.named(name) == [[text, note]]
        assert re.search(
            rf"^{name} +{re.escape(text)} \({re.escape(note)}\)$", str(told.report), re.M
        )
    assert cli.main(["report", str(told.path), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["runs"]
    assert {name: data[name] for name in found.to_dict()} == found.to_dict()
    assert cli.main(["report", str(told.path), "-o", str(told.path.with_name("x.html"))]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert f"{show_seconds(found.typical_s)} an iteration" in line
    assert f"{show_share(found.stall_share)} waiting" in line


def test_waits_are_the_same_in_page_line_and_logs(told: Told) -> None:
    found = told.report.iterations
    assert told.report.live_numbers()["stall_share"] == found.stall_share
    assert told.logged["offload/stall_share"] == found.stall_share
    assert f"waiting {found.stall_share:.0%} |" in told.line
    assert f"{show_share(found.stall_share)} of it is waiting" in told.page.text


def test_the_trainer_logs_the_numbers_of_the_report(told: Told) -> None:
    huggingface = pytest.importorskip("offload.integrations.huggingface")
    callback = huggingface.TrainerCallback.__new__(huggingface.TrainerCallback)
    callback._trainer = SimpleNamespace(model=told.model, optimizer=told.optimizer)
    callback._steps_logged = 0
    live = told.report.live_numbers()
    del live["disk_bytes"]  # of now: writes may still be in flight
    for logged in (callback._numbers(), told.logged):
        assert {name: logged[f"offload/{name}"] for name in live} == live


def test_the_last_iteration_is_the_same_in_text_page_and_logs(told: Told) -> None:
    last, model = [*iterations_of(told.run.about.steps)][-1], told.report.model
    assert model is not None and last.total_s is not None
    assert model.round_s == pytest.approx(last.total_s)
    assert model.stall_share == pytest.approx(last.waited_s / last.total_s)
    (row,) = told.page.named(str(last.number))
    assert row[0] == show_seconds(model.round_s) and row[2] == show_seconds(model.round_waited_s)
    share = show_share(model.stall_share)
    assert f"last iteration  {row[0]}, waited {row[2]} ({share})" in re.sub(
        r"(?m)^(last iteration) +", r"\1  ", str(told.report)
    )
    live = told.report.live_numbers()
    assert live["disk_read_bytes"] == last.counts["disk_read_bytes"]
    assert live["step_seconds"] == told.report.last.step_s
    assert live["hit_rate"] == model.hit_rate == told.report.iterations.hit_rate


def test_parts_add_up_to_the_seconds_of_an_iteration(told: Told) -> None:
    found = told.report.iterations
    assert sum(found.parts.values()) == pytest.approx(found.typical_s)
    assert sum(found.stalls.values()) == pytest.approx(found.stall_share * found.typical_s)
    for part, seconds in found.parts.items():
        rows = told.page.named(show_part(part))
        assert rows == [] or rows[0][1] == show_seconds(seconds)


def test_bytes_have_one_name(told: Told) -> None:
    for counter, text in MOVES.items():
        if told.report.total.moved[counter] and told.report.iterations.moved.get(counter):
            assert told.page.named(text), "the page has it"
            assert re.search(rf"^{text}  ", str(told.report), re.M), "and so has the text"
