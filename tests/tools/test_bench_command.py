"""`offload bench`: every figure is there and leads to the profile, nothing is left, nothing is
written that was not announced. Sizes are tiny; no test asks how fast it was.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fake_accelerator.build import library
from support import children

import offload
from offload.core.config import Config
from offload.core.drive_facts import DirectoryFacts
from offload.core.errors import FormatError, StateError, StoreError
from offload.core.host_facts import Accelerator, Memory, Torch
from offload.integrations import screen
from offload.integrations.screen import StatusLine
from offload.optim.traffic import StateTrafficFigures, Traffic, plan_traffic
from offload.planning import profile, tuning
from offload.planning.profile import DriveProfile, Profile, Tuned, Tuning
from offload.storage.disk import DiskStore
from offload.tools import cli
from offload.tools.bench import sizes as default_sizes
from offload.tools.bench import survey as surveys
from offload.tools.bench.drives import DiskFigures, measure_beside
from offload.tools.bench.figure import (
    BenchProgress,
    Figure,
    FigureUnit,
    Repeats,
    SurveyPart,
    repeat,
)
from offload.tools.bench.sizes import Bench, BenchSizes, ModelSize
from offload.tools.bench.survey import BenchRequest, SurveyResult, make_profile, survey
from offload.tools.cli import bench
from offload.tools.forecast.synthetic_llama import StandIn

HERE = Path(__file__).resolve().parents[1]
GIB = 1 << 30
TINY = BenchSizes(
    seconds=0.02,
    least_runs=2,
    memory_bytes=1 << 16,
    update_numel=4096,
    disk_bytes=1 << 20,
    disk_runs=2,
    chunk_numel=4096,
    buffers=4,
    beside_bytes=GIB,  # never reached: the runs beside it take microseconds
    copy_bytes=1 << 16,
    product_width=64,
    model=ModelSize(
        layers=4, hidden=64, vocabulary=128, heads=2, intermediate=128, batch=2, length=16
    ),
    steps=2,
    warm_up_steps=1,
)
# The speeds in the profile of a machine without an accelerator.
MEASURED = (
    "memory_bytes_per_s",
    "update_bytes_per_s",
    "disk_read_bytes_per_s",
    "disk_write_bytes_per_s",
    "disk_mixed_bytes_per_s",
    "compute_beside_disk",
    "update_beside_disk",
)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make measurements small, on a machine that has no profile."""
    monkeypatch.setattr(default_sizes, "DEFAULT", TINY)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    path = tmp_path / "drive"
    path.mkdir()
    return path


@pytest.fixture
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if anything is measured."""

    def refuse(*args: Any) -> None:
        raise AssertionError("something was measured")

    monkeypatch.setattr(surveys, "survey", refuse)


def run_json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["bench", "--json", *argv]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def tuned(name: str = "a model") -> Tuned:
    return Tuned(
        model="0123456789abcdef",
        name=name,
        device="cpu",
        host_bytes=1 << 20,
        device_bytes=None,
        directories=1,
        tuning=Tuning(prefetch_depth=3),
        step_s=0.5,
        spread_s=0.1,
        stall_share=0.25,
        limit_s=0.4,
        date="2026-11-16",
    )


def known_profile(**changes: Any) -> Profile:
    """Make a profile of this machine, with speeds that no machine has."""
    cpu, cores = profile.this_machine()
    found = Profile(
        name="here",
        is_measured=True,
        sources=("offload bench",),
        date="2026-11-16",
        cpu=cpu,
        cores=cores,
        memory_bytes_per_s=7.0,
        update_bytes_per_s=7.0,
        disks=(DriveProfile("/gone", 7.0, 7.0, 7.0, 7.0),),
        disk_mixed_bytes_per_s=7.0,
        flops={"float32": 7.0},
        tuned=(tuned(),),
    )
    return replace(found, **changes)


class Quiet:
    """A listener that remembers names."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.shares: list[float] = []
        self.figures: list[Figure] = []

    def begin(self, name: str) -> None:
        self.begun.append(name)

    def at(self, share: float) -> None:
        self.shares.append(share)

    def done(self, figure: Figure) -> None:
        self.figures.append(figure)


# --- a whole run ----------------------------------------------------------------------------------


def test_every_speed_is_measured_and_the_profile_has_it(
    drive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", str(drive)]) == 0
    path = profile.own_path()
    made = profile.load(path)
    for name in MEASURED:
        value = getattr(made, name)
        assert value is not None and 0 < value < math.inf, name
    assert made.compute_beside_disk is not None and made.compute_beside_disk <= 1
    assert made.update_beside_disk is not None and made.update_beside_disk <= 1
    assert made.flops is not None and set(made.flops) == {"float32", "bfloat16"}
    assert all(value > 0 for value in made.flops.values())
    (disk,) = made.disks
    assert disk.directory == str(drive) and disk.sustained_bytes_per_s is None
    assert disk.mixed_bytes_per_s == made.disk_mixed_bytes_per_s > 0
    assert made.is_measured and made.is_of_this_machine and made.memory_bytes
    assert (made.device, made.to_device_bytes_per_s, made.to_host_bytes_per_s) == (None,) * 3
    assert os.listdir(drive) == []
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(os.listdir(path.parent)) == [path.name]
    table = capsys.readouterr().out
    for word in ("memory copy", "AdamW update", "products bfloat16", "training step", str(path)):
        assert word in table


@pytest.mark.quick
def test_json_has_every_figure_and_the_profile_as_it_was_written(
    drive: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    told = run_json(capsys, str(drive), "--output", str(path))
    assert told["path"] == str(path)
    assert told["profile"] == json.loads(path.read_text())
    assert told["version"] == offload.__version__
    names = [figure["name"] for figure in told["figures"]]
    assert names == [
        "memory copy",
        "AdamW update",
        "the same, no arithmetic",
        "products float32",
        "products bfloat16",
        *(f"{drive}: {kind}" for kind in ("read", "write", "mixed")),
        "AdamW beside busy drives",
        *[name for name in names if name.endswith("beside busy drives") and "products" in name],
        "training step",
        "training tokens",
    ]
    for figure in told["figures"]:
        assert figure["median"] > 0 and figure["spread"] >= 0 and figure["runs"] >= 1, figure
    assert told["step"]["seconds"] > 0 and told["step"]["written_bytes"] > 0
    assert not profile.own_path().exists(), "the machine's own is left alone"


def test_what_is_written_is_what_the_runtime_reads(drive: Path, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    model = StandIn(1, 16, 32, 2, 32, 8)
    found = replace(tuned(), model=tuning.fingerprint_of(model.parameters()))
    known_profile(tuned=(found,)).save(path)
    assert cli.main(["bench", str(drive), "--only", "disk,memory", "--output", str(path)]) == 0
    config = Config(profile=path, host_memory=1 << 20, nvme=drive)
    chosen = tuning.choose(config, model.parameters(), "cpu", among_ranks=False)
    assert chosen.tuning == Tuning(prefetch_depth=3) and chosen.source == path
    assert cli.main(["bench", "--only", "memory"]) == 0
    own = tuning.choose(Config(), model.parameters(), "cpu", among_ranks=False)
    assert own == tuning.NOTHING, "it is read, without a complaint, and has nothing to say"


def test_all_that_goes_to_drives_is_counted_and_within_what_was_announced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lock, written = DiskStore.write, threading.Lock(), [0]

    def counted(self: DiskStore, name: str, source: Any, *args: Any, **named: Any) -> Any:
        with lock:
            written[0] += (
                memoryview(source).nbytes if not torch.is_tensor(source) else source.nbytes
            )
        return real(self, name, source, *args, **named)

    monkeypatch.setattr(DiskStore, "write", counted)
    drives = [tmp_path / "one", tmp_path / "two"]
    for path in drives:
        path.mkdir()
    for argv in (
        ["--only", "disk"],
        ["--only", "disk", "--sustained", "4"],
        ["--only", "step"],
        [],
    ):
        written[0] = 0
        with monkeypatch.context() as patch:
            if "--sustained" in argv:  # the size that the flag gives is too large here
                patch.setattr(bench, "replace", small_sustained)
            told = run_json(capsys, *map(str, drives), *argv)
        assert told["written_bytes"] == written[0] > 0
        assert written[0] <= told["most_written_bytes"]
    assert all(os.listdir(path) == [] for path in drives)


def small_sustained(value: Any, **changes: Any) -> Any:
    if "sustained_bytes" in changes:
        changes["sustained_bytes"] = 8 << 20
    return replace(value, **changes)


def test_the_bound_of_runs_over_drives_is_tight() -> None:
    wanted = BenchRequest(frozenset({SurveyPart.DISK}), (Path("/a"),), TINY)
    passes = 1 + 2 * TINY.disk_runs
    buffers_bytes = TINY.buffers * TINY.chunk_bytes
    assert wanted.most_written_bytes == passes * (TINY.disk_bytes + buffers_bytes)


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_help_tells_no_less_than_a_run_may_write(count: int) -> None:
    paths = tuple(Path(f"/{number}") for number in range(count))
    most = BenchRequest(frozenset(SurveyPart), paths, BenchSizes()).most_written_bytes
    assert most <= (bench.FIRST_GIB + (count - 1) * bench.FURTHER_GIB) * GIB
    assert f"at most {bench.FIRST_GIB} GiB" in bench.EPILOG


def test_a_long_run_writes_what_was_asked_for_and_a_little_more() -> None:
    sizes = BenchSizes(sustained_bytes=64 * 10**9)
    assert 64 * 10**9 <= sizes.sustained_written_bytes() <= 1.01 * 64 * 10**9
    assert sizes.room_bytes() >= sizes.sustained_traffic.disk_capacity_bytes > 12 * 10**9


@pytest.mark.parametrize("nbytes", [1, 1 << 20, 3 << 20, 8 << 20])
def test_however_little_is_asked_for_both_tenths_have_moved_something(
    nbytes: int, drive: Path
) -> None:
    sizes = replace(TINY, sustained_bytes=nbytes)
    found = survey(BenchRequest(frozenset({SurveyPart.DISK}), (drive,), sizes), Quiet())
    first, last = found.disks[0].first, found.disks[0].last
    assert first is not None and last is not None and first.median > 0 and last.median > 0
    most = BenchRequest(frozenset({SurveyPart.DISK}), (drive,), sizes).most_written_bytes
    assert max(nbytes, 1) < found.written_bytes <= most


def test_the_model_has_as_many_parameters_as_the_bound_counts() -> None:
    size = TINY.model
    model = StandIn.of(size, size.length)
    assert sum(param.numel() for param in model.parameters()) == size.numel


def test_several_directories_are_measured_alone_and_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drives = [tmp_path / "one", tmp_path / "two"]
    for path in drives:
        path.mkdir()
    told = run_json(capsys, *map(str, drives), "--only", "disk")
    names = [figure["name"] for figure in told["figures"]]
    labels = [*map(str, drives), surveys.ALL]
    assert names == [f"{label}: {kind}" for label in labels for kind in ("read", "write", "mixed")]
    made = told["profile"]
    assert [disk["directory"] for disk in made["disks"]] == list(map(str, drives))
    together = {figure["name"]: figure["median"] for figure in told["figures"]}
    for kind in ("read", "write", "mixed"):
        assert made[f"disk_{kind}_bytes_per_s"] == together[f"{surveys.ALL}: {kind}"]


def test_without_a_directory_all_else_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    told = run_json(capsys)
    made = told["profile"]
    assert made["memory_bytes_per_s"] > 0 and made["flops"]["float32"] > 0
    assert made["disks"] == [] and made["compute_beside_disk"] is None
    assert told["written_bytes"] == told["most_written_bytes"] == 0
    assert told["step"]["seconds"] > 0
    assert any("no directory was named" in note for note in told["notes"])
    assert any("no accelerator" in note for note in told["notes"])


def test_only_what_was_asked_for_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    told = run_json(capsys, "--only", "memory, update")
    names = [figure["name"] for figure in told["figures"]]
    assert names == ["memory copy", "AdamW update", "the same, no arithmetic"]
    assert told["step"] is None and told["profile"]["flops"] is None


def test_a_long_run_tells_of_its_first_and_last_tenth(
    drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "replace", small_sustained)
    told = run_json(capsys, str(drive), "--only", "disk", "--sustained", "4")
    figures = {figure["name"]: figure for figure in told["figures"]}
    last = figures[f"{drive}: sustained, last tenth"]
    assert 1 <= last["runs"] <= 4 and figures[f"{drive}: sustained, first tenth"]["runs"] >= 1
    assert told["profile"]["disks"][0]["sustained_bytes_per_s"] == last["median"] > 0
    assert told["written_bytes"] >= 8 << 20
    again = run_json(capsys, str(drive), "--only", "disk")
    kept = again["profile"]["disks"][0]["sustained_bytes_per_s"]
    assert kept == last["median"], "what was not measured again stays"


# --- the profile that is there already ------------------------------------------------------------


@pytest.mark.quick
def test_a_second_run_keeps_tunings_and_what_it_did_not_measure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = known_profile()
    profile.own_path().parent.mkdir(parents=True)
    before.save(profile.own_path())
    run_json(capsys, "--only", "memory")
    made = profile.load(profile.own_path())
    assert made.tuned == before.tuned
    assert made.memory_bytes_per_s not in (None, 7.0), "measured anew"
    kept = ("update_bytes_per_s", "disks", "disk_mixed_bytes_per_s", "flops")
    assert all(getattr(made, name) == getattr(before, name) for name in kept)
    assert made.date != before.date


def test_a_tuning_that_is_found_in_the_meantime_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = profile.own_path(), surveys.survey

    def beside_a_tuner(*args: Any) -> SurveyResult:
        path.parent.mkdir(parents=True)
        known_profile(tuned=(tuned("in the meantime"),)).save(path)
        return real(*args)

    monkeypatch.setattr(surveys, "survey", beside_a_tuner)
    run_json(capsys, "--only", "memory")
    assert [each.name for each in profile.load(path).tuned] == ["in the meantime"]


def test_published_numbers_make_room_but_tunings_stay() -> None:
    before = known_profile(is_measured=False, sources=("a data sheet",))
    memory = Memory(24 * GIB, None, None, None, 8 * GIB, None, None)
    made = make_profile(SurveyResult(), before, memory, None, "2026-11-17")
    assert made.tuned == before.tuned and made.is_measured
    assert made.sources == ("offload bench",)
    speeds = (made.memory_bytes_per_s, made.disk_mixed_bytes_per_s, made.flops)
    assert speeds == (None, None, None) and made.disks == ()
    assert made.memory_bytes == 8 * GIB, "the cgroup's limit counts"


def test_numbers_of_another_device_do_not_stay() -> None:
    before = known_profile(device="xpu", to_device_bytes_per_s=7.0, compute_beside_disk=0.7)
    memory = Memory(24 * GIB, None, None, None, None, None, None)
    cuda = Accelerator("cuda", 1, "Fast GPU", 80 * GIB)
    made = make_profile(SurveyResult(), before, memory, cuda, "2026-11-17")
    assert (made.to_device_bytes_per_s, made.flops, made.compute_beside_disk) == (None,) * 3
    assert made.memory_bytes_per_s == 7.0
    assert (made.device, made.device_memory_bytes) == ("cuda", 80 * GIB)
    same = make_profile(SurveyResult(), replace(before, device="cuda"), memory, cuda, "2026-11-17")
    assert same.to_device_bytes_per_s == 7.0 and same.flops == {"float32": 7.0}


def test_a_share_above_one_is_noise() -> None:
    found = SurveyResult(compute_beside_disk=Figure("c", FigureUnit.SHARE, 1.2, 0.1, 3))
    found.update_beside_disk = Figure("u", FigureUnit.SHARE, 0.8, 0.1, 3)
    memory = Memory(None, None, None, None, None, None, None)
    made = make_profile(found, None, memory, None, "2026-11-17")
    assert (made.compute_beside_disk, made.update_beside_disk) == (1.0, 0.8)


def test_a_profile_of_another_machine_is_replaced_with_a_warning(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    known_profile(cpu="Another CPU").save(path)
    assert cli.main(["bench", "--only", "memory", "--output", str(path)]) == 0
    assert "is of another machine (Another CPU" in capsys.readouterr().err
    made = profile.load(path)
    assert made.is_of_this_machine and made.tuned == () and made.disks == ()


def test_a_damaged_profile_is_refused_unless_another_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile.own_path()
    path.parent.mkdir(parents=True)
    path.write_text('{"format": "offload profile", "version": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(surveys, "survey", None)  # nothing is measured
        assert cli.main(["bench", "--only", "memory"]) == 2
    told = capsys.readouterr()
    assert str(path) in told.err and "--output" in told.err and told.out == ""
    assert path.read_text() == '{"format": "offload profile", "version": 1}'
    other = tmp_path / "other.json"
    assert cli.main(["bench", "--only", "memory", "--output", str(other)]) == 0
    assert profile.load(other).memory_bytes_per_s


def test_somebody_elses_file_is_not_overwritten(tmp_path: Path, unmeasured: None) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    assert cli.main(["bench", "--only", "memory", "--output", str(path)]) == 2
    assert path.read_text() == "dear diary"


def test_figures_are_shown_also_when_the_file_cannot_be_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Profile, path: Path) -> None:
        raise StoreError(f"{path}: cannot write it: No space left on device")

    monkeypatch.setattr(Profile, "save", fail)
    assert cli.main(["bench", "--only", "memory", "--json"]) == 2
    told = capsys.readouterr()
    assert "No space left" in told.err
    shown = json.loads(told.out)
    assert shown["path"] is None and shown["profile"]["memory_bytes_per_s"] > 0


# --- what is refused ------------------------------------------------------------------------------


def refusals() -> list[tuple[str, Callable[[Path], list[str]], str]]:
    """List the refused calls: a name, the arguments for a directory that exists, and what the
    message says.
    """
    return [
        ("missing", lambda d: [str(d / "nope")], "is not there"),
        ("no directory", lambda d: [_file(d)], "is not a directory"),
        ("below a file", lambda d: [f"{_file(d)}/x"], "is not there"),
        ("not writable", lambda d: ["/proc"], "no file can be made there"),
        ("empty", lambda d: [""], "expected a path"),
        ("twice", lambda d: [str(d), str(d)], "each once"),
        ("twice by a link", lambda d: [str(d), _link(d)], "each once"),
        ("one of two", lambda d: [str(d), str(d / "nope")], "is not there"),
        ("no room", lambda d: [str(d), "--sustained", "900000"], "free; make room"),
        ("unknown part", lambda d: ["--only", "memory,disc"], "'disc'"),
        ("no part", lambda d: ["--only", ""], "expected some of memory"),
        ("disk without one", lambda d: ["--only", "disk"], "name at least one directory"),
        ("sustained without one", lambda d: ["--sustained"], "name a directory"),
        (
            "sustained without disk",
            lambda d: [str(d), "--only", "memory", "--sustained"],
            "disk in --only",
        ),
        ("output nowhere", lambda d: ["--output", str(d / "nope" / "p")], "is not a directory"),
        ("output a directory", lambda d: ["--output", str(d)], "expected a new or an ordinary"),
        ("output a link", lambda d: ["--output", _link(d)], "expected a new or an ordinary"),
        ("output empty", lambda d: ["--output", ""], "expected a file"),
    ]


def _file(directory: Path) -> str:
    path = directory / "file"
    path.touch()
    return str(path)


def _link(directory: Path) -> str:
    path = directory.parent / "link"
    path.symlink_to(directory)
    return str(path)


@pytest.mark.parametrize(
    ("argv", "message"), [case[1:] for case in refusals()], ids=[case[0] for case in refusals()]
)
def test_it_is_refused_before_anything_is_measured(
    argv: Callable[[Path], list[str]],
    message: str,
    drive: Path,
    unmeasured: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", *argv(drive)]) == 2
    told = capsys.readouterr()
    assert told.out == "" and message in told.err
    assert told.err.startswith("offload: error: ") and told.err.count("\n") == 1
    assert not profile.own_path().parent.exists()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("EROFS", "mount it for writing"),
        ("ENOSPC", "no room is left"),
        ("EDQUOT", "quota"),
        ("EACCES", "let your user write there"),
    ],
)
def test_a_directory_that_takes_no_file_is_refused_with_the_remedy(
    error: str,
    message: str,
    drive: Path,
    unmeasured: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = DirectoryFacts(drive, exists=True, is_directory=True, writable=False, error=error)
    monkeypatch.setattr(bench, "read_directory", lambda path: facts)
    assert cli.main(["bench", str(drive)]) == 2
    told = capsys.readouterr().err
    assert error in told and message in told


def test_a_drive_that_is_nearly_full_is_refused_with_the_numbers(
    drive: Path,
    unmeasured: None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    needed = TINY.room_bytes()
    real = bench.read_directory
    monkeypatch.setattr(
        bench, "read_directory", lambda path: replace(real(path), free_bytes=needed - 1)
    )
    assert cli.main(["bench", str(drive)]) == 2
    told = capsys.readouterr().err
    assert f"({needed} bytes)" in told and f"({needed - 1} bytes)" in told


@pytest.mark.parametrize(
    "argv",
    [["--seconds", "0"], ["--seconds", "nan"], ["--seconds", "x"], ["--sustained", "/mnt"]],
)
def test_bad_numbers_are_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["bench", *argv])
    assert leaving.value.code == 2
    assert f"got '{argv[1]}'" in capsys.readouterr().err


def test_without_torch_it_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "read_torch", lambda: Torch(None, "OSError: libtorch.so"))
    assert cli.main(["bench"]) == 2
    told = capsys.readouterr().err
    assert "libtorch.so" in told and "offload doctor" in told


def test_memory_that_looks_like_a_drive_is_told_of(
    drive: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bench.read_directory
    monkeypatch.setattr(bench, "read_directory", lambda path: replace(real(path), ram_backed=True))
    assert cli.main(["bench", str(drive), "--only", "memory"]) == 0
    assert f"{drive} lies in memory" in capsys.readouterr().err


# --- the parts ------------------------------------------------------------------------------------


def test_a_figure_is_the_median_and_half_of_the_middle_halfs_width() -> None:
    figure = Figure.of("x", FigureUnit.SECONDS, [5.0, 1.0, 3.0, 2.0, 4.0])
    assert (figure.median, figure.spread, figure.runs) == (3.0, 1.0, 5)
    assert Figure.of("x", FigureUnit.SECONDS, [2.0]) == Figure("x", FigureUnit.SECONDS, 2.0, 0.0, 1)
    with pytest.raises(StateError, match="x: no run"):
        Figure.of("x", FigureUnit.SECONDS, [])


@pytest.mark.parametrize(("runs", "count"), [(Repeats(1e-9, 3, 9), 3), (Repeats(1e9, 3, 9), 9)])
def test_runs_stay_within_their_bounds(runs: Repeats, count: int) -> None:
    calls, shares = [0], list[float]()

    def run() -> float:
        calls[0] += 1
        return float(calls[0])

    assert repeat(run, runs, shares.append) == [2.0 + n for n in range(count)], "the first warms up"
    assert shares == sorted(shares) and shares[-1] == 1.0
    assert len(repeat(run, runs, shares.append, warm_up=False)) == count


def make_traffic(drive: Path) -> Traffic:
    plan = plan_traffic(TINY.disk_bytes, TINY.buffers, TINY.chunk_numel)
    return Traffic(plan, [drive])


def test_each_kind_of_traffic_moves_what_it_says(drive: Path) -> None:
    chunk_bytes, buffers_bytes = TINY.chunk_bytes, TINY.buffers * TINY.chunk_bytes
    with make_traffic(drive) as traffic:
        filled = traffic.fill()
        assert len(traffic.chunks) * chunk_bytes == TINY.disk_bytes
        assert filled.read_bytes == 0
        assert filled.written_bytes == TINY.disk_bytes - buffers_bytes, "the last stay in buffers"
        before = traffic.written_bytes
        read = traffic.read()
        assert (read.read_bytes, read.written_bytes) == (TINY.disk_bytes, 0)
        assert traffic.written_bytes == before + buffers_bytes, "which reading has to empty first"
        written = traffic.write()
        assert (written.read_bytes, written.written_bytes) == (0, TINY.disk_bytes)
        for _ in range(3):  # the first pass leaves some in buffers
            mixed = traffic.mix()
        assert mixed.read_bytes == mixed.written_bytes == TINY.disk_bytes - buffers_bytes
        assert mixed.bytes_per_s == (mixed.read_bytes + mixed.written_bytes) / mixed.busy_s
    assert os.listdir(drive) == []


def test_what_is_read_is_the_noise_that_was_written(drive: Path) -> None:
    with make_traffic(drive) as traffic:
        traffic.fill()
        traffic.read()
        memory = torch.empty(TINY.chunk_bytes // 4)
        store = traffic._store
        seen = set()
        for name in store.names():
            store.read(name, memory).wait()
            assert memory.view(torch.int32).unique().numel() > 4000, "no zeros, no repeats"
            seen.add(memory.view(torch.int32)[:4].numpy().tobytes())
        assert len(seen) == len(traffic.chunks)


def test_traffic_ends_early_when_it_is_told_to_and_goes_on_later(drive: Path) -> None:
    with make_traffic(drive) as traffic:
        traffic.fill()
        for act in (traffic.read, traffic.write, traffic.mix):
            left = [10]

            def keep_going(left: list[int] = left) -> bool:
                left[0] -= 1
                return left[0] >= 0

            moved = act(keep_going)
            most = (10 + TINY.buffers) * TINY.chunk_bytes
            assert 0 < moved.read_bytes + moved.written_bytes <= 2 * most
            assert max(moved.read_bytes, moved.written_bytes) <= most
        assert traffic.read().read_bytes == TINY.disk_bytes


def test_a_slow_drive_is_filled_in_part_and_the_rest_is_left_alone(drive: Path) -> None:
    with make_traffic(drive) as traffic:
        left = [12]

        def keep_going() -> bool:
            left[0] -= 1
            return left[0] >= 0

        traffic.fill(keep_going)
        assert len(traffic.chunks) == 12
        assert traffic.read().read_bytes == 12 * TINY.chunk_bytes
        assert traffic.write().written_bytes == 12 * TINY.chunk_bytes


def test_nothing_moved_has_no_speed() -> None:
    assert StateTrafficFigures(0, 0, 0.0).bytes_per_s is None
    assert (StateTrafficFigures(1, 1, 0.25) + StateTrafficFigures(0, 1, 0.25)).bytes_per_s == 6.0


class EndlessTraffic:
    """A stand-in for traffic, busy until it is stopped; then it ends, or fails with `error`."""

    def __init__(self, error: Exception | None = None) -> None:
        self.written_bytes, self.error, self.passes = 0, error, 0

    def mix(self, keep_going: Callable[[], bool]) -> None:
        self.passes += 1
        while keep_going():
            threading.Event().wait(0.001)
        if self.error is not None:
            raise self.error


def in_turns(alone_s: float, beside_s: float) -> Callable[[], float]:
    """Return a run that takes longer while another thread is busy."""

    def run() -> float:
        busy = any(thread.name == "busy drives" for thread in threading.enumerate())
        return beside_s if busy else alone_s

    return run


def test_a_share_is_the_speed_beside_busy_drives_of_that_alone() -> None:
    traffic: Any = EndlessTraffic()
    figure = measure_beside(Bench(TINY, Quiet()), "x", in_turns(1.0, 4.0), traffic)
    assert figure == Figure("x", FigureUnit.SHARE, 0.25, 0.0, default_sizes.ROUNDS)
    assert traffic.passes == default_sizes.ROUNDS
    assert not any(thread.name == "busy drives" for thread in threading.enumerate())


def test_drives_that_are_done_too_soon_give_no_share() -> None:
    traffic: Any = EndlessTraffic()
    traffic.written_bytes = 0
    sizes = replace(TINY, beside_bytes=0)
    assert measure_beside(Bench(sizes, Quiet()), "x", in_turns(1.0, 1.0), traffic) is None


def test_that_is_told_of(drive: Path) -> None:
    sizes = replace(TINY, beside_bytes=0)
    parts = frozenset({SurveyPart.UPDATE, SurveyPart.COMPUTE})
    found = survey(BenchRequest(parts, (drive,), sizes), Quiet())
    assert (found.update_beside_disk, found.compute_beside_disk) == (None, None)
    assert sum("speed beside them is not known" in note for note in found.notes) == 2


def test_an_error_of_the_drives_ends_the_measurement() -> None:
    traffic: Any = EndlessTraffic(StoreError("swap file: EIO"))
    with pytest.raises(StoreError, match="EIO"):
        measure_beside(Bench(TINY, Quiet()), "x", in_turns(1.0, 1.0), traffic)
    assert not any(thread.name == "busy drives" for thread in threading.enumerate())


def test_a_measurement_that_is_interrupted_stops_the_drives() -> None:
    traffic: Any = EndlessTraffic()
    calls = [0]

    def run() -> float:
        calls[0] += 1
        if any(thread.name == "busy drives" for thread in threading.enumerate()):
            raise KeyboardInterrupt
        return 1.0

    with pytest.raises(KeyboardInterrupt):
        measure_beside(Bench(TINY, Quiet()), "x", run, traffic)
    assert not any(thread.name == "busy drives" for thread in threading.enumerate())


def test_training_leaves_the_users_random_numbers_alone(drive: Path) -> None:
    before = torch.get_rng_state()
    survey(BenchRequest(frozenset({SurveyPart.STEP}), (drive,), TINY), Quiet())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_listener_is_told_of_every_figure_in_the_table(drive: Path) -> None:
    listener = Quiet()
    found = survey(BenchRequest(frozenset(SurveyPart), (drive,), TINY), listener)
    assert sorted(f.name for f in listener.figures) == sorted(f.name for f in found.figures)
    assert all(0 <= share <= 1 for share in listener.shares)


# --- what is shown --------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now_s = Terminal(), [0.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now_s[0])
    monkeypatch.setenv("COLUMNS", "80")
    progress = BenchProgress(StatusLine(stream, 0.1))
    progress.begin("a\x1b[2Jdrive")
    for share in (0.25, 0.5, 1.0):
        now_s[0] += 1
        progress.at(share)
    progress.at(0.9)  # too soon
    progress.done(Figure("x", FigureUnit.SECONDS, 1.0, 0.0, 1))
    progress.line.erase()
    shown = stream.getvalue()
    assert "\n" not in shown and "\x1b" not in shown
    *lines, last, end = shown.split("\r")[1:]
    assert [line.split("]")[0] for line in lines] == [
        f"[{'#' * done}{'-' * (20 - done)}" for done in (0, 5, 10, 20)
    ]
    assert all(len(line) == 79 for line in lines)
    assert (last.strip(), end) == ("", "")


def test_a_narrow_terminal_has_no_room_for_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    stream = Terminal()
    BenchProgress(StatusLine(stream)).begin("/mnt/nvme0: write")
    assert stream.getvalue().strip() == "0% /mnt/nvme0: write"


def test_elsewhere_each_figure_is_a_line() -> None:
    stream = io.StringIO()
    progress = BenchProgress(StatusLine(stream))
    progress.begin("memory copy")
    progress.at(0.5)
    progress.done(Figure("memory copy", FigureUnit.BYTES_PER_S, 2e9, 1e8, 7))
    progress.line.erase()
    assert stream.getvalue() == "memory copy: 2 GB/s +- 5% (7 runs)\n"


def test_without_stderr_nothing_is_told() -> None:
    progress = BenchProgress(StatusLine(None))
    progress.begin("x")
    progress.line.say("y")
    progress.line.erase()


def wish_to_write(most_written_bytes: int) -> Any:
    return SimpleNamespace(most_written_bytes=most_written_bytes)


def test_the_table_has_the_notes_and_what_was_written() -> None:
    figure = Figure("x", FigureUnit.BYTES_PER_S, 1e9, 0.0, 1)
    disk = DiskFigures(("/a",), figure, figure, figure)
    found = SurveyResult(disks=[disk], together=disk, notes=["no O_DIRECT"], written_bytes=GIB)
    made, wanted, none = known_profile(), *map(wish_to_write, (2 * GIB, 0))
    lines = bench.describe(found, wanted, made, Path("/p.json"))
    assert any("1 GiB of at most 2 GiB" in line for line in lines)
    assert any("/p.json, with the 1 tuning it had" in line for line in lines)
    assert lines[-1] == "note: no O_DIRECT"
    assert any("not written" in line for line in bench.describe(found, none, made, None))


# --- as a program ---------------------------------------------------------------------------------


def program(sizes: BenchSizes, before: str = "pass") -> list[str]:
    """Return the command line of `offload bench` with other sizes. before: code that runs first."""
    text = (
        f"import sys; {before}\n"
        "from offload.tools.bench import sizes\n"
        "from offload.tools.bench.sizes import BenchSizes, ModelSize\n"
        f"sizes.DEFAULT = {sizes!r}\n"
        "from offload.tools.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    return [sys.executable, "-W", "error", "-c", text, "bench"]


def test_as_a_program_with_the_sizes_that_people_get(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    argv = ["--json", "--output", str(path), "--only", "memory", "--seconds", "0.01"]
    done = children.run(
        [sys.executable, "-m", "offload", "bench", *argv],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["profile"] == json.loads(path.read_text())
    assert done.stderr.startswith("writes to no drive\nmemory copy: ")


def test_help_ends_with_an_example_and_needs_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; "
        "from offload.tools.cli import main; main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "example:\n  offload bench /mnt/nvme0" in done.stdout
    assert f"writes at most {bench.FIRST_GIB} GiB" in done.stdout


@pytest.mark.parametrize(
    ("part", "line"),
    [
        ("disk", ": write: "),
        ("compute", "products bfloat16: "),
        ("step", "writes at most "),
    ],
)
def test_ctrl_c_leaves_nothing(part: str, line: str, drive: Path) -> None:
    long = replace(TINY, seconds=2.0, disk_runs=10**6, steps=10**6)
    child = children.Popen(
        [*program(long), str(drive), "--only", part],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stderr is not None
        told = ""
        while line not in told:
            told = child.stderr.readline()
            assert told, "it ended by itself"
        child.send_signal(signal.SIGINT)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert (child.returncode, out) == (130, ""), err
    assert "Traceback" not in err
    assert os.listdir(drive) == []
    assert not profile.own_path().exists()


def test_with_an_accelerator_copies_and_products_are_its_own(drive: Path, tmp_path: Path) -> None:
    library()  # build it first, not within the time limit of the run
    path = tmp_path / "p.json"
    load = f"sys.path.insert(0, {str(HERE)!r}); from fake_accelerator import load; load('lazy', 1)"
    done = children.run(
        [*program(TINY, load), str(drive), "--json", "--output", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    told, made = json.loads(done.stdout), profile.load(path)
    assert made.device == "fake" and made.device_memory_bytes
    for name in (*MEASURED, "to_device_bytes_per_s", "to_host_bytes_per_s"):
        assert (getattr(made, name) or 0) > 0, name
    names = [figure["name"] for figure in told["figures"]]
    assert {"copy to device", "copy to host", "products float32"} <= set(names)
    assert told["step"]["seconds"] > 0
    assert not any("no accelerator" in note for note in told["notes"])
    assert told["written_bytes"] <= told["most_written_bytes"]
    assert os.listdir(drive) == []


def test_every_speed_of_a_profile_is_somebodys_business() -> None:
    """A new field of the profile must be measured, or be known to come from elsewhere."""
    speeds = {f.name for f in dataclasses.fields(Profile) if f.name.endswith(("_per_s", "_disk"))}
    assert speeds == {*MEASURED, "to_device_bytes_per_s", "to_host_bytes_per_s"}
    with pytest.raises(FormatError):
        profile.from_dict({**known_profile().to_dict(), "speed": 1.0})
