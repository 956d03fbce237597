"""Tensors as a checkpoint has them: their bytes in the order of their shape, in host memory."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload.checkpoint.format.manifest import crc32
from offload.checkpoint.rank_group import Range, RankGroup, TensorToSave
from offload.checkpoint.shard import Shards
from offload.core.errors import ConfigError, FormatError
from offload.core.tensors import is_dense, is_row_major
from offload.distributed.placing import is_sharded, local_of, rows_of
from offload.optim.export import ParamOptimizerState
from offload.optim.recipe import Record
from offload.optim.source import FieldPart, FieldSource, as_bytes
from offload.planning.layout import ELEMENT_BYTES
from offload.storage.safetensors_file import DTYPES
from offload.storage.safetensors_header import TensorSpec

PIECE_BYTES = 16 << 20
_SAMPLE_BYTES = 64 << 10
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def spec_of(name: str, tensor: Tensor, to_fill: bool = False) -> TensorSpec:
    """Return the spec of a tensor. Refuses one that has no bytes of its own, or a type that
    safetensors files cannot have. A sharded tensor has the spec of the whole. to_fill: a load will
    write into it, so each element must have its own place in memory.
    """
    if is_lazy(tensor):
        raise ConfigError(f"{name}: is lazy and has no shape yet; run one batch through the model")
    if is_sharded(tensor):
        rows_of(name, tensor)
        spec_of(name, local_of(tensor), to_fill)
        return TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape))
    is_several = is_traceable_wrapper_subclass(tensor)  # a quantised weight
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
    if to_fill and any(
        n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        raise ConfigError(
            f"{name}: several elements share one place in memory (strides {tensor.stride()} for "
            f"shape {tuple(tensor.shape)}), so that it could not be loaded; register .contiguous()"
        )
    return TensorSpec(name, NAMES[tensor.dtype], tuple(tensor.shape))


def each_piece(
    tensor: Tensor, wants: Callable[[int, int], bool] = lambda begin, end: True
) -> Iterator[tuple[int, Tensor]]:
    """Yield the tensor's bytes piece by piece, in host memory, with the begin of each. Only a
    tensor whose memory is in another order than its shape is copied whole. wants: whether anything
    in [begin, end) is wanted; a piece that is not wanted is not copied from its device.
    """
    values = tensor.detach().resolve_conj().resolve_neg()
    if not values.is_contiguous():
        values = values.cpu().contiguous()
    whole = as_bytes(values)
    for begin in range(0, whole.numel(), PIECE_BYTES):
        if wants(begin, min(begin + PIECE_BYTES, whole.numel())):
            yield begin, whole[begin : begin + PIECE_BYTES].cpu()


def write(name: str, tensor: Tensor, sink: Shards) -> None:
    """Write those bytes of the tensor that are here to the sink, piece by piece. Keeps no view of
    the tensor.
    """
    (first, end), here = bytes_here(name, tensor), local_of(tensor)
    if first < end and sink.wants(name, first, end):
        for begin, piece in each_piece(here, lambda a, b: sink.wants(name, first + a, first + b)):
            sink.write(name, first + begin, piece)


def holding_of(name: str, tensor: Tensor, own: Range | None = None) -> TensorToSave:
    """Return which bytes of a tensor this rank writes; own: as in `own_bytes`."""
    return TensorToSave(spec_of(name, tensor), own_bytes(name, tensor, own))


def own_bytes(
    name: str, tensor: Tensor, own: Range | None, each_bytes: int = 0
) -> tuple[Range, ...] | None:
    """Return which bytes of a tensor this rank writes, as `TensorToSave` has them: of a sharded
    tensor, the rows that this rank is the first to hold; of any other `own`, in elements, or None
    if each rank writes a share. each_bytes: as in `bytes_here`.
    """
    if is_sharded(tensor):
        is_ours = rows_of(name, tensor).is_first_holder
        return (bytes_here(name, tensor, each_bytes),) if is_ours else ()
    each_bytes = each_bytes or tensor.element_size()
    return None if own is None else ((own[0] * each_bytes, own[1] * each_bytes),)


def bytes_here(name: str, tensor: Tensor, each_bytes: int = 0) -> Range:
    """Return the range of the whole tensor's bytes that this process has. each_bytes: of an element
    of the tensor itself, if not given, or of a field of its state.
    """
    each_bytes = each_bytes or tensor.element_size()
    if not is_sharded(tensor):
        return 0, tensor.numel() * each_bytes
    rows = rows_of(name, tensor)
    row_bytes = math.prod(tensor.shape[1:]) * each_bytes
    return rows.begin * row_bytes, rows.end * row_bytes


def sample(tensor: Tensor) -> int:
    """Return a checksum of some of the tensor's bytes: the first, the last, and some between."""
    flat = tensor.detach().reshape(-1)
    size = max(1, _SAMPLE_BYTES // tensor.element_size())
    crc = 0
    for begin in sorted({0, max(0, flat.numel() // 2 - size // 2), max(0, flat.numel() - size)}):
        for _, piece in each_piece(flat[begin : begin + size]):
            crc = crc32(piece.numpy(), crc)
    return crc


def fill(target: Tensor, source: FieldSource) -> None:
    """Read a source of the same type and shape into the tensor; for a sharded tensor, only the rows
    that are here.
    """
    if is_sharded(target):
        fill(local_of(target.detach()), local_part(source, target))
        increment_version(target)
        return
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
        _fill_rows(values, source, 0)


def _fill_rows(target: Tensor, source: FieldSource, begin: int) -> None:
    """Fill `target`, of any memory order, with the bytes from `begin` on, some rows at a time."""
    row_bytes = target[0].nbytes if target.dim() else target.nbytes
    if row_bytes > PIECE_BYTES:
        for number, row in enumerate(target):
            _fill_rows(row, source, begin + number * row_bytes)
        return
    for some in torch.split(target, PIECE_BYTES // row_bytes) if target.dim() else (target,):
        some.copy_(_read(source, begin, some.nbytes).view(some.dtype).view(some.shape))
        begin += some.nbytes


class _RowsOfSource:
    """A source of some rows of another source."""

    def __init__(self, source: FieldSource, first: int, like: Tensor) -> None:
        self._source, self._first = source, first
        self.dtype, self.shape = source.dtype, tuple(like.shape)

    def read_into(self, begin_bytes: int, target: Tensor) -> None:
        self._source.read_into(self._first + begin_bytes, target)


def local_part(source: FieldSource, like_tensor: Tensor) -> FieldSource:
    """Return a source of the rows that a sharded tensor has here; `source` itself for others."""
    if not is_sharded(like_tensor):
        return source
    first, _ = bytes_here("", like_tensor, source.dtype.itemsize)
    return _RowsOfSource(source, first, local_of(like_tensor))


def has_values_of(target: Tensor, source: FieldSource) -> bool:
    """Return whether the tensor has these very bits already."""
    return all(
        torch.equal(piece, _read(source, begin, piece.numel()))
        for begin, piece in each_piece(target)
    )


def _read(source: FieldSource, begin: int, nbytes: int) -> Tensor:
    read = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    source.read_into(begin, read)
    return read


# --- memory formats -------------------------------------------------------------------------------
# The order in which the dimensions of a parameter lie in memory. torch's fused steps go by memory
# alone: moments in another order than their parameter's are silently added to the wrong elements.
# So a checkpoint records which parameters are not in the order of their shape (channels_last, say),
# for readers that have its bytes and no parameter.


def order_of(tensor: Tensor) -> list[int] | None:
    """Return the tensor's dimensions, the one with the largest stride first. None: they are in the
    order of its shape, or its memory has holes.
    """
    if is_row_major(tensor.shape, tensor.stride()) or not is_dense(tensor):
        return None
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def parse_memory_formats(values: Mapping[str, Any]) -> dict[str, list[int]] | None:
    """Return the orders of dimensions, by parameter name, from an optimizer's values in a
    checkpoint; None: it is of a version that did not record them. Raises `FormatError`.
    """
    found = values.get("orders")
    if found is None:
        return None
    if not isinstance(found, dict) or not all(
        isinstance(order, list)
        and all(type(dim) is int for dim in order)
        and sorted(order) == list(range(len(order)))
        for order in found.values()
    ):
        raise FormatError(f"checkpoint: expected orders of dimensions, got {str(found)[:200]}")
    return found


def viewed(flat: Tensor, shape: Sequence[int], order: Sequence[int]) -> Tensor:
    """View flat memory as a tensor of `shape` whose dimensions lie in `order`."""
    there = flat.view([shape[dim] for dim in order])
    return there.permute([order.index(dim) for dim in range(len(order))])


class StridedState:
    """The state of parameters whose memory is in another order than their shape, from its slices
    until it can be saved.

    Where ranks share a parameter, a rank's part is one run of the memory, and is scattered over the
    tensor that is saved. So each field is gathered, and one rank, another for each parameter,
    writes all of it; one field at a time.
    """

    def __init__(self, held: Iterable[ParamOptimizerState]) -> None:
        self._records = {
            (each.record.number, field): each.record
            for each in held
            if not is_row_major(each.record.shape, each.record.stride)
            for field in each.fields
        }
        self._parts: dict[tuple[int, str], FieldPart] = {}
        self._added = dict.fromkeys(self._records, 0)
        self._lock = threading.Lock()

    def takes(self, number: int, field: str) -> bool:
        return (number, field) in self._records

    def add(self, number: int, field: str, begin_bytes: int, values: Tensor) -> Tensor | None:
        """Copy some of this rank's elements, by their places in the parameter's memory. Return all
        in the order of the shape, once they are there, unless ranks share the parameter. Any thread
        may call it.
        """
        key, record = (number, field), self._records[number, field]
        with self._lock:
            part = self._part(*key)
        part.write(begin_bytes // ELEMENT_BYTES, values)
        with self._lock:
            self._added[key] += values.numel()
            if record.own is not None or self._added[key] < part.values.numel():
                return None
            self._parts.pop(key, None)
        return _by_shape(record, part.values)

    def _part(self, number: int, field: str) -> FieldPart:
        if (number, field) not in self._parts:
            own = self._records[number, field].own_range
            self._parts[number, field] = FieldPart.empty(*own)
        return self._parts[number, field]

    def gathered(self, rank_group: RankGroup) -> Iterator[tuple[int, str, Tensor]]:
        """Gather each field that ranks share; yield those that this rank writes. Every rank must
        take all of them; each blocks until all ranks have come to it.
        """
        for (number, field), record in self._records.items():
            if record.own is not None:
                mine = self._part(number, field)
                del self._parts[number, field]
                parts = rank_group.bring_together(as_bytes(mine.values))
                if number % rank_group.count == rank_group.rank:
                    whole = torch.cat(parts).view(torch.float32)
                    yield number, field, _by_shape(record, whole)

    def drop(self) -> None:
        """Let go of the memory, where the save has failed."""
        with self._lock:
            self._parts.clear()


def _by_shape(record: Record, memory: Tensor) -> Tensor:
    """Return a field's elements in the order of its shape; `memory` has them in that of memory."""
    return memory.as_strided(record.shape, record.stride).contiguous().view(-1)
