"""The layout of optimizer state in chunks: the one place that knows where an element lies.

A chunk is what one read and one write move: some fields (`exp_avg`, `exp_avg_sq`, and `master` for
16-bit parameters) of up to `chunk_numel` elements, always fp32, one field after the other in
contiguous memory. Its elements are slices of parameters: a large parameter is cut over several
chunks, small ones share a chunk. Slices begin at multiples of 64 bytes within a field and cut a
parameter at multiples of 16 elements. Pure numbers; no memory, no files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

CHUNK_NUMEL = 4 << 20
MASTER = "master"
ELEMENT_BYTES = 4
_SLICE_ALIGN = 16  # elements: 64 bytes
_FIELD_ALIGN = 1024  # elements: 4 KiB, so that every field begins at a page


@dataclass(frozen=True)
class ParamSpec:
    """The facts about a parameter that the layout of its state needs.

    fields: those of its chunks. device_bytes: bytes of an element on a device, which is downloaded
    for the update; its gradient's element has as many. unit: the unit of the prepared model that
    owns the parameter; a chunk keeps within one unit, and its parameters are fetched for the
    update. own: the elements [begin, end) whose state is this rank's where ranks share it, begin a
    multiple of 16; None: all. comes_late: its gradient may change unseen until the step, so no copy
    is made before.
    """

    name: str
    numel: int
    fields: tuple[str, ...]
    device_bytes: int = 0
    unit: int | None = None
    own: tuple[int, int] | None = None
    comes_late: bool = False

    @property
    def own_numel(self) -> int:
        begin, end = self.own or (0, self.numel)
        return end - begin

    @property
    def element_bytes(self) -> int:
        """The bytes of an element of a parameter that is trained, and of its gradient."""
        return ELEMENT_BYTES // 2 if MASTER in self.fields else ELEMENT_BYTES

    @property
    def has_staging_buffer(self) -> bool:
        """Whether the parameter is staged for its update."""
        return self.device_bytes > 0 or self.unit is not None

    def touched_bytes(self, grad_bytes: int | None = None) -> int:
        """Return the bytes of host memory that one update reads and writes: the gradient is read,
        state and parameter are read and written. grad_bytes: of a gradient's element; None: as the
        parameter's.
        """
        grad = self.element_bytes if grad_bytes is None else grad_bytes
        return self.own_numel * (2 * (ELEMENT_BYTES * len(self.fields) + self.element_bytes) + grad)


@dataclass(frozen=True)
class Slice:
    """A slice: elements [begin, end) of a parameter, at element `offset` of a chunk's fields."""

    param: int  # its number among the parameters that were laid out
    begin: int
    end: int
    offset: int


@dataclass(frozen=True)
class Chunk:
    """A chunk: some slices and their fields. `numel`: elements of one field, padding included."""

    number: int
    name: str
    fields: tuple[str, ...]
    slices: tuple[Slice, ...]
    numel: int

    @cached_property
    def nbytes(self) -> int:
        return self.numel * len(self.fields) * ELEMENT_BYTES

    @cached_property
    def begins(self) -> dict[str, int]:
        """The element at which each field begins."""
        return {field: index * self.numel for index, field in enumerate(self.fields)}


def lay_out(params: Sequence[ParamSpec], chunk_numel: int = CHUNK_NUMEL) -> list[Chunk]:
    """Cut the state of `params` into chunks, in their order; each combination of unit and fields
    has chunks of its own. A parameter without elements on this rank has no chunk. A parameter
    without fields has one of no bytes where it is staged, since a staging buffer serves a chunk.
    """
    chunks: list[Chunk] = []
    for fields, packed in _packed_together(params):
        for slices in _pack(packed, round_up(chunk_numel, _SLICE_ALIGN)):
            numel = round_up(slices[-1].offset + slices[-1].end - slices[-1].begin, _FIELD_ALIGN)
            first = slices[0]
            name = f"{params[first.param].name}[{first.begin}:{first.end}]"
            if len(slices) > 1:
                name += f" and {len(slices) - 1} more"
            chunks.append(Chunk(len(chunks), name, fields, tuple(slices), numel))
    return chunks


def layout_size(params: Sequence[ParamSpec], chunk_numel: int) -> tuple[int, int]:
    """Return the bytes of all chunks that `lay_out` would make, and of the largest, without making
    them: a large model has millions.
    """
    most = round_up(chunk_numel, _SLICE_ALIGN)
    whole_bytes = largest_bytes = 0
    for fields, packed in _packed_together(params):
        width, end = len(fields) * ELEMENT_BYTES, 0  # end: of what the open chunk has; 0: none is
        numels = [0]  # of chunks that are full or the last one
        for _, param in packed:
            begin = round_up(end, _SLICE_ALIGN)
            if begin >= most and param.own_numel:
                numels.append(end)
                begin = 0
            over = begin + param.own_numel - most
            if over > 0:
                full = 1 + (over - 1) // most
                numels.append(most)
                whole_bytes += (full - 1) * round_up(most, _FIELD_ALIGN) * width
                end = over - (full - 1) * most
            elif param.own_numel:
                end = begin + param.own_numel
        numels.append(end)
        rounded = [round_up(numel, _FIELD_ALIGN) * width for numel in numels]
        whole_bytes += sum(rounded)
        largest_bytes = max(largest_bytes, *rounded)
    return whole_bytes, largest_bytes


def _packed_together(
    params: Sequence[ParamSpec],
) -> Iterator[tuple[tuple[str, ...], list[tuple[int, ParamSpec]]]]:
    """Yield the parameters that share chunks, with their numbers and after the fields that all of
    them have.
    """
    alike: dict[tuple[int | None, tuple[str, ...]], list[tuple[int, ParamSpec]]] = {}
    for number, param in enumerate(params):
        packed = alike.setdefault((param.unit, param.fields), [])
        if param.fields or param.has_staging_buffer:
            packed.append((number, param))
    yield from ((fields, packed) for (_, fields), packed in alike.items())


def _pack(params: Sequence[tuple[int, ParamSpec]], chunk_numel: int) -> Iterator[list[Slice]]:
    """Yield the slices of each chunk."""
    slices: list[Slice] = []
    offset = 0
    for number, param in params:
        begin, last = param.own or (0, param.numel)
        while begin < last:
            if offset >= chunk_numel:
                yield slices
                slices, offset = [], 0
            end = min(last, begin + chunk_numel - offset)
            slices.append(Slice(number, begin, end, offset))
            offset = round_up(offset + end - begin, _SLICE_ALIGN)
            begin = end
    if slices:
        yield slices


def slices_by_param(chunks: Iterable[Chunk]) -> dict[int, list[tuple[Chunk, Slice]]]:
    """Return where each parameter's state lies, in the order of its elements."""
    found: dict[int, list[tuple[Chunk, Slice]]] = {}
    for chunk in chunks:
        for piece in chunk.slices:
            found.setdefault(piece.param, []).append((chunk, piece))
    return found


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple
