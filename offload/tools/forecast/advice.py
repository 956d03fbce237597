"""Advice: the call that a training takes, and the single changes with which one fits that does not,
each with its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from offload.core.config import format_size
from offload.planning.planner import Budgets
from offload.tools.forecast.case import ForecastCase
from offload.tools.forecast.forecast import Change
from offload.tools.forecast.request import PREPARE, WRAP, ForecastRequest

# Seconds and tokens a second of a request that fits; None instead of numbers: no speed is known;
# None: it does not fit.
StepOf = Callable[[ForecastRequest], tuple[float | None, float | None] | None]
_MI = 1 << 20
_LACKING = ", more than this machine's"


@dataclass(frozen=True)
class _Candidate:
    """A changed request. what, option: as a person reads it, and as it is given to the command."""

    what: str
    option: str
    request: ForecastRequest


def find_changes(case: ForecastCase, step_of: StepOf) -> tuple[Change, ...]:
    """Find the single changes with which the case fits: the fastest first, and last those that this
    machine has not the memory for.
    """
    found = []
    for kind in _kinds(case):
        for candidate in kind:  # the first one that fits changes least
            step = step_of(candidate.request)
            if step is not None:
                found.append(Change(candidate.what, candidate.option, *step))
                break
    return tuple(
        sorted(found, key=lambda change: (_LACKING in change.what, -(change.tokens_per_s or 0.0)))
    )


def _kinds(case: ForecastCase) -> Iterator[list[_Candidate]]:
    request, budgets = case.request, case.budgets
    ways = ["recompute"] if request.use == WRAP else ["recompute", "offload"]
    for way in ways if request.activations == "keep" else ():
        text, option = f'activations="{way}"', f"--activations {way}"
        yield [_Candidate(text, option, replace(request, activations=way))]
    yield list(_smaller_batches(request))
    if request.activations != "offload":
        other = WRAP if request.use == PREPARE else PREPARE
        text = f"offload.{other} instead of offload.{request.use}"
        yield [_Candidate(text, f"--use {other}", replace(request, use=other))]
    if not budgets.directories:
        one = replace(request, drives=1)
        yield [_Candidate("one drive", "--nvme-count 1", one)]
    least, known = case.least, case.known
    memory, device_memory = (
        (known.memory_bytes, known.device_memory_bytes) if known is not None else (None, None)
    )
    kind = "host memory with a drive" if budgets.directories else "host memory without one"
    if budgets.host_bytes is not None and least[kind] > budgets.host_bytes:
        more = replace(request, host_bytes=_up(least[kind]))
        yield [_more("host_memory", _up(least[kind]), memory, more)]
    device = least.get("device memory", 0)
    if budgets.device_bytes is not None and device > budgets.device_bytes:
        more = replace(request, device_bytes=_up(device))
        yield [_more("device_memory", _up(device), device_memory, more)]


def _smaller_batches(request: ForecastRequest) -> Iterator[_Candidate]:
    batch, times = request.batch // 2, 2
    while batch:
        text = f"batch {batch}, accumulated {times} times"
        yield _Candidate(text, f"--batch {batch}", replace(request, batch=batch))
        batch, times = batch // 2, times * 2


def _more(name: str, nbytes: int, has: int | None, request: ForecastRequest) -> _Candidate:
    lacking = f"{_LACKING} {format_size(has)}" if has and nbytes > has else ""
    option = f"--{name.replace('_', '-')} {nbytes // _MI}MiB"
    return _Candidate(f"{name}={format_size(nbytes)} at least{lacking}", option, request)


def _up(nbytes: int) -> int:
    """Round up to whole MiB."""
    return -(-nbytes // _MI) * _MI


def call_of(request: ForecastRequest, budgets: Budgets, on_device: bool) -> str:
    """Return the line of code that trains so."""
    given = []
    if request.use == PREPARE and on_device:
        given.append('device="cuda"')
    if request.use == PREPARE and request.device_bytes is not None:
        given.append(f'device_memory="{_size(request.device_bytes)}"')
    if budgets.host_bytes is not None:
        given.append(f'host_memory="{_size(budgets.host_bytes)}"')
    if budgets.directories:
        drives = [f'"DRIVE{n + 1}"' for n in range(budgets.directories)]
        given.append("nvme=" + (drives[0] if len(drives) == 1 else f"[{', '.join(drives)}]"))
    if request.use == PREPARE and request.lora is not None:
        given.append('weights="DIRECTORY"')
    if request.use == PREPARE and request.activations != "keep":
        given.append(f'activations="{request.activations}"')
    if request.use == WRAP:
        return f"optimizer = offload.wrap({', '.join(['optimizer', *given])})"
    return f"model, optimizer = offload.prepare({', '.join(['model', 'optimizer', *given])})"


def _size(nbytes: int) -> str:
    """Write a budget as it may be given, in whole GiB or MiB if it is about that."""
    for unit, size in (("GiB", 1 << 30), ("MiB", _MI)):
        if nbytes >= 10 * size or (nbytes % size == 0 and nbytes):
            return f"{nbytes // size}{unit}"
    return str(nbytes)
