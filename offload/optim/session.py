"""The session of a wrapped optimizer: plan, memory, store, and the updater on top of them.

When the optimizer's parameters change, everything is opened anew, and the state moves to the new
plan. Until it has arrived it is kept aside, outside of budget and plan: if there is no room to
open, it is still there, and the next call tries again.
"""

from __future__ import annotations

import weakref
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload import kernels
from offload.core.budget import held_by, holder_now
from offload.core.config import Config, format_size
from offload.core.errors import CorruptionError, OffloadError, StateError
from offload.core.heap import HEAP
from offload.core.locks import steadfast
from offload.core.log import LOG
from offload.core.tensors import outside_inference_mode
from offload.distributed.placing import is_sharded, local_of
from offload.optim.consistency import LOAD, MOVE, Consistency, ExclusiveAccess, clear_frames
from offload.optim.coordinator import StepCoordinator
from offload.optim.export import (
    KeptOptimizerState,
    ParamOptimizerState,
    Room,
    States,
    exact_room,
    export,
    plain_room,
    plain_state,
    tell_what_is_lost,
)
from offload.optim.gradient_source import Gradient
from offload.optim.recipe import NativeRecipe, Record
from offload.optim.records import (
    OptimizerDraft,
    check_grad_buffers,
    check_param,
    each_param,
    facts_of,
    make_records,
)
from offload.optim.source import fitting
from offload.optim.step_stats import StepStats
from offload.optim.updater import Updater
from offload.planning.layout import MASTER
from offload.planning.state_plan import Plan
from offload.planning.training import plan_training

_KEPT = (
    "the state is kept aside and nothing is lost: make room and go on, or close() for the plain "
    "optimizer with its state"
)


class Session:
    """The session of one optimizer. `reopen` makes a new plan when the parameters have changed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        draft: OptimizerDraft,
        config: Config,
        coordinator: StepCoordinator,
    ) -> None:
        # A weak reference: with a strong one each would hold the other, and its memory, until
        # garbage collection.
        self._optimizer = weakref.ref(optimizer)
        self.config = config
        self.coordinator = coordinator
        self.metrics = coordinator.metrics
        self.step_stats = StepStats(self.metrics, draft.plan.speeds)
        self.supported_scaling: bool | None = None  # what the plain optimizer says of itself
        self.incoming: Mapping[int, Mapping[str, Any]] | None = None  # during load_state_dict
        self.grad_norm: float | None = None
        self.access = ExclusiveAccess()
        self.consistency = Consistency(may_move=coordinator.owner is not None)
        # State that is in no chunk, after a failed opening.
        self._aside: KeptOptimizerState | None = None
        self._recipe, self._budgets, self.chosen = draft.recipe, draft.budgets, draft.chosen
        self.updater: Updater = None  # type: ignore[assignment]  # None: nothing is open
        self._holder = holder_now()  # also of memory that a later plan takes
        self._open(draft)

    @property
    def is_alive(self) -> bool:
        """Whether the optimizer still exists."""
        return self._optimizer() is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "the caller holds it"
        return optimizer

    def _draw_up(self, with_state: Container[Tensor]) -> OptimizerDraft:
        """Make records and plan for the optimizer as it is now. Changes nothing."""
        records = make_records(self.optimizer, self._recipe, with_state)
        buckets, share = self.coordinator.share_out(records)
        budgets = self.coordinator.allowed(self._budgets)
        plan = plan_training(
            facts_of(records, self.config, share, self.step_stats.speeds), budgets
        ).state
        check_grad_buffers(self.config, plan)
        self.coordinator.check(records, plan)
        return OptimizerDraft(self._recipe, records, plan, budgets, self.chosen, buckets)

    def _open(self, draft: OptimizerDraft) -> None:
        self.plan = draft.plan
        try:
            with held_by(self._holder):
                resources = self.coordinator.open(draft)
        except BaseException as error:
            self.close()
            clear_frames(error)
            raise
        self.updater = Updater(
            draft.records,
            self._recipe,
            resources,
            self.metrics,
            self.consistency,
            self.config.max_grad_norm,
        )

    # --- the step ---------------------------------------------------------------------------------

    @outside_inference_mode
    def step(self) -> None:
        with self.step_stats.step():
            optimizer = self.optimizer
            if self.coordinator.ranks is not None:
                self._leave_ranks_if_sharded()
            pending = self.coordinator.begin_step(
                optimizer, self._look, lambda grads: self.updater.begin(grads)
            )
            self.updater.carry_out(pending)
            self.grad_norm = self.updater.grad_norm
        if self.chosen.trial is not None:
            last, threads = self.step_stats.steps.last, kernels.num_threads()
            self.chosen.trial.note_step(last, self.metrics, self.coordinator.owner, threads)
        HEAP.look()

    def _leave_ranks_if_sharded(self) -> None:
        """Stop sharing the state over ranks if whole parameters have been replaced by DTensors
        since, as accelerate does it: FSDP2 shards them now.
        """
        if not any(is_sharded(p) for p, _, _ in each_param(self.optimizer)):
            return
        if self.updater is None or any(record.has_state for record in self.updater.records):
            raise StateError(
                "optimizer: its parameters have become DTensors, and it has state for the whole "
                "ones; shard the model first (fully_shard), then wrap its optimizer"
            )
        self.close()
        self.coordinator = self.coordinator.alone()
        self._open_if_closed()

    def _look(self) -> dict[int, Gradient]:
        """Check that nothing stands in the way of a step, and return its gradients."""
        self._look_again()
        if self.config.self_check and isinstance(self._recipe, NativeRecipe):
            self._recipe.is_checked = self.steps_done < self.config.self_check
        return self.updater.gradients()

    @property
    def steps_done(self) -> int:
        return self.metrics.snapshot().counts.get("steps", 0)

    def _look_again(self) -> None:
        """Make a new plan if the user's code has replaced, unfrozen, moved or cast a parameter."""
        self.consistency.check()
        if len(self.optimizer.state):
            raise StateError(
                "optimizer.state: something was put there, but the state of a wrapped optimizer is "
                "elsewhere; use load_state_dict, or close() first"
            )
        if self.updater is None:
            self._open_if_closed()
        records = self.updater.records
        as_planned = [record.check_unchanged() for record in records]
        groups = self.optimizer.param_groups
        now = [(param, group) for group in groups for param in group["params"]]
        same = len(now) == len(records) and all(
            param is record.param for (param, _), record in zip(now, records, strict=True)
        )
        thawed = any(r.is_frozen and r.param.grad is not None for r in records)
        if not (same and all(as_planned)) or thawed:
            self.reopen()
        for record, (_, group) in zip(self.updater.records, now, strict=True):
            record.group = group  # may be another dict by now

    # --- state ------------------------------------------------------------------------------------

    def export(self, room: Room = exact_room) -> States:
        """Export the state by parameter: in fp32, with master weights, or as `room` has it. Nothing
        has changed when it raises. Where ranks share the state all of them call it, and each gets
        all of it.
        """
        coordinator = self.coordinator
        try:
            coordinator.meet(self._numbers_held)
            self.consistency.check()
            origin = self.updater or self._aside
            if origin is None:
                return {}
            if self.updater is not None:
                self._check_unchanged()
            gatherer = coordinator.gatherer([held.record for held in origin.held()])
            is_on_disk = self._aside is not None and self._aside.is_on_disk
            directories = coordinator.directories if coordinator.store or is_on_disk else ()
            return export(origin, room, gatherer, directories, self.metrics)
        except OffloadError as error:
            clear_frames(error)  # its frames hold the session's memory
            raise

    def _check_unchanged(self) -> None:
        for record in self.updater.records:
            record.check_unchanged()

    def _numbers_held(self) -> list[int]:
        """Open the state if it is closed, since the ranks gather it from the chunks. Return the
        numbers of the parameters that have state.
        """
        self.consistency.check()
        self._open_if_closed()  # the state kept aside is this rank's part only
        self._check_unchanged()
        return [held.record.number for held in self.updater.held()]

    def export_plain(self) -> States:
        """Export the state as the plain optimizer keeps it. Empty where the state is inconsistent,
        or where the other ranks are out of reach.
        """
        if self.consistency.is_lost:
            self.consistency.tell("close(): the optimizer has no state any more; parameters")
            return {}
        if self.coordinator.has_lost_ranks:
            LOG.warning(
                "close(): the other ranks are out of reach, and so is their part of the state"
            )
            return {}
        states = self.export(plain_room)
        records = {record.param: record for record in self._records()}
        self.coordinator.return_gradients()
        states = {p: plain_state(records[p], s) for p, s in states.items() if p in records}
        tell_what_is_lost({param: records[param] for param in states})
        return {param: state for param, state in states.items() if state}

    @property
    def has_state(self) -> bool:
        """Whether any parameter has state."""
        if self.updater is None:
            return self._aside is not None and bool(self._aside.held())
        return any(record.has_state for record in self.updater.records)

    def _records(self) -> Sequence[Record]:
        if self.updater is not None:
            return self.updater.records
        with_state = self._aside.states if self._aside else ()
        records = make_records(self.optimizer, self._recipe, with_state)
        self.coordinator.share_out(records)
        return records

    def held(self) -> list[ParamOptimizerState]:
        """Return the state to save, by the parameters of today; raise where it is inconsistent."""
        self._look_again()
        return self.updater.held()

    def fields_of(self, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the fields that a parameter's state must have, and those that it may have."""
        self._open_if_closed()
        record = self.updater.records[number]
        return record.fields, record.fields + ((MASTER,) if record.is_half else ())

    def check_incoming(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` would refuse once the parameters are loaded. Changes
        nothing.
        """
        self._open_if_closed()
        states = fitting(state_dict, self.updater.records, self._recipe)
        params = {self.updater.records[number].param for number in states}
        if any(self.updater.records[number].is_frozen for number in states):
            self._draw_up(params)

    def checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Return the states of a `state_dict` by the numbers of this optimizer's parameters; raise
        where they do not fit.
        """
        self.consistency.check_mendable()
        self._open_if_closed()
        return fitting(state_dict, self.updater.records, self._recipe)

    def take_in(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the state by that of a `state_dict`. The optimizer's groups are that
        `state_dict`'s already.
        """
        for record, (_, group, _) in zip(
            self.updater.records, each_param(self.optimizer), strict=True
        ):
            record.group = group
        records = self.updater.records
        thawed = any(record.is_frozen and record.number in states for record in records)
        if thawed or self.consistency.is_lost:  # an error may have lost some buffers
            fresh = self._draw_up({records[number].param for number in states})
            self.close()
            try:
                self._open(fresh)
            except BaseException as error:
                self.consistency.lose(LOAD, error)
                raise
        self.updater.take_in(states)
        self.consistency.mend()

    def reopen(self) -> None:
        """Make a new plan for the optimizer as it is now, and move the state to it. When it fails
        the old plan stands, or the state is kept aside.
        """
        self.consistency.check()
        if self.updater is None:
            self._open_if_closed()
            return
        having = {record.param for record in self.updater.records if record.has_state}
        # Each rank of a prepared model has a plan of its own, and one may have no room for it.
        fresh = self.coordinator.redraw(lambda: self._draw_up(having))
        # A refusal up to here changes nothing.
        self._aside = self._keep_aside(fresh.plan)
        self.close()
        self._open_if_closed(fresh)

    def _keep_aside(self, plan: Plan) -> KeptOptimizerState:
        """Copy the state, for the time between the present plan and `plan`. Where the copy does not
        fit beside them it is put in a store, or the excess is reported as a fall-back.
        """
        self._check_unchanged()
        coordinator = self.coordinator
        allowed_bytes = coordinator.allowed(self._budgets).host_bytes
        taken_bytes = self.plan.state_bytes + max(self.plan.arena_bytes, plan.arena_bytes)
        fits = (
            allowed_bytes is None or taken_bytes <= allowed_bytes or coordinator.ranks is not None
        )
        if coordinator.store is not None or (coordinator.directories and not fits):
            return KeptOptimizerState.on_disk(
                self.updater, self.plan.chunks, coordinator.directories, self.metrics
            )
        if not fits:
            self.metrics.fall_back(
                "memory while the plan is made anew",
                f"the state is there twice then, {format_size(taken_bytes - (allowed_bytes or 0))} "
                "above what host_memory allows; with nvme=... the copy would be on disk",
            )
        return KeptOptimizerState.in_memory(self.updater)

    def _open_if_closed(self, fresh: OptimizerDraft | None = None) -> None:
        """Open with the state that was kept aside, if an opening has failed."""
        if self.updater is not None:
            return
        states, was_lost = self._aside.states if self._aside else {}, self.consistency.is_lost
        try:
            self._open(fresh or self._draw_up(states))
            numbers = {record.param: record.number for record in self.updater.records}
            self.updater.take_in({numbers[p]: s for p, s in states.items() if p in numbers})
        except BaseException as error:
            self.close()
            clear_frames(error)
            if isinstance(error, CorruptionError):  # only the state kept aside is read here
                self._drop_aside()
                self.consistency.lose(MOVE, error)
            elif not was_lost:
                self.consistency.mend()  # the inconsistent state is closed; the one aside is whole
                if isinstance(error, OffloadError):
                    error.args = (f"{error}; {_KEPT}",)
            raise
        self._drop_aside()

    def _drop_aside(self) -> None:
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.close()

    def check_addable(self, group: Mapping[str, Any]) -> None:
        params = group["params"]
        for param in [params] if isinstance(params, Tensor) else params:
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, Tensor):
                check_param("a parameter of the new group", local_of(tensor))

    def end(self) -> None:
        """Close for good."""
        self.close()
        self._drop_aside()
        if self.coordinator.ranks is not None:
            self.coordinator.ranks.close()

    @steadfast  # no other call could release the rest once it has begun
    def close(self) -> None:
        """Release memory and disk, but for the state that is kept aside. Idempotent."""
        if self.updater is not None:
            self.updater.settle()
        updater, self.updater = self.updater, None  # type: ignore[assignment]
        self.consistency.let_go()
        del updater  # it holds the memory
        self.coordinator.close()
