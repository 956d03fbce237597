"""The command line and its doctor: statuses, advice, output and exit codes.

The doctor judges facts, so most tests hand it a healthy machine with one fact changed. The native
core is a stand-in, except in the last tests, which run everything as it is on this machine.
"""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import offload
from offload.core.drive_facts import DirectIo, DirectoryFacts, Drive, Mount
from offload.core.errors import OffloadError
from offload.core.host_facts import (
    UNLIMITED_BYTES,
    Accelerator,
    Cpu,
    HostFacts,
    HugePages,
    IoUring,
    Memlock,
    Memory,
    Torch,
)
from offload.tools import cli, judgement
from offload.tools.cli import doctor
from offload.tools.judgement import Row, Severity

GIB = 2**30
HEALTHY = HostFacts(
    system="Linux",
    kernel="6.12.0",
    cpu=Cpu("Fast CPU", logical=16, physical=8, affinity=16, quota_cores=None, numa_nodes=1),
    memory=Memory(64 * GIB, 60 * GIB, 0, 0, None, None, None),
    huge_pages=HugePages("madvise", 0),
    memlock=Memlock(UNLIMITED_BYTES, UNLIMITED_BYTES, exempt=False),
    io_uring=IoUring(True, None, 0),
    torch=Torch("2.13.0", None),
    accelerator=Accelerator("cuda", 2, "Fast GPU", 80 * GIB),
)
GOOD = DirectoryFacts(
    path=Path("/mnt/nvme"),
    exists=True,
    is_directory=True,
    writable=True,
    mount=Mount("/mnt/nvme", "xfs", "/dev/nvme0n1", "259:0"),
    drive=Drive("nvme0n1", False, "Quick 990"),
    ram_backed=False,
    total_bytes=1000 * GIB,
    free_bytes=900 * GIB,
    o_tmpfile=True,
    direct_io=DirectIo(True, 4, 512),
)
MACHINE_ROWS = [
    "native core",
    "cores",
    "memory",
    "huge pages",
    "memlock",
    "io_uring",
    "accelerator",
    "torch",
]
DIRECTORY_ROWS = ["directory", "file system", "O_DIRECT", "O_TMPFILE", "free space", "drive"]


def make_core(**functions: Callable[[], Any]) -> SimpleNamespace:
    usual: dict[str, Callable[[], Any]] = {
        "native_error": lambda: None,
        "isa": lambda: "avx2",
        "available_isas": lambda: ["avx2", "scalar", "reference"],
        "num_threads": lambda: 16,
    }
    return SimpleNamespace(**{**usual, **functions})


def use_core(monkeypatch: pytest.MonkeyPatch, **functions: Callable[[], Any]) -> None:
    monkeypatch.setattr(offload, "kernels", make_core(**functions), raising=False)


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make commands see the healthy machine and the good directory."""
    use_core(monkeypatch)
    monkeypatch.setattr(doctor, "read_machine", lambda: HEALTHY)
    monkeypatch.setattr(doctor, "read_directory", lambda path: replace(GOOD, path=path))


def say(row: Row) -> str:
    return f"{row.value} | {row.advice}"


# --- the diagnosis -----------------------------------------------------------------------------


def test_healthy_machine(healthy: None) -> None:
    rows = judgement.examine(HEALTHY, GOOD)
    assert [row.name for row in rows] == MACHINE_ROWS + DIRECTORY_ROWS
    assert {row.status for row in rows} == {Severity.OK}
    assert all(row.advice is None and row.value and row.why for row in rows)
    assert doctor.exit_code(rows) == 0


def test_without_a_directory_only_the_machine_is_judged(healthy: None) -> None:
    assert [row.name for row in judgement.examine(HEALTHY)] == MACHINE_ROWS


def test_unusable_directory_has_one_row(healthy: None) -> None:
    rows = judgement.examine(
        HEALTHY, DirectoryFacts(Path("/nope"), False, False, False, error="ENOENT")
    )
    assert [row.name for row in rows] == [*MACHINE_ROWS, "directory"]
    assert doctor.exit_code(rows) == 1


def test_machine_that_tells_nothing(healthy: None) -> None:
    """Unknown is never ok, and only what training cannot do without is missing."""
    unknown = HostFacts(
        system="unknown",
        kernel="unknown",
        cpu=Cpu(*[None] * 6),
        memory=Memory(*[None] * 7),
        huge_pages=HugePages(None, None),
        memlock=Memlock(None, None, exempt=False),
        io_uring=IoUring(None, None, None),
        torch=Torch(None, "ModuleNotFoundError: No module named 'torch'"),
        accelerator=None,
    )
    rows = {
        row.name: row
        for row in judgement.examine(unknown, DirectoryFacts(Path("/x"), True, True, True))
    }
    assert {name for name, row in rows.items() if row.status is Severity.OK} == {
        "native core",
        "directory",
    }
    assert {name for name, row in rows.items() if row.status is Severity.MISSING} == {"torch"}
    for name, row in rows.items():
        assert (row.advice is None) == (row.status is Severity.OK), name


# --- native core -------------------------------------------------------------------------------


def test_native_core(monkeypatch: pytest.MonkeyPatch) -> None:
    use_core(monkeypatch)
    row = judgement.judge_native_core()
    assert row.status is Severity.OK
    assert row.value == "avx2 (of avx2, scalar, reference), 16 threads"


def test_reference_path_is_degraded(monkeypatch: pytest.MonkeyPatch) -> None:
    use_core(monkeypatch, native_error=lambda: "no module _native", isa=lambda: "reference")
    row = judgement.judge_native_core()
    assert row.status is Severity.DEGRADED
    assert "no module _native" in row.value
    assert "compiler" in (row.advice or "")


@pytest.mark.parametrize(
    ("available", "advice"),
    [(["avx2", "scalar", "reference"], "unset OFFLOAD_ISA"), (["scalar", "reference"], "AVX2")],
)
def test_slow_instruction_set(
    monkeypatch: pytest.MonkeyPatch, available: list[str], advice: str
) -> None:
    use_core(monkeypatch, isa=lambda: "scalar", available_isas=lambda: available)
    row = judgement.judge_native_core()
    assert row.status is Severity.DEGRADED
    assert advice in (row.advice or "")


@pytest.mark.parametrize("name", ["native_error", "isa", "available_isas", "num_threads"])
def test_error_of_the_core_is_a_row(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def fail() -> None:
        raise OffloadError("OFFLOAD_ISA: 'sse9' is not available here")

    use_core(monkeypatch, **{name: fail})
    rows = judgement.examine(HEALTHY)
    assert rows[0].status is Severity.MISSING
    assert "sse9" in rows[0].value
    assert doctor.exit_code(rows) == 1


def test_core_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(offload, "kernels", raising=False)
    monkeypatch.setitem(sys.modules, "offload.kernels", None)
    row = judgement.judge_native_core()
    assert row.status is Severity.MISSING
    assert "not importable: ModuleNotFoundError: " in row.value


# --- the machine -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({"quota_cores": 32.0}, Severity.OK, "quota 32.00"),
        ({"quota_cores": 2.5}, Severity.DEGRADED, "--cpus"),
        ({"quota_cores": 15.0}, Severity.DEGRADED, "quota 15.00"),
        ({"affinity": 8}, Severity.OK, "8 usable of 16"),
        ({"affinity": 7}, Severity.DEGRADED, "taskset"),
        ({"logical": 1, "affinity": 1}, Severity.DEGRADED, "one core"),
        ({"numa_nodes": 2}, Severity.OK, "NUMA nodes: 2"),
    ],
)
def test_cores(changes: dict[str, Any], status: Severity, text: str) -> None:
    row = judgement.judge_cores(replace(HEALTHY.cpu, **changes))
    assert row.status is status
    assert text in say(row)


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({}, Severity.OK, "60 GiB free of 64 GiB, no cgroup limit"),
        (
            {
                "cgroup_limit_bytes": 32 * GIB,
                "cgroup_usage_bytes": 8 * GIB,
                "cgroup_room_bytes": 24 * GIB,
            },
            Severity.OK,
            "24 GiB free of 64 GiB, cgroup limit 32 GiB (8 GiB used)",
        ),
        (
            {"cgroup_limit_bytes": 4 * GIB, "cgroup_room_bytes": 4 * GIB - 1},
            Severity.DEGRADED,
            "--memory",
        ),
        ({"available_bytes": GIB}, Severity.DEGRADED, "--shm-size is not needed"),
        (
            {"total_bytes": None, "available_bytes": None, "cgroup_room_bytes": 9 * GIB},
            Severity.DEGRADED,
            "pip install psutil",
        ),
        ({"swap_total_bytes": 2 * GIB}, Severity.OK, "swap 2 GiB"),
    ],
)
def test_memory(changes: dict[str, Any], status: Severity, text: str) -> None:
    row = judgement.judge_memory(replace(HEALTHY.memory, **changes))
    assert row.status is status
    assert text in say(row)


@pytest.mark.parametrize(
    ("pages", "status", "text"),
    [
        (HugePages("always", None), Severity.OK, "always"),
        (HugePages("madvise", 2 * GIB), Severity.OK, "2 GiB free"),
        (HugePages("never", 0), Severity.DEGRADED, "echo madvise"),
        (HugePages(None, None), Severity.DEGRADED, "does not tell"),
    ],
)
def test_huge_pages(pages: HugePages, status: Severity, text: str) -> None:
    row = judgement.judge_huge_pages(pages)
    assert row.status is status
    assert text in say(row)


@pytest.mark.parametrize(
    ("memlock", "status", "text"),
    [
        (Memlock(UNLIMITED_BYTES, UNLIMITED_BYTES, exempt=False), Severity.OK, "unlimited"),
        (Memlock(65536, 65536, exempt=True), Severity.OK, "CAP_IPC_LOCK"),
        (Memlock(65536, 65536, exempt=False), Severity.DEGRADED, "--ulimit memlock=-1"),
        (
            Memlock(8 * 2**20, UNLIMITED_BYTES, exempt=False),
            Severity.DEGRADED,
            "ulimit -l unlimited",
        ),
    ],
)
def test_memlock(memlock: Memlock, status: Severity, text: str) -> None:
    row = judgement.judge_memlock(memlock)
    assert row.status is status
    assert text in say(row)


@pytest.mark.parametrize(
    ("ring", "text"),
    [
        (IoUring(False, "EPERM", 0), "--security-opt seccomp="),
        (IoUring(False, "EPERM", None), "--security-opt seccomp="),
        (IoUring(False, "EPERM", 2), "sysctl kernel.io_uring_disabled=0"),
        (IoUring(False, "ENOSYS", None), "Linux 5.1"),
        (IoUring(False, "ENOMEM", 0), "memlock"),
        (IoUring(None, None, None), "only Linux"),
    ],
)
def test_without_io_uring(ring: IoUring, text: str) -> None:
    row = judgement.judge_io_uring(replace(HEALTHY, io_uring=ring))
    assert row.status is Severity.DEGRADED
    assert text in (row.advice or "")
    assert "thread-pool engine" in (row.advice or "")
    assert (ring.error or "not tried") in row.value


def test_accelerator() -> None:
    row = judgement.judge_accelerator(HEALTHY)
    assert row.value == "2 x Fast GPU (cuda), 80 GiB each"
    nameless = replace(HEALTHY, accelerator=Accelerator("xpu", 1, None, None))
    assert judgement.judge_accelerator(nameless).value == "1 x xpu (xpu)"


def test_missing_accelerator_is_degraded() -> None:
    row = judgement.judge_accelerator(replace(HEALTHY, accelerator=None))
    assert row.status is Severity.DEGRADED
    assert "--gpus all" in (row.advice or "")


def test_missing_torch_is_missing() -> None:
    machine = replace(HEALTHY, torch=Torch(None, "OSError: libcudart.so"), accelerator=None)
    row = judgement.judge_torch(machine)
    assert row.status is Severity.MISSING
    assert "libcudart" in row.value
    assert "--force-reinstall torch" in (row.advice or "")
    assert judgement.judge_accelerator(machine).value == "unknown without torch"


# --- the directory -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"exists": False, "is_directory": False, "error": "ENOENT"}, "mkdir"),
        ({"is_directory": False, "error": "ENOTDIR"}, "not a directory"),
        ({"error": "EROFS"}, "without :ro"),
        ({"error": "EACCES"}, "chown"),
        ({"error": "ENOSPC"}, "make room"),
        ({"is_directory": False, "error": "ELOOP", "mount": None}, "ELOOP"),
    ],
)
def test_unusable_directory(changes: dict[str, Any], text: str) -> None:
    row = judgement.judge_directory(replace(GOOD, writable=False, **changes))
    assert row.status is Severity.MISSING
    assert text in say(row)
    assert "/mnt/nvme" in row.value


@pytest.mark.parametrize(
    ("fs_type", "text"),
    [
        ("overlay", "-v /mnt/nvme:/mnt/nvme"),
        ("nfs4", "network"),
        ("fuse.sshfs", "network"),
        ("btrfs", "chattr +C"),
    ],
)
def test_unsuitable_file_system(fs_type: str, text: str) -> None:
    row = judgement.judge_file_system(Mount("/mnt", fs_type, "source", "0:1"))
    assert row.status is Severity.DEGRADED
    assert text in (row.advice or "")


def test_good_file_system() -> None:
    row = judgement.judge_file_system(GOOD.mount)
    assert (row.status, row.value) == (Severity.OK, "xfs on /dev/nvme0n1 at /mnt/nvme")


def test_o_direct() -> None:
    row = judgement.judge_o_direct(GOOD)
    assert row.value == "works, memory aligned to 4 bytes, offsets to 512"
    for works, value in ((False, "refused"), (None, "could not be tried")):
        row = judgement.judge_o_direct(replace(GOOD, direct_io=DirectIo(works)))
        assert (row.status, row.value) == (Severity.DEGRADED, value)
        assert "-v /mnt/nvme:/mnt/nvme" in (row.advice or "")


def test_o_tmpfile() -> None:
    assert judgement.judge_o_tmpfile(GOOD).status is Severity.OK
    assert judgement.judge_o_tmpfile(replace(GOOD, o_tmpfile=False)).status is Severity.DEGRADED


@pytest.mark.parametrize(
    ("free_bytes", "status"),
    [
        (0, Severity.MISSING),
        (1, Severity.DEGRADED),
        (16 * GIB - 1, Severity.DEGRADED),
        (16 * GIB, Severity.OK),
        (None, Severity.DEGRADED),
    ],
)
def test_free_space(free_bytes: int | None, status: Severity) -> None:
    assert judgement.judge_free_space(replace(GOOD, free_bytes=free_bytes)).status is status


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({}, Severity.OK, "nvme0n1, Quick 990, solid state"),
        ({"drive": Drive("sda", True, None)}, Severity.DEGRADED, "sda, rotational"),
        ({"drive": Drive("sda", None, None)}, Severity.DEGRADED, "sda"),
        ({"drive": None}, Severity.DEGRADED, "unknown"),
        (
            {"ram_backed": True, "drive": None, "mount": Mount("/m", "tmpfs", "tmpfs", "0:1")},
            Severity.DEGRADED,
            "RAM (tmpfs)",
        ),
    ],
)
def test_drive(changes: dict[str, Any], status: Severity, text: str) -> None:
    row = judgement.judge_drive(replace(GOOD, **changes))
    assert (row.status, row.value) == (status, text)


# --- the table ---------------------------------------------------------------------------------

LONG = Row("directory", Severity.MISSING, "/" + "long" * 60, "word " * 40, "--gpus all " * 30)


def test_table_fits_100_columns() -> None:
    rows = [LONG, *judgement.examine(replace(HEALTHY, accelerator=None), GOOD)]
    lines = doctor.format_table(rows).splitlines()
    assert max(len(line) for line in lines) <= 100
    joined = "".join(line.strip() for line in lines)
    assert LONG.value in joined, "nothing may be cut off"


def test_table_does_not_break_flags() -> None:
    for before in range(100):  # wherever in the line the flag comes to lie
        text = doctor.format_table([replace(LONG, advice="x" * before + " --security-opt")])
        assert "--security-opt" in text


def test_table_is_aligned(healthy: None) -> None:
    lines = doctor.format_table(judgement.examine(HEALTHY, GOOD)).splitlines()
    assert lines[0] == "native core  ok        avx2 (of avx2, scalar, reference), 16 threads"
    assert lines[-1] == "14 ok, 0 degraded, 0 missing: all is well."
    assert len(lines) == 16, "no advice, an empty line, and the summary"
    for line in lines[:-2]:
        assert re.match(r"\S.{10}  ok        \S", line), line


def test_only_rows_that_are_not_ok_have_advice(healthy: None) -> None:
    text = doctor.format_table(judgement.examine(replace(HEALTHY, accelerator=None)))
    assert text.count("do: ") == text.count("why: ") == 1
    assert text.splitlines()[-1].startswith("7 ok, 1 degraded, 0 missing: ")


def test_summary_of_what_is_missing() -> None:
    assert doctor.summarize([LONG]).startswith("0 ok, 0 degraded, 1 missing: offload cannot run")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "no_color", "term", "coloured"),
    [
        (Terminal(), None, "xterm", True),
        (Terminal(), "", "xterm", True),  # the convention: an empty value does not count
        (Terminal(), "1", "xterm", False),
        (Terminal(), None, "dumb", False),
        (io.StringIO(), None, "xterm", False),
    ],
)
def test_colours(
    monkeypatch: pytest.MonkeyPatch,
    stream: io.StringIO,
    no_color: str | None,
    term: str,
    coloured: bool,
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    rows = [LONG]
    doctor.write_table(rows, stream)
    assert ("\x1b[31mmissing" in stream.getvalue()) is coloured
    plain = re.sub(r"\x1b\[\d+m", "", stream.getvalue())
    assert plain == doctor.format_table(rows) + "\n", "colours change nothing else"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_paths_that_the_terminal_cannot_show(encoding: str) -> None:
    path = os.fsdecode(b"/mnt/\xff") + "\u65e5"
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    doctor.write_table([replace(LONG, value=path)], stream)
    stream.flush()
    assert b"/mnt/\\udcff" in buffer.getvalue()


# --- the command -------------------------------------------------------------------------------


def test_json_schema(healthy: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json", "/mnt/nvme"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.count("\n") == 1, "one object, one line"
    found = json.loads(printed.out)
    assert list(found) == ["version", "rows", "summary"]
    assert found["version"] == offload.__version__
    assert [row["name"] for row in found["rows"]] == MACHINE_ROWS + DIRECTORY_ROWS
    for row in found["rows"]:
        assert list(row) == ["name", "status", "value", "why", "advice"]
        assert row["status"] == "ok"
        assert row["advice"] is None
    assert found["summary"] == {"ok": 14, "degraded": 0, "missing": 0, "exit_code": 0}


def test_json_of_a_bad_machine(
    healthy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine = replace(HEALTHY, torch=Torch(None, "gone"), accelerator=None)
    monkeypatch.setattr(doctor, "read_machine", lambda: machine)
    assert cli.main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["summary"] == {"ok": 6, "degraded": 1, "missing": 1, "exit_code": 1}
    assert {row["status"] for row in found["rows"]} == {"ok", "degraded", "missing"}
    assert all((row["advice"] is None) == (row["status"] == "ok") for row in found["rows"])


def test_degraded_is_not_a_failure(
    healthy: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "read_machine", lambda: replace(HEALTHY, accelerator=None))
    assert cli.main(["doctor"]) == 0
    assert "1 degraded" in capsys.readouterr().out


def test_missing_directory_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_core(monkeypatch)
    monkeypatch.setattr(doctor, "read_machine", lambda: HEALTHY)
    assert cli.main(["doctor", "--json", str(tmp_path / "nope")]) == 1
    row = json.loads(capsys.readouterr().out)["rows"][-1]
    assert (row["name"], row["value"]) == ("directory", f"{tmp_path / 'nope'}, does not exist")
    assert os.listdir(tmp_path) == []


class Misbehaving:
    """A command that raises."""

    SUMMARY = "Raises."

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--loud", action="store_true")

    def run(self, args: Namespace) -> int:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (OffloadError("disk: full"), 2, "offload: error: disk: full\n"),
        (KeyboardInterrupt(), 130, "offload: error: interrupted\n"),
    ],
)
def test_errors_of_commands(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"bad": Misbehaving(error)})
    assert cli.main(["bad", "--loud"]) == code
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", message)


def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"bad": Misbehaving(ZeroDivisionError())})
    with pytest.raises(ZeroDivisionError):
        cli.main(["bad"])


def test_reader_that_went_away(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cli, "COMMANDS", {"bad": Misbehaving(BrokenPipeError())})
    with (tmp_path / "out").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert cli.main(["bad"]) == 2
        print("lost", flush=True)
        monkeypatch.undo()
    assert (tmp_path / "out").read_text() == "", "stdout leads nowhere from then on"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["doctor", "--nonsense"],
        ["doctor", "a", "b"],
        ["doctor", ""],
        ["doctor", "/mnt/\0nvme"],
    ],
)
def test_bad_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert leaving.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "error:" in printed.err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--help"])
    assert leaving.value.code == 0
    shown = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"    {name} " in shown


# --- as it is on this machine ------------------------------------------------------------------


def test_python_dash_m(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["python -m offload", "--version"])
    monkeypatch.delitem(sys.modules, "offload.__main__", raising=False)  # imported by another test
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module("offload", run_name="__main__")
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"offload {offload.__version__}\n"


def test_ctrl_c_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(ModuleType):
        def __getattr__(self, name: str) -> object:
            if name.startswith("__"):  # asked by code that looks through all modules
                raise AttributeError(name)
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "offload.__main__", raising=False)
    monkeypatch.setitem(sys.modules, "offload.tools.cli", Slow("offload.tools.cli"))
    with pytest.raises(SystemExit) as leaving:
        runpy.run_module("offload", run_name="__main__")
    assert leaving.value.code == 130
    assert capsys.readouterr().err == "offload: error: interrupted\n"


def test_real_doctor(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor", "--json", str(tmp_path)])
    found = json.loads(capsys.readouterr().out)
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == MACHINE_ROWS + DIRECTORY_ROWS
    assert code == found["summary"]["exit_code"]
    assert rows["torch"]["status"] == "ok"
    assert rows["native core"]["status"] != "missing", rows["native core"]["value"]
    assert rows["directory"]["value"] == f"{tmp_path}, writable"
    assert os.listdir(tmp_path) == []


def test_real_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["doctor", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert re.match(r"\d+ ok, \d+ degraded, \d+ missing: ", lines[-1])


def run_doctor(
    command: str, *, path: Path | None = None, before: str = "pass"
) -> subprocess.CompletedProcess[str]:
    """Run `command` in a shell, where $DOCTOR is the program; `before` runs in it first."""
    program = (
        f"import sys; {before}; from offload.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    environment = {**os.environ, "PYTHON": sys.executable, "PROGRAM": program}
    environment.pop("PYTHONUNBUFFERED", None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        ["sh", "-c", command.replace("$DOCTOR", '"$PYTHON" -c "$PROGRAM"')],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )


@pytest.mark.parametrize("error", ["OSError('libtorch_cpu.so: no such file')", "RuntimeError('x')"])
def test_torch_that_does_not_load_is_a_row(tmp_path: Path, error: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(f"raise {error}")
    done = run_doctor("$DOCTOR doctor --json", path=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    for name in ("native core", "torch"):
        assert rows[name]["status"] == "missing"
        assert error.partition("(")[0] in rows[name]["value"]
    assert rows["memory"]["value"] != "unknown"


def test_without_psutil() -> None:
    done = run_doctor("$DOCTOR doctor --json", before="sys.modules['psutil'] = None")
    assert (done.returncode, done.stderr) == (0, "")
    rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["memory"]["status"] == "degraded"
    assert "pip install psutil" in rows["memory"]["advice"]


@pytest.mark.parametrize(
    "command",
    [
        "$DOCTOR doctor",
        "$DOCTOR doctor --json",
        "PYTHONUNBUFFERED=1 $DOCTOR doctor",
        "$DOCTOR --help",
        "$DOCTOR --version",
    ],
)
@pytest.mark.parametrize(
    ("redirection", "message"),
    [
        (">/dev/full", "stdout: the result could not be written: No space left on device"),
        (">&-", "stdout is closed"),
    ],
)
def test_stdout_that_takes_nothing(command: str, redirection: str, message: str) -> None:
    done = run_doctor(f"{command} {redirection}")
    assert done.returncode == 2
    assert done.stderr.startswith(f"offload: error: {message}")
    assert done.stderr.count("\n") == 1, "one line, no traceback"


def test_stdout_and_stderr_that_take_nothing() -> None:
    assert run_doctor("$DOCTOR --version >/dev/full 2>/dev/full").returncode == 2
    assert run_doctor("$DOCTOR --version >&- 2>&-").returncode == 2


def test_arguments_that_are_no_path() -> None:
    done = run_doctor("$DOCTOR doctor ''")
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument DIRECTORY: expected a directory, got ''; leave it out" in done.stderr
    done = run_doctor("$DOCTOR doctor", before=r"sys.argv.append('/mnt/\0nvme')")
    assert (done.returncode, done.stdout) == (2, "")
    assert r"expected a path without NUL characters, got '/mnt/\x00nvme'" in done.stderr


def test_documentation_has_every_row() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    for name in MACHINE_ROWS + DIRECTORY_ROWS:
        assert f"\n### {name}\n" in text
