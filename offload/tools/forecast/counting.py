"""The count of what one iteration of a model costs and holds, by a run on shapes alone.

The forward and backward pass run on the meta device, with the hooks that the engine itself uses.
Of many layers that are alike only a few run, unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError, OffloadError
from offload.core.metrics import Metrics
from offload.params.hooks import call_in_backward, follow
from offload.params.recompute import Recompute
from offload.planning.unit import Unit
from offload.tools.forecast.meta_cost import Cost, Meter, metered
from offload.tools.forecast.model_source import ModelSource
from offload.tools.forecast.repeats import (
    CHECKED_PERIODS,
    LEAST_PERIODS,
    TYPICAL,
    IrregularError,
    Repeat,
    find_repeats,
    lengthen,
    shortened,
)
from offload.tools.forecast.workload import BACKWARD, FORWARD


@dataclass(frozen=True)
class _KeptOfPeriod:
    """The bytes that autograd keeps of a typical period, from one use on until another ends."""

    nbytes: int
    begin: int
    end: int


@dataclass(frozen=True)
class Count:
    """The count of one iteration. parts: the modules that units use. uses: of parts, by number.
    peaks_bytes: the most that is held before the first use, and during each. kept_bytes: what
    autograd keeps. layer_bytes: the most that one use adds. repeats: the layers of which only
    `LEAST_PERIODS` have run. is_irregular: there are layers that look alike and are not.
    """

    parts: tuple[nn.Module, ...]
    uses: tuple[Cost, ...]
    peaks_bytes: tuple[int, ...]
    kept_bytes: int
    layer_bytes: int
    repeats: Mapping[Repeat, _KeptOfPeriod]
    is_irregular: bool = False

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return max(self.peaks_bytes)

    @property
    def whole(self) -> dict[Repeat, int]:
        """The periods that the model has."""
        return {repeat: repeat.periods for repeat in self.repeats}

    def lengthened(self, periods: Mapping[Repeat, int]) -> Count:
        """Return the count of a model with so many periods of its repeated layers."""
        uses, peaks_bytes, kept_bytes = list(self.uses), list(self.peaks_bytes), self.kept_bytes
        for repeat, kept in self.repeats.items():
            uses = lengthen(uses, repeat, periods[repeat])
            more_bytes = (periods[repeat] - LEAST_PERIODS) * kept.nbytes
            kept_bytes += more_bytes
            for place in range(kept.begin + 1, kept.end + 2):
                peaks_bytes[place] += more_bytes
        return replace(
            self,
            uses=tuple(uses),
            peaks_bytes=tuple(peaks_bytes),
            kept_bytes=kept_bytes,
            repeats={},
        )

    def is_like(self, other: Count) -> bool:
        """Return whether the other count, of a run, has the same result."""
        return (
            self.uses == other.uses
            and self.kept_bytes == other.kept_bytes
            and self.peak_bytes == other.peak_bytes
            and self.layer_bytes == other.layer_bytes
        )


@dataclass(frozen=True)
class ShapeRun:
    """A model that runs on shapes, with its input; size: of the input, for messages. recomputed:
    the layers that run again in backward.
    """

    source: ModelSource
    model: nn.Module
    inputs: Any
    size: str
    units: Sequence[Unit]
    recomputed: Mapping[nn.Module, tuple[Unit, ...]]
    on_device: bool

    def count(self, counts_all: bool) -> Count:
        """Count an iteration. counts_all: run every layer; otherwise they run where a few do not
        tell what all cost.
        """
        repeats = [] if counts_all else find_repeats(self.model, self._parts)
        some = self._count_some(repeats) if repeats else None
        return some or replace(self._count_all(), is_irregular=bool(repeats))

    def _count_some(self, repeats: Sequence[Repeat]) -> Count | None:
        """Count an iteration in which a few of the layers that are alike run. None: the model does
        not run so, or uses them differently.
        """
        try:
            with shortened(dict.fromkeys(repeats, LEAST_PERIODS)):
                found = self._run().count(self._parts, repeats)
            more = dict.fromkeys(repeats, CHECKED_PERIODS)
            with shortened(more):
                checked = self._run().count(self._parts, ())
            return found if found.lengthened(more).is_like(checked) else None
        except OffloadError:
            raise
        except Exception:  # of the user's code, too; if that is at fault, all layers will tell
            return None

    def _count_all(self) -> Count:
        try:
            return self._run().count(self._parts, ())
        except OffloadError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(
                f"{self.source.name}: cannot be run on shapes alone with {self.size}: "
                f"{type(error).__name__}: {first_line(error)}; {self.source.remedy}"
            ) from error

    @cached_property
    def _parts(self) -> tuple[nn.Module, ...]:  # of the whole model, before it is shortened
        used = {module for unit in self.units for module in unit.modules}
        return tuple(module for module in self.model.modules() if module in used)

    def _run(self) -> _Recorder:
        known = [*self.model.parameters(), *self.model.buffers(), *_tensors_in(self.inputs)]
        recorder = _Recorder(Meter(known))
        recompute = Recompute(self.recomputed, lambda unit: (), Metrics(), compares=False)
        with (
            closing(recompute),
            _followed(self.model, self._parts, recorder),
            metered(recorder.meter, self.on_device),
        ):
            loss = self.source.loss(self.model, self.inputs)
            recorder.end_forward()
            _run_backward(loss)
        return recorder


@dataclass(frozen=True)
class _NotedUse:
    """A use of a part that begins, and what was counted before it."""

    phase: int
    part: int
    flops: int
    moved_bytes: int
    live_bytes: int


class _Recorder:
    """A recorder that the hooks call before and after each run, as they would call the engine."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self._kept_bytes = 0  # activations of the layers, without the last part's output
        self._layer_bytes = 0
        self._uses: list[_NotedUse] = []
        self._peaks_bytes: list[int] = []  # before each use that has begun
        self._last: Unit | None = None

    def before_forward(self, part: Unit) -> None:
        self._note(BACKWARD if _in_backward() else FORWARD, part)

    def after_forward(self, part: Unit, outputs: list[Tensor]) -> None:
        if part is self._last and not _in_backward():
            made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
            self._kept_bytes = max(0, self.meter.live_bytes - sum(made.values()))
        made_here = [tensor for tensor in outputs if tensor.grad_fn is not None]
        if torch.is_grad_enabled() and made_here:
            call_in_backward(made_here, lambda: self._note(BACKWARD, part))

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def end_forward(self) -> None:
        """Note that autograd now holds all it keeps. If no part has run, the output counts, too."""
        if self._last is None:
            self._kept_bytes = self.meter.live_bytes

    def _note(self, phase: int, part: Unit) -> None:
        meter, before = self.meter, self._uses[-1].live_bytes if self._uses else 0
        self._last = part
        self._layer_bytes = max(self._layer_bytes, meter.live_bytes - before)
        use = _NotedUse(phase, part.number, meter.flops, meter.moved_bytes, meter.live_bytes)
        self._uses.append(use)
        self._peaks_bytes.append(meter.take_peak())

    def count(self, parts: tuple[nn.Module, ...], repeats: Sequence[Repeat]) -> Count:
        return Count(
            parts,
            tuple(self._costs()),
            (*self._peaks_bytes, self.meter.take_peak()),
            self._kept_bytes,
            self._layer_bytes,
            {repeat: self._kept_of(repeat) for repeat in repeats},
        )

    def _costs(self) -> Iterator[Cost]:
        """Yield the cost of each use. The first also has what was counted before it."""
        ends = [(use.flops, use.moved_bytes) for use in self._uses[1:]]
        ends.append((self.meter.flops, self.meter.moved_bytes))
        flops = moved = 0
        for use, end in zip(self._uses, ends, strict=False):  # no use has no end
            yield Cost(use.phase, use.part, end[0] - flops, end[1] - moved)
            flops, moved = end

    def _kept_of(self, repeat: Repeat) -> _KeptOfPeriod:
        """Find what a forward pass through one typical period leaves, and how long it stays: from
        the first use of the next period to the last one of the typical one. Raises `IrregularError`
        if the layers run more than once, in another order, or only forward.
        """
        begins: dict[int | None, int] = {}
        last, passes = 0, 0
        for number, use in enumerate(self._uses):
            period = repeat.period_of(use.part)
            if use.phase == FORWARD:
                begins.setdefault(period, number)
            if period == TYPICAL:
                is_new = repeat.period_of(self._uses[number - 1].part) != TYPICAL
                passes += use.phase == FORWARD and is_new
                last = number
        if passes != 1:
            raise IrregularError  # a second pass keeps more
        if self._uses[last].phase == FORWARD and repeat.is_trained:
            raise IrregularError  # others compute gradients, or none does
        before, typical, after = (begins[n] for n in (TYPICAL - 1, TYPICAL, repeat.periods - 1))
        if not before < typical < after:
            raise IrregularError
        nbytes = self._uses[typical].live_bytes - self._uses[before].live_bytes
        return _KeptOfPeriod(nbytes, after, max(last, after))


@contextmanager
def _followed(model: nn.Module, parts: Sequence[nn.Module], recorder: _Recorder) -> Iterator[None]:
    """Report the runs of parts to the recorder while the block runs. Each gradient is dropped as
    soon as autograd has accumulated it, as the engine takes it away.
    """
    each = [Unit(number, "", (part,), (), ()) for number, part in enumerate(parts)]
    handles = [*follow(model, each, recorder)]
    handles += [
        param.register_post_accumulate_grad_hook(_drop_grad)  # type: ignore[no-untyped-call]
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run_backward(loss: Tensor) -> None:
    """Do what `loss.backward()` does, but keep function modes in force: `loss.backward()` would
    suspend them, and a layer that is recomputed would take another path.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True
    )


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _tensors_in(inputs: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
