"""Host memory as the I/O engines take it: address, length, and the object that keeps it alive."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from offload.core.errors import ConfigError
from offload.kernels.arguments import check_pages, check_tensor, read_maps

_STRIDED = torch.strided
_mode_is_on = torch._C._is_torch_function_mode_enabled


class ByteRange(NamedTuple):
    """The addresses [begin, end) of a run of memory."""

    begin: int
    end: int


class Buffer(NamedTuple):
    """A run of host memory to read from or write to.

    owner: held while an operation may touch the memory, so that it is not freed and reused.
    """

    address: int
    nbytes: int
    owner: object

    @classmethod
    def of(
        cls, name: str, memory: Any, writable: bool, anonymous: tuple[ByteRange, ...] = ()
    ) -> Buffer:
        """Return the memory of a contiguous host tensor, or of an object with the buffer protocol
        (a pool's `buffer()`, an array). anonymous: spans in which every page is known to be
        accessible, see `find_anonymous`; elsewhere the first and the last page are touched to test.
        """
        found = _of_plain_tensor(memory) if type(memory) is torch.Tensor else None
        if found is None:
            if isinstance(memory, torch.Tensor):
                found = cls._of_tensor(name, memory)
            else:
                found = cls._of_view(name, memory, writable)
        begin, end = found.address, found.address + found.nbytes
        for first, last in anonymous:
            if first <= begin and end <= last:
                return found
        check_pages(name, begin, end, writable)
        return found

    @classmethod
    def _of_view(cls, name: str, memory: Any, writable: bool) -> Buffer:
        try:
            view = memoryview(memory)
        except TypeError as error:
            kind = type(memory).__name__
            raise ConfigError(f"{name}: expected a tensor or a buffer, got {kind}") from error
        if not view.c_contiguous:
            raise ConfigError(f"{name}: expected contiguous memory, got strides {view.strides}")
        if writable and view.readonly:
            raise ConfigError(f"{name}: expected memory that can be written, got a read-only view")
        if view.nbytes == 0:
            return cls(0, 0, memory)
        array = np.frombuffer(view, dtype=np.uint8)
        return cls(array.ctypes.data, view.nbytes, array)

    @classmethod
    def _of_tensor(cls, name: str, tensor: torch.Tensor) -> Buffer:
        with torch._C.DisableTorchFunction():
            found = check_tensor(name, tensor)
            # The storage, not the tensor: user code may give the tensor another one at any time.
            return cls(found.begin, found.end - found.begin, tensor.untyped_storage())

    def view(self) -> memoryview:
        """Return a view of the bytes, which does not keep the memory alive."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address)).cast("B")

    def part(self, begin: int, nbytes: int) -> Buffer:
        if nbytes == self.nbytes and begin == 0:
            return self
        assert 0 <= begin <= begin + nbytes <= self.nbytes
        return Buffer(self.address + begin, nbytes, self.owner)


def _of_plain_tensor(tensor: torch.Tensor) -> Buffer | None:
    """Return what `Buffer._of_tensor` returns, at half its cost, or None where that function must
    decide and name the fault. Every write and read calls this.
    """
    if (
        _mode_is_on()
        or not tensor.is_cpu
        or tensor.layout is not _STRIDED
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_conj()
    ):
        return None
    try:
        begin, storage = tensor.data_ptr(), tensor.untyped_storage()
        end = begin + tensor.nbytes
        if begin == 0 or end == begin or end > storage.data_ptr() + storage.nbytes():
            return None
    except (RuntimeError, NotImplementedError, UserWarning):  # a tensor without memory
        return None
    return Buffer(begin, end - begin, storage)


def find_anonymous(memory: Iterable[Buffer]) -> tuple[ByteRange, ...]:
    """Return the spans of `memory` that are private, writable and not backed by a file. They cannot
    be truncated while their owner lives, so their pages need no test at each request.
    """
    try:
        anonymous = [
            ByteRange(begin, end)
            for begin, end, permissions, is_file in read_maps()
            if permissions.startswith("rw") and permissions.endswith("p") and not is_file
        ]
    except OSError:  # not Linux, or /proc is not mounted: pages are tested at each request
        return ()
    return tuple(
        ByteRange(each.address, each.address + each.nbytes)
        for each in memory
        if _is_covered(each.address, each.address + each.nbytes, anonymous)
    )


def _is_covered(begin: int, end: int, spans: Iterable[ByteRange]) -> bool:
    """Return whether `spans`, sorted by address, cover every byte of [begin, end)."""
    for span in spans:
        if span.begin <= begin < span.end:
            begin = span.end
    return begin >= end
