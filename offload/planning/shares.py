"""The division of a prepared model's host memory. A pure function of facts and budgets.

Where not all fits: one unit at a time and the buffers of the state have their room first, then
gradients, then all parameters, then state that stays resident. What does not fit is on disk and
passes through buffers: the largest gradients are spilled, blocks are fetched and evicted.
Activations that may be offloaded have a part of the budget to themselves, and half of what remains
when all else fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.planning.layout import round_up
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.unit import PAGE as _PAGE

_STATE_SHARE = 1 / 8  # of the budget, for state that passes through, where not all fits
_STATE_MOST_BYTES = 320 << 20  # six chunks of the usual size
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


def share_out(facts: TrainingFacts, budgets: Budgets) -> Shares:
    """Divide the budget of host memory. Raises `CapacityError` with the arithmetic where not even
    one unit at a time works, or where not all fits and there is no disk.
    """
    sizes, offloads = facts.units, budgets.offloads_activations
    gathered = facts.sharding.host_bytes if facts.sharding is not None else 0
    params, staging = sum(sizes.pages), _page_up(facts.staging_bytes)
    grads, state = _page_up(sum(facts.gradients)) + staging, _page_up(facts.state_bytes)
    if budgets.host_bytes is None:
        activations = _ACTIVATIONS_BYTES if offloads else 0
        return Shares(params, grads, state, True, activations, whole=gathered)
    budget = (budgets.host_bytes - gathered) // _PAGE * _PAGE
    least_state = _page_up(facts.least_state_bytes)
    buffers, activations = _reserved(budget, state, least_state, offloads)
    least_activations = min(activations, _PAGE)
    whole = params + grads + state
    if whole + least_activations <= budget:
        activations = min(activations, budget - whole)
        # Half of what is left; the rest stays free for later holders.
        left = (budget - whole - activations) // 2 if offloads else 0
        activations += left - left % _PAGE
        return Shares(params, grads, state, True, activations, whole=gathered)
    allowed = (
        f"host_memory: {format_size(budgets.host_bytes)} ({budgets.host_bytes} bytes) are allowed"
    )
    if facts.sharding is not None and gathered:
        allowed += f" {facts.sharding.arithmetic}; beside it"
    else:
        allowed += ";"
    # Weights that stay in their own files need no room in the store.
    if not budgets.directories and (sizes.stored_bytes or state):
        raise CapacityError(
            f"{allowed} "
            f"{format_size(params)} of parameters, {format_size(grads)} of gradients, "
            f"{format_size(state)} of optimizer state and {format_size(least_activations)} for "
            f"activations need {whole + least_activations + gathered} bytes in all; "
            "raise host_memory, or give nvme=... a directory on a fast drive for the rest"
        )
    least_spill = min(_page_up(facts.least_spill_bytes), _page_up(sum(facts.gradients)))
    least = sizes.least_bytes + staging + least_spill
    works = min(least + least_state, whole) + least_activations
    if works > budget:
        raise CapacityError(
            f"{allowed} one unit at a time needs {format_size(least)} for parameters "
            f"and gradients in transit, "
            f"{format_size(least_state)} for optimizer state and "
            f"{format_size(least_activations)} for activations, with all gradients on disk; "
            f"the least that works is about {works + gathered} bytes"
        )
    # Both shrink to their least where one unit needs the room.
    buffers = min(buffers, budget - least - least_activations)
    activations = min(activations, budget - least - buffers)
    shares = _share_out_least(facts, budget, buffers, activations, least_spill)
    return replace(shares, whole=gathered)


def _share_out_least(
    facts: TrainingFacts, budget: int, buffers: int, activations: int, least_spill: int
) -> Shares:
    """Divide a budget in which not all fits: gradients in memory if one unit at a time has room
    beside them, parameters in what is left. buffers: for optimizer state that passes through.
    """
    sizes, gradients, staging = facts.units, facts.gradients, _page_up(facts.staging_bytes)
    room = budget - sizes.least_bytes - staging - buffers - activations
    passing = 0
    if _page_up(sum(gradients)) > room:
        wanted = min(int(budget * _STAGING_SHARE), _STAGING_MOST_BYTES)
        passing = min(room, max(least_spill, wanted - wanted % _PAGE))
    spilled = spill(gradients, room - passing)
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


def spill(gradients: Sequence[int], room: int) -> list[int]:
    """Choose the gradients that go to disk, by number: the largest first, as few as possible."""
    left, spilled = sum(gradients), []
    order = sorted(range(len(gradients)), key=lambda number: -gradients[number])
    for number in order:
        if _page_up(left) <= room:
            break
        spilled.append(number)
        left -= gradients[number]
    return sorted(spilled)


def _page_up(nbytes: int) -> int:
    return round_up(nbytes, _PAGE)
