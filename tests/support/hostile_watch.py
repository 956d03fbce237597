"""A watch over a process that reads hostile files: what it opens, whether it runs code, how much
memory it takes. Runs in a process of its own, because an audit hook stays for good.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offload.checkpoint.format.directory import CheckpointDirectory, check_name, find_newest
from offload.checkpoint.format.manifest import MANIFEST
from offload.checkpoint.format.values import decode
from offload.checkpoint.format.verify import verify
from offload.core.errors import ConfigError, CorruptionError, FormatError

# The audit events that reading a checkpoint may cause. So nothing is imported, compiled, run,
# started, sent, loaded, changed or removed.
HARMLESS = frozenset({"open", "os.listdir", "object.__getattr__", "sys._getframe"})
IN_ACCESS, IN_OPEN = 0x1, 0x20


class Watch:
    """An audit hook and an inotify watch, armed only while the judges run.

    problems: what the judges did and must not do.
    """

    def __init__(self, root: Path, outside: Path) -> None:
        self.problems: list[str] = []
        self._root, self._armed = f"{root}/", False
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._inotify = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        for path in (outside, *outside.iterdir()):
            added = self._libc.inotify_add_watch(
                self._inotify, os.fsencode(path), IN_OPEN | IN_ACCESS
            )
            assert added >= 0, os.strerror(ctypes.get_errno())
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if not self._armed:
            return
        if event not in HARMLESS:
            self.problems.append(f"{event} {args!a}"[:200])
        elif event == "open":
            path, _, flags = args
            text = os.fspath(path)
            if f"{text}/".startswith(self._root):
                return
            # A name in an open directory.
            if "/" in text or text in (".", "..") or not flags & os.O_NOFOLLOW or "\0" in text:
                self.problems.append(f"open {text!a} {flags:#x}")

    @contextmanager
    def armed(self) -> Iterator[None]:
        self._drain()
        self._armed = True
        try:
            yield
        finally:
            self._armed = False
            if self._drain():
                self.problems.append("a file outside was opened or read")

    def _drain(self) -> bool:
        """Return whether any process has opened or read a file outside since the last call."""
        try:
            return len(os.read(self._inotify, 65536)) >= struct.calcsize("iIII")
        except BlockingIOError:
            return False


def limit_memory(more_bytes: int) -> None:
    """Limit the address space of this process to so much more than now; then `MemoryError`."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


# --- the judges -----------------------------------------------------------------------------------


def outcome(act: Callable[[], object]) -> str:
    """Run a reader; return `ok`, `damaged` or the name of a typed error. Other errors propagate."""
    try:
        found = act()
    except (FormatError, CorruptionError, ConfigError) as error:
        assert 0 < len(str(error)) < 3000 and str(error).isprintable(), repr(str(error))
        return type(error).__name__
    return "damaged" if getattr(found, "is_whole", True) is False else "ok"


def read_all(path: Path) -> None:
    """Read a checkpoint as a reader does: manifest, values, and the first bytes of every part."""
    with CheckpointDirectory(path) as directory:
        manifest = directory.read_whole()
        for tree in manifest.values.values():
            decode(tree, manifest.tensors.__getitem__)
        for tensor in manifest.tensors.values():
            for part in tensor.parts:
                with directory.opened(check_name(part.file)) as fd:
                    assert part.offset + part.nbytes <= os.fstat(fd).st_size
                    few = min(16, part.nbytes)
                    assert len(os.pread(fd, few, part.offset)) == few


def judge(path: Path) -> dict[str, str]:
    """Return what each reader says about a checkpoint, and about the directory it lies in."""
    return {
        "verify": outcome(lambda: verify(path)),
        "read": outcome(lambda: read_all(path)),
        "newest": outcome(lambda: find_newest(path)),
        "newest below": outcome(lambda: find_this(path)),
    }


def find_this(path: Path) -> None:
    """Check that no neighbour of a checkpoint is taken for a newer whole one."""
    assert find_newest(path.parent) == path


def warm_up(path: Path) -> None:
    """Have everything imported and compiled that is so late, before the watch begins."""
    # To show a warning Python opens the file that it comes from.
    warnings.filterwarnings("ignore", r"checkpoint .* is passed over")
    assert set(judge(path).values()) == {"ok"}, judge(path)
    outcome(lambda: verify(path / "none"))
    outcome(lambda: verify(path / MANIFEST))
