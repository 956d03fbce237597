"""Repeated layers of a model: where the same layers follow one another many times, so that a few of
them tell what all of them cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from torch import nn

from offload.tools.forecast.meta_cost import Cost

TYPICAL = 2  # the period that tells what those cost that do not run
LEAST_PERIODS = 4  # that run: the first, two that are compared, and the last
# That run once more, to see whether what follows from fewer holds. Nine tell also of layers that
# are others by their number: every third, every sixth, every eighth.
CHECKED_PERIODS = 9
_MOST_LENGTH = 8  # layers of a period: longer ones do not occur in published models
# An attribute that counts layers differs from one to the next, and changes nothing else.
_COUNTING = re.compile(r"(^|_)(idx|index|layer_id|layer_number|layer_num)$")
_PLAIN = (bool, int, float, str, tuple, type(None))
# Rates of dropout grow from layer to layer; the cost does not.
_RATE = re.compile(r"drop|prob|rate|^p$")


class IrregularError(Exception):
    """The layers that look alike are not used alike: all of them must run."""


@dataclass(frozen=True)
class Repeat:
    """A run of equal periods in a list of layers. begin: index of the first layer. length: layers
    of a period. first, parts: number of the first part, and how many a period has; a part is a
    module that a unit uses.
    """

    layers: nn.Module = field(repr=False)
    begin: int
    length: int
    periods: int
    first: int
    parts: int

    @property
    def is_trained(self) -> bool:
        """Whether any parameter of its layers is."""
        layers = list(self.layers.children())[self.begin : self.begin + self.length]
        return any(param.requires_grad for layer in layers for param in layer.parameters())

    def period_of(self, part: int) -> int | None:
        """Return the period that the part belongs to; None: it is not in this run."""
        period = (part - self.first) // self.parts
        return period if 0 <= period < self.periods else None


def find_repeats(model: nn.Module, parts: Sequence[nn.Module]) -> list[Repeat]:
    """Find the repeated layers in the order of the model's structure. parts: the modules that are
    followed, in that order, too.
    """
    found: list[Repeat] = []
    inside: set[nn.Module] = set()
    number_of = {part: number for number, part in enumerate(parts)}
    for module in model.modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential) or module in inside:
            continue
        layers = list(module)
        for begin, length, periods in _runs([_signature(layer) for layer in layers]):
            run = layers[begin : begin + length * periods]
            repeat = Repeat(module, begin, length, periods, *_first_part(run, length, number_of))
            if repeat.parts and _is_apart(model, run, length):
                found.append(repeat)
                inside.update(inner for layer in run for inner in layer.modules())
    return found


@contextmanager
def shortened(periods: Mapping[Repeat, int]) -> Iterator[None]:
    """Leave only so many periods of each run in its list of layers while the block runs: the first
    ones, and the last.
    """
    whole = {repeat.layers: dict(repeat.layers._modules) for repeat in periods}
    removed = {repeat: set(_removed(repeat, count)) for repeat, count in periods.items()}
    try:
        for layers, modules in whole.items():
            gone = {n for repeat, own in removed.items() if repeat.layers is layers for n in own}
            kept = [layer for n, layer in enumerate(modules.values()) if n not in gone]
            _set_layers(layers, {str(n): layer for n, layer in enumerate(kept)})
        yield
    finally:
        for layers, modules in whole.items():
            _set_layers(layers, modules)


def _removed(repeat: Repeat, periods: int) -> range:
    begin = repeat.begin + (periods - 1) * repeat.length
    return range(begin, begin + (repeat.periods - periods) * repeat.length)


def _set_layers(layers: nn.Module, modules: Mapping[str, nn.Module | None]) -> None:
    layers._modules.clear()
    layers._modules.update(modules)


# --- from a few periods to many -------------------------------------------------------------------


def lengthen(uses: Sequence[Cost], repeat: Repeat, periods: int) -> list[Cost]:
    """Return the uses of so many periods, given those of a run with `LEAST_PERIODS`: where the
    typical period is used, so are those that did not run, in their turn. Raises `IrregularError`
    where the typical period and the one before it are not used alike.
    """
    stretches = list(_stretches(uses, repeat))
    found: list[Cost] = []
    for place, (period, own) in enumerate(stretches):
        if period != TYPICAL:
            found += own
            continue
        before, after = stretches[place - 1], (*stretches, (None, []))[place + 1]
        is_back = (before[0], after[0]) == (repeat.periods - 1, TYPICAL - 1)
        if not is_back and (before[0], after[0]) != (TYPICAL - 1, repeat.periods - 1):
            raise IrregularError
        if _moved((after if is_back else before)[1], repeat.parts) != own:
            raise IrregularError
        others = [_moved(own, n * repeat.parts) for n in range(1, periods - LEAST_PERIODS + 1)]
        in_turn = [*reversed(others), own] if is_back else [own, *others]
        found += [use for of_one_period in in_turn for use in of_one_period]
    return found


def _stretches(uses: Sequence[Cost], repeat: Repeat) -> Iterator[tuple[int | None, list[Cost]]]:
    """Yield the stretches of uses of one period, each with that period."""
    for period, own in groupby(uses, key=lambda use: repeat.period_of(use.unit)):
        yield period, list(own)


def _moved(uses: Sequence[Cost], parts: int) -> list[Cost]:
    return [replace(use, unit=use.unit + parts) for use in uses]


# --- finding --------------------------------------------------------------------------------------


def _runs(signatures: Sequence[Any]) -> Iterator[tuple[int, int, int]]:
    """Yield begin, length of a period, and number of periods of each run that is long enough: from
    each place on the longest, among equals that of the shortest period.
    """
    at = 0
    while at < len(signatures):
        lengths = range(1, _MOST_LENGTH + 1)
        covered, length = max((_periods(signatures, at, n) * n, -n) for n in lengths)
        if covered:
            yield at, -length, covered // -length
        at += covered or 1


def _periods(signatures: Sequence[Any], begin: int, length: int) -> int:
    """Return how many equal periods of this length begin here; 0: not more than run anyway."""
    end = begin + length
    while end < len(signatures) and signatures[end] == signatures[end - length]:
        end += 1
    periods = (end - begin) // length
    return periods if periods > CHECKED_PERIODS else 0


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    """Return what must be equal for two layers to run alike: their modules, the shapes of their
    tensors, and their settings.
    """
    return tuple((name, type(module), *_facts(module)) for name, module in layer.named_modules())


def _facts(module: nn.Module) -> Iterator[Any]:
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None:
            yield name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad
    yield len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module)
    for name, value in sorted(vars(module).items()):
        if isinstance(value, _PLAIN) and not _COUNTING.search(name):
            is_rate = isinstance(value, float) and _RATE.search(name)
            yield name, bool(value) if is_rate else value


def _first_part(
    run: Sequence[nn.Module], length: int, number_of: Mapping[nn.Module, int]
) -> tuple[int, int]:
    """Return the number of the first part in these layers, and how many each period has; (0, 0):
    not the same of each.
    """
    numbers = [number_of[m] for layer in run for m in layer.modules() if m in number_of]
    period = {m: n // length for n, layer in enumerate(run) for m in layer.modules()}
    owners = [period[module] for module in number_of if module in period]
    parts = len(numbers) * length // len(run)
    if not numbers or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
        return 0, 0
    is_regular = owners == [n // parts for n in range(len(numbers))] if parts else False
    return (numbers[0], parts) if is_regular else (0, 0)


def _is_apart(model: nn.Module, run: Sequence[nn.Module], length: int) -> bool:
    """Return whether no period shares a parameter with another, or with the rest of the model."""
    period = {inner: n // length for n, layer in enumerate(run) for inner in layer.modules()}
    holders: dict[nn.Parameter, set[int]] = {}
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(param, set()).add(period.get(module, -1))
    return all(len(places) == 1 for places in holders.values() if places != {-1})
