"""Processes that train together, for tests: `run(2, function, ...)` calls the function in each of
two, with gloo between them, and returns what each has returned.

They are forked from a server that has torch and offload imported already, which saves seconds a
process. A function must be found by name in a module that can be imported; what it returns must be
picklable. All are killed when the deadline has passed, and whenever the test ends; those that are
late tell first where each of their threads stands.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

from support.loops import SEED

_FORKS = multiprocessing.get_context("forkserver")
# Tests have threads. Starting a process polls all others for their end, as join() does: of two
# threads that poll at once one reads the exit code and the other gets 255.
_ASKING = threading.Lock()
_PRELOADED = "support.ranks.preloaded"
_preload = [_PRELOADED]
_TESTS = str(Path(__file__).parents[2])
_TELL = signal.SIGRTMIN + 5  # a rank writes down where its threads stand
_TELLING_S = 5.0


@dataclass
class Outcome:
    """The end of one process.

    error: its traceback, if it raised.
    exit_code: negative for a signal, None if it was killed at the deadline.
    """

    result: Any = None
    error: str | None = None
    exit_code: int | None = None
    ended_s: float | None = None  # after the beginning


def run(count: int, function: Callable[..., Any], *args: Any, deadline_s: float = 240) -> list[Any]:
    """Run `function(rank, *args)` on each rank; return the results by rank.

    Raises AssertionError with the tracebacks if one has failed.
    """
    found = outcomes(count, function, *args, deadline_s=deadline_s)
    bad = [
        f"--- rank {rank} (exit code {one.exit_code}):\n{one.error or 'said nothing'}"
        for rank, one in enumerate(found)
        if one.error is not None or one.exit_code != 0
    ]
    assert not bad, "\n".join(bad)
    return [one.result for one in found]


def outcomes(
    count: int, function: Callable[..., Any], *args: Any, deadline_s: float = 240
) -> list[Outcome]:
    """Run `function(rank, *args)` on each rank; return how each has ended, also if one failed."""
    with _ASKING:
        _start_server()
    with tempfile.TemporaryDirectory() as directory:
        store = str(Path(directory) / "store")
        pipes, processes = [], []
        try:
            for rank in range(count):
                ours, theirs = _FORKS.Pipe(duplex=False)
                process = _FORKS.Process(
                    target=_main, args=(theirs, rank, count, store, function, args), daemon=True
                )
                with _ASKING:
                    process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            found, late = _collect(pipes, processes, deadline_s)
            for rank in late:
                why = f"was still there after {deadline_s} s\n{_ask(processes[rank], store, rank)}"
                found[rank].error = f"{found[rank].error or ''}\n{why}"
            return found
        finally:
            for process in processes:
                with _ASKING:
                    process.kill()
                    process.join()


def preload_device() -> None:
    """Have the server load the fake accelerator, too; call it before the first `run`."""
    _preload.insert(0, "support.device.preloaded")


@functools.cache
def _start_server() -> None:
    """Start the server, which finds the modules it preloads by the environment (Python 3.11)."""
    _FORKS.set_forkserver_preload(_preload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _TESTS, prepend=os.pathsep)
        forkserver.ensure_running()


def _collect(
    pipes: list[Connection], processes: list[Any], deadline_s: float
) -> tuple[list[Outcome], list[int]]:
    """Wait for the ranks; return how each has ended, and the ranks that missed the deadline."""
    found, begin = [Outcome() for _ in processes], time.monotonic()
    left = dict(enumerate(pipes))
    while left and (remaining := begin + deadline_s - time.monotonic()) > 0:
        for pipe in wait(list(left.values()), remaining):
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                said = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                found[rank].result, found[rank].error = said
            except EOFError:  # has ended
                del left[rank]
                with _ASKING:
                    processes[rank].join()
                    found[rank].exit_code = processes[rank].exitcode
                found[rank].ended_s = time.monotonic() - begin
    return found, list(left)


def _ask(process: Any, store: str, rank: int) -> str:
    """Ask a rank where its threads stand, and return its stacks."""
    stacks, end = Path(f"{store}.{rank}"), time.monotonic() + _TELLING_S
    with suppress(ProcessLookupError):
        os.kill(process.pid, _TELL)
    while not (told := stacks.read_text() if stacks.exists() else "") and time.monotonic() < end:
        time.sleep(0.05)
    return told or "it does not say where"


def _main(
    pipe: Connection,
    rank: int,
    count: int,
    store: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    assert _PRELOADED in sys.modules, "the server has not imported it, and nobody was told why"
    gc.freeze()  # the test's own imports, too
    stacks = open(f"{store}.{rank}", "w")  # noqa: SIM115 - as long as the process
    faulthandler.register(_TELL, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ["LOCAL_WORLD_SIZE"] = str(count)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=30),
        )
        result = function(rank, *args)
        dist.destroy_process_group()
    except BaseException:
        _say(pipe, None, traceback.format_exc())
        os._exit(1)  # the other ranks must notice by themselves
    _say(pipe, result, None)
    pipe.close()


def _say(pipe: Connection, result: Any, error: str | None) -> None:
    """Send result and error by value.

    A pipe's own `send` would hand over shared memory of tensors, which ends with this process.
    """
    pipe.send_bytes(pickle.dumps((result, error)))
