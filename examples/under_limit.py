"""Run a script under a memory limit: `under_limit.py cgroup=PATH|data=BYTES|none script.py ...`.

The process puts itself under the limit before torch is loaded, waits until its standard input says
`go`, and runs the script. It is killed when the process that started it ends (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import runpy
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enter(limit: str) -> None:
    """Put this process under the limit: what it takes from now on counts."""
    kind, _, value = limit.partition("=")
    if kind == "cgroup":
        Path(value, "cgroup.procs").write_text(str(os.getpid()))
    elif kind == "data":
        resource.setrlimit(resource.RLIMIT_DATA, (int(value), int(value)))
    elif kind != "none":
        sys.exit(f"under_limit.py: expected cgroup=PATH, data=BYTES or none, got {limit!r}")


def take(nbytes: int) -> None:
    """Take that much memory, and touch all of it."""
    print(len(b"x" * nbytes))


def main(limit: str, script: str, *options: str) -> None:
    end_with_parent()
    enter(limit)
    if sys.stdin.readline() != "go\n":
        sys.exit("under_limit.py: was not told to go")
    if script == "--take":
        take(int(options[0]))
        return
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
