"""The checks of tensors that kernels and stores are given, done before a byte is written.

The native core works on raw addresses, so a mistake here would be a crash or silent damage there.
Every refusal is a `ConfigError` that names the argument, what it is and what it should be.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from offload.core.errors import ConfigError

_MADV_POPULATE_READ = 22  # both since Linux 5.14
_MADV_POPULATE_WRITE = 23


class Argument(NamedTuple):
    """A tensor that was checked, and its memory: bytes `[begin, end)`."""

    name: str
    tensor: Tensor
    numel: int
    begin: int
    end: int


def check_tensor(
    name: str, tensor: object, dtypes: Sequence[torch.dtype] | None = None
) -> Argument:
    """Return `tensor` as an argument if it is dense host memory of one of `dtypes` (None: any)."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if not tensor.is_cpu:
        raise ConfigError(
            f"{name}: expected a tensor in host memory, got device {tensor.device}; "
            "copy it to the CPU first"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ConfigError(f"{name}: expected a dense tensor, got {kind}")
    if dtypes is not None and tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ConfigError(f"{name}: expected {expected}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{name}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; pass .contiguous()"
        )
    if tensor.is_neg():
        raise ConfigError(f"{name}: is a lazily negated view; pass .resolve_neg()")
    if tensor.is_conj():
        raise ConfigError(f"{name}: is a lazily conjugated view; pass .resolve_conj()")
    numel = tensor.numel()
    if not numel:
        return Argument(name, tensor, 0, 0, 0)
    kind = type(tensor).__name__
    try:
        begin, stored = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    # Fake, functional, wrapping tensors. For some torch warns instead, which may be made an error.
    except (RuntimeError, NotImplementedError, UserWarning) as error:
        raise ConfigError(f"{name}: a {kind} without memory: {error}") from error
    nbytes = numel * tensor.element_size()
    needed = tensor.storage_offset() * tensor.element_size() + nbytes
    if needed > stored:
        raise ConfigError(
            f"{name}: a {kind} that reaches to byte {needed} of a storage that has {stored}; its "
            "memory was freed or made smaller"
        )
    if begin == 0:
        raise ConfigError(f"{name}: a {kind} without memory of its own; pass its local tensor")
    return Argument(name, tensor, numel, begin, begin + nbytes)


def check_sizes(arguments: Sequence[Argument]) -> int:
    """Return the number of elements that all `arguments` have; the first one sets it."""
    first = arguments[0]
    for other in arguments:
        if other.numel != first.numel:
            raise ConfigError(
                f"{other.name}: expected {first.numel} elements as in {first.name}, "
                f"got {other.numel}"
            )
    return first.numel


def check_access(
    arguments: Sequence[Argument], read: Argument, rooms: Sequence[Argument] = ()
) -> None:
    """Check that no two of all these share a byte, and that the pages of `arguments` can be
    touched. read: the one among them that is not written. rooms: known to be ordinary memory.
    """
    before: Argument | None = None
    for this in sorted((*arguments, *rooms), key=attrgetter("begin")):
        if before is not None and this.begin < before.end:
            raise ConfigError(
                f"{this.name}: overlaps {before.name} by {before.end - this.begin} bytes; give "
                "each its own memory"
            )
        before = this
    for argument in arguments:
        check_pages(argument.name, argument.begin, argument.end, writable=argument is not read)


def check_pages(name: str, begin: int, end: int, writable: bool) -> None:
    """Check that the first and the last page of `[begin, end)` can be touched: a tensor may lie in
    a read-only mapping, and a mapped file may have been truncated.
    """
    if begin == end or not _can_probe():
        return
    advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
    if _populate_call()(begin, end, mmap.PAGESIZE, advice) == 0:
        return
    for page in sorted({begin & -mmap.PAGESIZE, (end - 1) & -mmap.PAGESIZE}):
        code = _populate(page, advice)
        if code == errno.EFAULT:  # touching the page would kill the process
            raise ConfigError(
                f"{name}: lies behind the end of its memory-mapped file; was it cut short?"
            )
        # Mappings of a driver refuse the probe although they can be written; the process's memory
        # map decides.
        if code == 0 or not writable:
            continue
        if not any(first <= page < last and "w" in how for first, last, how, _ in read_maps()):
            raise ConfigError(
                f"{name}: lies in read-only memory (a memory-mapped file?); pass a copy"
            )


@cache
def _populate_call() -> Callable[[int, int, int, int], int]:
    """Return the native core's call if there is one, else the same by ctypes: ten times as slow."""
    try:
        from offload import _native
    except ImportError:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

        def populate(begin: int, end: int, page_bytes: int, advice: int) -> int:
            for page in (begin & -page_bytes, (end - 1) & -page_bytes):
                if madvise(page, page_bytes, advice) != 0:
                    return ctypes.get_errno()
            return 0

        return populate
    return _native.populate


def _populate(page: int, advice: int) -> int:
    """Touch the page. Return 0 if that is possible, otherwise the kernel's error number."""
    return _populate_call()(page, page + 1, mmap.PAGESIZE, advice)


@cache
def _can_probe() -> bool:
    """Return whether this kernel knows the probe. Without it read-only memory is not noticed before
    the write.
    """
    if not sys.platform.startswith("linux"):
        return False
    byte = ctypes.create_string_buffer(1)
    return _populate(ctypes.addressof(byte) & -mmap.PAGESIZE, _MADV_POPULATE_WRITE) == 0


def read_maps() -> Iterator[tuple[int, int, str, bool]]:
    """Yield the mappings of this process by address: begin, end, permissions, and whether a file is
    behind it. Raises OSError where the system does not report them.
    """
    with open("/proc/self/maps", errors="replace") as file:
        for line in file:
            span, permissions, _, _, inode, *_ = line.split()
            begin, end = span.split("-")
            yield int(begin, 16), int(end, 16), permissions, inode != "0"
