"""`offload tune`: trials inside a loop, the command around them, and what it leaves behind.

Most tests run a program that only writes what a trial would find, so that time decides nothing; the
last ones tune a real loop.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import children
from torch import nn

import offload
from offload import kernels
from offload.core.errors import ConfigError
from offload.integrations.screen import StatusLine
from offload.planning import planner, profile, trial, tuning
from offload.planning.profile import Tuned, Tuning, TuningTarget
from offload.planning.trial import TrialOrder, TrialResult
from offload.storage import choose as store_choose
from offload.tools import cli
from offload.tools.tune import picture, session, space, trials
from offload.tools.tune.search import Knob, Measured, Search, SearchSpace, TunedTrial

WIDTH, HOST_BYTES = 64, 400 << 10
KI, MI = 1 << 10, 1 << 20


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(count))
    )


def target() -> TuningTarget:
    """Return the target of a trial that opens `layers` by `prepared`."""
    return TuningTarget(tuning.fingerprint_of(layers().parameters()), "cpu", HOST_BYTES, None, 1)


# --- a trial --------------------------------------------------------------------------------------


@pytest.fixture
def order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_budget: Any) -> Iterator[TrialOrder]:
    """Make this process a trial."""
    made = TrialOrder(Tuning(1, 72 << 10, 4096, 5, 1), 2, 3, str(tmp_path / "result.json"))
    made.save(tmp_path / "order.json")
    monkeypatch.setenv(trial.ENVIRONMENT, str(tmp_path / "order.json"))
    yield made
    trial._TRIALS.clear()


def prepared(directory: Path, **fields: Any) -> Any:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return offload.prepare(model, optimizer, host_memory=HOST_BYTES, nvme=directory, **fields)


def train(model: nn.Module, optimizer: Any, steps: int) -> int:
    """Train; return after how many steps the trial ended the loop, or `steps` if it did not."""
    for done in range(steps):
        model(torch.randn(4, WIDTH)).square().mean().backward()
        try:
            optimizer.step()
        except SystemExit as error:
            assert error.code == 0
            return done + 1
        optimizer.zero_grad()
    return steps


def result_of(order: TrialOrder) -> TrialResult:
    found = trial.load_result(Path(order.result))
    assert found is not None
    return found


def test_a_trial_runs_with_its_tuning_and_ends_after_its_steps(
    tmp_path: Path, order: TrialOrder
) -> None:
    named = tmp_path / "none.json"  # a trial does not even look for the profile
    model, optimizer = prepared(tmp_path, profile=named)
    with optimizer:
        made = model._offload_prepared
        assert made.engine.residency.prefetch.depth == 1
        assert max(len(unit.modules) for unit in made.units) == 2
        assert max(chunk.numel for chunk in made.session.plan.chunks) == 4096
        assert kernels.num_threads() == 1
        assert train(model, optimizer, 20) == 5
        step_s = [fact.end_s for fact in made.session.step_stats.steps.so_far()]
    found = result_of(order)
    assert found.is_whole and found.steps_done == 5
    assert found.targets == (target(),)
    assert found.seconds == tuple(b - a for a, b in itertools.pairwise(step_s[1:]))
    assert found.is_prepared and found.tunes_depth and not found.tunes_activations
    assert found.layer_bytes == 2 * 2 * (WIDTH * WIDTH + WIDTH) * 4 and found.layers == 3
    assert found.read_bytes > 0 and found.written_bytes > 0 and found.threads == 1
    assert found.disk_bytes_per_s and found.update_bytes_per_s
    assert 0 < found.stall_share < 1 and found.compute_s > 0 and found.update_s > 0
    assert found.peak_bytes["process"] > 10 * MI and found.peak_bytes["host: parameters"] > 0
    assert Path(order.result).stat().st_mode & 0o777 == 0o600


def test_seconds_of_an_iteration_are_all_accounted_for(tmp_path: Path, order: TrialOrder) -> None:
    model, optimizer = prepared(tmp_path)
    with optimizer:
        train(model, optimizer, 20)
        last = trial.current()._iterations[-1]  # type: ignore[union-attr]
    (seconds,), waited_s = last.seconds, last.stall_share * last.seconds[0]
    assert last.compute_s + last.update_s + waited_s == pytest.approx(seconds, rel=0.05)


def test_a_loop_that_goes_on_is_ended_at_every_step(tmp_path: Path, order: TrialOrder) -> None:
    model, optimizer = prepared(tmp_path)
    with optimizer:
        assert train(model, optimizer, 20) == 5
        assert train(model, optimizer, 20) == 1


def test_a_wrapped_optimizer_is_a_trial_too(tmp_path: Path, order: TrialOrder) -> None:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    offload.wrap(optimizer, host_memory=HOST_BYTES, nvme=tmp_path)
    with optimizer:
        assert train(model, optimizer, 20) == 5
    found = result_of(order)
    assert found.is_whole and found.targets == (target(),)
    assert not found.is_prepared and found.layer_bytes is None


def test_what_the_loop_fixes_is_told(tmp_path: Path, order: TrialOrder) -> None:
    model, optimizer = prepared(tmp_path, prefetch_depth=2, activations="auto")
    with optimizer:
        assert model._offload_prepared.engine.residency.prefetch.depth == 2
        train(model, optimizer, 1)
    found = result_of(order)
    assert not found.tunes_depth and found.tunes_activations
    assert found.steps_done == 1 and not found.is_whole and found.seconds == ()


def test_the_steps_of_a_second_optimizer_are_part_of_the_first_ones(
    tmp_path: Path, order: TrialOrder
) -> None:
    model, other = layers(), layers(2)
    one, two = (torch.optim.AdamW(m.parameters(), fused=True) for m in (model, other))
    offload.wrap(one, nvme=tmp_path, host_memory="2MiB")
    offload.wrap(two, nvme=tmp_path, host_memory="2MiB")
    with one, two:
        train(model, one, 1)
        train(other, two, 3)
        assert result_of(order).steps_done == 1
        assert train(model, one, 20) == 4
    found = result_of(order)
    assert [t.model for t in found.targets] == [
        tuning.fingerprint_of(m.parameters()) for m in (model, other)
    ]


def test_an_order_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trial.ENVIRONMENT, str(tmp_path / "gone.json"))
    with pytest.raises(ConfigError, match=r"OFFLOAD_TRIAL.*unset it"):
        trial.current()
    (tmp_path / "gone.json").write_text('{"steps": 1}')
    with pytest.raises(ConfigError, match=r"gone\.json"):
        trial.current()


def test_several_ranks_are_refused(order: TrialOrder) -> None:
    with pytest.raises(ConfigError, match="several ranks"):
        tuning.choose(offload.Config(), layers().parameters(), "cpu", among_ranks=True)


def test_without_an_order_nothing_is_told(tmp_path: Path, own_budget: Any) -> None:
    assert trial.current() is None
    model, optimizer = prepared(tmp_path)
    with optimizer:
        assert train(model, optimizer, 8) == 8


# --- the command, on a program that only says what a trial would find -----------------------------

FAKE = """
import dataclasses, json, os, sys, time
from pathlib import Path
from offload.core.portable import write_private
from offload.planning.profile import Tuning
from offload.planning.profile import TuningTarget
from offload.planning.trial import TrialResult, load_order

order = load_order(Path(os.environ["OFFLOAD_TRIAL"]))
wanted, changes = json.loads(sys.argv[1]), json.loads(sys.argv[2])
number = int(Path(order.result).name.split(".")[0])
if hang := changes.pop("hang", None):
    if number >= hang:
        Path(changes.pop("pids")).write_text(str(os.getpid()))
        time.sleep(600)
    del changes["pids"]
def miss(name, value):
    got = getattr(order.tuning, name)
    if name == "prefetch_depth" and got is not None:
        return min(4, abs(got - value)) / 4
    return got != value
misses = sum(miss(name, value) for name, value in wanted.items())
step_s = 1.0 + 0.2 * misses
result = TrialResult(
    targets=(TuningTarget(**json.loads(sys.argv[3])),), is_whole=True,
    steps_done=order.steps_needed, seconds=(step_s,) * order.steps,
    is_prepared=True, tunes_depth=True,
    tunes_activations=True,
    threads=2, layer_bytes=1000, layers=8, stall_share=0.1 + 0.1 * misses, compute_s=0.3,
    update_s=0.2, read_bytes=300, written_bytes=200, disk_bytes_per_s=1000.0,
    update_bytes_per_s=1e9, peak_bytes={"process": 1 << 20},
)
result = dataclasses.replace(result, **changes)
write_private(Path(order.result), json.dumps(dataclasses.asdict(result)))
"""
ONLY_DEPTH = ("--try", "chunk=", "--try", "queue=", "--try", "units=", "--try", "threads=")
FEW = (*ONLY_DEPTH, "--try", "depth=1")


@dataclasses.dataclass
class Desk:
    """The place where the command runs: its directory, its profile and its temporary files."""

    path: Path
    capsys: Any

    @property
    def profile(self) -> Path:
        return self.path / "p.json"

    def fake(self, wanted: dict[str, Any], **changes: Any) -> list[str]:
        """Return the command of a program that is fastest with the settings `wanted`. changes:
        fields of its result; `hang` and `pids`: the trial from which on it hangs, and the file for
        its process id.
        """
        script = self.path / "fake.py"
        script.write_text(FAKE)
        described = json.dumps(dataclasses.asdict(target()))
        return [sys.executable, str(script), json.dumps(wanted), json.dumps(changes), described]

    def script(self, text: str) -> list[str]:
        script = self.path / "train.py"
        script.write_text(text)
        return [sys.executable, str(script)]

    def tune(self, program: list[str], *options: str) -> tuple[int, str, str]:
        words = ["tune", "--profile", str(self.profile), *options, "--", *program]
        code = cli.main(words)
        return code, *self.capsys.readouterr()

    def left(self) -> list[Path]:
        """List the temporary files that are ours: torch has a directory of its own there."""
        return list((self.path / "tmp").glob("offload*"))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Iterator[Desk]:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    made = Desk(tmp_path, capsys)
    yield made
    assert made.left() == [], "nothing is left behind"


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the trials of Python programs in this process, in tests that are not about processes."""

    def carry_out(self: trials.Program, order: Path, result: Path, *others: Any) -> Any:
        stderr = others[0]
        with monkeypatch.context() as patch:
            patch.setenv(trial.ENVIRONMENT, str(order))
            patch.setattr(sys, "argv", list(self.command[1:]))
            try:
                runpy.run_path(self.command[1], run_name="__main__")
            except SystemExit as error:
                stderr.write_text(str(error.code))
                return 1, 0.0
        stderr.touch()
        return 0, 0.0

    monkeypatch.setattr(trials.Program, "_carry_out", carry_out)


here = pytest.mark.usefixtures("without_processes")


@here
@pytest.mark.quick
def test_what_is_best_is_found_told_and_written(desk: Desk) -> None:
    code, out, err = desk.tune(desk.fake({"prefetch_depth": 3}), *ONLY_DEPTH)
    assert code == 0
    tuned = profile.load(desk.profile).tuned
    assert [t.tuning for t in tuned] == [Tuning(prefetch_depth=3)]
    assert tuned[0].target == target() and tuned[0].name == "fake.py"
    assert (tuned[0].step_s, tuned[0].spread_s, tuned[0].stall_share) == (1.0, 0.0, 0.1)
    assert tuned[0].limit_s == 0.5  # 500 bytes at 1000 bytes a second; computing takes as long
    assert profile.load(desk.profile).is_of_this_machine
    assert desk.profile.stat().st_mode & 0o777 == 0o600
    assert re.search(r"chosen +depth 3: 1 s .*16\.7% less", out)
    assert f"profile={str(desk.profile)!r}" in out
    assert (desk.path / "p_tune.png").read_bytes().startswith(b"\x89PNG")
    assert (desk.path / "p_tune.png").stat().st_mode & 0o777 == 0o600
    lines = [line for line in err.splitlines() if re.match(r" +\d+  ", line)]
    assert re.match(r" +1  all derived +1\.2 ± 0 +20% +1\.2  9:\d\d", lines[0])
    assert any(re.match(r" +\d+  depth 3 +1 ± 0 +10%", line) for line in lines)


def test_json_is_one_object_with_every_trial(desk: Desk) -> None:
    picture = desk.path / "other.png"
    code, out, _ = desk.tune(
        desk.fake({"prefetch_depth": 1}), *FEW, "--json", "--picture", str(picture)
    )
    found = json.loads(out)
    assert code == 0
    assert found["best"]["prefetch_depth"] == 1 and found["is_beaten"] is True
    assert found["picture"] == str(picture) and picture.exists()
    assert found["profile"] == str(desk.profile) and found["limit_s"] == 0.5
    assert [t["number"] for t in found["trials"]] == list(range(1, len(found["trials"]) + 1))
    assert found["trials"][0]["tuning"] == dataclasses.asdict(Tuning())
    assert found["trials"][0]["result"]["read_bytes"] == 300
    assert found["targets"] == [dataclasses.asdict(target())]


@here
def test_where_nothing_helps_the_derived_is_kept_and_written(desk: Desk) -> None:
    code, out, _ = desk.tune(desk.fake({}), *FEW)
    assert code == 0 and "nothing has beaten it" in out
    assert profile.load(desk.profile).tuned[0].tuning == Tuning()


@here
def test_a_profile_keeps_what_else_it_knows(desk: Desk) -> None:
    cpu, cores = profile.this_machine()
    other = Tuned("m", "cpu", None, None, 1, "n", Tuning(threads=1), 1.0, 0.0, 0.0, 0.5, "2026")
    before = dataclasses.replace(
        session.new_profile(), memory_bytes_per_s=1e9, tuned=(other,), cpu=cpu, cores=cores
    )
    before.save(desk.profile)
    desk.tune(desk.fake({"threads": 1}), "--try", "depth=", *ONLY_DEPTH[:-1], "threads=1,2")
    found = profile.load(desk.profile)
    assert found.memory_bytes_per_s == 1e9
    assert [t.tuning for t in found.tuned] == [Tuning(threads=1), Tuning(threads=1)]
    assert found.tuned[0] == other


@here
def test_the_machines_own_profile_is_made_and_used(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(desk.path / "config"))
    program = desk.fake({"prefetch_depth": 1})
    code = cli.main(["tune", *FEW, "--", *program])
    out, _ = desk.capsys.readouterr()
    assert code == 0 and "nothing to do" in out
    assert profile.load(profile.own_path()).tuned[0].tuning == Tuning(prefetch_depth=1)
    assert (profile.own_path().parent / "profile_tune.png").exists()


@here
def test_activations_are_tried_where_the_loop_leaves_them_open(desk: Desk) -> None:
    options = ("--try", "depth=", *ONLY_DEPTH, "--activations", "auto")
    code, *_ = desk.tune(desk.fake({"activations": "recompute"}), *options)
    assert code == 0
    assert profile.load(desk.profile).tuned[0].tuning == Tuning(activations="recompute")


@here
def test_without_matplotlib_a_line_says_so(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = desk.tune(desk.fake({}), "--try", "depth=", *ONLY_DEPTH)
    assert code == 0 and "matplotlib is not installed" in out
    assert not (desk.path / "p_tune.png").exists()


# --- what goes wrong ------------------------------------------------------------------------------

WRITES = """
import dataclasses, json, os, sys, time
from pathlib import Path
from offload.core.portable import write_private
from offload.planning.trial import TrialResult, load_order
order = load_order(Path(os.environ["OFFLOAD_TRIAL"]))
def write(steps, **changes):
    result = TrialResult(steps_done=steps, is_whole=steps >= order.steps_needed, **changes)
    write_private(Path(order.result), json.dumps(dataclasses.asdict(result)))
"""
WRONG = {
    "it crashes": (
        "import sys\nsys.stderr.write('loading\\n')\nraise ValueError('no such file: data.bin')",
        r"exit code 1.*after 0 of 7 steps(.|\n)*ValueError: no such file: data\.bin",
    ),
    "it is killed": ("import os; os.kill(os.getpid(), 9)", "ended by SIGKILL"),
    "it never calls us": ("pass", r"without a call of offload\.prepare or offload\.wrap"),
    "it ends early": (WRITES + "write(3)", "ended after 3 of 7 steps .2 to warm up, 5 to measure"),
    "it hangs": (WRITES + "write(4)\ntime.sleep(600)", "did not end within .* after 4 of 7 steps"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_program_that_cannot_be_tuned_is_an_error_that_says_why(desk: Desk, what: str) -> None:
    text, message = WRONG[what]
    options = ("--minutes", "0.05") if what == "it hangs" else ()
    code, out, err = desk.tune(desk.script(text), *options)
    assert (code, out) == (2, "") and re.search(message, err), err
    assert not desk.profile.exists() and not (desk.path / "p_tune.png").exists()


def test_a_loop_that_swallows_its_end_is_ended(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_GRACE_S", 0.2)
    program = desk.script(
        WRITES + f"Path({str(desk.path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "write(7, seconds=(1.0,) * 5)\ntime.sleep(600)"
    )
    code, *_ = desk.tune(program, "--try", "threads=")
    assert code == 0 and profile.load(desk.profile)
    assert not is_alive(int((desk.path / "pid").read_text()))


@here
@pytest.mark.quick
def test_a_tuning_that_does_not_work_is_a_line_and_the_search_goes_on(desk: Desk) -> None:
    program = desk.fake({"prefetch_depth": 1})
    text = Path(program[1]).read_text()
    Path(program[1]).write_text(
        text.replace(
            "wanted, changes",
            "if order.tuning.prefetch_depth == 8: sys.exit('no room')\nwanted, changes",
        )
    )
    code, _, err = desk.tune(program, *ONLY_DEPTH, "--try", "depth=1,8")
    assert code == 0 and re.search(r"depth 8 +failed: no room", err)
    assert profile.load(desk.profile).tuned[0].tuning == Tuning(prefetch_depth=1)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected a MODEL, or -- and a program"),
        (["--", "/no/such/program", "x"], "cannot be started"),
        (["--host-memory", "1GiB", "--", "python", "train.py"], "--host-memory: is for a MODEL"),
        (["7B", "--host-memory", "much"], "--host-memory"),
        (["--try", "dept=3", "--", "a", "b"], "--try: expected KNOB="),
        (["--try", "depth=x", "--", "a", "b"], "--try depth: expected whole numbers"),
        (["--try", "queue=0", "--", "a", "b"], "--try queue: expected values from 1"),
        (["--activations", "kept", "--", "a", "b"], "--activations: expected auto"),
        (["--minutes", "0", "--", "a", "b"], "--minutes"),
        (["--steps", "0", "--", "a", "b"], "--steps"),
        (["--warm-up", "0", "--", "a", "b"], "--warm-up"),
        (["--profile", "/no/such/place/p.json", "--", "a", "b"], "is not there"),
        (["--picture", "/no/such/place/p.png", "--", "a", "b"], "--picture"),
    ],
)
def test_wrong_arguments_are_refused(desk: Desk, words: list[str], message: str) -> None:
    assert cli.main(["tune", *words]) == 2
    out, err = desk.capsys.readouterr()
    assert out == "" and message in err


@here
def test_a_loop_that_does_not_leave_open_what_is_to_be_tried_is_refused(desk: Desk) -> None:
    program = desk.fake({}, tunes_activations=False, tunes_depth=False)
    code, _, err = desk.tune(program, "--activations", "auto")
    assert code == 2 and 'activations="auto"' in err
    code, _, err = desk.tune(program, "--try", "depth=1,2")
    assert code == 2 and 'prefetch_depth="auto"' in err


def test_the_profile_of_another_machine_stays_as_it_is(desk: Desk) -> None:
    dataclasses.replace(session.new_profile(), cpu="another").save(desk.profile)
    before = desk.profile.read_bytes()
    code, _, err = desk.tune(desk.fake({}))
    assert code == 2 and "of another machine" in err
    assert desk.profile.read_bytes() == before
    desk.profile.write_text("{}")
    code, _, err = desk.tune(desk.fake({}))
    assert code == 2 and "p.json" in err and desk.profile.read_text() == "{}"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # It may be a zombie: its parent has not read the exit code yet.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize(
    ("number", "code", "keeps"),
    [(signal.SIGINT, 130, False), (signal.SIGINT, 130, True), (signal.SIGTERM, 143, False)],
)
def test_a_signal_ends_the_trial_and_leaves_nothing(
    desk: Desk, number: signal.Signals, code: int, keeps: bool
) -> None:
    pids = desk.path / "pid"
    program = desk.fake({"prefetch_depth": 1}, hang=6, pids=str(pids))
    options = ["--profile", str(desk.profile), *FEW, *(["--keep"] if keeps else [])]
    command = [sys.executable, "-m", "offload", "tune", *options, "--", *program]
    with children.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            until_s = time.monotonic() + 120
            while not (pids.exists() and pids.read_text()):
                assert time.monotonic() < until_s and process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == code and out == b""
    assert not is_alive(int(pids.read_text()))
    assert desk.profile.exists() is keeps, err.decode()
    if keeps:
        assert profile.load(desk.profile).tuned[0].tuning == Tuning(prefetch_depth=1)


# --- parts ----------------------------------------------------------------------------------------


def whole(**changes: Any) -> TrialResult:
    return dataclasses.replace(
        TrialResult(
            targets=(target(),),
            is_prepared=True,
            tunes_depth=True,
            layer_bytes=100,
            layers=3,
            threads=8,
            read_bytes=5,
            written_bytes=5,
        ),
        **changes,
    )


def knobs_of(first: TrialResult, **tries: tuple[int, ...]) -> tuple[dict[str, Any], list[str]]:
    found, notes = space.make_space(first, Tuning(), tries, (), cores=6)
    return {knob.field: knob for knob in found.knobs}, notes


def test_what_is_tried_follows_from_the_first_trial() -> None:
    knobs, notes = knobs_of(whole())
    assert list(knobs) == list(space.FIELDS.values()) and notes == []
    assert knobs["unit_bytes"].values == (100, 200)  # there are only three layers
    assert knobs["threads"].values == (1, 2, 4, 6) and knobs["threads"].derived == 8
    assert knobs["prefetch_depth"].coarse == (0, 1, 2, 4, 8)
    assert knobs["queue_depth"].coarse == (4, 16, 64)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({"is_prepared": False, "layer_bytes": None}, ["chunk_numel", "queue_depth", "threads"]),
        ({"read_bytes": 0, "written_bytes": 0}, ["threads"]),
        (
            {"read_bytes": 0, "written_bytes": 0, "to_device_bytes": 9},
            ["prefetch_depth", "unit_bytes", "threads"],
        ),
        ({"tunes_depth": False}, ["chunk_numel", "queue_depth", "unit_bytes", "threads"]),
    ],
)
def test_what_would_change_nothing_is_not_tried(changes: dict[str, Any], left: list[str]) -> None:
    knobs, notes = knobs_of(whole(**changes))
    assert list(knobs) == left
    assert all("is not tried: " in note for note in notes) and notes


def test_what_is_asked_for_is_tried() -> None:
    knobs, _ = knobs_of(whole(read_bytes=0, written_bytes=0), chunk=(64, 128), depth=(), units=(2,))
    assert knobs["chunk_numel"].values == (64, 128) and "prefetch_depth" not in knobs
    assert knobs["unit_bytes"].values == (200,)


def test_the_tuner_knows_what_the_engine_derives() -> None:
    assert space.DERIVED_CHUNK == planner.DISK_CHUNK_NUMEL
    assert space.DERIVED_QUEUE == store_choose.DEPTH


def test_tries_are_numbers_with_units() -> None:
    assert space.parse_try("chunk=512Ki,2Mi,512Ki") == ("chunk", (512 * KI, 2 * MI))
    assert space.parse_try("depth=2,0") == ("depth", (0, 2))
    assert space.parse_try("threads=") == ("threads", ())


def test_a_policy_that_is_not_derived_is_the_base() -> None:
    assert space.make_base(("keep", "recompute")) == Tuning()
    assert space.make_base(("recompute", "offload")) == Tuning(activations="recompute")


def test_the_limit_is_the_slower_of_drive_and_cores() -> None:
    slow = whole(
        read_bytes=600, written_bytes=400, compute_s=0.5, update_s=0.2, disk_bytes_per_s=500.0
    )
    fast = dataclasses.replace(slow, disk_bytes_per_s=1000.0, compute_s=0.4)
    assert space.Limit.of([slow], [slow]).seconds == 2.0
    assert space.Limit.of([slow], [slow, fast]) == space.Limit(1.0, 0.4, 0.2, True)
    assert space.Limit(0.1, 0.4, 0.2, is_on_cpu=True).seconds == pytest.approx(0.6)
    assert space.Limit(0.1, 0.4, 0.2, is_on_cpu=False).seconds == 0.4


def test_the_picture_has_the_best_trial_of_each_depth() -> None:
    seen = [
        (Tuning(), 1.0, 0.5),
        (Tuning(prefetch_depth=2), 0.8, 0.4),
        (Tuning(prefetch_depth=2, threads=1), 0.6, 0.3),
        (Tuning(prefetch_depth=0), 2.0, 0.9),
    ]
    trials = [
        TunedTrial(n, tuning, Measured((s,) * 3, 1.0, stalls))
        for n, (tuning, s, stalls) in enumerate(seen)
    ]
    trials.append(TunedTrial(9, Tuning(prefetch_depth=8), Measured((), 1.0, failure="no room")))
    assert picture.drawn_field(trials) == "prefetch_depth"
    points = picture.make_points(trials, Tuning(prefetch_depth=2, threads=1), "prefetch_depth")
    assert [(p.label, p.step_s, p.stall_share) for p in points] == [
        ("derived", 1.0, 0.5),
        ("0", 2.0, 0.9),
        ("2", 0.6, 0.3),
    ]
    assert [p.is_best for p in points] == [False, False, True]
    assert (
        picture.drawn_field([trials[0], TunedTrial(1, Tuning(threads=1), trials[0].measured)])
        == "threads"
    )


class Terminal:
    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None: ...


def test_on_a_terminal_the_line_of_the_running_trial_is_written_over() -> None:
    screen: Any = Terminal()
    found = session.TrialTable(StatusLine(screen, 0.5))
    search = Search(SearchSpace(Tuning(), ()), lambda _: Measured((1.0,), 1.0), 100.0, found.add)
    found.search = search
    found.tick(Tuning(prefetch_depth=2), 3.0)
    assert screen.text.startswith("\r") and "\n" not in screen.text and "0:03" in screen.text
    search.take(Tuning(), Measured((1.0, 1.2), 40.0, 0.25))
    last = screen.text.splitlines()[-1]
    assert re.search(r"1  all derived +1\.1 ± 0\.05 +25% +1\.1  1:00$", last)


def test_in_a_narrow_terminal_the_times_of_the_running_trial_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    screen: Any = Terminal()
    found = session.TrialTable(StatusLine(screen))
    found.search = Search(SearchSpace(Tuning(), ()), lambda _: Measured((1.0,), 1.0), 100.0)
    found.search.take(Tuning(), Measured((1.0, 1.2), 40.0, 0.25))
    found.tick(Tuning(prefetch_depth=2), 3.0)
    assert screen.text.strip() == "0:03 1.1 0:57 | depth 2"


def test_knobs_are_told_in_the_words_of_the_command() -> None:
    every = Tuning(3, 200, 512 * KI, 64, 2, "recompute")
    assert session.describe(every, 100) == (
        "depth 3, chunk 512Ki, queue 64, units x2, threads 2, activations recompute"
    )
    assert session.describe(Tuning(), None) == "all derived"


# --- what the tuner writes is what the runtime reads ----------------------------------------------


@here
def test_every_number_that_the_tuner_has_found_is_in_force_afterwards(
    desk: Desk, own_budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {
        "prefetch_depth": 3,
        "chunk_numel": 4096,
        "queue_depth": 8,
        "unit_bytes": 72 << 10,
        "threads": 1,
        "activations": "recompute",
    }
    tries = ("depth=3", "chunk=4Ki", "queue=8", "units=2", "threads=1")
    options = [word for text in tries for word in ("--try", text)]
    program = desk.fake(wanted, layer_bytes=36 << 10)
    code, *_ = desk.tune(program, *options, "--activations", "auto")
    assert code == 0
    assert profile.load(desk.profile).tuned[0].tuning == Tuning(**wanted)

    from offload.params import prepared as module

    opened: list[dict[str, Any]] = []

    class Store(module.DiskStore):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            opened.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr(module, "DiskStore", Store)
    model, optimizer = prepared(desk.path, profile=desk.profile, activations="auto")
    with optimizer:
        train(model, optimizer, 2)
        told = offload.report(model)
        made = model._offload_prepared
        assert told.model is not None and told.model.depth == 3
        assert max(chunk.numel for chunk in told.plan.chunks) == 4096
        assert opened[0]["depth"] == 8
        assert max(len(unit.modules) for unit in made.units) == 2 and told.model.units == 3
        assert kernels.num_threads() == 1
        assert made.recompute is not None
        for name, value in wanted.items():
            assert f"{name} {value}" in str(told)


LOOP = """
import sys, time

class Clock:
    now_s = 0.0

def look():
    Clock.now_s += 1e-6
    return Clock.now_s

time.perf_counter = look  # how busy this machine is must not decide
import torch
from torch import nn
import offload

model = nn.Sequential(
    *(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6))
)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
fields = {} if len(sys.argv) < 3 else {"profile": sys.argv[2]}
model, optimizer = offload.prepare(
    model, optimizer, host_memory=400 << 10, nvme=sys.argv[1], **fields
)
for _ in range(5):
    # A machine that likes to have three units ahead.
    Clock.now_s += 0.5 if offload.report(model).model.depth == 3 else 1.0
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print(offload.report(model))
"""


def test_a_real_loop_is_tuned_untouched_and_then_runs_with_it(desk: Desk) -> None:
    program = [*desk.script(LOOP), str(desk.path)]
    options = ["--steps", "1", "--warm-up", "1", "--try", "depth=3", *ONLY_DEPTH, "--json"]
    words = ["tune", "--profile", str(desk.profile), *options, "--", *program]
    command = [sys.executable, "-m", "offload", *words]
    done = children.run(command, nested=True, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["best"] == dataclasses.asdict(Tuning(prefetch_depth=3))
    assert found["targets"] == [dataclasses.asdict(target())]
    assert [t["failure"] for t in found["trials"] if t["failure"]] == []
    again = [*program, str(desk.profile)]
    after = children.run(again, capture_output=True, text=True, timeout=120, check=True)
    assert re.search(r"prefetch +3 units ahead", after.stdout)
    assert f"prefetch_depth 3; from {desk.profile}" in after.stdout


def test_a_model_that_is_named_runs_the_stand_in_loop(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.subprocess, "Popen", children.start)
    words = ["300K", "--layers", "2", "--hidden", "64", "--vocabulary", "500", "--sequence", "8"]
    words += ["--host-memory", "3MiB", "--nvme", str(desk.path), "--dtype", "float32"]
    words += ["--steps", "1", "--warm-up", "1", "--try", "depth=", *ONLY_DEPTH, "--json"]
    code = cli.main(["tune", "--profile", str(desk.profile), *words])
    out, err = desk.capsys.readouterr()
    assert code == 0, err
    found = json.loads(out)
    assert found["name"] == "300K" and found["targets"][0]["host_bytes"] == 3 * MI
    assert [t["failure"] for t in found["trials"]] == [None, None]
    assert found["trials"][0]["result"]["is_prepared"]


def test_a_model_that_there_is_not_is_an_error_of_one_line(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials.subprocess, "Popen", children.start)
    code = cli.main(["tune", "--profile", str(desk.profile), "no_such_module:model"])
    _, err = desk.capsys.readouterr()
    assert code == 2 and "no_such_module" in err and "Traceback" not in err


def test_the_benchmark_has_a_table_and_a_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    results = importlib.import_module("tune_results")
    knobs = (Knob("threads", (1, 2), (1, 2), derived=2), Knob("queue_depth", (4, 8), (4, 8)))
    every = results.every_tuning(SearchSpace(Tuning(activations="keep"), knobs))
    assert len(every) == len(set(every)) == 2 * 3 and every[0] == Tuning(activations="keep")
    for module in ("tune_results", "model_results"):
        monkeypatch.setattr(f"{module}.HERE", tmp_path)
    seconds = {Tuning(): 1.0, Tuning(prefetch_depth=2): 0.52, Tuning(prefetch_depth=4): 0.5}
    row = results.TuneRow(results.Setup("slow disk", 2, 3.5), 40, 300.0, 0.4, 48)
    row.measure(seconds, lambda tuning: [seconds[tuning]] * 3, rounds=2)
    row.choice = results.Choice(Tuning(prefetch_depth=2), Tuning(), 100)
    assert row.fastest({t: [s] for t, s in seconds.items()}, 2) == list(seconds)[:0:-1]
    assert row.ratio == pytest.approx(1.04) and row.demand.met
    text = results.write_tune("make bench ONLY=tune", [row]).read_text()
    assert "| slow disk | 1.00 (1.00-1.00) | 0.52 (0.52-0.52) | 0.50 (0.50-0.50) | 0.40 |" in text
    row.choice = results.Choice(Tuning(), Tuning(), 100)
    assert not row.demand.met


def test_help_ends_with_an_example(capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["tune", "--help"])
    out = capsys.readouterr().out
    assert left.value.code == 0
    assert "offload tune -- python train.py" in out and "exit codes:" in out
