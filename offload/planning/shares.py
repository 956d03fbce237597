"""The division of a prepared model's host memory. A pure function of sizes and the budget.

Where not all fits: one unit at a time and the buffers of the state have their room first, then
gradients, then all parameters, then state that stays resident. What does not fit is on disk and
passes through buffers: the largest gradients are spilled, blocks are fetched and evicted.
Activations that may be offloaded have a part of the budget to themselves, and half of what remains
when all else fits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.planning.layout import Chunk
from offload.planning.unit import Unit, enclosing

_PAGE = 4096
_STATE_SHARE = 1 / 8  # of the budget, for state that passes through, where not all fits
_STATE_MOST_BYTES = 320 << 20  # six chunks of the usual size
_DEVICE_ALIGN = 512
DEVICE_SPARE_BYTES = 8 * _DEVICE_ALIGN  # a placeholder's value for each type of parameters
_ACTIVATIONS_SHARE = 1 / 8  # of the budget, where they are offloaded
_ACTIVATIONS_BYTES = 1 << 30  # where there is no budget
_STAGING_SHARE = 1 / 16  # of the budget, to stage spilled gradients
_STAGING_MOST_BYTES = 32 << 20  # eight slices of the usual size


@dataclass(frozen=True)
class Shares:
    """The shares of host memory in bytes, each a multiple of the page."""

    params: int  # for blocks
    gradients: int
    state: int  # for resident chunks and buffers
    holds_all_params: bool
    activations: int = 0  # for those that are offloaded
    gradients_on_disk: int = 0  # beside those in memory
    spilled: tuple[int, ...] = ()  # numbers of the gradients on disk
    staging: int = 0  # part of `gradients`: buffers for spilled ones
    whole: int = 0  # for gathered blocks and whole gradients, where ranks have shards

    def __str__(self) -> str:
        text = f"host memory taken: {self.taken}"
        if self.spilled:
            text += (
                f"\non disk for want of it: {len(self.spilled)} gradients, "
                f"{format_size(self.gradients_on_disk)}"
            )
        return text

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by their use; activations only where they are offloaded."""
        parts = {"parameters": self.params, "gradients": self.gradients, "state": self.state}
        parts |= {"activations": self.activations} if self.activations else {}
        return parts | ({"gathered from ranks": self.whole} if self.whole else {})

    @property
    def taken(self) -> str:
        each = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in self.parts.items())
        return f"{format_size(self.total)}: {each}"

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.state + self.activations + self.whole


@dataclass(frozen=True)
class UnitSizes:
    """The sizes of a model's units. nbytes: of each in host memory. needs: the units that each
    needs. kept: those that hold others, and stay resident.
    """

    nbytes: tuple[int, ...]
    needs: tuple[tuple[int, ...], ...]
    kept: frozenset[int]

    @classmethod
    def of(
        cls, units: Sequence[Unit], nbytes_of: Callable[[Unit], int] = lambda unit: unit.nbytes
    ) -> UnitSizes:
        return cls(
            tuple(map(nbytes_of, units)),
            tuple(unit.needs for unit in units),
            frozenset(enclosing(units)),
        )

    @property
    def pages(self) -> list[int]:
        return [_page_up(nbytes) for nbytes in self.nbytes]

    @property
    def least_bytes(self) -> int:
        """The bytes for blocks when one unit at a time is in memory, beside the units that hold
        others.
        """
        return self._least(self.pages)

    @property
    def least_device_bytes(self) -> int:
        """The same on a device."""
        return self._least([on_device_bytes(nbytes) for nbytes in self.nbytes])

    def _least(self, sizes: Sequence[int]) -> int:
        at_once = (sum(sizes[n] for n in needs if n not in self.kept) for needs in self.needs)
        return sum(sizes[number] for number in self.kept) + max(at_once, default=0)


def share_out(
    units: Sequence[Unit],
    gradients: Sequence[int],
    state_bytes: int,
    budget_bytes: int | None,
    has_disk: bool = True,
    offloads_activations: bool = False,
    staging_bytes: int = 0,
    least_state_bytes: int = 0,
    least_spill_bytes: int = 0,
    nbytes_of: Callable[[Unit], int] = lambda unit: unit.nbytes,
    fixed_bytes: int = 0,
    fixed: str = "",
) -> Shares:
    """Divide the budget; None is no limit. Raises `CapacityError` with the arithmetic where not
    even one unit at a time works, or where not all fits and there is no disk.

    gradients: bytes of each. staging_bytes: for gradients on their way from a device.
    least_state_bytes: with which optimizer state can pass through. least_spill_bytes: with which
    spilled gradients can. nbytes_of: the bytes of a unit that are in host memory. fixed_bytes: of
    the budget, for what `fixed` says: they are no share.
    """
    return share_out_sizes(
        UnitSizes.of(units, nbytes_of),
        gradients,
        state_bytes,
        budget_bytes,
        has_disk,
        offloads_activations,
        staging_bytes,
        least_state_bytes,
        least_spill_bytes,
        fixed_bytes,
        fixed,
    )


def share_out_sizes(
    sizes: UnitSizes,
    gradients: Sequence[int],
    state_bytes: int,
    budget_bytes: int | None,
    has_disk: bool = True,
    offloads_activations: bool = False,
    staging_bytes: int = 0,
    least_state_bytes: int = 0,
    least_spill_bytes: int = 0,
    fixed_bytes: int = 0,
    fixed: str = "",
) -> Shares:
    """Divide the budget as `share_out` does, for units of which only the sizes are known."""
    params = sum(sizes.pages)
    staging = _page_up(staging_bytes)
    grads, state = _page_up(sum(gradients)) + staging, _page_up(state_bytes)
    if budget_bytes is None:
        activations = _ACTIVATIONS_BYTES if offloads_activations else 0
        return Shares(params, grads, state, True, activations)
    budget = (budget_bytes - fixed_bytes) // _PAGE * _PAGE
    least_state = _page_up(least_state_bytes)
    buffers, activations = _reserved(budget, state, least_state, offloads_activations)
    least_activations = min(activations, _PAGE)
    whole = params + grads + state
    if whole + least_activations <= budget:
        activations = min(activations, budget - whole)
        # Half of what is left; the rest stays free for later holders.
        left = (budget - whole - activations) // 2 if offloads_activations else 0
        return Shares(params, grads, state, True, activations + left - left % _PAGE)
    allowed = f"host_memory: {format_size(budget_bytes)} ({budget_bytes} bytes) are allowed"
    allowed += f" {fixed}" if fixed else ""
    beside = "beside it " if fixed else ""
    if not has_disk:
        raise CapacityError(
            f"{allowed}; {beside}"
            f"{format_size(params)} of parameters, {format_size(grads)} of gradients, "
            f"{format_size(state)} of optimizer state and {format_size(least_activations)} for "
            f"activations need {whole + least_activations + fixed_bytes} bytes in all; "
            "raise host_memory, or give nvme=... a directory on a fast drive for the rest"
        )
    least_spill = min(_page_up(least_spill_bytes), _page_up(sum(gradients)))
    least = sizes.least_bytes + staging + least_spill
    works = min(least + least_state, whole) + least_activations
    if works > budget:
        raise CapacityError(
            f"{allowed}; {beside}one unit at a time needs {format_size(least)} for parameters "
            f"and gradients in transit, "
            f"{format_size(least_state)} for optimizer state and "
            f"{format_size(least_activations)} for activations, with all gradients on disk; "
            f"the least that works is about {works + fixed_bytes} bytes"
        )
    # Both shrink to their least where one unit needs the room.
    buffers = min(buffers, budget - least - least_activations)
    activations = min(activations, budget - least - buffers)
    return _share_out_least(sizes, gradients, budget, buffers, activations, staging, least_spill)


def _share_out_least(
    sizes: UnitSizes,
    gradients: Sequence[int],
    budget: int,
    buffers: int,
    activations: int,
    staging: int,
    least_spill: int,
) -> Shares:
    """Divide a budget in which not all fits: gradients in memory if one unit at a time has room
    beside them, parameters in what is left. buffers: for optimizer state that passes through.
    """
    room = budget - sizes.least_bytes - staging - buffers - activations
    passing = 0
    if _page_up(sum(gradients)) > room:
        wanted = min(int(budget * _STAGING_SHARE), _STAGING_MOST_BYTES)
        passing = min(room, max(least_spill, wanted - wanted % _PAGE))
    spilled = _spill(gradients, room - passing)
    on_disk = sum(gradients[number] for number in spilled)
    grads = _page_up(sum(gradients) - on_disk) + staging + passing
    params = sum(sizes.pages)
    blocks = min(params, budget - grads - buffers - activations)
    left = budget - grads - blocks - activations
    return Shares(
        blocks,
        grads,
        left,
        blocks == params,
        activations,
        _page_up(on_disk),
        tuple(spilled),
        passing,
    )


def _reserved(
    budget: int, state: int, least_state: int, offloads_activations: bool
) -> tuple[int, int]:
    """Return the bytes for optimizer state that passes through, and those for activations; the
    caller cuts both where one unit at a time needs the room.
    """
    wanted = max(min(int(budget * _STATE_SHARE), _STATE_MOST_BYTES), least_state)
    activations = max(_PAGE, _page_up(int(budget * _ACTIVATIONS_SHARE)))
    return min(state, _page_up(wanted)), activations if offloads_activations else 0


def spill_room_bytes(shares: Shares, chunks: Sequence[Chunk]) -> int:
    """Return the room on disk for spilled gradients, cut like the chunks of state, and for new ones
    in flight: each part begins at a page.
    """
    pieces = sum(2 * len(chunk.slices) + 1 for chunk in chunks)  # and the gaps between them
    return shares.gradients_on_disk + _PAGE * pieces + 2 * shares.staging


def _spill(gradients: Sequence[int], room: int) -> list[int]:
    """Choose the gradients that go to disk, by number: the largest first, as few as possible."""
    left, spilled = sum(gradients), []
    order = sorted(range(len(gradients)), key=lambda number: -gradients[number])
    for number in order:
        if _page_up(left) <= room:
            break
        spilled.append(number)
        left -= gradients[number]
    return sorted(spilled)


def on_device_bytes(nbytes: int) -> int:
    """Return the bytes that a block of `nbytes` takes on a device: allocators round up."""
    return -(-nbytes // _DEVICE_ALIGN) * _DEVICE_ALIGN


def least_device_bytes(units: Sequence[Unit]) -> int:
    """Return the bytes for blocks on a device when one unit at a time is there, beside the units
    that hold others.
    """
    return UnitSizes.of(units).least_device_bytes


def check_device(
    units: Sequence[Unit], buffer_bytes: int, others_bytes: int, limit_bytes: int
) -> None:
    """Refuse a limit for everything on a device in which not even one unit at a time works.
    buffer_bytes: of the model's buffers. others_bytes: on the device already.
    """
    check_device_bytes(least_device_bytes(units), buffer_bytes, others_bytes, limit_bytes)


def check_device_bytes(blocks: int, buffer_bytes: int, others_bytes: int, limit_bytes: int) -> None:
    """Refuse a limit in which not even one unit at a time works. blocks: the bytes of that unit."""
    works = blocks + on_device_bytes(buffer_bytes) + others_bytes + DEVICE_SPARE_BYTES
    if works > limit_bytes:
        raise CapacityError(
            f"device_memory: {format_size(limit_bytes)} ({limit_bytes} bytes) are allowed; one "
            f"unit at a time needs {format_size(blocks)} for parameters, the model's buffers "
            f"{format_size(buffer_bytes)}, other code holds {format_size(others_bytes)}; the "
            "least that "
            f"works is about {works} bytes, and what activations take"
        )


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
