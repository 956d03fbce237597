"""The progress line: what it says, where it is shown, and how often."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import batch, loss_of, make
from torch import nn

import offload
from offload.core.errors import StateError
from offload.core.timeline import StepFact
from offload.integrations import progress_line, screen
from offload.integrations.progress_line import Progress, count_tokens
from offload.integrations.screen import fit
from offload.params import units
from offload.telemetry.iterations import IterationSummary, recent

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)


def trained(folder: Path, steps: int, out: Any) -> tuple[nn.Module, Any]:
    model = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload.prepare(model, optimizer, host_memory=140 << 10, nvme=folder)
    seen = []
    for seed in offload.progress(range(steps), optimizer, file=out):
        seen.append(seed)
        loss_of(model, batch(seed)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert seen == list(range(steps))
    return model, optimizer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        """The lines as they were shown, each over the one before it."""
        return self.getvalue().rstrip("\n").split("\r")[1:]


class Clock:
    """A clock for the progress line; it advances only when a test sets it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (progress_line, screen):
        monkeypatch.setattr(module, "time", made)
    return made


def run(bar: Progress[Any], clock: Clock, step_s: float = 1.0) -> Progress[Any]:
    """Run a loop whose steps take `step_s` each; its loss is the number of the step."""
    for number, _ in enumerate(bar, start=1):
        clock.now_s += step_s
        bar.set(loss=torch.tensor(float(number), requires_grad=True))
    return bar


# --- the line -------------------------------------------------------------------------------------


def test_the_line(tmp_path: Path) -> None:
    out = io.StringIO()
    model, _ = trained(tmp_path, 3, out)
    offload.close(model)
    lines = out.getvalue().splitlines()
    assert len(lines) == 2, "after the first step and at the end"
    assert lines[0].startswith("step 1/3 | ") and "s/step" in lines[0] and " left" in lines[0]
    assert re.search(r"^step 3/3 \| .*s an iteration \| waiting \d+% \| host 1\d\d", lines[1])
    assert ", disk " in lines[1] and " left" not in lines[1] and "tokens" not in lines[1]
    screen = Terminal()
    model, _ = trained(tmp_path, 2, screen)
    offload.close(model)
    assert screen.getvalue().startswith("\rstep 1/2") and screen.getvalue().endswith("\n")


def test_the_line_of_a_wrapped_optimizer_has_the_memory_that_is_taken(
    tmp_path: Path, clock: Clock
) -> None:
    optimizer = offload.wrap(
        torch.optim.AdamW(make("gpt").parameters()), host_memory=40 << 10, nvme=tmp_path
    )
    out = io.StringIO()
    run(offload.progress(range(2), optimizer, file=out), clock)
    taken = offload.report(optimizer).plan
    host, disk = (offload.core.config.format_size(n) for n in (taken.arena_bytes, taken.disk_bytes))
    assert out.getvalue().endswith(f"| host {host}, disk {disk}\n") and taken.disk_bytes > 0
    optimizer.close()


def test_what_the_loop_knows_is_shown_with_speed_and_time_left(clock: Clock) -> None:
    screen = Terminal()
    bar = offload.progress(range(5), None, file=screen, tokens=1200, every_s=0)
    assert iter(bar) is bar
    run(bar, clock, step_s=2.0)
    first, last = screen.lines[0].rstrip(), screen.lines[-1].rstrip()
    assert first == "step 1/5 | loss 1 | 600 tokens/s | 2.00 s/step | 0:08 left"
    assert last == "step 5/5 | loss 5 | 600 tokens/s | 2.00 s/step"
    with pytest.raises(StateError, match="make another for the next pass"):
        list(bar)


def test_a_resumed_run_goes_on_counting(clock: Clock) -> None:
    screen = Terminal()
    stream = (number for number in range(3))  # has no length
    run(offload.progress(stream, None, file=screen, start=7, total=4000, every_s=0), clock)
    assert screen.lines[0].startswith("step 8/4000 | loss 1 | 1.00 s/step | 1:06:32 left")
    assert screen.lines[-1].startswith("step 10/4000 | loss 3")
    other = Terminal()
    run(offload.progress((n for n in range(1)), None, file=other), clock)
    assert other.lines[0].startswith("step 1 | loss 1")
    loader = Terminal()
    run(offload.progress(range(1), None, file=loader, start=7), clock)
    assert loader.lines[0].startswith("step 8/8")


def test_lines_are_no_closer_than_they_may_be(clock: Clock) -> None:
    screen, file = Terminal(), io.StringIO()
    run(offload.progress(range(40), None, file=screen, every_s=2.0), clock, step_s=0.5)
    shown = [int(re.match(r"step (\d+)", line)[1]) for line in screen.lines]
    assert shown == [1, *range(5, 40, 4), 40]
    run(offload.progress(range(60), None, file=file, every_s=0.1), clock, step_s=1.0)
    shown = [int(re.match(r"step (\d+)", line)[1]) for line in file.getvalue().splitlines()]
    assert shown == [1, 11, 21, 31, 41, 51, 60], "every ten seconds, and at the end"


def test_tensors_are_not_looked_at_before_a_line_is_due(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []
    plain = torch.Tensor.__float__
    monkeypatch.setattr(torch.Tensor, "__float__", lambda t: looked.append(t) or plain(t))
    run(offload.progress(range(40), None, file=Terminal(), every_s=2.0), clock, step_s=0.5)
    assert len(looked) == 11, "as many as there were lines"
    bar = offload.progress([1], None, file=io.StringIO())
    loss = torch.ones(3, requires_grad=True).sum()
    bar.set(loss=loss)
    assert loss.grad_fn is not None and bar._numbers["loss"].grad_fn is None, "holds no graph"


def test_a_loop_that_is_left_leaves_no_open_line(clock: Clock) -> None:
    def leave(out: Terminal) -> None:
        for number in offload.progress(range(9), None, file=out):
            clock.now_s += 1.0
            if number == 3:
                raise KeyboardInterrupt

    screen = Terminal()
    with pytest.raises(KeyboardInterrupt):
        leave(screen)
    assert screen.getvalue().rstrip(" \n").endswith("left") and screen.getvalue().endswith("\n")
    empty = Terminal()
    assert list(offload.progress([], None, file=empty)) == [] and not empty.getvalue()
    bar = offload.progress(range(9), None, file=(other := Terminal()))
    next(bar), next(bar)
    bar.close()
    bar.close()
    assert other.getvalue().count("\n") == 1
    with pytest.raises(StopIteration):
        next(bar)


@pytest.mark.parametrize("width", [12, 20, 40, 60, 79, 200])
def test_the_line_fits_the_terminal(
    width: int, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Terminal()
    bar = offload.progress(range(12), None, file=screen, tokens=100, every_s=0)
    for _ in bar:
        clock.now_s += 1.0
        bar.set(loss=2.34567, lr=3e-4, accuracy=0.5)
    assert {len(line) for line in screen.lines} == {width - 1}, "and covers what was there"
    assert all(line.startswith("step ") for line in screen.lines)
    assert ("loss 2.346" in screen.lines[0]) == (width >= 40)
    assert ("accuracy 0.5" in screen.lines[0]) == (width == 200)


def test_the_important_parts_stay_in_their_order() -> None:
    parts = [screen.LinePart(text, rank) for text, rank in (("a", 0), ("bbbb", 2), ("c", 1))]
    assert fit(parts, None) == "a | bbbb | c"
    assert [fit(parts, width) for width in (12, 11, 5, 4, 1)] == [
        "a | bbbb | c",
        "a | c",
        "a | c",
        "a",
        "a",
    ]


def test_in_a_real_terminal_it_is_one_line_of_its_width() -> None:
    master, slave = pty.openpty()
    code = (
        "import offload, os, fcntl, struct, termios\n"
        "fcntl.ioctl(2, termios.TIOCSWINSZ, struct.pack('HHHH', 24, 50, 0, 0))\n"
        "bar = offload.progress(range(3), None, tokens=7, every_s=0)\n"
        "for _ in bar: bar.set(loss=1.5, other=2)\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=slave, env=environment
    )
    os.close(slave)
    said = os.read(master, 10000).decode()
    os.close(master)
    assert done.returncode == 0 and done.stdout == b""
    lines = said.removesuffix("\r\n").split("\r")
    assert lines[0] == "" and [len(line) for line in lines[1:]] == [49, 49, 49], said
    assert lines[-1].startswith("step 3/3 | loss 1.5 | ")


# --- tokens ---------------------------------------------------------------------------------------

IDS = torch.zeros(4, 8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("found", "told", "count"),
    [
        ({"input_ids": IDS, "labels": IDS}, None, 32),
        ({"pixels": IDS}, None, None),
        ({"input_ids": [1, 2]}, None, None),
        (IDS.to(torch.uint8), None, 32),
        ((IDS, IDS), None, 32),
        ([IDS], None, 32),
        (IDS.float(), None, None),
        (IDS.bool(), None, None),
        (IDS[0], None, None),
        ((), None, None),
        (7, None, None),
        (7, 100, 100),
        ((IDS, IDS), lambda both: both[0].numel() + both[1].numel(), 64),
    ],
)
def test_tokens_are_found_in_the_batch_or_told(
    found: Any, told: int | Callable[[Any], int] | None, count: int | None
) -> None:
    assert count_tokens(found, told) == count


def test_an_unknown_batch_ends_the_counting(clock: Clock) -> None:
    screen = Terminal()
    run(offload.progress([IDS, IDS, 3, IDS], None, file=screen, every_s=0), clock)
    shown = ["tokens/s" in line for line in screen.lines]
    assert shown == [True, True, False, False], "a part of them would be a wrong speed"


# --- stalls ---------------------------------------------------------------------------------------


def test_the_stall_share_is_of_whole_iterations() -> None:
    waits = {"step(): disk read": 0.5, "model: parameter read": 0.25}
    works = {"step(): update": 0.75, "step(): other": 0.5, "step(): gradient norm": 0.25}
    steps = [StepFact(n, 4.0 * n, 4.0 * n + 1, {**waits, **works}, {}) for n in (1, 2, 3)]
    steps.append(StepFact(4, 16.0, 17.0, {"step(): device copy": 4.0}, {}))
    assert recent([]).typical_s is None and not recent(steps[:1]).is_whole
    assert recent(steps[:2]).stall_share == 0.75 / 4
    assert recent(steps, 4).stall_share == 4 / 4, "of the last iteration at least"
    assert recent(steps, 3).stall_share == 4 / 4 and recent(steps, 2).stall_share == 4.75 / 8
    assert recent(steps) == IterationSummary.of(steps, {})
    assert recent(steps).stall_share == (0.75 * 2 + 4) / 12 and recent(steps).typical_s == 4.0


# --- notebooks ------------------------------------------------------------------------------------


class Handle:
    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def update(self, shown: Any, *, raw: bool) -> None:
        self.seen.append(("update", raw, shown))


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Put a kernel of IPython's in place that records what it shows. `shell.kernel` is what
    IPython's terminal does not have.
    """
    seen: list[Any] = []

    def display(shown: Any, *, raw: bool, display_id: bool) -> Handle:
        assert display_id
        seen.append(("display", raw, shown))
        return Handle(seen)

    shell = types.SimpleNamespace(kernel=object())
    modules = {name: types.ModuleType(name) for name in ("IPython", "IPython.display")}
    modules["IPython"].get_ipython = lambda: shell
    modules["IPython"].shell = shell
    modules["IPython.display"].display = display
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_in_a_notebook_one_output_is_changed_in_place(
    notebook: list[Any], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run(offload.progress(range(3), None, every_s=0), clock)
    assert [kind for kind, *_ in notebook] == ["display", "update", "update"]
    assert all(raw for _, raw, _ in notebook)
    assert notebook[-1][2] == {"text/plain": "step 3/3 | loss 3 | 1.00 s/step"}
    assert capsys.readouterr().err == ""
    run(offload.progress(range(3), None, every_s=0, file=(out := io.StringIO())), clock)
    assert len(notebook) == 3 and out.getvalue(), "a file that is given wins"


def test_the_terminal_of_ipython_is_a_terminal(
    notebook: list[Any], clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    sys.modules["IPython"].shell.kernel = None
    run(offload.progress(range(2), None), clock)
    assert not notebook and capsys.readouterr().err.startswith("step 1/2")


def test_ipython_is_not_imported() -> None:
    code = (
        "import sys, offload; list(offload.progress([1], None)); "
        "found = {name.partition('.')[0] for name in sys.modules}; "
        "sys.exit(bool(found & {'IPython', 'wandb', 'tensorboard'}))"
    )
    assert subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"start": -1}, "start: expected at least 0, got -1"),
        ({"log_every": 0}, "log_every: expected at least 1, got 0"),
        ({"log_every": True}, "log_every: expected at least 1, got True"),
        ({"every_s": -0.5}, "every_s: expected seconds"),
        ({"every_s": float("nan")}, "every_s: expected seconds"),
        ({"tokens": "many"}, "tokens: expected how many"),
        ({"log_to": object()}, "log_to: expected TensorBoard.*neither"),
    ],
)
def test_wrong_arguments_are_refused_before_the_loop(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(offload.ConfigError, match=match):
        offload.progress([1], None, **wrong)


def test_what_is_not_ours_is_refused_before_the_loop() -> None:
    plain = torch.optim.AdamW(make("gpt").parameters())
    with pytest.raises(offload.ConfigError, match="expected a wrapped optimizer"):
        offload.progress([1], plain)


@pytest.mark.parametrize("wrong", ["low", None, torch.ones(2), [1.0]])
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    bar = offload.progress([1], None)
    with pytest.raises(offload.ConfigError, match=r"set\(loss=...\): expected a number"):
        bar.set(loss=wrong)
