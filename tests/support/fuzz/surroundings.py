"""The environment of a case: small sizes, a budget of its own, scratch directories; and a check of
what it leaves behind.
"""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy
import pytest
import torch

from offload import kernels
from offload.core import budget
from offload.core.budget import Budget
from offload.params import units
from offload.planning import planner
from support.fuzz.cases import Place
from support.leftovers import await_nothing_held

SHARED = "/dev/shm"
_NEED_BYTES = 64 << 20


@contextmanager
def scratch() -> Iterator[Path]:
    """Make a directory for many cases; in memory, if there is room."""
    is_shared = os.access(SHARED, os.W_OK) and shutil.disk_usage(SHARED).free > _NEED_BYTES
    with TemporaryDirectory(prefix="offload-fuzz-", dir=SHARED if is_shared else None) as made:
        yield Path(made)


@contextmanager
def surroundings(folder: Path, threads: int) -> Iterator[Budget]:
    """Set up the environment of one case, and undo it after, also the random generators."""
    for name in ("a", "b", "checkpoints"):
        (folder / name).mkdir()
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    lanes = kernels.num_threads()
    try:
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as schedulers' about the order of steps
            random.seed(1)
            numpy.random.seed(1)
            torch.manual_seed(1)
            kernels.set_num_threads(threads)
            patch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)
            yield _own_budget(patch)
    finally:
        kernels.set_num_threads(lanes)
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
        for name in ("a", "b", "checkpoints"):
            shutil.rmtree(folder / name, ignore_errors=True)


def _own_budget(patch: pytest.MonkeyPatch) -> Budget:
    own = Budget()
    for name, module in list(sys.modules.items()):
        is_ours = name.startswith("offload.") and name != "offload.core.budget"
        if is_ours and getattr(module, "HOST", None) is budget.HOST:
            patch.setattr(module, "HOST", own)
    return own


@contextmanager
def sized(place: Place) -> Iterator[None]:
    """Make chunks and units as small as the place says while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "CHUNK_NUMEL", place.chunk_numel)
        patch.setattr(units, "LARGE_BYTES", place.large_bytes)
        yield


class Leftovers:
    """The descriptors and threads that exist before a case; no others may exist after it."""

    def __init__(self) -> None:
        self._descriptors, self._threads = _descriptors(), set(threading.enumerate())

    def check(self, budget: Budget, folder: Path, was_interrupted: bool) -> None:
        """Raise AssertionError unless the case has released everything.

        After Ctrl-C a descriptor may be left that no variable had yet, and a hidden directory that
        the next save removes.
        """
        await_nothing_held(budget)
        threads = [thread for thread in threading.enumerate() if thread not in self._threads]
        for thread in threads:
            thread.join(10.0)
        left = [thread.name for thread in threads if thread.is_alive()]
        assert not left, f"threads are left: {left}"
        files = [str(path) for name in ("a", "b") for path in (folder / name).rglob("*")]
        if not was_interrupted:
            files += [str(path) for path in (folder / "checkpoints").glob(".*")]
        assert not files, f"files are left: {files}"
        opened = _descriptors() - self._descriptors
        if opened and not was_interrupted:
            gc.collect()
            opened = _descriptors() - self._descriptors
        assert was_interrupted or not opened, f"descriptors are left: {sorted(opened)}"


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            continue  # that of the listing itself
    return found
