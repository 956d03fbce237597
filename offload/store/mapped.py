"""Tensors on memory-mapped files without a name: for what is larger than memory."""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.config import format_size
from offload.errors import StoreError
from offload.machine import free_memory_bytes, read_memory
from offload.metrics import Metrics
from offload.portable import drop_cached, reserve
from offload.store.files import System

_SPARE = 2  # times as much must be free, for what is handed out in memory


class _Refusal(NamedTuple):
    why: str
    errno: int | None
    directory: str


class MappedFile:
    """Host memory on a file without a name, for every operator to work on like any other.

    `push_out` lets its pages go: what was written to them is on its way to the drive, and they come
    back when somebody touches them. Nothing is lost, at any time. The file goes with the last
    tensor on it. One thread at a time.
    """

    def __init__(self, directory: str | os.PathLike[str], nbytes: int, what: str) -> None:
        self._fd, self._memory = _map(directory, nbytes, what)
        weakref.finalize(self, os.close, self._fd)
        self.nbytes = nbytes
        self.address = self.tensor(torch.uint8, nbytes, 0).data_ptr()

    def tensor(self, dtype: torch.dtype, numel: int, begin: int) -> Tensor:
        """One from that byte on, with a storage of its own: it keeps the memory, not others."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=numel, offset=begin)

    def push_out(self, begin: int, nbytes: int) -> None:
        """Let go of the pages that hold these bytes. Does not wait for the drive."""
        first = begin - begin % mmap.PAGESIZE
        length = min(begin + nbytes, self.nbytes) - first
        if length > 0:
            # Of a shared map this drops the process's view of the pages, not what is in them; the
            # second call starts their way to the drive, and drops those that are there already.
            self._memory.madvise(mmap.MADV_DONTNEED, first, length)
            drop_cached(self._fd, first, length)


def mapped_tensor(
    directories: Sequence[str | os.PathLike[str]],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    metrics: Metrics,
) -> Tensor:
    """A tensor of that shape and those strides, dense, on a file that goes with it: in the first
    directory that has room. Where none has, in host memory, if so much more is free; the report
    says so.
    """
    nbytes = shape.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    refusals: list[_Refusal] = []
    for directory in directories:
        try:
            fd, memory = _map(directory, nbytes, "state to hand out")
        except StoreError as error:
            # Not the error itself: its traceback would hold the caller's tensors.
            refusals.append(_Refusal(str(error), error.errno, os.fspath(directory)))
            continue
        os.close(fd)  # the map has its own
        flat = torch.frombuffer(memory, dtype=dtype)
        return flat.as_strided(shape, stride)
    _allow_memory(nbytes, refusals, metrics)
    # Touched at once, so that the next one sees it gone.
    return torch.empty_strided(shape, stride, dtype=dtype, device="cpu").zero_()


def _allow_memory(nbytes: int, refusals: Sequence[_Refusal], metrics: Metrics) -> None:
    """Whether it may be in host memory instead; an error where not."""
    told = "; ".join(refusal.why for refusal in refusals)
    free = free_memory_bytes(read_memory()) or 0
    if nbytes * _SPARE > free:
        raise StoreError(
            f"{told}; and of host memory {format_size(free)} are free; make room in one of the "
            "directories and call again: nothing is lost (offload.save(path, model, optimizer) to "
            "another drive needs no such room)",
            errno=refusals[0].errno,
            operation="map",
            file=refusals[0].directory,
        )
    metrics.fall_back("values that are handed out", f"{told}; they are in host memory instead")


def _map(directory: str | os.PathLike[str], nbytes: int, what: str) -> tuple[int, mmap.mmap]:
    """A new file and its bytes; the caller closes the file."""
    try:
        fd, _ = System().open_unnamed(Path(directory))
        try:
            reserve(fd, nbytes)
            return fd, mmap.mmap(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise StoreError(
            f"{os.fspath(directory)}: no room for {nbytes} bytes of {what}: {error}",
            errno=error.errno,
            operation="map",
            file=os.fspath(directory),
        ) from error
