"""Tensors on memory-mapped files without a name: for what is larger than memory."""

from __future__ import annotations

import mmap
import os
import weakref
from pathlib import Path

import torch
from torch import Tensor

from offload.errors import StoreError
from offload.portable import drop_cached, reserve
from offload.store.files import System


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
    directory: str | os.PathLike[str],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A tensor of that shape and those strides, dense, on a file that goes with it."""
    nbytes = shape.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    fd, memory = _map(directory, nbytes, "state to hand out")
    os.close(fd)  # the map has its own
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided(shape, stride)


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
