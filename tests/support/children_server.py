"""The server behind `support.children`: imports what is slow to import, then forks on request.

A request is some files (standard input, output, error and those that are passed) and JSON: argv,
cwd, env, session, group, numbers (the descriptors that the files get) and nested. The child is
forked twice, so that the process that asked adopts it. It returns from `serve` and runs its program
at the top level of this module: it ends as any interpreter ends.
"""

from __future__ import annotations

import array
import fcntl
import gc
import io
import json
import os
import runpy
import signal
import socket
import sys
import time
import warnings
from types import ModuleType
from typing import Any

import torch
import torch._dynamo  # which the first optimizer imports, in seconds
import torch.distributed

import offload.api
import offload.tools.cli  # noqa: F401
from offload import kernels
from support import children

_MOST_FILES = 16


def serve(link: socket.socket) -> dict[str, Any] | None:
    """Fork for every request. Return the request in a child, None when the link is closed."""
    gc.collect()
    gc.freeze()
    while True:
        head, rights, _, _ = link.recvmsg(4, socket.CMSG_SPACE(_MOST_FILES * 4))
        if not head:
            return None
        files = array.array("i")
        files.frombytes(rights[0][2])
        message = link.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        told, tell = os.pipe()
        middle = os.fork()
        if middle == 0:
            parent, child = os.getpid(), os.fork()
            if child:
                os.write(tell, child.to_bytes(4, "little"))
                os._exit(0)
            for file in (link.detach(), told, tell):
                os.close(file)
            while os.getppid() == parent:  # which is about to end
                time.sleep(0.0002)
            return json.loads(message) | {"files": list(files)}
        os.waitpid(middle, 0)
        link.sendall(os.read(told, 4))  # not before: it can be waited for once it is adopted
        for file in (told, tell, *files):
            os.close(file)


def start_of_child(link: socket.socket) -> dict[str, Any]:
    """Serve, and return in each child with its request; the server itself exits here."""
    request = serve(link)
    if request is None:
        os._exit(0)
    become(request)
    if request["nested"]:
        here, there = socket.socketpair()
        if os.fork() == 0:  # while there is one thread
            here.close()
            os.setpgid(0, 0)  # not of the child's group, which may be killed or waited for
            return start_of_child(there)
        there.close()
        children.use_server(here)
    return request


def become(request: dict[str, Any]) -> None:
    """Take over the request's session or group, files, directory, environment and search path."""
    if request["session"]:
        os.setsid()
    elif os.getpgrp() != request["group"]:
        os.setpgid(0, request["group"])
    _take_files(request["files"], request["numbers"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    sys.stdin, sys.stdout = _text(0, "r"), _text(1, "w")
    sys.stderr = _text(2, "w", line_buffering=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "OMP_NUM_THREADS" in os.environ:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        kernels.set_num_threads(torch.get_num_threads())
    paths = request["env"].get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, paths), *_SEARCH_PATH]


def _take_files(files: list[int], numbers: list[int]) -> None:
    """Give each file its descriptor number, which another of them may have now."""
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _text(file: int, mode: str, line_buffering: bool | None = None) -> io.TextIOWrapper:
    raw = open(file, mode + "b", closefd=False)  # noqa: SIM115
    lines = os.isatty(file) if line_buffering is None else line_buffering
    direct = bool(os.environ.get("PYTHONUNBUFFERED")) and mode == "w"
    return io.TextIOWrapper(raw, line_buffering=lines or direct, write_through=direct)


def execute(argv: list[str]) -> None:
    """Run `python ARGV`."""
    while argv[0] == "-W":
        sys.warnoptions.append(argv[1])
        warnings._processoptions([argv[1]])  # type: ignore[attr-defined]
        argv = argv[2:]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    if argv[0] == "-m":
        sys.argv[:] = ["-m", *argv[2:]]
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(argv[1])  # type: ignore[attr-defined]
        return
    if argv[0] == "-c":
        sys.argv[:] = ["-c", *argv[2:]]
        sys.path.insert(0, "")
        code = compile(argv[1], "<string>", "exec")
    else:
        sys.argv[:] = argv
        sys.path.insert(0, os.path.dirname(os.path.abspath(argv[0])))
        main.__file__ = argv[0]
        with open(argv[0], "rb") as file:
            code = compile(file.read(), argv[0], "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    # The own folder and the search path of the asking process come first; a child has its own.
    own = os.environ["PYTHONPATH"].split(os.pathsep)
    _SEARCH_PATH = [path for path in sys.path[1:] if path not in own]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the children that run
    execute(start_of_child(socket.socket(fileno=int(sys.argv[1])))["argv"])
