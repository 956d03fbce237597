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
from offload.core.config import format_size
from offload.params import units
from offload.telemetry import run_file
from offload.telemetry.figures import key_figures, memory_of
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.words import MOVES, show_part, show_seconds, show_share
from offload.tools import cli
from offload.tools.html_report import make_page

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]
STEPS = 6
HOST_BYTES = 90 << 10  # room for one unit at a time, and gradients on disk
CELLS = ("th", "td", "dt", "dd")


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
        if name in CELLS:
            self._is_in_cell = True
            self.rows[-1].append("")

    def handle_endtag(self, name: str) -> None:
        self._is_in_cell &= name not in CELLS

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
        offload.prepare(self.model, self.optimizer, host_memory=HOST_BYTES, nvme=folder)
        out, writer = io.StringIO(), Scalars()
        line: Any = offload.progress(
            range(STEPS), self.optimizer, file=out, tokens=9, log_to=writer, log_every=STEPS + 1
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


def words(text: str) -> str:
    """Return the text on one line: a report breaks long ones, markup has space around them."""
    return " ".join(text.replace(" -> ", " ").split())


def test_key_figures_are_the_same_in_page_and_text(told: Told) -> None:
    figures = key_figures(told.report.run_facts)
    assert figures == key_figures(RunFacts.of(told.run))
    names = ["time of an iteration", "share of the ceiling", "waiting", "host memory"]
    assert [figure.name for figure in figures] == [*names, "prefetch hits"]
    for figure in figures:
        card = told.page.named(figure.name)[0]  # before all tables
        assert [card[0], words(card[1]).removesuffix(" What helps").removesuffix(" See below")] == [
            figure.text,
            figure.note,
        ]
        line = rf"^{figure.name} +{re.escape(figure.text)} \({re.escape(figure.note)}\)$"
        assert re.search(line, str(told.report), re.M)


def test_hints_are_the_same_in_page_text_and_json(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    """A budget for one unit at a time: blocks are late, whatever the machine does."""
    figures = {figure.name: figure.hints for figure in key_figures(told.report.run_facts)}
    assert figures["prefetch hits"] and "on disk" in words(str(told.report))
    page, text = words(told.page.text), words(str(told.report))
    for hints in figures.values():
        for hint in hints:
            whole = " ".join([hint.fact, *hint.ways])
            assert whole in page and whole in text
    assert cli.main(["report", str(told.path), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["runs"]
    expected = {name: [hint._asdict() for hint in hints] for name, hints in figures.items()}
    assert data["hints"] == json.loads(json.dumps({n: h for n, h in expected.items() if h}))


def test_the_summary_is_the_same_in_json_and_lines(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told.report.iterations
    assert found == told.run.iterations == told.report.run_facts.found
    assert found.is_whole and found.steps == STEPS and found.stall_share is not None
    assert cli.main(["report", str(told.path), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["runs"]
    assert {name: data[name] for name in found.to_dict()} == found.to_dict()
    assert cli.main(["report", str(told.path), "-o", str(told.path.with_name("x.html"))]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    time = show_seconds(found.typical_s)
    assert f"{time} an iteration (median)" in line
    assert f"{show_share(found.stall_share)} waiting" in line
    assert f"An iteration takes {time} (median)" in told.page.text


def test_memory_is_the_same_in_page_text_line_and_json(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = memory_of(told.report.run_facts)
    assert memory == memory_of(RunFacts.of(told.run)) and {"host", "process"} <= memory.keys()
    assert (
        memory["host"].nbytes == told.report.host_bytes == told.report.live_numbers()["host_bytes"]
    )
    assert memory["host"].nbytes <= memory["host"].budget_bytes == HOST_BYTES
    for one in memory.values():
        (row,) = told.page.named(f"{one.name}, {one.what}")
        assert row[1] == format_size(one.nbytes)
    text = str(told.report)
    assert re.search(rf"^host memory, taken +{format_size(memory['host'].nbytes)}: ", text, re.M)
    assert re.search(rf"^disk, in use +{format_size(memory['disk'].nbytes)}$", text, re.M)
    assert f"host {format_size(memory['host'].nbytes)}, disk " in told.line
    assert cli.main(["report", str(told.path), "--json"]) == 0
    (data,) = json.loads(capsys.readouterr().out)["runs"]
    assert {tier: each["bytes"] for tier, each in data["memory"].items()} == {
        tier: one.nbytes for tier, one in memory.items()
    }


def test_numbers_of_now_are_those_of_the_run_where_all_of_it_is_now(told: Told) -> None:
    found, live = told.report.iterations, told.report.live_numbers()
    assert live["stall_share"] == told.logged["offload/stall_share"] == found.stall_share
    assert live["iteration_seconds"] == told.logged["offload/iteration_seconds"]
    assert live["iteration_seconds"] == found.typical_s and live["step_seconds"] == found.step_s
    assert live["tokens_per_s"] == found.tokens_per_s == 9 / found.typical_s
    assert live["hit_rate"] == found.hit_rate
    assert live["disk_read_bytes"] == found.moved["disk_read_bytes"]
    of_line = told.report.live_numbers(1)
    assert f"| {of_line['tokens_per_s']:,.0f} tokens/s |" in told.line
    assert f"| {show_seconds(of_line['iteration_seconds'])} an iteration |" in told.line
    assert f"waiting {of_line['stall_share']:.0%} |" in told.line
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


def test_parts_add_up_to_the_seconds_of_an_iteration(told: Told) -> None:
    found = told.report.iterations
    assert sum(found.parts.values()) == pytest.approx(found.typical_s)
    assert sum(found.stalls.values()) == pytest.approx(found.stall_share * found.typical_s)
    shown = 0
    for part, seconds in found.parts.items():
        one, share = show_seconds(seconds), show_share(seconds / found.typical_s)
        rows = told.page.named(show_part(part))
        assert rows == [] or rows[0][1:] == [one, share]
        line = re.search(rf"^  {re.escape(show_part(part))}  +(.*)$", str(told.report), re.M)
        if line is not None:
            shown += 1
            assert line[1].startswith(f"{one} ") and f" {share}" in line[1]
    assert shown >= 2


def test_bytes_have_one_name(told: Told) -> None:
    for counter, text in MOVES.items():
        if told.report.total.moved[counter] and told.report.iterations.moved.get(counter):
            size = format_size(round(told.report.iterations.moved[counter]))
            assert told.page.named(text)[0][0] == size
            assert re.search(rf"^{text}  +{size} ", str(told.report), re.M)
