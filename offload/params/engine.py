"""The engine of a prepared model: it fetches parameters before their use and evicts them when there
is no room.

The hooks tell it when units run, and autograd what it saves and what it unpacks. Of parameters that
autograd would save it keeps references instead, and looks the values up again in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.core.errors import StateError
from offload.core.heap import HEAP
from offload.core.locks import uninterrupted
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.tensors import entered_outside, outside_inference_mode
from offload.params.activations import Activations, KeptTensor, PackedTensor
from offload.params.block import Reference
from offload.params.device_tier import DeviceTier
from offload.params.gradients import (
    DeviceGradients,
    Gradients,
    SpilledGradientParams,
    gradient_memory,
)
from offload.params.hooks import at_end_of_backward, call_in_backward, follow, watch_gradients
from offload.params.mean_gradients import ShardContext
from offload.params.residency import Device, make_residency
from offload.params.sharded_gradients import ShardedGradients
from offload.params.start import PreparedModelStart
from offload.params.trace import Phase
from offload.planning.unit import Unit, enclosing
from offload.storage.disk import DiskStore
from offload.storage.handout import Outgoing, in_memory


@dataclass(eq=False)
class _Casts:
    """The casts of one model's weights by `torch.autocast` in one pass, held for one unit at a
    time. One thread at a time.

    torch keeps the cast of every weight until the outermost autocast ends: at the end of a forward
    pass that is a copy of the whole model, regardless of the budget. If nothing else keeps the
    casts, they are dropped when another unit begins to run; the next use casts again, to the same
    values. If autograd keeps them for backward anyway, they stay: dropping them would free no
    memory.
    """

    metrics: Metrics
    last: int | None = None  # unit that began last
    dropped: set[int] = field(default_factory=set)  # units in the graph with their casts

    def begin(self, unit: Unit, are_kept: bool) -> None:
        """Begin a unit under autocast: drop the casts that torch holds for other units. are_kept:
        autograd keeps casts anyway; none are dropped.
        """
        last, self.last = self.last, unit.number
        if last == unit.number or are_kept:
            return
        torch.clear_autocast_cache()
        if not torch.is_grad_enabled():
            return
        if unit.number in self.dropped:
            self.metrics.note(
                "autocast",
                f"{unit.name} runs more than once in a pass, with others in between: its weights "
                "are cast each time, so that their gradients are summed in the weights' own type; "
                "plain torch sums them in autocast's",
            )
        self.dropped.add(unit.number)


class _UnitRuns(threading.local):
    """The runs of the model and of units that have not ended in one thread."""

    def __init__(self) -> None:
        # For each the hooks that it entered; None: it entered none, earlier ones stay.
        self.open: list[Any] = []


class Engine:
    """The engine that runs one model within a pool and a store, and on a device if there is one.

    keeps_gradients: gradients count in the budget, and have gradient buffers where they need them,
    or go to the store if `spill` says so.
    shard_context: the ranks that share the model, and how; None: all of it is here.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        pool: Pool,
        store: DiskStore | None,
        metrics: Metrics,
        depth: int | None = 2,
        keeps_gradients: bool = True,
        start: PreparedModelStart | None = None,
        on: Device | None = None,
        spill: SpilledGradientParams | None = None,
        shard_context: ShardContext | None = None,
    ) -> None:
        self.device = torch.device("cpu") if on is None else on.transfer.device
        self.model = model
        self.units = units
        self.metrics = metrics
        self._names: dict[Tensor, str] = {m.param: m.name for u in units for m in u.members}
        self._unit_of: dict[Tensor, Unit] = {m.param: u for u in units for m in u.members}
        self._pool = pool
        self._runs = _UnitRuns()
        self._running = 0  # threads in which the model or a unit runs
        self._lock = threading.Lock()
        self._backward = False  # one runs, and has reached a unit
        self.activations: Activations | None = None  # None: autograd keeps them in memory
        self.recomputes = False  # backward runs layers again
        self._casts = _Casts(metrics)
        self._handles: list[Any] = []
        trained = {n: param for n, param in enumerate(self._names) if param.requires_grad}
        placed = trained if keeps_gradients else {}
        spill = spill or SpilledGradientParams()
        area = spill.open(pool, store, metrics)
        self.gradients: Gradients | DeviceGradients | ShardedGradients
        self._sharded: ShardedGradients | None = None
        self.residency = make_residency(units, pool, store, metrics, self, depth, on, shard_context)
        if shard_context is not None:
            left = self.residency.prefetch.left_in_backward
            self.gradients = self._sharded = ShardedGradients(
                units, placed, shard_context, pool, metrics, left, area
            )
            trained = placed
        elif on is None:
            trained = placed
            self.gradients = Gradients(placed, metrics, self._names, area)
        else:
            here = {n: param for n, param in placed.items() if param not in spill.params}
            places = gradient_memory(here, pool)
            self.gradients = DeviceGradients(
                trained, places, pool, on.transfer, metrics, self._names, area
            )
        try:
            if not isinstance(self.gradients, Gradients):
                self.gradients.take_in(list(self._names))
            self._take_in(start)
            expect = self.expect if isinstance(self.residency.tier, DeviceTier) else None
            self._handles = follow(model, units, self, expect)
            self._handles += watch_gradients(
                trained, self.gradients.arrived, reduces=shard_context is not None
            )
        except BaseException:
            if start is not None:
                start.forget(self.residency)
            self.close()
            raise

    def _take_in(self, start: PreparedModelStart | None) -> None:
        kept = enclosing(self.units)
        # Blocks that are kept lie together at one end of memory.
        first = sorted(self.units, key=lambda unit: unit.number not in kept)
        for unit in first:
            block = self.residency.blocks[unit.number]
            if start is None:
                self.residency.take_in(block)
            else:
                start.take_in(self.residency, block, unit.number in kept)
            if unit.number in kept:
                self.residency.tier.keep(block)
        if start is not None:
            start.finish(self.residency)
        self.residency.tier.watch_edits()

    # --- runs -------------------------------------------------------------------------------------

    @outside_inference_mode
    def enter(self) -> None:
        if not self._runs.open:
            if not _in_backward():
                self._backward = False  # the last one may have ended with an exception
                self.residency.tier.collect_edits()
                self._casts = _Casts(self.metrics)
            with self._lock:
                self._running += 1
        self._runs.open.append(self._begin_saving())

    def _begin_saving(self) -> Any:
        """Enter hooks for the tensors that autograd saves, if parameters or activations may be
        evicted. Return the context to exit, or None if none was entered.
        """
        if self.residency.tier.never_drops and self.activations is None:
            return None
        others, is_counted = _hooks_of_others()
        if not is_counted and (self._runs.open or (others is not None and _in_backward())):
            return None  # ours are in force, or other code's that were entered after ours
        pack = partial(self._pack_counted if is_counted else self._pack, others and others[0])
        unpack = partial(self._unpack_counted if is_counted else self._unpack, others and others[1])
        saving = saved_tensors_hooks(pack, unpack)
        saving.__enter__()
        return saving

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Enter the same hooks inside the `with`, in which a checkpoint runs a layer."""
        begun = self._begin_saving()
        try:
            yield
        finally:
            if begun is not None:
                begun.__exit__()

    @outside_inference_mode
    def leave(self) -> None:
        assert self._runs.open, "a run has ended that had not begun"
        saving = self._runs.open.pop()
        if saving is not None:
            saving.__exit__()
        if self._runs.open:
            return
        with self._lock:
            self._running -= 1
            is_last = self._running == 0
        if is_last and not self._backward:
            self.residency.prefetch.pause()
        if is_last:
            self.residency.tier.watch_edits(_in_backward())

    @outside_inference_mode
    def expect(self, numel: int) -> None:
        if not self._runs.open and isinstance(self.residency.tier, DeviceTier):
            self.residency.tier.expect(numel)

    @outside_inference_mode
    def before_forward(self, unit: Unit) -> None:
        phase = Phase.FORWARD if torch.is_grad_enabled() else Phase.EVALUATION
        if _in_backward():
            phase = Phase.BACKWARD  # a recomputation
        if torch.is_autocast_enabled(self.device.type):
            self._casts.begin(unit, are_kept=self._keeps_casts(phase))
        self.residency.use(unit, phase)
        if phase is Phase.BACKWARD and self._sharded is not None:
            self._sharded.visited(unit)
        try:
            self.enter()
        except BaseException:
            self.residency.done(unit)
            raise

    @outside_inference_mode
    def after_forward(self, unit: Unit, outputs: list[Tensor]) -> None:
        self.leave()
        self.residency.done(unit)
        HEAP.look()
        if torch.is_grad_enabled():
            made = [tensor for tensor in outputs if tensor.grad_fn is not None]
            if made:
                call_in_backward(made, lambda: self._visit(unit))

    @uninterrupted
    @outside_inference_mode
    def _visit(self, unit: Unit) -> None:
        self._begin_backward()
        self.residency.use(unit, Phase.BACKWARD, is_run=False)
        if self._sharded is not None:
            self._sharded.visited(unit)
        HEAP.look()

    def _begin_backward(self) -> None:
        if not self._backward and _in_backward():
            self._backward = True
            self.residency.tier.collect_edits()
            if self._sharded is not None:
                self._sharded.begin()
            at_end_of_backward(self._end_backward)

    @uninterrupted
    @outside_inference_mode
    def _end_backward(self) -> None:
        self._backward = False
        self.residency.prefetch.pause()
        self.gradients.end_backward()
        self.residency.tier.watch_edits()

    def _keeps_casts(self, phase: Phase) -> bool:
        """Return whether autograd keeps casts of weights on the device, as it keeps a layer's
        activations.
        """
        keeps = phase is Phase.FORWARD and not self.recomputes and self.activations is None
        return keeps and not _hooks_of_others()[1]

    # --- what autograd keeps ----------------------------------------------------------------------

    @uninterrupted
    def _pack(self, others: Callable[[Tensor], Any] | None, tensor: Tensor) -> Any:
        block = self.residency.tier.block_of(tensor)
        if block is not None:
            return Reference(block, tensor)
        if others:
            return others(tensor)
        saved = self.activations.save(tensor) if self.activations else None
        return saved or KeptTensor(tensor.detach(), tensor._version)

    @uninterrupted
    def _pack_counted(self, others: Callable[[Tensor], Any] | None, tensor: Tensor) -> Any:
        """Pack a tensor inside a checkpoint, which counts what is saved in the first run and in the
        second, and keeps what the second saves until backward has reached it. In place of a
        parameter the checkpoint gets a tensor of the same shape, since views of the parameters
        would keep the blocks of all units.
        """
        assert others is not None, "those of a checkpoint"
        block = self.residency.tier.block_of(tensor)
        if block is None:
            return others(tensor)
        return _Counted(Reference(block, tensor), others(_like(tensor)))

    @uninterrupted
    @outside_inference_mode
    def _unpack(self, others: Callable[[Any], Tensor] | None, kept: Any) -> Tensor:
        if isinstance(kept, KeptTensor):
            if kept.tensor._version != kept.version:
                raise kept.refusal()
            return kept.tensor
        if isinstance(kept, PackedTensor):
            return kept.checked()
        if not isinstance(kept, Reference):
            assert others is not None, "only the engine packs"
            return others(kept)
        self._begin_backward()
        if kept.generation != kept.block.generation:
            raise StateError(
                f"{kept.block.name}: its parameters have changed since the forward pass whose "
                "backward needs them; run the forward pass again"
            )
        return kept.view(self.residency.tier.memory_of(kept.block))

    def _unpack_counted(self, others: Callable[[Any], Tensor] | None, kept: Any) -> Tensor:
        """Unpack a tensor inside a checkpoint, which runs the whole segment again, unit by unit,
        before there is a view of a parameter. Backward of some operations unpacks a weight before
        their input, and the view would hold the room that the other units need.
        """
        if not isinstance(kept, _Counted):
            return self._unpack(others, kept)
        self._unpack(others, kept.holder)
        return self._unpack(others, kept.parameter)

    # --- parameters outside of their unit ---------------------------------------------------------

    def name_of(self, param: Tensor) -> str:
        return self._names[param]

    @uninterrupted
    @outside_inference_mode
    def bring(self, params: Sequence[Tensor]) -> bool:
        if not self._runs.open and not _in_backward():
            return False
        units = [self._unit_of[param] for param in params]
        with self.residency.using(units):
            return True

    @contextmanager
    def resident(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep the parameters and gradients of these units exposed inside the `with`, all at once,
        for user code.
        """
        params = [member.param for unit in units for member in unit.members]
        exposed, grads = self.residency.exposed(units), self.gradients.exposed(params)
        with entered_outside(exposed), entered_outside(grads):
            yield

    # --- end --------------------------------------------------------------------------------------

    @uninterrupted
    @outside_inference_mode
    def close(self, make: Callable[[Tensor], Outgoing] = in_memory) -> None:
        """Leave the model with all its parameters in memory that `make` returns. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for block in self.residency.in_order_of_return():
            self.residency.return_to_model(block, make)
        self.gradients.return_to_model(make)


@dataclass(frozen=True)
class _Counted:
    """A parameter that is saved inside a checkpoint. holder: what the checkpoint packed for it."""

    parameter: Reference
    holder: Any


def _like(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape, dtype and device, in the memory of one element."""
    return tensor.detach().new_empty(()).expand(tensor.shape)


def _hooks_of_others() -> tuple[
    tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None, bool
]:
    """Return the innermost hooks for saved tensors in force here: other code's, that offload
    activations or recompute them, or ours; None: there are none. And whether they are those of
    torch's checkpointing, which keeps no tensor, and counts them.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    is_counted = getattr(hooks and hooks[0], "__module__", None) == "torch.utils.checkpoint"
    return hooks, is_counted


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
