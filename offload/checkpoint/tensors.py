"""Tensors as a checkpoint has them: their bytes in the order of their shape, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload.errors import ConfigError
from offload.format.safetensors import TensorSpec
from offload.optim.source import Source, as_bytes
from offload.store.safetensors_file import DTYPES

PIECE_BYTES = 16 << 20
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """Refuses what has no bytes of its own, or a type that safetensors files cannot have."""
    is_several = is_traceable_wrapper_subclass(tensor)  # a DTensor, a quantised weight
    if tensor.layout != torch.strided or tensor.is_quantized or is_several:
        raise ConfigError(
            f"{name}: expected an ordinary dense tensor, got {type(tensor).__name__} with layout "
            f"{tensor.layout}; it cannot be in a checkpoint"
        )
    if tensor.is_meta:
        raise ConfigError(f"{name}: is on the meta device and has no values; fill it first")
    if tensor.dtype not in NAMES:
        raise ConfigError(
            f"{name}: {tensor.dtype} cannot be in a safetensors file; expected one of "
            f"{', '.join(str(dtype) for dtype in NAMES)}"
        )
    return TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape))


def each_piece(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The tensor's bytes, piece by piece: where each begins, and itself, in host memory. Whole
    copies are made only of those whose memory is in another order than their shape.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if not values.is_contiguous():
        values = values.cpu().contiguous()
    whole = as_bytes(values)
    for begin in range(0, whole.numel(), PIECE_BYTES):
        yield begin, whole[begin : begin + PIECE_BYTES].cpu()


def write(name: str, tensor: Tensor, put: Callable[[str, int, Tensor], None]) -> None:
    """Hand the tensor's bytes over, piece by piece. No view of it is left."""
    for begin, piece in each_piece(tensor):
        put(name, begin, piece)


def fill(target: Tensor, source: Source) -> None:
    """Read the tensor's values, of the same type and shape, into it."""
    values = target.detach()
    if values.is_contiguous() and values.is_cpu:
        source.read_into(0, as_bytes(values))
        increment_version(target)
    elif values.is_contiguous():
        there = as_bytes(values)
        for begin in range(0, there.numel(), PIECE_BYTES):
            some = there[begin : begin + PIECE_BYTES]
            some.copy_(_read(source, begin, some.numel()))
        increment_version(target)
    else:
        values.copy_(whole(source))


def whole(source: Source) -> Tensor:
    """All of it, in memory."""
    found = torch.empty(source.shape, dtype=source.dtype)
    source.read_into(0, as_bytes(found))
    return found


def has_values_of(target: Tensor, source: Source) -> bool:
    """Whether the tensor has these very bits already."""
    return all(
        torch.equal(piece, _read(source, begin, piece.numel()))
        for begin, piece in each_piece(target)
    )


def _read(source: Source, begin: int, nbytes: int) -> Tensor:
    read = torch.empty(nbytes, dtype=torch.uint8)
    source.read_into(begin, read)
    return read
