"""Advice: the call that a training takes, and the single changes with which one fits that does not,
each with its step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from offload.core.config import format_size
from offload.planning.planner import Budgets
from offload.tools.forecast.case import ForecastCase
from offload.tools.forecast.forecast import Change
from offload.tools.forecast.machines import usual_budgets
from offload.tools.forecast.request import PREPARE, WRAP, ForecastRequest

# Seconds and tokens a second of a request that fits; None instead of numbers: no speed is known;
# None: it does not fit.
StepOf = Callable[[ForecastRequest], tuple[float | None, float | None] | None]
_MI = 1 << 20


@dataclass(frozen=True)
class _Candidate:
    """A changed request. what, option: as a person reads it, and as it is given to the command."""

    what: str
    option: str
    request: ForecastRequest


def find_changes(case: ForecastCase, step_of: StepOf) -> tuple[Change, ...]:
    """Find the single changes with which the case fits, the fastest first; where none is enough, a
    smaller batch whose layers are recomputed.
    """
    found = list(_working(_kinds(case), step_of))
    if not found and case.request.activations == "keep":
        found += _working([_smaller_batches(case.request, recomputes=True)], step_of)
    return tuple(sorted(found, key=lambda change: -(change.tokens_per_s or 0.0)))


def _working(kinds: Iterable[Iterable[_Candidate]], step_of: StepOf) -> Iterator[Change]:
    """Yield of each kind the first candidate that fits: it changes least."""
    for kind in kinds:
        for candidate in kind:
            step = step_of(candidate.request)
            if step is not None:
                yield Change(candidate.what, candidate.option, *step)
                break


def _kinds(case: ForecastCase) -> Iterator[Iterable[_Candidate]]:
    request, budgets = case.request, case.budgets
    ways = ["recompute"] if request.use == WRAP else ["recompute", "offload"]
    for way in ways if request.activations == "keep" else ():
        text, option = f'activations="{way}"', f"--activations {way}"
        yield [_Candidate(text, option, replace(request, activations=way))]
    yield _smaller_batches(request)
    if request.activations != "offload":
        other = WRAP if request.use == PREPARE else PREPARE
        text = f"offload.{other} instead of offload.{request.use}"
        yield [_Candidate(text, f"--use {other}", replace(request, use=other))]
    if not budgets.directories:
        one = replace(request, drives=1)
        yield [_Candidate("one drive", "--nvme-count 1", one)]
    yield from _other_budgets(case)


def _other_budgets(case: ForecastCase) -> Iterator[Iterable[_Candidate]]:
    """Yield the least budgets that work, and those that the machine has."""
    request, budgets, least, known = case.request, case.budgets, case.least, case.known
    kind = "host memory with a drive" if budgets.directories else "host memory without one"
    if budgets.host_bytes is not None and least[kind] > budgets.host_bytes:
        more = replace(request, host_bytes=_up(least[kind]))
        yield [_budget("host_memory", _up(least[kind]), "at least", more)]
    device = least.get("device memory", 0)
    if budgets.device_bytes is not None and device > budgets.device_bytes:
        more = replace(request, device_bytes=_up(device))
        yield [_budget("device_memory", _up(device), "at least", more)]
    usual = usual_budgets(known, request.activations) if known is not None else None
    if usual is None:
        return
    if usual.host_bytes is not None and usual.host_bytes < (budgets.host_bytes or 0):
        nbytes = usual.host_bytes // _MI * _MI
        less = replace(request, host_bytes=nbytes)
        yield [_budget("host_memory", nbytes, "as this machine has it", less)]
    if usual.device_bytes is not None and usual.device_bytes < (budgets.device_bytes or 0):
        nbytes = usual.device_bytes // _MI * _MI
        less = replace(request, device_bytes=nbytes)
        yield [_budget("device_memory", nbytes, "as this machine has it", less)]


def _smaller_batches(request: ForecastRequest, recomputes: bool = False) -> Iterator[_Candidate]:
    batch = request.batch // 2
    while batch:
        text, option = f"batch {batch} instead of {request.batch}", f"--batch {batch}"
        smaller = replace(request, batch=batch)
        if recomputes:
            text, option = (
                f'{text}, and activations="recompute"',
                f"{option} --activations recompute",
            )
            smaller = replace(smaller, activations="recompute")
        yield _Candidate(text, option, smaller)
        batch //= 2


def _budget(name: str, nbytes: int, how: str, request: ForecastRequest) -> _Candidate:
    option = f"--{name.replace('_', '-')} {nbytes // _MI}MiB"
    return _Candidate(f"{name}={format_size(nbytes)}, {how}", option, request)


def _up(nbytes: int) -> int:
    """Round up to whole MiB."""
    return -(-nbytes // _MI) * _MI


def call_of(request: ForecastRequest, budgets: Budgets, on_device: bool) -> str:
    """Return the line of code that trains so."""
    given = []
    if request.use == PREPARE and on_device:
        given.append('device="cuda"')
    if request.use == PREPARE and request.device_bytes is not None:
        given.append(f"device_memory={_size(request.device_bytes)}")
    if budgets.host_bytes is not None:
        is_asked = request.host_bytes is not None
        host = budgets.host_bytes if is_asked else budgets.host_bytes // _MI * _MI
        given.append(f"host_memory={_size(host)}")
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
    """Write a budget as it may be given, never more or less than it is."""
    for unit, size in (("GiB", 1 << 30), ("MiB", _MI)):
        if nbytes and nbytes % size == 0:
            return f'"{nbytes // size}{unit}"'
    return str(nbytes)
