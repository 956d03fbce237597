"""A memory limit that the kernel enforces: a cgroup where one can be made, else RLIMIT_DATA."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from offload.core.host_facts import cgroup_levels

PROGRAM = Path(__file__).parent / "under_limit.py"
TRIAL_S, GONE_S = 60.0, 30.0  # deadlines: of a trial; until the kernel has forgotten a process
DATA_SHARE = 1.375  # RLIMIT_DATA also counts what is reserved: stacks of threads, free heap
WORDS = ("DefaultCPUAllocator: can't allocate memory", "MemoryError", "std::bad_alloc")
FILES = {  # of each version of cgroups: the limit, that of swap, and the count of kills
    2: ("memory.max", "memory.swap.max", "memory.events"),
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"),
}


class Limit:
    """The limit of a machine on which none can be set."""

    about, argument, nbytes = "no limit", "none", 0

    def holds(self, pid: int) -> bool:
        """Return whether the process is under this limit, by what the kernel says."""
        return True

    def kills(self) -> int:
        """Return how many processes the kernel has killed because of this limit."""
        return 0

    def failure(self, code: int, said: str, kills_before: int) -> str | None:
        """Return how a process that ended so has run out of memory; None: it has not."""
        count = self.kills() - kills_before
        if code == -signal.SIGKILL and count > 0:
            return f"killed by the kernel (oom_kill {count})"
        found = [word for word in WORDS if word in said.rstrip().rpartition("\n")[2]]
        return found[0] if code != 0 and found else None

    def close(self) -> None:
        """Remove the limit, and end what is left under it."""


class DataLimit(Limit):
    """A limit on the memory that a process can write to and shares with no other: RLIMIT_DATA."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = int(nbytes * DATA_SHARE)
        self.about, self.argument = "RLIMIT_DATA", f"data={self.nbytes}"
        try_out(self)

    def holds(self, pid: int) -> bool:
        return resource.prlimit(pid, resource.RLIMIT_DATA) == (self.nbytes, self.nbytes)


class CgroupLimit(Limit):
    """A cgroup for memory, without swap, as near to this process's own as one can be made."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.path = nbytes, make_group()
        version = 2 if (self.path / FILES[2][0]).exists() else 1
        self._limit, self._swap, self._events = (self.path / name for name in FILES[version])
        self.about, self.argument = f"cgroup v{version}, no swap", f"cgroup={self.path}"
        try:
            self._limit.write_text(str(nbytes))
            if self._swap.exists() or Path("/proc/swaps").read_text().count("\n") > 1:
                self._swap.write_text("0" if version == 2 else str(nbytes))
            try_out(self)
        except BaseException:
            self.close()
            raise

    def holds(self, pid: int) -> bool:
        return int(self._limit.read_text()) == self.nbytes and pid in self._pids()

    def kills(self) -> int:
        counts = dict(line.split() for line in self._events.read_text().splitlines())
        return int(counts.get("oom_kill", 0))

    def close(self) -> None:
        end_s = time.monotonic() + GONE_S
        while self.path.exists():
            with contextlib.suppress(OSError):
                for pid in self._pids():
                    os.kill(pid, signal.SIGKILL)
            try:
                self.path.rmdir()
            except OSError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.01)

    def _pids(self) -> list[int]:
        return [int(pid) for pid in (self.path / "cgroup.procs").read_text().split()]


KINDS = {"cgroup": CgroupLimit, "data": DataLimit}


def set_limit(wanted: str, nbytes: int) -> tuple[Limit, list[str]]:
    """Return the first wanted limit ("auto": of any kind) that works, and why others do not."""
    refusals = []
    for name, kind in KINDS.items():
        if wanted in ("auto", name):
            try:
                return kind(nbytes), refusals
            except (OSError, subprocess.TimeoutExpired) as error:
                refusals.append(f"{name}: {getattr(error, 'strerror', None) or error}")
    return Limit(), refusals


def make_group() -> Path:
    """Make a cgroup below this process's own, or below the next above it that can have some."""
    refusal = OSError("no cgroup with the memory controller is here")
    for level in cgroup_levels("memory"):
        handed_down = level / "cgroup.subtree_control"  # v2
        is_v2 = handed_down.exists() and "memory" in handed_down.read_text().split()
        if is_v2 or (level / FILES[1][0]).exists():
            remove_old(level)
            group = level / f"offload-demo-{os.getpid()}"
            try:
                group.mkdir()
                return group
            except OSError as error:
                refusal = error
    raise refusal


def remove_old(level: Path) -> None:
    """Remove the groups of demos that were killed themselves; what was in them has ended, too."""
    for group in level.glob("offload-demo-*"):
        if not Path("/proc", group.name.rpartition("-")[2]).exists():
            with contextlib.suppress(OSError):
                group.rmdir()


def try_out(limit: Limit) -> None:
    """Raise `OSError` unless a process that takes more than the limit fails for want of memory."""
    command = [sys.executable, PROGRAM, limit.argument, "--take", str(limit.nbytes)]
    before = limit.kills()
    done = subprocess.run(command, input="go\n", capture_output=True, text=True, timeout=TRIAL_S)
    if limit.failure(done.returncode, done.stderr, before) is None:
        raise OSError(f"a process that takes more ends with {done.returncode} {done.stderr[-99:]}")
