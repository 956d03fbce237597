"""From sizes and budgets to a plan: what lives where, and what it costs. A pure function.

Nothing is allocated and nothing is measured here. The plan says which chunks of optimizer state
stay in host memory and which go to the disk, how many buffers the update uses, what moves each step
and what that does to an SSD; and it is refused with the arithmetic when it cannot work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config import format_size
from offload.errors import CapacityError
from offload.layout import CHUNK_NUMEL, ELEMENT_BYTES, Chunk, ParamSpec, Slice, lay_out

BUFFERS = 6  # chunks under way: some being read, one updated, some written
LEAST_BUFFERS = 2
DESKS = 3  # chunks of device parameters under way: one comes, one is updated, one goes
LEAST_CHUNK_NUMEL = 16 << 10
_PAGE = 4096
_LINE = 64
STEPS_OF_INTEREST = 10_000
RATED_TERABYTES_WRITTEN = 600.0  # what common 1 TB drives are warranted for


@dataclass(frozen=True)
class Speeds:
    """Bytes a second, as measured; None: not known."""

    disk_bytes_per_s: float | None = None  # reads and writes together
    update_bytes_per_s: float | None = None  # of the update kernel, over all it reads and writes


UNKNOWN = Speeds()


@dataclass(frozen=True)
class Plan:
    """Where the optimizer state lives and what a step moves. `str()` is a table for people."""

    params: tuple[ParamSpec, ...]
    chunks: tuple[Chunk, ...]
    resident: frozenset[int]  # numbers of the chunks that stay in host memory
    buffers: int
    desks: int
    host_memory_bytes: int | None  # the budget; None: no limit was given
    speeds: Speeds = UNKNOWN

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)

    @property
    def state_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks)

    @property
    def resident_bytes(self) -> int:
        return sum(chunk.nbytes for chunk in self.chunks if chunk.number in self.resident)

    @property
    def disk_bytes(self) -> int:
        return self.state_bytes - self.resident_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of one buffer: the largest chunk that moves."""
        return max((c.nbytes for c in self.chunks if c.number not in self.resident), default=0)

    @property
    def desk_bytes(self) -> int:
        """Of one desk: parameters and gradients of the largest chunk that come from a device."""
        return largest_desk(self.chunks, self.params)

    @property
    def arena_bytes(self) -> int:
        """Host memory that the optimizer takes: resident chunks, buffers and desks."""
        buffers = self.buffers * self.buffer_bytes
        return self.resident_bytes + buffers + self.desks * self.desk_bytes

    @property
    def disk_capacity_bytes(self) -> int:
        """Room on disk: what lies there, and the new generations that are being written."""
        moving = [chunk for chunk in self.chunks if chunk.number not in self.resident]
        rounded = sum(-(-chunk.nbytes // _PAGE) * _PAGE for chunk in moving)
        return rounded + self.buffers * self.buffer_bytes

    @property
    def step_read_bytes(self) -> int:
        return self.disk_bytes

    @property
    def step_written_bytes(self) -> int:
        return self.disk_bytes

    @property
    def predicted_step_s(self) -> float | None:
        """Seconds of one `step()`: the slower of disk and update, which run together."""
        speeds, parts = self.speeds, []
        if self.disk_bytes:
            if speeds.disk_bytes_per_s is None:
                return None
            parts.append((self.step_read_bytes + self.step_written_bytes) / speeds.disk_bytes_per_s)
        if speeds.update_bytes_per_s is None:
            return None
        touched = 2 * self.state_bytes + 3 * ELEMENT_BYTES * self.numel
        return max([*parts, touched / speeds.update_bytes_per_s])

    def endurance_share(
        self, steps: int = STEPS_OF_INTEREST, rated_tb: float = RATED_TERABYTES_WRITTEN
    ) -> float:
        """Of a drive's rated writes, the share that so many steps take."""
        return self.step_written_bytes * steps / (rated_tb * 1e12)

    def __str__(self) -> str:
        size = format_size
        rows = [
            ("parameters", f"{self.numel:,} in {len(self.params)} tensors"),
            ("optimizer state", f"{size(self.state_bytes)} in {len(self.chunks)} chunks"),
            ("  in host memory", f"{size(self.resident_bytes)} in {len(self.resident)} chunks"),
            ("  on disk", size(self.disk_bytes)),
            ("buffers", f"{self.buffers} of {size(self.buffer_bytes)}" if self.buffers else "none"),
            *self._desk_row(),
            ("host memory taken", f"{size(self.arena_bytes)} of {self._budget()}"),
        ]
        if self.disk_bytes:
            written = self.step_written_bytes
            rows += [
                ("disk space taken", size(self.disk_capacity_bytes)),
                ("moved each step", f"{size(self.step_read_bytes)} read, {size(written)} written"),
                (
                    f"{STEPS_OF_INTEREST:,} steps write",
                    f"{written * STEPS_OF_INTEREST / 1e12:.1f} TB: {self.endurance_share():.1%} of "
                    f"a drive rated for {RATED_TERABYTES_WRITTEN:.0f} TB",
                ),
            ]
        else:
            rows.append(("verdict", "fits in host memory; nothing goes to disk"))
        predicted = self.predicted_step_s
        seconds = "not predicted: no speeds measured" if predicted is None else f"{predicted:.3g} s"
        rows.append(("step()", seconds))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _desk_row(self) -> list[tuple[str, str]]:
        if not self.desks:
            return []
        return [("device copies", f"{self.desks} desks of {format_size(self.desk_bytes)}")]

    def _budget(self) -> str:
        return "no limit" if self.host_memory_bytes is None else format_size(self.host_memory_bytes)


def make_plan(
    params: Sequence[ParamSpec],
    host_memory_bytes: int | None,
    has_disk: bool,
    chunk_numel: int | None = None,
    speeds: Speeds = UNKNOWN,
) -> Plan:
    """Keep in host memory what fits, move the rest through a few buffers.

    host_memory_bytes: None is no limit. chunk_numel: None derives it: 4 Mi elements, less where the
    budget would not hold a few buffers of that. Raises `CapacityError` where nothing works.
    """
    numel = chunk_numel or CHUNK_NUMEL
    chunks = lay_out(params, numel)
    total = sum(chunk.nbytes for chunk in chunks)
    desk = largest_desk(chunks, params)
    desks = DESKS if desk else 0
    if host_memory_bytes is None or total + desks * desk <= host_memory_bytes:
        everything = frozenset(chunk.number for chunk in chunks)
        return Plan(tuple(params), tuple(chunks), everything, 0, desks, host_memory_bytes, speeds)
    if not has_disk:
        raise CapacityError(
            f"host_memory: the optimizer state needs {format_size(total)} ({total} bytes)"
            + (f" and copies of device parameters {format_size(desks * desk)}" if desks else "")
            + f", {format_size(host_memory_bytes)} are allowed; raise host_memory, or give "
            "nvme=... a directory on a fast drive for the rest"
        )
    while chunk_numel is None and numel > LEAST_CHUNK_NUMEL:
        if BUFFERS * _largest(chunks) + desks * largest_desk(chunks, params) <= host_memory_bytes:
            break
        numel //= 2
        chunks = lay_out(params, numel)
    return _split(params, chunks, desks, host_memory_bytes, speeds)


def desk_spans(chunk: Chunk, desk_bytes: Sequence[int]) -> dict[Slice, tuple[int, int, int]]:
    """Where the slices of a chunk lie on a desk: a parameter's bytes from the first number on, its
    gradient's from the second, both ending at the third. desk_bytes: of each parameter, an element.
    """
    spans, at = {}, 0
    for part in chunk.slices:
        half = (part.end - part.begin) * desk_bytes[part.param] // 2
        half = -(-half // _LINE) * _LINE
        spans[part] = (at, at + half, at + 2 * half)
        at += 2 * half
    return spans


def largest_desk(chunks: Sequence[Chunk], params: Sequence[ParamSpec]) -> int:
    """Bytes that the slices of any chunk take on a desk."""
    widths = [param.desk_bytes for param in params]
    ends = [max(end for _, _, end in desk_spans(chunk, widths).values()) for chunk in chunks]
    return -(-max(ends, default=0) // _PAGE) * _PAGE


def _largest(chunks: Sequence[Chunk]) -> int:
    return max(chunk.nbytes for chunk in chunks)


def _split(
    params: Sequence[ParamSpec], chunks: list[Chunk], desks: int, budget: int, speeds: Speeds
) -> Plan:
    """Desks and buffers first, then as many resident chunks as fit."""
    largest, desk = _largest(chunks), largest_desk(chunks, params)
    buffers = min(BUFFERS, (budget - desks * desk) // largest)
    if buffers < LEAST_BUFFERS:
        least = LEAST_BUFFERS * largest + desks * desk
        raise CapacityError(
            f"host_memory: {format_size(budget)} ({budget} bytes) are less than the "
            f"{LEAST_BUFFERS} buffers of {format_size(largest)} ({largest} bytes)"
            + (f" and {desks} desks of {format_size(desk)}" if desks else "")
            + f" that the update needs; the least that works is {least} bytes"
        )
    free, resident = budget - buffers * largest - desks * desk, set()
    for chunk in chunks:
        if chunk.nbytes <= free:
            resident.add(chunk.number)
            free -= chunk.nbytes
    return Plan(tuple(params), tuple(chunks), frozenset(resident), buffers, desks, budget, speeds)
