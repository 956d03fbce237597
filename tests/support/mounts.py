"""File systems of a test's own, mounted for a forked child alone, so that nothing stays behind."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

HANG_S = 120
CLONE_NEWNS = 0x20000  # of linux/sched.h
CANNOT_MOUNT = 77
FAILED = 78  # not 1, which is EPERM


def run_here(
    check: Callable[[Path], None], directory: Path, setup: str = "", tools: tuple[str, ...] = ()
) -> None:
    """Run shell lines that mount something, then `check`, in a forked child with mounts of its own.

    Skips where that is not possible, and names what is missing.
    """
    for tool in ("mount", *tools):
        if shutil.which(tool) is None:
            packages = "mount e2fsprogs xfsprogs btrfs-progs squashfs-tools"
            pytest.skip(f"needs {tool}: apt-get install {packages}")
    pid = os.fork()
    if pid == 0:
        code = FAILED
        try:
            signal.alarm(2 * HANG_S)
            code = mount_and_check(check, directory, setup)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code == errno.EPERM:
        pytest.skip("needs the right to mount (CAP_SYS_ADMIN)")
    if code == CANNOT_MOUNT:
        pytest.skip("cannot mount, see standard error")
    assert code == 0, "see standard error"


def mount_and_check(check: Callable[[Path], None], directory: Path, setup: str) -> int:
    """Mount and run the check, in the child; return its exit code."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        return errno.EPERM
    script = f"set -e; mount --make-rprivate /; {setup or ':'}"
    if subprocess.run(["sh", "-ec", f"( {script} ) >&2"], timeout=HANG_S).returncode != 0:
        return CANNOT_MOUNT
    check(directory)
    return 0


def loop_mount(tmp_path: Path, make: str, size: str, sector: int = 512) -> str:
    """Return shell lines that mount a file system in a file, on a loop device that ends with the
    mount.
    """
    image, point = tmp_path / "image", tmp_path / "point"
    return f"""
      mkdir {point}; truncate -s {size} {image}; {make} {image} >/dev/null
      loop=$(losetup -b {sector} --show -f {image})
      mount $loop {point} || {{ losetup -d $loop; exit 1; }}
      losetup -d $loop
    """
