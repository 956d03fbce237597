"""`offload report`: files, output and exit codes, and the page in a browser where there is one."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_html_report import EMPTY, EVENTS, HOSTILE, PARAM, RUN, hostile
from torch import nn

import offload
from offload.core.errors import ConfigError
from offload.core.timeline import COMPUTE, STEP, Event
from offload.telemetry import run_file
from offload.tools import cli

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None,
    reason="needs Chromium (apt-get install chromium): test_html_report.py checks the structure",
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    RUN.save(tmp_path / "run.json")
    return tmp_path / "run.json"


@pytest.fixture(scope="module")
def real_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the run of a model most of which is on disk; return the file."""
    directory = tmp_path_factory.mktemp("real")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(6)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = offload.prepare(model, optimizer, host_memory="600KiB", nvme=directory)
    with optimizer:
        for _ in range(3):
            model(torch.randn(8, 128)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        offload.report(model).save_trace(directory / "trace.json")
    return directory / "trace.json"


def report(*words: object) -> int:
    return cli.main(["report", *map(str, words)])


# --- files ----------------------------------------------------------------------------------------


def test_the_page_lies_beside_the_trace_and_is_its_owners_alone(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(trace) == 0
    page = trace.with_suffix(".html")
    assert page.stat().st_mode & 0o777 == 0o600
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    out, err = capsys.readouterr()
    assert "3 steps, 4 s an iteration (median), 7.5 % waiting" in out
    assert f"page: {page}" in out and err == ""


def test_every_kind_of_file_is_made_where_it_is_asked_for(trace: Path, tmp_path: Path) -> None:
    RUN.save(tmp_path / "other.json")
    made = [tmp_path / name for name in ("p.html", "p.png", "p.trace")]
    words = ["-o", made[0], "--png", made[1], "--chrome", made[2]]
    assert report(trace, tmp_path / "other.json", *words) == 0
    assert "Timeline of B: other.json" in made[0].read_text("utf-8")
    assert made[1].read_bytes()[:4] == b"\x89PNG"
    assert {e["pid"] for e in json.loads(made[2].read_text())["traceEvents"]} == {1, 2}
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}
    assert not trace.with_suffix(".html").exists()


def test_json_is_one_object_and_makes_no_file(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(trace, trace, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [run["iteration_seconds"] for run in told["runs"]] == [4.0, 4.0]
    taken = {"bytes": 90 << 20, "is": "taken", "budget_bytes": 100 << 20}
    assert told["runs"][0]["memory"]["host"] == taken
    assert told["files"] == {}
    assert os.listdir(trace.parent) == [trace.name]


def test_a_real_run_is_told_as_its_report_tells_it(
    real_trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(real_trace, "--json") == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    run = run_file.load(real_trace)
    read = [step.counts["disk_read_bytes"] for step in run.about.steps[1:]]
    assert told["bytes"]["disk_read_bytes"] == sum(read) / len(read)
    assert told["iteration_is_whole"] and 0 < told["share_of_ceiling"] <= 1
    assert sum(told["seconds"].values()) == pytest.approx(
        (run.about.steps[-1].end_s - run.about.steps[0].end_s) / 2, rel=0.01
    )


# --- wrong input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["none.json"], "none.json"),
        (["not.json"], "expected what offload.report"),
        (["run.json", "not.json"], "not.json"),
        (["run.json", "-o", "run.json"], "a trace that is read"),
        (["run.json", "-o", "x.html", "--png", "x.html"], "the page as well"),
        (["run.json", "-o", "missing/x.html"], "missing"),
        (["run.json", "--png", "missing/x.png"], "missing"),
        (["run.json", "--png", "."], "something else"),
    ],
)
def test_wrong_input_is_said_and_nothing_is_made(
    trace: Path, capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    (trace.parent / "not.json").write_text("{}")
    whole = trace.read_bytes()
    places = [word if word.startswith("-") else trace.parent / word for word in words]
    assert report(*places) == 2
    out, err = capsys.readouterr()
    assert out == "" and named in err and len(err.splitlines()) == 1
    assert sorted(os.listdir(trace.parent)) == ["not.json", "run.json"]
    assert trace.read_bytes() == whole


def test_a_second_file_that_cannot_be_made_keeps_the_first_from_being_written(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> bytes:
        raise ConfigError("no matplotlib")

    monkeypatch.setattr("offload.tools.cli.report.make_picture", refuse)
    assert report(trace, "-o", trace.with_name("x.html"), "--png", trace.with_name("x.png")) == 2
    assert os.listdir(trace.parent) == [trace.name]


def test_without_matplotlib_the_picture_says_what_to_install(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert report(trace, "--png", trace.with_name("x.png")) == 2
    assert "offload[plots]" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-o", "--png", "--chrome"])
def test_an_interrupted_write_leaves_nothing(
    trace: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    assert report(trace, option, trace.with_name("made")) == 130
    assert os.listdir(trace.parent) == [trace.name]


def test_bad_arguments_leave_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [""], ["a", "b", "c"]):
        with pytest.raises(SystemExit) as refused:
            report(*words)
        assert refused.value.code == 2
    with pytest.raises(SystemExit) as left:
        report("--help")
    assert left.value.code == 0
    assert "offload report run.json -o run.html" in capsys.readouterr().out


def test_a_name_that_does_things_to_a_terminal_is_spelled_out(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = trace.with_name("a\x1b[31mb.json")
    hostile().save(odd)
    assert report(odd, "-o", trace.with_name("x.html")) == 0
    out = capsys.readouterr().out
    assert all(line.isprintable() for line in out.splitlines())


# --- as a program ---------------------------------------------------------------------------------


def test_the_program_makes_a_page(real_trace: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = [sys.executable, "-m", "offload", "report", str(real_trace), "-o", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"page: {page}" in done.stdout
    assert "Sequential" in page.read_text("utf-8")


def test_a_page_needs_no_torch(trace: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from offload.telemetry import run_file\n"
        "from offload.tools import html_report as page\n"
        f"run = run_file.load({str(trace)!r})\n"
        "print(len(page.make_page([run], ['x'])))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10_000


# --- in a browser ---------------------------------------------------------------------------------


def chromium(page: Path, *options: str, width: int = 1280, height: int = 1600) -> tuple[str, str]:
    """Open a page in Chromium; return its stdout, and its log with all of the page's console. The
    browser itself asks no network.
    """
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
        "--enable-logging=stderr",
        "--virtual-time-budget=60000",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={width},{height}",
        *options,
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, timeout=200)
    log = done.stderr.decode("utf-8", "replace")
    assert done.returncode == 0, log
    return done.stdout.decode("utf-8", "replace"), log


def marks(page: Path, width: int = 1280) -> dict[str, str]:
    """Return what the page's script found out about the page, from the data attributes of its root.
    Nothing may have been written to the console.
    """
    dom, log = chromium(page, "--dump-dom", width=width)
    assert "CONSOLE" not in log, log
    (root,) = re.findall(r"<html[^>]*>", dom)
    return dict(re.findall(r'data-(\w+)="([^"]*)"', root))


def looks(page: Path, *options: str) -> Any:
    """Return the pixels of a screenshot: rows of red, green and blue from 0 to 1."""
    image = pytest.importorskip("matplotlib.image")
    picture = page.with_suffix(".png")
    chromium(page, f"--screenshot={picture}", *options)
    return image.imread(picture)[..., :3]


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_everything_and_asks_for_nothing(
    real_trace: Path, tmp_path: Path, width: int
) -> None:
    page = tmp_path / "page.html"
    assert report(real_trace, "-o", page) == 0
    drawn = sum(event.row != STEP for event in run_file.load(real_trace).events)
    assert marks(page, width) == {
        "page": "ready",
        "problems": "",
        "requests": "0",
        "drawn": str(drawn),
        "beyond": "0",
    }


def far_away() -> run_file.Run:
    """Return a run with an event of 1e17 seconds, three billion years."""
    return replace(RUN, events=(*EVENTS, Event(COMPUTE, "forward 0: first", -1e14, 1e17)))


@needs_chromium
@pytest.mark.parametrize("other", [EMPTY, far_away()], ids=["empty", "far away"])
def test_a_browser_draws_hostile_names_beside_any_other_run(
    tmp_path: Path, other: run_file.Run
) -> None:
    hostile().save(tmp_path / "hostile.json")
    other.save(tmp_path / "other.json")
    page = tmp_path / "page.html"
    assert report(tmp_path / "hostile.json", tmp_path / "other.json", "-o", page) == 0
    found = marks(page, 390)
    drawn = sum(event.row != STEP for event in (*hostile().events, *other.events))
    assert (found["page"], found["requests"], found["drawn"]) == ("ready", "0", str(drawn))
    assert found["beyond"] == "0", "long names are broken, not the page"
    assert HOSTILE not in page.read_text("utf-8")


@needs_chromium
def test_a_browser_paints_the_timeline_by_day_and_by_night(trace: Path) -> None:
    assert report(trace) == 0
    page = trace.with_suffix(".html")
    day = looks(page)
    night = looks(page, "--blink-settings=preferredColorScheme=0")
    assert day.mean() > 0.8 and night.mean() < 0.3
    for pixels, colour in ((day, "0072b2"), (night, "3a8fdb")):
        wanted = [int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        painted = (abs(pixels - wanted) < 0.01).all(axis=-1).sum()
        assert painted > 3000, "forward has its colour, in the timeline and in the bars"


HANDS = """
const canvas = document.querySelector("canvas"), told = [], box = canvas.getBoundingClientRect();
const say = () => told.push(document.querySelector(".detail").textContent);
const left = 118, wide = box.width - left - 2; // of what is drawn
const point = (share, y) => {
  const at = { clientX: box.x + left + share * wide, clientY: box.y + y, pointerType: "mouse" };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  say();
};
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
const click = (name) => document.querySelector(`[data-do=${name}]`).click();
point(0.06, 65); // the view is the iteration from 2 s to 6 s
press("0");
point(0.375, 65); // the view is all, from 0 s to 6 s
press("Home");
click("in"); // from 3 s to 5 s
point(0.3, 65);
click("previous"); // the first step
press("."); // the next event after the one that was pointed at; the view goes with it
say();
press(".");
say();
click("units");
told.push(document.querySelector("[data-do=units]").getAttribute("aria-pressed"));
document.body.dataset.told = told.join("|");
"""


@needs_chromium
def test_hands_and_keys_move_the_timeline_and_ask_it(trace: Path) -> None:
    assert report(trace) == 0
    page = trace.with_suffix(".html")
    text = re.sub(r"<meta http-equiv=[^>]*>", "", page.read_text("utf-8"))
    page.write_text(text.replace("</body>", f"<script>{HANDS}</script></body>"), "utf-8")
    dom, log = chromium(page, "--dump-dom")
    assert "CONSOLE" not in log, log
    (told,) = re.findall(r'data-told="([^"]*)"', dom)
    assert told.split("|") == [
        "forward 0: first · forward · unit first · 500 ms · at 2 s",
        "forward 0: first · forward · unit first · 500 ms · at 2 s",
        "backward 0: first · backward · unit first · 400 ms · at 3.6 s",
        f"update: {PARAM}[0:512] and 3 more · update · unit second and 2 more · 500 ms · at 4 s",
        f"state chunk 7: {PARAM}[512:1024] · read · unit second and 2 more · 600 ms · 1 MiB · "
        "0.00175 GB/s · at 4 s",
        "true",
    ]


@needs_chromium
def test_without_javascript_there_is_no_empty_box(trace: Path) -> None:
    """The page's policy forbids a script that was changed: the page must then do without it."""
    assert report(trace) == 0
    page = trace.with_suffix(".html")
    page.write_text(page.read_text("utf-8").replace('"use strict";', '"use strict"; ', 1), "utf-8")
    dom, log = chromium(page, "--dump-dom")
    assert "Content Security Policy" in log
    assert "data-page" not in dom
    assert re.search(r'<div class="timeline" hidden', dom)
    assert "An iteration takes 4 s (median)" in dom
