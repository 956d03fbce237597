"""How a prepared model's host memory is shared out. A pure function of sizes and the budget.

Parameters come first: a byte of them is read for forward and for backward, and written by the
update. Then gradients, which stay from backward to step; then optimizer state, of which a byte is
read and written once a step. What does not fit is on disk and passes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.config import format_size
from offload.errors import CapacityError
from offload.units import Unit, enclosing

_PAGE = 4096
_STATE_SHARE = 1 / 8  # of the budget, for buffers of state on its way, where not all fits
_STATE_MOST_BYTES = 320 << 20  # six chunks of the usual size
_DEVICE_ALIGN = 512
_DEVICE_SPARE_BYTES = 8 * _DEVICE_ALIGN  # a value for each type of parameters that are away
_STATE_LEAST_BYTES = 6 * 3 * _PAGE  # six of the least


@dataclass(frozen=True)
class Shares:
    """Bytes of host memory, each a multiple of the page."""

    params: int  # for blocks
    gradients: int
    state: int  # for resident chunks and buffers
    holds_all_params: bool

    def __str__(self) -> str:
        rows = {"parameters": self.params, "gradients": self.gradients, "state": self.state}
        each = ", ".join(f"{name} {format_size(nbytes)}" for name, nbytes in rows.items())
        return f"host memory taken: {format_size(self.total)}: {each}"

    @property
    def total(self) -> int:
        return self.params + self.gradients + self.state


def share_out(
    units: Sequence[Unit],
    gradient_bytes: int,
    state_bytes: int,
    budget_bytes: int | None,
    has_disk: bool = True,
) -> Shares:
    """Shares of the budget; None is no limit. Raises `CapacityError` with the arithmetic where not
    even one unit at a time works, or not all fits and there is no disk.
    """
    params = sum(_page_up(unit.nbytes) for unit in units)
    least, grads, state = least_bytes(units), _page_up(gradient_bytes), _page_up(state_bytes)
    if budget_bytes is None or params + grads + state <= budget_bytes:
        return Shares(params, grads, state, holds_all_params=True)
    if not has_disk:
        whole = params + grads + state
        raise CapacityError(
            f"host_memory: {format_size(budget_bytes)} ({budget_bytes} bytes) are allowed; "
            f"{format_size(params)} of parameters, {format_size(grads)} of gradients and "
            f"{format_size(state)} of optimizer state need {whole} bytes; raise host_memory, or "
            "give nvme=... a directory on a fast drive for the rest"
        )
    budget = budget_bytes - budget_bytes % _PAGE
    wanted = min(max(int(budget * _STATE_SHARE), _STATE_LEAST_BYTES), _STATE_MOST_BYTES)
    buffers = min(state, _page_up(wanted))
    if least + grads + buffers > budget:
        works = least + grads
        if state:
            works = max(int(works / (1 - _STATE_SHARE)), works + _STATE_LEAST_BYTES)
        raise CapacityError(
            f"host_memory: {format_size(budget_bytes)} ({budget_bytes} bytes) are allowed; one "
            f"unit at a time needs {format_size(least)} for parameters, {format_size(grads)} for "
            f"gradients and {format_size(buffers)} for optimizer state; the least that works is "
            f"about {_page_up(works + _PAGE)} bytes"
        )
    blocks = min(params, budget - grads - buffers)
    return Shares(blocks, grads, budget - grads - blocks, holds_all_params=blocks == params)


def least_bytes(units: Sequence[Unit]) -> int:
    """For blocks, when one unit at a time is in memory, beside those that hold others."""
    kept = enclosing(units)
    pages = [_page_up(unit.nbytes) for unit in units]
    most = max((sum(pages[n] for n in u.needs if n not in kept) for u in units), default=0)
    return sum(pages[number] for number in kept) + most


def on_device_bytes(nbytes: int) -> int:
    """What a block of so many bytes takes there: allocators round up."""
    return -(-nbytes // _DEVICE_ALIGN) * _DEVICE_ALIGN


def least_device_bytes(units: Sequence[Unit]) -> int:
    """For blocks on a device, when one unit at a time is there, beside those that hold others."""
    kept = enclosing(units)
    sizes = [on_device_bytes(unit.nbytes) for unit in units]
    most = max((sum(sizes[n] for n in u.needs if n not in kept) for u in units), default=0)
    return sum(sizes[number] for number in kept) + most


def check_device(
    units: Sequence[Unit], buffer_bytes: int, others_bytes: int, limit_bytes: int
) -> None:
    """Refuse a limit for everything on a device in which not even one unit at a time works.
    buffer_bytes: of the model. others_bytes: on the device already.
    """
    blocks = least_device_bytes(units)
    works = blocks + on_device_bytes(buffer_bytes) + others_bytes + _DEVICE_SPARE_BYTES
    if works > limit_bytes:
        raise CapacityError(
            f"device_memory: {format_size(limit_bytes)} ({limit_bytes} bytes) are allowed; one "
            f"unit at a time needs {format_size(blocks)} for parameters, the model's buffers "
            f"{format_size(buffer_bytes)}, others hold {format_size(others_bytes)}; the least that "
            f"works is about {works} bytes, and what activations take"
        )


def _page_up(nbytes: int) -> int:
    return -(-nbytes // _PAGE) * _PAGE
