"""The plan of optimizer state: which chunks stay in host memory and which go to the disk, how many
buffers the update uses, what moves each step and what that does to an SSD. Pure numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from offload.core.config import format_size
from offload.planning.layout import (
    CHUNK_NUMEL,
    Chunk,
    ParamSpec,
    Slice,
    layout_size,
    round_up,
)

_PAGE = 4096
_LINE = 64
STEPS_OF_INTEREST = 10_000
RATED_TERABYTES_WRITTEN = 600.0  # what common 1 TB drives are warranted for


@dataclass(frozen=True)
class Speeds:
    """The measured rates of disk and update, bytes a second; None: not known."""

    disk_bytes_per_s: float | None = None  # reads and writes together
    update_bytes_per_s: float | None = None  # of the update, over all that it reads and writes

    def least_s(self, disk_bytes: int, updated_bytes: int) -> dict[str, float] | None:
        """Compute the seconds that disk and update each need at least. They run together, so a step
        takes at least the larger. None: a speed is missing, or there is nothing to do.
        """
        parts = {}
        for name, nbytes, speed in (
            ("disk", disk_bytes, self.disk_bytes_per_s),
            ("update", updated_bytes, self.update_bytes_per_s),
        ):
            if nbytes and speed is None:
                return None
            if nbytes and speed is not None:
                parts[name] = nbytes / speed
        return parts or None


UNKNOWN = Speeds()


@dataclass(frozen=True)
class RankShare:
    """The part of one rank where several share the state (stage 1) and the gradients, too (stage
    2).

    buffers: for values on their way over the network. buffer_bytes: of each in host memory.
    device_buffer_bytes: of each on the device, where the parameters are on one. grad_bytes: of this
    rank's slices of the reduced gradients. param_bytes: of all parameters that are shared, and
    gathered after each update.
    """

    stage: int
    rank: int
    count: int
    buffers: int
    buffer_bytes: int
    grad_bytes: int
    param_bytes: int
    device_buffer_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return self.buffers * self.buffer_bytes + self.grad_bytes

    @property
    def step_sent_bytes(self) -> int:
        """The bytes that this rank sends for one step, beside a few messages: new parameters, and
        in stage 2 the gradients of one backward pass.
        """
        return self.stage * self.param_bytes * (self.count - 1) // self.count

    def __str__(self) -> str:
        kept = "state" if self.stage == 1 else "state and gradients"
        return (
            f"rank {self.rank} of {self.count}, stage {self.stage}: 1/{self.count} of {kept} here; "
            f"{format_size(self.step_sent_bytes)} sent each step, through {self.buffers} buffers "
            f"of {self._size_of_buffers()}"
        )

    def _size_of_buffers(self) -> str:
        if not self.device_buffer_bytes:
            return format_size(self.buffer_bytes)
        also = f" and {format_size(self.buffer_bytes)} in host memory" if self.buffer_bytes else ""
        return f"{format_size(self.device_buffer_bytes)} on the device{also}"


@dataclass(frozen=True)
class Plan:
    """The plan of optimizer state: where it lives and what a step moves. `str()` is a table for
    people.

    chunk_numel: the most elements of a chunk. joined: how many chunks each of these stands for;
    more than one in a forecast only.
    """

    params: tuple[ParamSpec, ...]
    chunks: tuple[Chunk, ...]
    resident: frozenset[int]  # numbers of the chunks that stay in host memory
    buffers: int
    staging_buffers: int
    has_grad_buffers: bool  # gradients from devices have host memory of their own
    host_memory_bytes: int | None  # the budget; None: no limit was given
    speeds: Speeds = UNKNOWN
    ranks: RankShare | None = None  # None: nothing is shared with other ranks
    chunk_numel: int = CHUNK_NUMEL
    joined: int = 1

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

    @cached_property
    def buffer_bytes(self) -> int:
        """The bytes of one buffer: the largest chunk that moves."""
        if self.joined > 1 and len(self.resident) < len(self.chunks):
            return layout_size(self.params, self.chunk_numel)[1]
        return max((c.nbytes for c in self.chunks if c.number not in self.resident), default=0)

    @property
    def staging_buffer_bytes(self) -> int:
        """The bytes of one staging buffer: the downloads for the largest chunk."""
        largest = largest_staging_buffer(self.chunks, self.params, self.grads_are_here)
        return round_up(largest // self.joined, _PAGE)

    @property
    def grads_are_here(self) -> bool:
        """Whether gradients from devices need no staging buffer: they have gradient buffers, or are
        averaged over ranks into host memory of their own.
        """
        return self.has_grad_buffers or (self.ranks is not None and self.ranks.grad_bytes > 0)

    @property
    def grad_buffers_bytes(self) -> int:
        """The bytes of all gradient buffers, and of the flags that tell whether a gradient has
        changed.
        """
        moved = [param for param in self.params if param.device_bytes]
        if not self.has_grad_buffers or not moved:
            return 0
        return sum(map(grad_buffer_bytes, moved)) + verdicts_bytes(self.params)

    @property
    def arena_bytes(self) -> int:
        """The host memory that the optimizer takes."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of host memory by their use: resident chunks, buffers, staging buffers,
        gradient buffers, and what sharing with other ranks takes.
        """
        ranks = self.ranks
        return {
            "state": self.resident_bytes,
            "buffers": self.buffers * self.buffer_bytes,
            "staging_buffers": self.staging_buffers * self.staging_buffer_bytes,
            "gradients": self.grad_buffers_bytes + (ranks.grad_bytes if ranks else 0),
            "network": ranks.buffers * ranks.buffer_bytes if ranks else 0,
        }

    @property
    def chunk_bytes(self) -> int:
        """The part of it for resident chunks and buffers, which is never copied to or from a
        device.
        """
        return self.resident_bytes + self.buffers * self.buffer_bytes

    @property
    def shared_bytes(self) -> int:
        """The part of it for network buffers, and for gradients that were reduced over ranks."""
        return self.ranks.host_bytes if self.ranks else 0

    @property
    def disk_capacity_bytes(self) -> int:
        """The room on disk: the chunks, and the new generations that are being written."""
        moving = [chunk for chunk in self.chunks if chunk.number not in self.resident]
        rounded = sum(round_up(chunk.nbytes, _PAGE) for chunk in moving)
        return rounded + self.buffers * self.buffer_bytes

    @property
    def step_read_bytes(self) -> int:
        """The most bytes that a step reads, from the second step on. As many chunks as there are
        buffers wait in them for the next step; which ones differs from step to step, so the
        smallest are counted.
        """
        moving = sorted(c.nbytes for c in self.chunks if c.number not in self.resident)
        if self.joined > 1:
            return max(0, sum(moving) - self.buffers * self.buffer_bytes)
        return sum(moving[self.buffers :])

    @property
    def step_written_bytes(self) -> int:
        return self.step_read_bytes

    @property
    def step_updated_bytes(self) -> int:
        """The bytes of host memory that the update of all parameters reads and writes."""
        return sum(param.touched_bytes() for param in self.params)

    @property
    def predicted_step_s(self) -> float | None:
        """The seconds of one `step()`: the slower of disk and update, which run together. None
        where their speeds are not known, or where copies to a device take part, whose speed is not
        known.
        """
        parts = self._least_s()
        return max(parts.values()) if parts else None

    def _least_s(self) -> dict[str, float] | None:
        if self.staging_buffers:
            return None
        moved = self.step_read_bytes + self.step_written_bytes
        return self.speeds.least_s(moved, self.step_updated_bytes)

    @property
    def fits_without_us(self) -> bool:
        """Whether plain torch would do: parameters and state are in host memory anyway."""
        return not self.disk_bytes and not self.staging_buffers and self.ranks is None

    def endurance_share(
        self, steps: int = STEPS_OF_INTEREST, rated_tb: float = RATED_TERABYTES_WRITTEN
    ) -> float:
        """Return the share of a drive's rated writes that so many steps take."""
        return self.step_written_bytes * steps / (rated_tb * 1e12)

    def __str__(self) -> str:
        size = format_size
        rows = [
            ("parameters", f"{self.numel:,} in {len(self.params)} tensors"),
            *([("ranks", str(self.ranks))] if self.ranks else []),
            ("optimizer state", f"{size(self.state_bytes)} in {len(self.chunks)} chunks"),
            ("  in host memory", f"{size(self.resident_bytes)} in {len(self.resident)} chunks"),
            ("  on disk", size(self.disk_bytes)),
            *self._buffer_rows(),
            ("host memory taken", self._taken()),
        ]
        if self.disk_bytes:
            written, worn = self.step_written_bytes, 100 * self.endurance_share()
            rows += [
                ("disk space taken", size(self.disk_capacity_bytes)),
                ("moved each step", f"{size(self.step_read_bytes)} read, {size(written)} written"),
                (
                    f"{STEPS_OF_INTEREST:,} steps write",
                    f"{written * STEPS_OF_INTEREST / 1e12:.3g} TB: {worn:.2g} % of "
                    f"what a drive rated for {RATED_TERABYTES_WRITTEN:.0f} TB can take",
                ),
            ]
        rows += [("verdict", self._verdict()), ("step()", self._prediction())]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _verdict(self) -> str:
        if self.fits_without_us:
            return "fits without offload: parameters and state are in host memory anyway"
        if not self.disk_bytes:
            return "all state fits in host memory; nothing goes to disk"
        return f"{self.disk_bytes / self.state_bytes:.0%} of the state is on disk"

    def _prediction(self) -> str:
        parts, speeds = self._least_s(), self.speeds
        if parts is None:
            if self.staging_buffers:
                return "not predicted: the speed of copies to and from a device is not known"
            return "not predicted: no speeds known; wrap(..., measure=True) measures them"
        rates = {"disk": speeds.disk_bytes_per_s, "update": speeds.update_bytes_per_s}
        each = [f"{n} {s:.3g} s at {(rates[n] or 0.0) / 1e9:.3g} GB/s" for n, s in parts.items()]
        return f"{max(parts.values()):.3g} s at best: {', '.join(each)}"

    def _buffer_rows(self) -> Iterator[tuple[str, str]]:
        if self.buffers:
            each = format_size(self.buffer_bytes)
            yield "buffers", f"{self.buffers} of {each}, for chunks on their way from and to disk"
        if not self.staging_buffers:
            return
        each = format_size(self.staging_buffer_bytes)
        yield "device copies", f"{self.staging_buffers} buffers of {each}"
        grad_buffers = "at step()"
        if self.grads_are_here:
            grad_buffers = "while backward runs, averaged over ranks"
        if self.has_grad_buffers:
            grad_buffers = (
                f"while backward runs, to {format_size(self.grad_buffers_bytes)} of their own"
            )
        yield "gradients come", grad_buffers

    def _taken(self) -> str:
        each = ", ".join(f"{name} {format_size(n)}" for name, n in self.parts.items() if n)
        allowed = "without limit"
        if self.host_memory_bytes is not None:
            allowed = f"of {format_size(self.host_memory_bytes)} allowed"
        return f"{format_size(self.arena_bytes)} {allowed}" + (f": {each}" if each else "")


def staging_spans(
    chunk: Chunk, device_bytes: Sequence[int], has_no_grads: bool
) -> dict[Slice, tuple[int, int, int]]:
    """Place the slices of a chunk in a staging buffer: a parameter's bytes from the first number
    on, its gradient's, unless there are none, from the second, both ending at the third.
    device_bytes: of an element of each parameter.
    """
    spans, at = {}, 0
    for part in chunk.slices:
        nbytes = round_up((part.end - part.begin) * device_bytes[part.param], _LINE)
        middle = at + nbytes
        end = middle if has_no_grads else middle + nbytes
        spans[part] = (at, middle, end)
        at = end
    return spans


def largest_staging_buffer(
    chunks: Sequence[Chunk], params: Sequence[ParamSpec], has_no_grads: bool
) -> int:
    """Return the most bytes that the slices of a chunk take in a staging buffer; not 0 where a
    device takes part.
    """
    widths = [param.device_bytes for param in params]
    ends = [max(e for _, _, e in staging_spans(c, widths, has_no_grads).values()) for c in chunks]
    return round_up(max([*ends, int(any(widths))]), _PAGE)


def grad_buffer_bytes(param: ParamSpec) -> int:
    return round_up(param.numel * param.device_bytes, _PAGE)


def verdicts_bytes(params: Sequence[ParamSpec]) -> int:
    """Return the bytes of the flags that tell whether a gradient has changed: one for each
    parameter.
    """
    return round_up(len(params), _PAGE)
