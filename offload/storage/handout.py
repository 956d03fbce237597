"""Tensors that one call returns to user code: first written, then tensors. What finds no room in
host memory is in memory maps of one or a few unnamed files.

The kernel frees a file with the last tensor on it. Values are written by write calls, whose errors
are typed, and synced before the tensors are returned; the map, one for all tensors of a file, is
for the user's code. The engine neither writes nor reads through it: a page that finds no room on
the drive would kill the process (SIGBUS), and a failed write-back of a page would go unreported.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import StoreError
from offload.core.host_facts import free_memory_bytes, read_memory
from offload.core.metrics import Metrics
from offload.storage.files import BLOCK_BYTES, System

P = ParamSpec("P")
T = TypeVar("T")
_SPARE = 2  # times as many bytes must be free in host memory before a tensor is put there
_PIECE_BYTES = 4 << 20  # of one write call; values of another dtype are in memory twice
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)


class Refusal(NamedTuple):
    """The reason why a directory cannot take a tensor. Not the error itself, whose traceback would
    keep tensors alive.
    """

    why: str
    errno: int | None
    directory: str


class Handout:
    """The set of tensors that one call returns to user code.

    directories: tried in turn; none: ordinary memory. is_written_first: each room is filled with
    zeros when it is made, so that later writes, also through the map, have their blocks on the
    drive. expected_bytes: an estimate of all rooms together; the map is as large, so that one file
    is enough even if a tensor is taken before the last room is made. defers: other ranks take part
    and would wait for this one, so errors are kept for `finish`, and writes after one are dropped.

    Left without `finish` it closes its files; tensors that were taken stay valid. One thread at a
    time.
    """

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        metrics: Metrics,
        *,
        is_written_first: bool = False,
        expected_bytes: int = 0,
        defers: bool = False,
    ) -> None:
        self._directories = [Path(directory) for directory in directories]
        self._metrics = metrics
        self._is_written_first = is_written_first
        self._expected_bytes = expected_bytes
        self._defers = defers
        self._error: StoreError | None = None
        self._files: list[_HandoutFile] = []
        self._system = System()

    def __enter__(self) -> Handout:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def room(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Outgoing:
        """Make room for a dense tensor in the first directory that has some. Where none has, use
        host memory if twice as much is free there, and note the fall-back; else raise `StoreError`.
        """
        nbytes = shape.numel() * dtype.itemsize
        if nbytes == 0 or not self._directories:
            return InMemory(torch.empty_strided(shape, stride, dtype=dtype, device="cpu"))
        refusals: list[Refusal] = []
        for directory in self._directories:
            try:
                file, begin = self._take(directory, nbytes)
            except StoreError as error:
                refusals.append(Refusal(str(error), error.errno, os.fspath(directory)))
                continue
            return _OnFile(self, file, begin, shape, stride, dtype)
        try:
            allow_memory(nbytes, refusals, self._metrics)
        except StoreError as error:
            self._raise(error)  # else it is kept, and a tensor without values takes all writes
            return InMemory(torch.empty_strided(shape, stride, dtype=dtype, device="meta"))
        # Fill it at once, so that the next call sees these pages as taken.
        return InMemory(torch.empty_strided(shape, stride, dtype=dtype, device="cpu").zero_())

    def _take(self, directory: Path, nbytes: int) -> tuple[_HandoutFile, int]:
        """Take room in the directory's newest file, or in a new one; return file and offset."""
        file = next((f for f in reversed(self._files) if f.directory == directory), None)
        if file is not None and file.can_grow(nbytes):
            try:
                return file, file.take(nbytes, self._is_written_first)
            except StoreError as error:
                if error.errno != errno.EFBIG:
                    raise  # another file would find no more room
        file = _HandoutFile(directory, self._system, self._expected_bytes)
        try:
            begin = file.take(nbytes, self._is_written_first)
        except BaseException:
            file.close()
            raise
        self._files.append(file)
        return file, begin

    def act(self, act: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call `act` unless an error is kept already; raise or keep its `StoreError`."""
        if self._error is not None:
            return
        try:
            act(*args, **kwargs)
        except StoreError as error:
            self._raise(error)

    def _raise(self, error: StoreError) -> None:
        if not self._defers:
            raise error
        self._error = self._error or error.with_traceback(None)  # which would hold tensors

    def sync(self) -> None:
        """Sync all written values to the drive. Blocks."""
        for file in self._files:
            file.sync()

    def finish(self) -> None:
        """Sync all values to the drive and keep one descriptor of each file, that of its map. Call
        it after the last write. Raises a kept error. Blocks.
        """
        if self._error is not None:
            raise self._error
        self.sync()
        for file in self._files:
            file.memory()
        self.close()

    def close(self) -> None:
        """Close the files; their maps stay. Idempotent."""
        for file in self._files:
            file.close()


class _HandoutFile:
    """An unnamed file of mode 0600 that grows with each room until it is mapped."""

    def __init__(self, directory: Path, system: System, expected_bytes: int) -> None:
        self.directory = directory
        self._system = system
        self._memory: mmap.mmap | None = None
        self._end = 0  # of the last room
        self._is_dirty = False
        self._fd, _ = self._call("open", system.open_unnamed, directory)
        self.close = weakref.finalize(self, os.close, self._fd)  # the map stays
        system.keep_in_place(self._fd)  # now, while it is empty
        with suppress(OSError):  # a sparse length; where it is refused the file grows by room
            os.ftruncate(self._fd, expected_bytes)

    def can_grow(self, nbytes: int) -> bool:
        return self._memory is None or self._next + nbytes <= len(self._memory)

    @property
    def _next(self) -> int:
        return -(-self._end // BLOCK_BYTES) * BLOCK_BYTES

    def take(self, nbytes: int, is_written: bool) -> int:
        """Reserve room for `nbytes` and return its offset. Nothing is taken when it raises.
        is_written: fill it with zeros.
        """
        begin = self._next
        self._call("reserve", self._system.reserve, self._fd, nbytes, begin)
        if is_written:
            zeros = memoryview(bytes(min(nbytes, _PIECE_BYTES)))
            for at in range(0, nbytes, _PIECE_BYTES):
                self.write(begin + at, zeros[: nbytes - at])
        self._end = begin + nbytes
        return begin

    def write(self, begin: int, data: memoryview) -> None:
        """Write all of `data` at `begin`; one system call may write less."""
        self._is_dirty = True
        while data:
            written = self._call("write", self._write, begin, data)
            begin, data = begin + written, data[written:]

    def _write(self, begin: int, data: memoryview) -> int:
        written = self._system.write(self._fd, data, begin)
        if written == 0:
            raise OSError(errno.EIO, "a write call wrote nothing")
        return written

    def sync(self) -> None:
        """Sync the file if it is dirty. Each write is synced once: after a failed sync the kernel
        reports success the next time.
        """
        if self._is_dirty:
            self._is_dirty = False
            self._call("sync", self._system.sync, self._fd)

    def memory(self) -> mmap.mmap:
        """Map the whole file. The map keeps a descriptor of its own, and so the file."""
        if self._memory is None:
            self._memory = self._call("map", mmap.mmap, self._fd, 0)
        return self._memory

    def _call(self, operation: str, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        # Not a closure: the frames of an error would hold it, and it the memory to write.
        try:
            return call(*args, **kwargs)
        except OSError as error:
            raise _refusal(operation, self.directory, error) from error


class _OnFile:
    """An outgoing tensor in a file, from byte `begin` on; its methods are those of `InMemory`."""

    def __init__(
        self,
        whole: Handout,
        file: _HandoutFile,
        begin: int,
        shape: torch.Size,
        stride: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self._whole, self._file, self._begin = whole, file, begin
        self._shape, self._stride, self._dtype = shape, stride, dtype

    @property
    def tensor(self) -> Tensor:
        """A tensor with a storage of its own, so that `torch.save` writes its bytes only."""
        numel, memory = self._shape.numel(), self._file.memory()
        flat = torch.frombuffer(memory, dtype=self._dtype, count=numel, offset=self._begin)
        return flat.as_strided(self._shape, self._stride)

    def write(self, begin: int, values: Tensor) -> None:
        self._whole.act(self._write, begin, values)

    def _write(self, begin: int, values: Tensor) -> None:
        step = _PIECE_BYTES // self._dtype.itemsize
        for first in range(0, values.numel(), step):
            some = values[first : first + step].to(device="cpu", dtype=self._dtype).contiguous()
            at = self._begin + (begin + first) * self._dtype.itemsize
            self._file.write(at, some.view(torch.uint8).numpy().data)

    def fill(self, values: Tensor) -> None:
        self.write(0, in_order(values, self._stride))

    def sync(self) -> None:
        self._whole.act(self._file.sync)


def allow_memory(nbytes: int, refusals: Sequence[Refusal], metrics: Metrics) -> None:
    """Allow host memory for `nbytes` that no directory takes, and note the fall-back; raise
    `StoreError` unless twice as much is free.
    """
    told = "; ".join(refusal.why for refusal in refusals)
    free = free_memory_bytes(read_memory()) or 0
    if nbytes * _SPARE > free:
        remedy = "make room in one of the directories"
        if all(refusal.errno in _NO_DESCRIPTOR for refusal in refusals):
            remedy = "close files, or allow more"
        raise StoreError(
            f"{told}; and of host memory {format_size(free)} are free; {remedy} and call again: "
            "nothing is lost (offload.save(path, model, optimizer) to another drive needs no such "
            "room)",
            errno=refusals[0].errno,
            operation="map",
            file=refusals[0].directory,
        )
    metrics.fall_back("values that are handed out", f"{told}; they are in host memory instead")


def _refusal(operation: str, directory: Path, error: OSError) -> StoreError:
    if error.errno in _NO_DESCRIPTOR:
        why = f"too many open files; `ulimit -n` allows more ({error})"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        why = f"no room there ({error})"
    else:
        why = str(error)
    return StoreError(
        f"{directory}: cannot {operation} a file for state to hand out: {why}",
        errno=error.errno,
        operation=operation,
        file=os.fspath(directory),
    )


class InMemory:
    """An outgoing tensor in ordinary memory, the host's or a device's; the tensor is dense.

    tensor: the ordinary tensor for the user's code. Later writes show in it, too.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def write(self, begin: int, values: Tensor) -> None:
        """Write `values` to the elements from `begin` on, in memory order, rounded to the tensor's
        dtype. values: flat, in host memory. Raises `StoreError`.
        """
        there = in_order(self.tensor, self.tensor.stride())[begin : begin + values.numel()]
        there.copy_(values.to(self.tensor.dtype))  # rounded before an upload: the same bits

    def fill(self, values: Tensor) -> None:
        """Write all elements from `values`, a tensor of the same shape and any strides."""
        self.tensor.copy_(values)

    def sync(self) -> None:
        """Sync what was written to where it cannot be lost: memory needs no sync. Blocks. Raises
        `StoreError`.
        """


# A tensor that is written here and then returned to user code. One thread at a time.
Outgoing = InMemory | _OnFile


def in_memory(like: Tensor) -> Outgoing:
    """Make an outgoing tensor in host memory with the shape and dtype of `like`."""
    return InMemory(torch.empty_like(like, device="cpu"))


def in_order(values: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return the elements flat, in the memory order of a dense tensor with these strides; a view
    where `values` has them already.
    """
    values = values.detach()
    if values.stride() != stride:
        there = torch.empty_strided(values.shape, stride, dtype=values.dtype, device=values.device)
        values = there.copy_(values)
    if values.is_contiguous():
        return values.view(-1)
    return values.as_strided((values.numel(),), (1,))
