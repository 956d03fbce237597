"""The demo, small: plain torch runs out of memory under the limit, offload trains there, is killed,
goes on, and has the bits of torch without the limit; what is not so is named, and fails.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support import children
from support.memory_group import memory_group

from offload.core.host_facts import cgroup_levels

EXAMPLES = Path(__file__).parent.parent / "examples"
MI = 1 << 20
# What torch needs is more than the limit, and what the interpreter with torch takes is half of it.
SMALL = ("--steps=4", "--every=2", "--layers=5", "--host-memory=64MiB", "--limit=560MiB")
TINY = ("--steps=8", "--every=3", "--layers=2", "--width=256", "--host-memory=4MiB")
SETTINGS = {**os.environ, "OMP_NUM_THREADS": "1"}
BITS = r"^   The result +all (\d+) losses and all parameters: bit for bit those of 1\.$"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits and /proc are Linux's")


def command(out: Path, *options: str) -> list[str]:
    return [sys.executable, str(EXAMPLES / "demo.py"), *options, f"--out={out}"]


def groups_of(pid: int) -> list[Path]:
    return [
        path for level in cgroup_levels("memory") for path in level.glob(f"offload-demo-{pid}*")
    ]


def can_have_a_group() -> bool:
    with memory_group(64 * MI) as group:
        return group is not None


def check_story(said: str, out: Path, steps: int, every: int) -> None:
    """Check what every run of the demo tells, and what it leaves."""
    assert int(re.search(BITS, said, re.M)[1]) == steps
    killed = int(re.search(r"^3\. .*; then kill -9 in the middle of step (\d+)$", said, re.M)[1])
    assert killed >= steps * 3 // 4 + 1, "it had done those before"
    again = int(re.search(r"^4\. .*goes on after step (\d+), its newest whole", said, re.M)[1])
    assert every <= again < killed and again % every == 0
    first, last = re.search(r"^1\. .*, loss ([\d.]+) -> ([\d.]+)$", said, re.M).groups()
    assert float(last) < float(first)
    assert re.search(
        r"^What it costs +[\d.]+ s a step; torch, without a limit, [\d.]+ s$", said, re.M
    )
    assert said.splitlines()[-1].split("  ")[-1].strip().startswith(f"{out / 'demo.html'} (")
    assert sorted(path.name for path in out.iterdir()) == ["demo.html", "demo_trace.json"]
    lines = [line for line in said.splitlines() if str(out) not in line]
    assert len(lines) < 30 and max(map(len, lines)) <= 100, "one screen"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["auto", "data"])
def test_torch_runs_out_of_memory_where_offload_trains(kind: str, tmp_path: Path) -> None:
    """In fresh interpreters: memory of a server that forks them would not count."""
    process = subprocess.Popen(
        command(tmp_path / "build", *SMALL, f"--by={kind}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=SETTINGS,
    )
    said, _ = process.communicate(timeout=280)
    assert process.returncode == 0, said
    check_story(said, tmp_path / "build", steps=4, every=2)
    limit = re.search(r"^The limit from here on +([\d.]+) MiB \((.*)\); torch has", said, re.M)
    is_group = limit[2].startswith("cgroup v")
    assert is_group or limit[2] == "RLIMIT_DATA"
    assert is_group if kind == "auto" and can_have_a_group() else kind == "auto" or not is_group
    assert re.search(
        r"^2\. .*OUT OF MEMORY in step 1: (killed by the kernel \(oom_kill 1\)$|\w)", said, re.M
    )
    taken = [float(size) for size in re.findall(r"^[34]\. .*peak ([\d.]+) MiB", said, re.M)]
    assert len(taken) == 2 and max(taken) <= float(limit[1])
    assert groups_of(process.pid) == []


@pytest.mark.timeout(120)
def test_without_any_limit_it_says_so_and_compares_the_bits(tmp_path: Path) -> None:
    out = tmp_path / "build"
    done = run_tiny(out, "--by=none")
    assert done.returncode == 0, done.stdout + done.stderr
    check_story(done.stdout, out, steps=8, every=3)
    assert "none can be set here: torch will not fail, only the bits are compared" in done.stdout
    assert "OUT OF MEMORY" not in done.stdout


@pytest.mark.timeout(120)
def test_torch_that_does_not_fail_is_a_failure(tmp_path: Path) -> None:
    done = run_tiny(tmp_path / "build", "--by=data", "--limit=8GiB")
    assert done.returncode == 1, done.stdout + done.stderr
    assert re.search(
        r"^FAILED: plain torch trains in .*, within the limit of 11 GiB", done.stdout, re.M
    )
    assert "OUT OF MEMORY" not in done.stdout


def run_tiny(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    words = command(out, *TINY, *options)
    return children.run(
        words, nested=True, capture_output=True, text=True, timeout=110, env=SETTINGS
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("run", ["torch without a limit", "torch within the limit"])
def test_it_leaves_nothing_when_it_is_interrupted(name: str, run: str, tmp_path: Path) -> None:
    out, number = tmp_path / "build", getattr(signal, name)
    process = children.Popen(
        command(out, *TINY, "--steps=60", "--limit=1GiB"),
        nested=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=SETTINGS,
        start_new_session=True,
    )
    try:
        while not (out / "demo" / f"{run}.log").exists():  # its child trains
            assert process.poll() is None
            time.sleep(0.01)
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        assert process.wait(60) == 128 + number
    finally:
        process.kill()
        process.wait()
    assert list(out.iterdir()) == []
    assert groups_of(process.pid) == []
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


# --- the limit ------------------------------------------------------------------------------------


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give the demo's modules by name, each loaded anew."""
    names = ("memory_limit", "demo_run", "demo_checks", "demo")
    monkeypatch.syspath_prepend(EXAMPLES)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]


@pytest.fixture
def memory_limit(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["memory_limit"]


@pytest.mark.parametrize("kind", ["auto", "data"])
def test_the_kernel_says_that_the_limit_holds(
    kind: str, modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Looked at by other means than the demo's own."""
    limit, refusals = modules["memory_limit"].set_limit(kind, 600 * MI)
    assert limit.nbytes, refusals
    try:
        with modules["demo_run"].Run("held", tmp_path, limit, ["--in-memory"]) as run:
            pid = run._process.pid
            run.start()
            group = Path(f"/proc/{pid}/cgroup").read_text()
            if limit.about.startswith("cgroup"):
                assert f"offload-demo-{os.getpid()}\n" in group
                [path] = groups_of(os.getpid())
                texts = [
                    (path / name).read_text()
                    for name in ("memory.max", "memory.limit_in_bytes")
                    if (path / name).exists()
                ]
                assert texts == [f"{600 * MI}\n"]
            else:
                assert resource.prlimit(pid, resource.RLIMIT_DATA) == (825 * MI, 825 * MI)
                assert kind == "data" or refusals[0].startswith("cgroup: ")
    finally:
        limit.close()
    assert groups_of(os.getpid()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("version", [1, 2])
def test_a_cgroup_has_no_swap_and_counts_kills(
    version: int, memory_limit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tmp_path / "group"
    group.mkdir()
    names = memory_limit.FILES[version]
    for name in (*names[:2], "cgroup.procs"):
        (group / name).write_text("")
    (group / names[2]).write_text("under_oom 0\noom_kill 3\n")
    monkeypatch.setattr(memory_limit, "make_group", lambda: group)
    monkeypatch.setattr(memory_limit, "try_out", lambda limit: None)
    limit = memory_limit.CgroupLimit(1000)
    assert [(group / name).read_text() for name in names[:2]] == [
        "1000",
        "0" if version == 2 else "1000",
    ]
    assert limit.about == f"cgroup v{version}, no swap" and limit.kills() == 3
    assert not limit.holds(17)
    (group / "cgroup.procs").write_text("4\n17\n")
    assert limit.holds(17) and not limit.holds(1)
    (group / names[0]).write_text("2000")
    assert not limit.holds(17)


def test_a_group_is_made_where_the_controller_is_handed_down(
    memory_limit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A v2 group with processes of its own has no controllers for others; the next above has."""
    own = tmp_path / "slice" / "scope"
    own.mkdir(parents=True)
    (own / "cgroup.subtree_control").write_text("\n")
    (own.parent / "cgroup.subtree_control").write_text("cpu memory pids\n")
    levels = [own, own.parent, tmp_path]
    old, living = own.parent / "offload-demo-999999999", own.parent / "offload-demo-1"
    old.mkdir()
    living.mkdir()
    monkeypatch.setattr(memory_limit, "cgroup_levels", lambda controller: levels)
    assert memory_limit.make_group() == own.parent / f"offload-demo-{os.getpid()}"
    assert not old.exists() and living.exists()
    del levels[1]
    with pytest.raises(OSError, match="no cgroup with the memory controller"):
        memory_limit.make_group()


def test_a_limit_that_stops_nobody_is_not_used(
    memory_limit: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "heedless.py"
    program.write_text("print('took it')")
    monkeypatch.setattr(memory_limit, "PROGRAM", program)
    monkeypatch.setattr(memory_limit.subprocess, "Popen", children.start)
    limit, refusals = memory_limit.set_limit("auto", 64 * MI)
    assert limit.nbytes == 0 and len(refusals) == 2
    assert "a process that takes more ends with 0" in refusals[1]
    assert groups_of(os.getpid()) == []


TORCH = "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("code", "said", "kills", "words"),
    [
        (-9, "", 3, "killed by the kernel (oom_kill 1)"),
        (-9, "", 2, None),  # by somebody else
        (1, TORCH, 2, "DefaultCPUAllocator: can't allocate memory"),
        (1, "  x = b'x' * n\nMemoryError\n", 2, "MemoryError"),
        (-6, "what():  std::bad_alloc\n", 2, "std::bad_alloc"),
        (0, "MemoryError\n", 2, None),
        (1, "ValueError: the memory is full\n", 2, None),
        (1, "", 3, None),
    ],
)
def test_a_failure_for_want_of_memory_is_told_from_others(
    memory_limit: ModuleType, code: int, said: str, kills: int, words: str | None
) -> None:
    limit = memory_limit.Limit()
    limit.kills = lambda: kills
    assert limit.failure(code, said, kills_before=2) == words


# --- what it says of runs that are not as they must be --------------------------------------------


class Told:
    """A run, as its log has it."""

    name, end_text = "told", "told: train_gpt.py ended with 1, not for want of memory"

    def __init__(self, *losses: float, first: int = 1, digest: str = "a", peak: int = 90) -> None:
        self._steps = [{"step": n, "loss": loss} for n, loss in enumerate(losses, start=first)]
        self._digest, self.peak_bytes = digest, peak
        self.limit = type("Limit", (), {"nbytes": 100})

    def steps(self) -> list[dict[str, Any]]:
        return self._steps

    def lines(self) -> list[dict[str, Any]]:
        return [{"parameters": 5}, *self._steps, {"digest": self._digest}]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("first", "second", "newest", "problems"),
    [
        (Told(3.0, 2.5), Told(2.5, 2.0, first=2), 1, []),
        (Told(3.0, 2.6), Told(2.5, 2.0, first=2), 1, ["the losses differ in steps [2]"]),
        (Told(3.0, 2.5), Told(2.5, 1.9, first=2), 1, ["the losses differ in steps [3]"]),
        (Told(3.0), Told(2.5, 2.0, first=2, digest="b"), 1, ["the final parameters differ"]),
        (
            Told(3.0),
            Told(2.5, 2.0, first=2),
            0,
            ["resumed with step 2; the newest checkpoint is of step 0"],
        ),
        (Told(3.0), Told(2.5, first=2), 1, ["resumed up to step 2, expected 3"]),
    ],
)
def test_what_differs_is_named(
    modules: dict[str, ModuleType], first: Told, second: Told, newest: int, problems: list[str]
) -> None:
    found = modules["demo_checks"].check_bits(Told(3.0, 2.5, 2.0), first, second, newest)
    assert found == problems


@pytest.mark.quick
def test_a_loss_that_does_not_fall_is_a_failure(modules: dict[str, ModuleType]) -> None:
    found = modules["demo_checks"].check_bits(Told(3.0, 3.0), Told(3.0), Told(3.0, 3.0), 0)
    assert found == ["the loss does not fall: 3.000 -> 3.000"]


@pytest.mark.quick
def test_more_than_the_limit_and_another_failure_of_torch_are_named(
    modules: dict[str, ModuleType],
) -> None:
    checks = modules["demo_checks"]
    assert checks.check_memory(Told(3.0, peak=100)) == []
    assert checks.check_memory(Told(3.0, peak=101)) == ["told: has taken 101 B, the limit is 100 B"]
    assert checks.check_failure(Told(), -9, "killed by the kernel (oom_kill 1)") == []
    assert checks.check_failure(Told(), 1, None) == [Told.end_text]
    [problem] = checks.check_failure(Told(), 0, None)
    assert problem == "plain torch trains in 90 B, within the limit of 100 B: give --limit less"


@pytest.mark.quick
def test_only_whole_checkpoints_count(modules: dict[str, ModuleType], tmp_path: Path) -> None:
    newest = modules["demo_checks"].newest_checkpoint
    assert newest(tmp_path / "absent") == 0
    for name in ("2", "10", "12.partial", ".14"):
        (tmp_path / name).mkdir()
    assert newest(tmp_path) == 10


def test_a_run_that_fails_ends_the_show(
    modules: dict[str, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules["demo_run"].subprocess, "Popen", children.start)
    limit = modules["memory_limit"].Limit()
    text = r"wrong: train_gpt\.py ended with 2, not for want of memory"
    for act in (lambda run: run.finish(), lambda run: run.kill_in_step(3)):
        with modules["demo_run"].Run("wrong", tmp_path, limit, ["--no-such-option"]) as run:
            run.start()
            with pytest.raises(SystemExit, match=text) as caught:
                act(run)
        assert "unrecognized arguments: --no-such-option" in str(caught.value)


# --- the script -----------------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_plain_torch_is_the_script_without_the_two_lines(
    modules: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Without them it runs, and to the same bits: there is no other difference."""
    script, lines = EXAMPLES / "train_gpt.py", modules["demo_checks"].lines_of_offload()
    assert lines[0] == "import offload" and len(lines) == 2
    assert lines[1].startswith("model, optimizer = offload.prepare(model, optimizer, ")
    plain = tmp_path / "plain.py"
    plain.write_text(
        "".join(
            f"{line}\n" for line in script.read_text().splitlines() if line.strip() not in lines
        )
    )
    said = []
    for path in (script, plain):
        words = [sys.executable, path, "--steps=2", "--layers=1", "--width=64", "--in-memory"]
        settings = {**SETTINGS, "PYTHONPATH": str(EXAMPLES)}
        said.append(
            children.run(
                words, check=True, capture_output=True, text=True, timeout=100, env=settings
            ).stdout
        )
    assert said[0] == said[1] and "parameters: " in said[0]


@pytest.mark.quick
def test_the_loop_does_not_know_where_the_model_is() -> None:
    tree = ast.parse((EXAMPLES / "train_gpt.py").read_text())
    [loop] = [node for node in tree.body if getattr(node, "name", "") == "train"]
    assert not [node for node in ast.walk(loop) if getattr(node, "attr", "") == "in_memory"]


def test_its_files_are_short_enough_to_be_read() -> None:
    names = ("demo", "demo_run", "demo_checks", "memory_limit", "under_limit", "train_gpt", "gpt")
    for name in names:
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 150, name


def test_the_text_is_plain_and_enough_to_learn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from gpt import batches, text

    learned, held_out = text(), text(is_held_out=True)
    written = b"".join(p.read_bytes() for p in sorted((EXAMPLES / "text").glob("*.txt")))
    assert 30_000 < len(learned) + len(held_out) == len(written) < 60_000
    assert written.isascii() and len(held_out) > len(written) // 11
    pieces = [bytes(piece.tolist()) for piece in next(batches(1, 4, 64, seed=3))]
    whole = bytes(learned.tolist())
    assert all(len(piece) == 65 and piece in whole for piece in pieces)
    assert not any(piece in bytes(held_out.tolist()) for piece in pieces)
