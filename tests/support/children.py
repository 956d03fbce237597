"""Python children that start with torch loaded: `run` and `Popen` as those of `subprocess`.

A fresh interpreter takes three CPU seconds to import torch, the engine and what the first optimizer
imports. Here a server that has them imported forks instead, in milliseconds. The child becomes a
child of this process (the fork is orphaned at once, and this process adopts orphans), so waiting
for it and signals to it are the ordinary ones. With `nested=True` this holds for all that the child
starts with `subprocess`, too: it gets a server of its own.

Not for tests of what happens at import, of start-up flags, or of memory before the first import:
they need a fresh interpreter, by `subprocess` itself.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import inspect
import json
import os
import shutil
import socket
import subprocess
import sys
from typing import Any

_TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_PR_SET_CHILD_SUBREAPER = 36
# Read by an interpreter or a library when it starts: too late for a forked child.
_TOO_LATE = ("LD_", "PYTHON", "MALLOC_", "GLIBC_TUNABLES", "OMP_", "KMP_")
# How threads wait (OMP_WAIT_POLICY) is a matter of speed alone.
_TAKEN_OVER = {"PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "OMP_WAIT_POLICY"}


_Fresh = subprocess.Popen  # also where `start` has taken its place


class Popen(subprocess.Popen):
    """A process whose command is this Python: forked with torch loaded, otherwise as usual."""

    def __init__(self, command: Any, *args: Any, nested: bool = False, **options: Any) -> None:
        self._nested = nested
        super().__init__(command, *args, **options)

    def _execute_child(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(super()._execute_child).bind(*args, **kwargs).arguments
        command, environment = bound["args"], bound["env"]
        _check(command, bound)
        files = [
            mine if mine != -1 else inherited
            for mine, inherited in zip(
                (bound["p2cread"], bound["c2pwrite"], bound["errwrite"]), (0, 1, 2), strict=True
            )
        ]
        request = {
            "argv": [os.fspath(word) for word in command[1:]],
            "cwd": os.fspath(bound["cwd"] or os.getcwd()),
            "env": dict(os.environ if environment is None else environment),
            "session": bool(bound["start_new_session"]),
            "group": os.getpgrp(),
            "numbers": [0, 1, 2, *bound["pass_fds"]],
            "nested": self._nested,
        }
        self.pid = _server().start(request, [*files, *bound["pass_fds"]])
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(bound[name] for name in ends))


def run(command: list[Any], **options: Any) -> subprocess.CompletedProcess[Any]:
    """Run the command to its end, as `subprocess.run` does."""
    check, timeout = options.pop("check", False), options.pop("timeout", None)
    given = options.pop("input", None)
    if given is not None:
        options["stdin"] = subprocess.PIPE
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(given, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def start(command: Any, *args: Any, nested: bool = False, **options: Any) -> Any:
    """Start a process as `subprocess.Popen` does, with torch loaded if the command is this Python.

    Tests of code that starts processes patch it in for `subprocess.Popen`.
    """
    if is_this_python(command):
        return Popen(command, *args, nested=nested, **options)
    return _Fresh(command, *args, **options)


def is_this_python(command: Any) -> bool:
    return not isinstance(command, str) and shutil.which(command[0]) == sys.executable


def _check(command: Any, bound: dict[str, Any]) -> None:
    assert not bound["shell"] and is_this_python(command), "only for this Python"
    assert bound["preexec_fn"] is None, "needs a fresh interpreter"
    words = [str(word) for word in command[1:]]
    while words[0] == "-W":
        del words[:2]
    assert not words[0].startswith("-") or words[0] in ("-c", "-m"), "needs start-up flags"
    for name, value in (bound["env"] or {}).items():
        if name.startswith(_TOO_LATE) and name not in _TAKEN_OVER:
            assert os.environ.get(name) == value, f"{name} is read when an interpreter starts"


def program(module: str, *args: object) -> list[str]:
    """Return the command that runs a module below tests/, such as `support.kill_loop`."""
    start = f"import sys; sys.path.insert(0, {_TESTS!r}); import runpy; "
    run = f"sys.argv[0] = {module!r}; runpy.run_module({module!r}, run_name='__main__')"
    return [sys.executable, "-c", start + run, *map(str, args)]


class _Server:
    """The process that forks; it ends when this process closes its end of the pair."""

    def __init__(self, link: socket.socket) -> None:
        self._here = link
        adopt_orphans()

    def start(self, request: dict[str, Any], files: list[int]) -> int:
        """Have a child forked, and return its process id.

        files: its standard input, output and error, and the others that are passed to it.
        """
        message = json.dumps(request).encode()
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        self._here.sendmsg([len(message).to_bytes(4, "little")], rights)
        self._here.sendall(message)
        answer = self._here.recv(4, socket.MSG_WAITALL)
        assert len(answer) == 4, "the server of children has ended; its error is above"
        return int.from_bytes(answer, "little")


@functools.cache
def _server() -> _Server:
    """Return this process's server; the first call starts it."""
    here, there = socket.socketpair()
    paths = os.pathsep.join([_TESTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    with there:
        process = _Fresh(
            [sys.executable, "-m", "support.children_server", str(there.fileno())],
            pass_fds=[there.fileno()],
            env={**os.environ, "PYTHONPATH": paths},
            cwd=_TESTS,
        )
    atexit.register(_end, os.getpid(), here, process)
    return _Server(here)


def _end(owner: int, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the server, but only in the process that started it: its forks run this as well."""
    if os.getpid() == owner:
        link.close()
        process.kill()
        process.wait()


def use_server(link: socket.socket) -> None:
    """Have all children of this process forked by the server at the other end of `link`."""
    global _server
    server = _Server(link)
    _server = functools.cache(lambda: server)
    subprocess.Popen = functools.partial(start, nested=True)  # type: ignore[misc,assignment]


def adopt_orphans() -> None:
    """Make this process the parent of its orphaned descendants, as init is of others."""
    failed = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert not failed, os.strerror(ctypes.get_errno())
