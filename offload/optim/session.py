"""The session of a wrapped optimizer: plan, memory, store, and the updater on top of them.

When the optimizer's parameters change, everything is opened anew, and the state moves to the new
plan. Until it has arrived it is kept aside, outside of budget and plan: if there is no room to
open, it is still there, and the next call tries again.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.core.budget import HOST, held_by, holder_now
from offload.core.config import Config, format_size
from offload.core.errors import ConfigError, CorruptionError, OffloadError, StateError
from offload.core.heap import HEAP
from offload.core.locks import steadfast
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.distributed import (
    DeviceLink,
    Ranks,
    checksum_of,
    is_sharded,
    like,
    local_of,
    placing_of,
)
from offload.optim.agreement import settings_sum
from offload.optim.aside import KeptOptimizerState
from offload.optim.consistency import LOAD, MOVE, Consistency, clear_frames
from offload.optim.exclusive_access import ExclusiveAccess
from offload.optim.export import OptimizerStateGatherer, ParamOptimizerState, export
from offload.optim.flat import is_same_order
from offload.optim.gradient_source import Gradient
from offload.optim.incoming import check_groups, check_states
from offload.optim.norm import GlobalNorm
from offload.optim.pending_step import PendingStep
from offload.optim.plain import plain_room, plain_state, tell_what_is_lost
from offload.optim.recipe import NativeRecipe, Record
from offload.optim.records import (
    OptimizerDraft,
    check_grad_buffers,
    check_param,
    each_param,
    facts_of,
    make_records,
)
from offload.optim.resources import OptimizerOwnResources, ParamOwner, Resources, Watch, WatchPasses
from offload.optim.saver import Saver, Sink
from offload.optim.self_check import checked
from offload.optim.sharded_coordinator import ShardedCoordinator
from offload.optim.step_stats import StepStats
from offload.optim.updater import Updater
from offload.planning.layout import MASTER
from offload.planning.planner import Budgets
from offload.planning.state_plan import Plan
from offload.planning.training import plan_training
from offload.storage.disk import DiskStore
from offload.storage.handout import Handout
from offload.storage.outgoing import Outgoing

States = dict[Tensor, dict[str, Any]]  # by parameter, as torch keeps it
# Makes the target for a field of the state; for a DTensor, of this rank's part. None: the field is
# not exported.
Room = Callable[[Handout, Record, str], Outgoing | None]
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
        watch: Watch,
        host: ParamOwner | None = None,
        ranks: Ranks | None = None,
        watch_passes: WatchPasses | None = None,
        link: DeviceLink | None = None,
    ) -> None:
        # A weak reference: with a strong one each would hold the other, and its memory, until
        # garbage collection.
        self._optimizer = weakref.ref(optimizer)
        self.config = config
        self.metrics = Metrics(strict=config.strict) if host is None else host.metrics
        self.step_stats = StepStats(self.metrics, draft.plan.speeds)
        self.grad_norm: float | None = None
        self.supported_scaling: bool | None = None  # what the plain optimizer says of itself
        self.incoming: Mapping[int, Mapping[str, Any]] | None = None  # during load_state_dict
        self.access = ExclusiveAccess()
        self.consistency = Consistency(may_move=host is not None)
        self._aside: KeptOptimizerState | None = (
            None  # state that is in no chunk, after a failed opening
        )
        self._recipe = draft.recipe
        self._watch_gradients = watch
        self.host = host
        self._resources: Resources | None = None
        self.updater: Updater = None  # type: ignore[assignment]  # None: nothing is open
        self._directories: list[Path] = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
        self._budgets = draft.budgets
        self.chosen = draft.chosen
        if host is None:  # else the prepared model has done so
            self.chosen.begin(self.metrics)
        # For the ranks that share the state; None: all of it is here.
        self.coordinator = (
            ShardedCoordinator(ranks, config, self.metrics, watch_passes, link) if ranks else None
        )
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
        records = self._make_records(with_state)
        buckets, share = self.coordinator.share_out(records) if self.coordinator else (None, None)
        unit_of = self.host.unit_of if self.host is not None else None
        facts = facts_of(records, self.config, share, self.step_stats.speeds, unit_of)
        budgets = self._allowed()
        plan = plan_training(facts, budgets).state
        check_grad_buffers(self.config, plan)
        if self.host is not None:
            self.host.check(records, plan)
        return OptimizerDraft(self._recipe, records, plan, budgets, self.chosen, buckets)

    def _make_records(self, with_state: Container[Tensor]) -> list[Record]:
        records = make_records(self.optimizer, self._recipe, with_state)
        for record in records:
            record.original_device = (
                self.host.original_device_of(record.param) if self.host else None
            )
            record.own = self.host.own_of(record.param) if self.host else None
        return records

    def _allowed(self) -> Budgets:
        """Return the budgets for a new plan: the granted host bytes, less what other holders have
        taken of the limit since.
        """
        granted, limit = self._budgets.host_bytes, HOST.limit_bytes
        if self.host is not None:
            return self._budgets  # a share of the prepared model's pool
        held = HOST.used_bytes - sum(pool.capacity_bytes for pool in self.pools)
        if granted is not None and limit is not None:
            granted = min(granted, max(0, limit - held))
        return replace(self._budgets, host_bytes=granted, held_bytes=held)

    @property
    def pools(self) -> list[Pool]:
        """The pools of optimizer state, and of copies to and from devices."""
        pools = (self._resources.pool, self._resources.copies) if self._resources else ()
        return [pool for pool in pools if pool is not None]

    @property
    def store(self) -> DiskStore | None:
        return self._resources.store if self._resources else None

    def _open(self, draft: OptimizerDraft) -> None:
        records, plan = draft.records, draft.plan
        self.plan = plan
        try:
            with held_by(self._holder):
                self._resources = resources = self._make_resources(records, plan)
            sharded_update = None
            if self.coordinator is not None and draft.buckets is not None:
                assert isinstance(resources, OptimizerOwnResources), (
                    "a prepared model has ranks of its own"
                )
                sharded_update = self.coordinator.open(records, plan, draft.buckets, resources)
        except BaseException as error:
            self.close()
            clear_frames(error)
            raise
        self.updater = Updater(
            records, self._recipe, resources, self.metrics, self.consistency, sharded_update
        )

    def _make_resources(self, records: Sequence[Record], plan: Plan) -> Resources:
        if self.host is not None:
            return self.host.make_resources(records, plan)
        return OptimizerOwnResources(
            records,
            plan,
            self._directories,
            self.metrics,
            bool(self.config.release_grads),
            self._watch_gradients,
            self.chosen.store_options,
        )

    def step(self) -> None:
        if self.host is not None:
            self.host.check_step(self.optimizer)
        with self.step_stats.step():
            self._leave_ranks_if_sharded()
            pending = self._begin_step()
            self.updater.carry_out(pending, self.config.max_grad_norm)
            self.grad_norm = self.updater.grad_norm
        self.chosen.note_step(self.step_stats.steps.last, self.metrics, self.host)
        HEAP.look()

    def _leave_ranks_if_sharded(self) -> None:
        """Stop sharing the state over ranks if whole parameters have been replaced by DTensors
        since, as accelerate does it: FSDP2 shards them now.
        """
        if self.coordinator is None or not any(
            is_sharded(p) for p, _, _ in each_param(self.optimizer)
        ):
            return
        if self.updater is None or any(record.has_state for record in self.updater.records):
            raise StateError(
                "optimizer: its parameters have become DTensors, and it has state for the whole "
                "ones; shard the model first (fully_shard), then wrap its optimizer"
            )
        self.close()
        self.coordinator.ranks.close()
        self.coordinator = None
        self._open_if_closed()

    def _begin_step(self) -> PendingStep:
        if self.coordinator is not None:
            return self.coordinator.begin_step(self._look, self._begin, self._steps_done)
        if self.host is not None:
            pending = self._begin(self.host.by_consensus(self._look, self._facts))
            pending.complete(self.host.sum_over_ranks)
            return pending
        norm = GlobalNorm(self.optimizer, self.config.max_grad_norm)
        with norm.agreed():
            pending = self._begin(self._look())
            norm.complete(pending)
        return pending

    def _begin(self, grads: Mapping[int, Gradient]) -> PendingStep:
        return self.updater.begin(grads, self.config.max_grad_norm is not None)

    @property
    def _steps_done(self) -> int:
        return self.metrics.snapshot().counts.get("steps", 0)

    def _look(self) -> dict[int, Gradient]:
        """Check that nothing stands in the way of a step, and return its gradients."""
        self._look_again()
        self._watch(self._steps_done)
        return self.updater.gradients()

    def _facts(self, grads: Mapping[int, Gradient]) -> dict[str, Any]:
        """Return what must be the same on all ranks."""
        return {
            "hyper-parameters": settings_sum(self.updater.records),
            "which parameters have gradients": checksum_of(list(grads)),
        }

    def _look_again(self) -> None:
        """Make a new plan if the user's code has replaced, unfrozen, moved or cast a parameter."""
        self.consistency.check()
        if len(self.optimizer.state):
            raise StateError(
                "optimizer.state: something was put there, but the state of a wrapped optimizer is "
                "elsewhere; use load_state_dict, or close() first"
            )
        self._open_if_closed()
        self._check_shapes()
        now, records = each_param(self.optimizer), self.updater.records
        same = len(now) == len(records) and all(
            param is record.param for (param, _, _), record in zip(now, records, strict=True)
        )
        if not same or any(
            r.has_moved or (r.is_frozen and r.param.grad is not None) for r in records
        ):
            self.reopen()
        for record, (_, group, _) in zip(self.updater.records, now, strict=True):
            record.group = group  # may be another dict by now

    def _check_shapes(self) -> None:
        for record in self.updater.records:
            local, placing = record.local, placing_of(record.param)
            if local.shape != record.shape:
                raise ConfigError(
                    f"{record.name}: expected the shape {tuple(record.shape)} that it had when it "
                    f"was wrapped, got {tuple(local.shape)}; its state does not fit any more"
                )
            if placing != record.placing:
                raise ConfigError(
                    f"{record.name}: expected {record.placing or 'an ordinary tensor'} as when it "
                    f"was wrapped, got {placing or 'an ordinary tensor'}; its state does not fit "
                    "any more"
                )
            same = is_same_order(record.shape, local.stride(), record.stride)
            if record.own is not None and not same:
                raise ConfigError(
                    f"{record.name}: expected the order of memory that it had when it was wrapped "
                    f"(strides {record.stride}), got strides {local.stride()}; each rank has a "
                    "part of its state by that order: change it back. For another order, close() "
                    "the optimizer on all ranks before, and wrap or prepare again after"
                )

    def _watch(self, steps_done: int) -> None:
        """Check the first steps against plain torch, if `self_check` asks for it."""
        if isinstance(self._recipe, NativeRecipe) and self.config.self_check:
            wanted = steps_done < self.config.self_check
            self._recipe.watch = checked if wanted else lambda *_: nullcontext()

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero or drop the gradients that are in host memory only."""
        if self._resources is not None and self._resources.grad_buffers is not None:
            self._resources.grad_buffers.zero_grad(set_to_none)
        if self.coordinator is not None:
            self.coordinator.zero_grad(set_to_none)

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unreduced over ranks while the block runs."""
        whose = self.coordinator if self.host is None else self.host
        return whose.no_sync() if whose is not None else nullcontext()

    @property
    def reduces(self) -> bool:
        """Whether gradients are averaged over ranks here."""
        return self.coordinator is not None and bool(self.config.release_grads)

    @property
    def ranks(self) -> Ranks | None:
        """The ranks that share the state; None: they do not."""
        return self.coordinator.ranks if self.coordinator is not None else None

    # --- state ------------------------------------------------------------------------------------

    def export(self) -> States:
        """Export the state by parameter, in fp32, with master weights. Nothing has changed when it
        raises. Where ranks share the state all of them call it, and each gets all of it.
        """
        return self._hand_out(_exact_room)

    def _hand_out(self, room: Room) -> States:
        try:
            return self._handed_out(room)
        except OffloadError as error:
            clear_frames(error)  # its frames hold the session's memory
            raise

    def _handed_out(self, room: Room) -> States:
        if self.coordinator is not None:
            self.coordinator.meet(self._numbers_held)
        self.consistency.check()
        origin = self.updater or self._aside
        if origin is None:
            return {}
        if self.updater is not None:
            self._check_shapes()
        records = {held.record.number: held.record for held in origin.held()}
        gatherer = self._gatherer(list(records.values()))
        is_on_disk = self.store is not None or (self._aside is not None and self._aside.is_on_disk)
        directories = self._directories if is_on_disk else ()
        with Handout(directories, self.metrics, defers=gatherer is not None) as handout:
            states = export(origin, lambda *a: room(handout, *a), gatherer)
            handout.finish()
            return {records[n].param: _placed(records[n], state) for n, state in states.items()}

    def _gatherer(self, records: Sequence[Record]) -> OptimizerStateGatherer | None:
        """Make a gatherer for the parts of these records' state that are on other ranks."""
        if self.host is not None:
            return self.host.gatherer(records)
        sharded_update = self.updater.sharded_update if self.updater is not None else None
        return sharded_update.gatherer() if sharded_update is not None else None

    def _numbers_held(self) -> list[int]:
        """Open the state if it is closed, since the ranks gather it from the chunks. Return the
        numbers of the parameters that have state.
        """
        self.consistency.check()
        self._open_if_closed()  # the state kept aside is this rank's part only
        self._check_shapes()
        return [held.record.number for held in self.updater.held()]

    def export_plain(self) -> States:
        """Export the state as the plain optimizer keeps it. Empty where the state is inconsistent,
        or where the other ranks are out of reach.
        """
        if self.consistency.is_lost:
            self.consistency.tell("close(): the optimizer has no state any more; parameters")
            return {}
        is_alone = self.host is not None and self.host.has_lost_ranks
        if is_alone or (self.ranks is not None and self.ranks.is_broken):
            LOG.warning(
                "close(): the other ranks are out of reach, and so is their part of the state"
            )
            return {}
        states = self._hand_out(plain_room)
        records = {record.param: record for record in self._records()}
        if self.coordinator is not None:
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

    def note_handed_out(self) -> None:
        """Note that the whole state was handed to the caller, so that a later error can name it."""
        steps = self.metrics.snapshot().counts.get("steps", 0)
        self.consistency.last_checkpoint = f"state_dict() after {steps} steps"

    def _records(self) -> Sequence[Record]:
        if self.updater is not None:
            return self.updater.records
        return self._make_records(self._aside.states if self._aside else ())

    def held(self) -> list[ParamOptimizerState]:
        """Return the state to save, by the parameters of today; raise where it is inconsistent."""
        self._look_again()
        return self.updater.held()

    def fields_of(self, number: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the fields that a parameter's state must have, and those that it may have."""
        self._open_if_closed()
        record = self.updater.records[number]
        return record.fields, record.fields + ((MASTER,) if record.is_half else ())

    def begin_saving(self, sink: Sink) -> Saver:
        """Begin a snapshot of the state held now, which `sink` receives."""
        return self.updater.begin_saving(sink)

    def check_incoming(self, state_dict: Mapping[str, Any]) -> None:
        """Refuse what `load_state_dict` would refuse once the parameters are loaded. Changes
        nothing.
        """
        self._open_if_closed()
        states = self._fitting(state_dict)
        params = {self.updater.records[number].param for number in states}
        if any(self.updater.records[number].is_frozen for number in states):
            self._draw_up(params)

    def checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """Return the states of a `state_dict` by the numbers of this optimizer's parameters; raise
        where they do not fit.
        """
        self.consistency.check_mendable()
        self._open_if_closed()
        return self._fitting(state_dict)

    def _fitting(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        groups = state_dict["param_groups"]
        saved = [number for group in groups for number in group["params"]]
        numbers = {number: index for index, number in enumerate(saved)}
        states = {
            numbers[key]: state for key, state in state_dict["state"].items() if key in numbers
        }
        if len(saved) == len(self.updater.records):  # otherwise torch reports the mismatch
            check_groups(self.updater.records, self._recipe, groups)
            check_states(self.updater.records, self._recipe, states)
        return states

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
        fresh = self._draw_up_together(having)
        # A refusal up to here changes nothing.
        self._aside = self._keep_aside(fresh.plan)
        self.close()
        self._open_if_closed(fresh)

    def _draw_up_together(self, having: Container[Tensor]) -> OptimizerDraft:
        """Draw up with the consensus of the ranks that share a model: each has a plan of its own,
        and one of them may have no room for it.
        """
        if self.host is None:
            return self._draw_up(having)
        return self.host.by_consensus(lambda: self._draw_up(having), lambda drawn: {})

    def _keep_aside(self, plan: Plan) -> KeptOptimizerState:
        """Copy the state, for the time between the present plan and `plan`. Where the copy does not
        fit beside them it is put in a store, or the excess is reported as a fall-back.
        """
        self._check_shapes()
        allowed_bytes = self._allowed().host_bytes
        taken_bytes = self.plan.state_bytes + max(self.plan.arena_bytes, plan.arena_bytes)
        fits = allowed_bytes is None or taken_bytes <= allowed_bytes or self.coordinator is not None
        if self.store is not None or (self._directories and not fits):
            chunks = self.plan.chunks
            return KeptOptimizerState.on_disk(self.updater, chunks, self._directories, self.metrics)
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

    def add(self, group: Mapping[str, Any], add: Callable[[], None]) -> None:
        """Call `add`, which makes a new plan with another group; among ranks, all do or none."""
        if self.coordinator is None:
            add()
        else:
            self.coordinator.add(group, add, lambda: self.updater.records)

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

    @steadfast  # no other call could release the rest once it has begun
    def close(self) -> None:
        """Release memory and disk, but for the state that is kept aside. Idempotent."""
        if self.updater is not None:
            self.updater.settle()
        if self.coordinator is not None:
            self.coordinator.leave()
        updater, self.updater = self.updater, None  # type: ignore[assignment]
        self.consistency.let_go()
        del updater  # it holds the memory
        resources, self._resources = self._resources, None
        if resources is not None:
            resources.close()


def _exact_room(handout: Handout, record: Record, field: str) -> Outgoing:
    return handout.room(record.shape, record.stride, torch.float32)


def _placed(record: Record, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with tensors; a DTensor's part as a DTensor."""
    return {
        name: like(record.param, value.tensor) if isinstance(value, Outgoing) else value
        for name, value in state.items()
    }
