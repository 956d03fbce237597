"""The table of what common machines can train: the largest model that fits, and its step.

Machines are the shipped profiles with other amounts of memory and drives, so all figures follow
from published ones. A model of each size is counted once, and planned on each machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from offload.core.errors import CapacityError
from offload.planning.profile import Profile
from offload.planning.tuning import UNTUNED
from offload.tools.forecast.case import ForecastCase
from offload.tools.forecast.footprint import Footprint, measure
from offload.tools.forecast.forecast import FORMAT, VERSION, show_time
from offload.tools.forecast.machines import find_machine, usual_budgets, with_drives
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.sources import find_source

# By the memory of the GPU in GB: the shipped profile.
_GPUS = {16: "rtx4080-1ssd", 24: "rtx4090-1ssd", 32: "rtx5090-1ssd", 80: "a100-80g-2ssd"}
_HOST_GIB = (32, 64, 128, 256)
_DRIVES = (0, 1, 2)
_SMALL = ("1.1B", "3B", "7B", "13B", "20B", "33B")
_SIZES = (*_SMALL, "48B", "70B", "105B", "140B", "175B", "250B", "405B", "700B", "1T")
_RANK = 16  # of adapters
_SEQUENCE = 4096
_DRIVE_BYTES = 2 * 10**12
_QUICK_S = 60.0
_GI = 1 << 30
_LEGEND = (
    f"A step is one text of {_SEQUENCE:,} tokens, AdamW, bfloat16 with a master in fp32, "
    f'activations="recompute"; LoRA: rank {_RANK} beside a frozen model. All budgets are the usual '
    f"ones; an SSD has {_DRIVE_BYTES / 1e12:.0f} TB, and the speed that the machine's profile has. "
    "Made by `make table`. GPUs: "
)


@dataclass(frozen=True)
class Cell:
    """The largest model that one machine trains, and its step; None: not even the smallest. quick:
    the largest one whose step takes no longer than `_QUICK_S`.
    """

    gpu: str
    gpu_gb: int
    host_gib: int
    drives: int
    lora: bool
    largest: str | None
    step_s: float | None
    quick: str | None
    quick_step_s: float | None


@dataclass(frozen=True)
class SizeTable:
    """A table of cells. `str()` is Markdown."""

    cells: tuple[Cell, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT + " table",
            "version": VERSION,
            "cells": list(map(asdict, self.cells)),
        }

    def __str__(self) -> str:
        quick = f"a step of at most {_QUICK_S:.0f} s"
        return "\n".join(
            [
                "Predicted from published figures; no GPU has run this yet. The largest model that "
                "fits, and the seconds (or minutes) of a step:",
                "",
                *self._lines(lambda cell: (cell.largest, cell.step_s)),
                "",
                f"The largest model with {quick}:",
                "",
                *self._lines(lambda cell: (cell.quick, cell.quick_step_s)),
                "",
                _LEGEND + ", ".join(_gpu(gb, name) for gb, name in _GPUS.items()) + ".",
            ]
        )

    def _lines(self, told: Callable[[Cell], tuple[str | None, float | None]]) -> Iterator[str]:
        each = [f"{n or 'no'} SSD{'s' * (n > 1)}" for n in _DRIVES]
        yield "| GPU | RAM | " + " | ".join(each + [f"LoRA, {name}" for name in each]) + " |"
        yield "|--:|--:|" + "---|" * 2 * len(each)
        for gpu_gb in dict.fromkeys(cell.gpu_gb for cell in self.cells):
            for host in dict.fromkeys(cell.host_gib for cell in self.cells):
                row = [c for c in self.cells if (c.gpu_gb, c.host_gib) == (gpu_gb, host)]
                texts = [_told(*told(cell)) for cell in row]
                yield f"| {gpu_gb} GB | {host} GB | " + " | ".join(texts) + " |"


def _told(size: str | None, step_s: float | None) -> str:
    return "-" if size is None or step_s is None else f"{size}, {show_time(step_s)}"


def make_table(tell: Callable[[str], None] = lambda text: None) -> SizeTable:
    """Find the largest model for each machine. It takes minutes. tell: called with a text that says
    what is done now.
    """
    cells = []
    for gpu_gb, name in _GPUS.items():
        for host in _HOST_GIB:
            for lora in (False, True):
                for drives in _DRIVES:
                    tell(f"a GPU of {gpu_gb} GB, {host} GB of memory, {drives} drives")
                    machine = replace(_profile(name), memory_bytes=host * _GI)
                    cells.append(_cell(machine, gpu_gb, host, drives, lora))
    return SizeTable(tuple(cells))


def _gpu(gpu_gb: int, name: str) -> str:
    return f"{gpu_gb} GB {_profile(name).device}"


def _profile(name: str) -> Profile:
    found = find_machine(name).profile
    assert found is not None
    return found


def _cell(machine: Profile, gpu_gb: int, host_gib: int, drives: int, lora: bool) -> Cell:
    """Find the largest model, and the largest quick one; sizes that are larger than one that does
    not fit do not fit either.
    """
    fitting = list(_SIZES[: _first_misfit(machine, drives, lora)])
    largest = fitting[-1] if fitting else None
    largest_s = _step_s(machine, drives, lora, largest) if largest else None
    quick, quick_s = largest, largest_s
    while quick_s is not None and quick_s > _QUICK_S:
        fitting.pop()
        quick = fitting[-1] if fitting else None
        quick_s = _step_s(machine, drives, lora, quick) if quick else None
    gpu = machine.device or ""
    return Cell(gpu, gpu_gb, host_gib, drives, lora, largest, largest_s, quick, quick_s)


def _first_misfit(machine: Profile, drives: int, lora: bool) -> int:
    low, high = 0, len(_SIZES)
    while low < high:
        middle = (low + high) // 2
        low, high = (
            (middle + 1, high) if _fits(machine, drives, lora, _SIZES[middle]) else (low, middle)
        )
    return low


def _fits(machine: Profile, drives: int, lora: bool, size: str) -> bool:
    case = _case(machine, drives, lora, size)
    try:
        plan = case.plan()
    except CapacityError:
        return False
    has_room = plan.disk_room_bytes <= drives * _DRIVE_BYTES
    return has_room and not case.problems(plan)


def _step_s(machine: Profile, drives: int, lora: bool, size: str) -> float:
    return _case(machine, drives, lora, size).run().step_s


def _case(machine: Profile, drives: int, lora: bool, size: str) -> ForecastCase:
    rank = _RANK if lora else None
    request = ForecastRequest(size, sequence=_SEQUENCE, activations="recompute", lora=rank)
    budgets = replace(usual_budgets(machine, request.activations), directories=drives)
    fast = with_drives(machine, drives)
    return ForecastCase.of(request, _footprint(size, rank), budgets, fast, fast, UNTUNED)


@lru_cache(maxsize=2 * len(_SIZES))
def _footprint(size: str, rank: int | None) -> Footprint:
    return measure(
        find_source(size), 1, _SEQUENCE, activations="recompute", on_device=True, lora=rank
    )
