"""What a kernel may be given: checks of tensors, done before a byte is written.

The native core works on raw addresses, so a mistake here would be a crash or silent damage there.
Every refusal is a `ConfigError` that names the argument, what it is and what it should be.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from offload.errors import ConfigError

_MADV_POPULATE_READ = 22  # both since Linux 5.14
_MADV_POPULATE_WRITE = 23


def check_tensor(name: str, tensor: object, dtypes: Sequence[torch.dtype]) -> Tensor:
    """Return `tensor` if it is dense host memory of one of `dtypes`."""
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name}: expected a torch.Tensor, got {type(tensor).__name__}")
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"{name}: expected a tensor in host memory, got device {tensor.device}; "
            "copy it to the CPU first"
        )
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise ConfigError(f"{name}: expected a dense tensor, got {kind}")
    if tensor.dtype not in dtypes:
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ConfigError(f"{name}: expected {expected}, got {tensor.dtype}")
    if not tensor.is_contiguous():
        raise ConfigError(
            f"{name}: expected a contiguous tensor, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}; pass .contiguous()"
        )
    if tensor.is_neg():
        raise ConfigError(f"{name}: is a lazily negated view; pass .resolve_neg()")
    if tensor.numel():
        _check_memory(name, tensor)
    return tensor


def _check_memory(name: str, tensor: Tensor) -> None:
    """There is memory behind every element of `tensor`."""
    kind = type(tensor).__name__
    try:
        address, stored = tensor.data_ptr(), tensor.untyped_storage().nbytes()
    # Fake, functional, wrapping tensors; for some torch warns instead, which may be made an error.
    except (RuntimeError, NotImplementedError, UserWarning) as error:
        raise ConfigError(f"{name}: a {kind} without memory: {error}") from error
    needed = tensor.storage_offset() * tensor.element_size() + tensor.nbytes
    if needed > stored:
        raise ConfigError(
            f"{name}: a {kind} that reaches to byte {needed} of a storage that has {stored}; its "
            "memory was freed or made smaller"
        )
    if address == 0:
        raise ConfigError(f"{name}: a {kind} without memory of its own; pass its local tensor")


def check_sizes(tensors: Mapping[str, Tensor]) -> int:
    """Return the number of elements that all `tensors` have; the first one sets it."""
    (first, count), *rest = ((name, tensor.numel()) for name, tensor in tensors.items())
    for name, other in rest:
        if other != count:
            raise ConfigError(f"{name}: expected {count} elements as in {first}, got {other}")
    return count


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """No two of `tensors` share a byte."""
    spans = sorted(
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors.items()
        if tensor.numel()
    )
    for (_, end, name), (begin, _, other) in pairwise(spans):
        if begin < end:
            raise ConfigError(
                f"{other}: overlaps {name} by {end - begin} bytes; give each its own memory"
            )


def check_writable(tensors: Mapping[str, Tensor]) -> None:
    """The first and the last page of each tensor can be written: a tensor may lie on a read-only
    memory map.
    """
    if not _can_probe():
        return
    for name, tensor in tensors.items():
        if not tensor.numel():
            continue
        for address in _ends(tensor):
            code = _populate(address, _MADV_POPULATE_WRITE)
            _check_within_file(name, code)
            # Mappings of a driver refuse the probe although they can be written; the map of the
            # process decides.
            if code != 0 and not _mapped_writable(address):
                raise ConfigError(
                    f"{name}: lies in read-only memory (a memory-mapped file?); pass a copy"
                )


def check_readable(name: str, tensor: Tensor) -> None:
    """The first and the last page of the tensor are there: a mapped file may be cut short."""
    if _can_probe() and tensor.numel():
        for address in _ends(tensor):
            _check_within_file(name, _populate(address, _MADV_POPULATE_READ))


def _check_within_file(name: str, code: int) -> None:
    if code == errno.EFAULT:  # touching the page would be the end of the process
        raise ConfigError(
            f"{name}: lies behind the end of its memory-mapped file; was it cut short?"
        )


def _ends(tensor: Tensor) -> set[int]:
    """Addresses of the first and the last byte."""
    begin = tensor.data_ptr()
    return {begin, begin + tensor.nbytes - 1}


def note_writes(tensors: Mapping[str, Tensor]) -> None:
    """Tell autograd that the tensors have changed, as an in-place operation of torch does.

    Inference tensors count no versions; torch passes them over.
    """
    torch.autograd.graph.increment_version(list(tensors.values()))


@cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _populate(address: int, advice: int) -> int:
    """0 if the page at `address` can be touched so, otherwise the kernel's error number."""
    page = address - address % mmap.PAGESIZE
    failed = _madvise()(page, mmap.PAGESIZE, advice) != 0
    return ctypes.get_errno() if failed else 0


@cache
def _can_probe() -> bool:
    """Whether this kernel knows the probe; without it read-only memory is not noticed before the
    write.
    """
    if not sys.platform.startswith("linux"):
        return False
    page = ctypes.create_string_buffer(1)
    return _populate(ctypes.addressof(page), _MADV_POPULATE_WRITE) == 0


def _mapped_writable(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, permissions = line.split(maxsplit=2)[:2]
            begin, end = (int(part, 16) for part in span.split("-"))
            if begin <= address < end:
                return "w" in permissions
    return False
