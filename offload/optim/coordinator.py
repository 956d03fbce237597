"""The coordinator of an optimizer's steps and state, the resources that it opens for a plan, and
the pending step that it brings about.

An optimizer may be alone, share its state with other ranks (`sharded_coordinator.py`), or belong to
a prepared model (`params/prepared_coordinator.py`). A coordinator survives plans: it opens and
closes what one plan needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from math import fsum
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from offload.core.budget import HOST
from offload.core.config import Config
from offload.core.errors import OffloadError, StateError
from offload.core.heap import HEAP, resident_bytes, used_by
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.device.device import DeviceTransfer
from offload.distributed.placing import is_sharded, placing_of, sum_over_meshes
from offload.distributed.ranks import Ranks
from offload.optim.buckets import Buckets
from offload.optim.export import OptimizerStateGatherer
from offload.optim.grad_buffers import GradBuffers
from offload.optim.gradient_source import Gradient
from offload.optim.recipe import Record
from offload.optim.records import OptimizerDraft
from offload.optim.sharded_update import ShardedUpdate
from offload.optim.staging import DeviceStaging, StagingProvider
from offload.optim.tiers import Tiers, leased
from offload.planning.planner import Budgets
from offload.planning.state_plan import Plan, RankShare, grad_buffer_bytes, verdicts_bytes
from offload.storage.disk import DiskStore

T = TypeVar("T")


@dataclass
class PendingStep:
    """A step that can no longer be refused and has not changed anything yet, except that the
    records' step counts include it.

    squares: sums of squares over parts of this rank's gradients, by parameter number, for their
    norm; None if no norm is needed. sum_squares: their total; with the other ranks' after
    `complete`.
    """

    grads: dict[int, Gradient]
    fresh: set[int]  # numbers of the parameters that have no state yet
    stepping: list[Record]
    before: list[float]  # the step counts of `stepping` before this step
    squares: Mapping[int, Sequence[float]] | None
    sum_squares: float | None
    scale: float = 1.0  # what gradients are multiplied by, to clip their norm

    def undo(self) -> None:
        for record, step in zip(self.stepping, self.before, strict=True):
            record.step = step

    def complete(self, sum_over_ranks: Callable[[float], float]) -> None:
        """Add the squares of other ranks. If that fails, undo the step and raise."""
        if self.sum_squares is not None:
            try:
                self.sum_squares = sum_over_ranks(self.sum_squares)
            except BaseException:
                self.undo()
                raise


# Registers a function to be called with the number of each parameter whose gradient has arrived;
# returns the hook handles, whose `remove` ends it.
Watch = Callable[[Mapping[int, Tensor], Callable[[int], None]], list[Any]]


class Resources:
    """The resources of one optimizer: opened for records and a plan, and closed once.

    copies: the pool of copies to and from devices, where there are any. sharded: the exchange with
    the ranks that share the state. grads_are_own: gradients hold this rank's elements only, where
    ranks share it.
    """

    pool: Pool | None = None  # of optimizer state
    copies: Pool | None = None
    store: DiskStore | None = None
    grad_buffers: GradBuffers | None = None
    sharded: ShardedUpdate | None = None
    grads_are_own = False
    tiers: Tiers
    staging_buffers: StagingProvider

    def close(self) -> None:
        """Release everything. Idempotent."""


class OptimizerOwnResources(Resources):
    """A pool and a store that belong to the optimizer alone. Nothing stays open when the
    constructor raises.
    """

    def __init__(
        self,
        draft: OptimizerDraft,
        directories: Sequence[Path],
        metrics: Metrics,
        release_grads: bool,
        watch: Watch,
    ) -> None:
        records = draft.records
        self._plan = plan = draft.plan
        self._metrics = metrics
        self._hooks: list[Any] = []
        self.transfers: Mapping[torch.device, DeviceTransfer] = {}
        try:
            self._open_pools(records)
            if plan.disk_bytes:
                assert self.pool is not None, "what is on disk passes through buffers"
                memory = [self.pool.buffer()]
                room = plan.disk_capacity_bytes
                self.store = DiskStore(
                    directories, room, metrics=metrics, memory=memory, **draft.chosen.store_options
                )
            pools = {"host: optimizer state": self.pool, "host: copies": self.copies}
            for name, watched in (*pools.items(), ("disk", self.store)):
                if watched is not None:
                    metrics.watch(name, used_by(watched))
            metrics.watch("process", resident_bytes)
            if any(record.param.is_cpu for record in records):
                HEAP.serve(self, metrics)
            self.tiers = Tiers(plan, self.pool, self.store)
            self._open_devices(records, release_grads, watch)
        except BaseException:
            self.close()
            raise

    def _open_pools(self, records: Sequence[Record]) -> None:
        """Open the pools. Where there are devices, the memory that is copied to and from them is a
        pool of its own: only that is pinned.
        """
        device = next((record.device for record in records if record.device_bytes), None)
        nbytes, copied = self._plan.arena_bytes, 0
        if device is not None:
            copied = nbytes - self._plan.chunk_bytes
        if nbytes - copied:
            self.pool = Pool(nbytes - copied, budget=HOST)
        if copied:
            self.copies = Pool(copied, budget=HOST, device=device, metrics=self._metrics)

    def _open_devices(self, records: Sequence[Record], release_grads: bool, watch: Watch) -> None:
        """Open staging buffers, gradient buffers and transfers for parameters on devices."""
        devices = {record.device for record in records if record.device_bytes}
        buffers = [
            leased(self.copies, self._plan.staging_buffer_bytes, "a staging buffer")
            for _ in range(self._plan.staging_buffers if devices else 0)
        ]
        self.transfers = transfers = {d: DeviceTransfer(d, metrics=self._metrics) for d in devices}
        self.staging_buffers = staging_buffers = DeviceStaging(
            records, buffers, transfers, self._plan.grads_are_here
        )
        if devices and self._plan.has_grad_buffers:
            places = {}
            for record in records:
                if record.device_bytes and record.param.numel():
                    nbytes = grad_buffer_bytes(self._plan.params[record.number])
                    memory = leased(self.copies, nbytes, f"of {record.name}").view(record.dtype)
                    places[record.number] = memory[: record.param.numel()]
            verdicts = leased(
                self.copies, verdicts_bytes(self._plan.params), "verdicts on gradients"
            )
            self.grad_buffers = GradBuffers(
                records, places, verdicts, transfers, self._metrics, release_grads, staging_buffers
            )
            params = {number: records[number].param for number in places}
            self._hooks = watch(params, self.grad_buffers.arrived)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.grad_buffers is not None:
            self.grad_buffers.close()
        if self.store is not None:
            self.store.close()
        for transfer in self.transfers.values():
            transfer.close()
        self.grad_buffers = self.store = self.sharded = None
        self.transfers = {}
        self.staging_buffers = self.tiers = None  # type: ignore[assignment]  # they hold memory
        for pool in (self.pool, self.copies):
            if pool is not None:
                pool.close()
        self.pool = self.copies = None


# Returns the gradients for a step; raises where something stands in its way.
Look = Callable[[], dict[int, Gradient]]
Begin = Callable[[Mapping[int, Gradient]], PendingStep]


class ParamOwner(Protocol):
    """A prepared model, which owns the parameters of an optimizer."""

    def ended(self) -> None:
        """Note that the optimizer is a plain one again."""


class StepCoordinator:
    """The coordinator of an optimizer that is alone: no other rank has a part of its state, and no
    prepared model owns its parameters. The other coordinators differ from it in what they override.
    """

    ranks: Ranks | None = None  # that share the state of a wrapped optimizer
    owner: ParamOwner | None = None  # the prepared model that owns the parameters, and moves them
    scaler_refusal: Callable[[], OffloadError] | None = None  # why a GradScaler must not be used

    def __init__(self, config: Config, metrics: Metrics, watch: Watch) -> None:
        self.metrics = metrics
        self.directories: list[Path] = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
        self.resources: Resources | None = None  # None: no plan is in force
        self._config, self._watch = config, watch

    @property
    def pools(self) -> list[Pool]:
        """The pools of optimizer state, and of copies to and from devices."""
        pools = (self.resources.pool, self.resources.copies) if self.resources else ()
        return [pool for pool in pools if pool is not None]

    @property
    def store(self) -> DiskStore | None:
        return self.resources.store if self.resources else None

    # --- from plan to plan ------------------------------------------------------------------------

    def share_out(self, records: Sequence[Record]) -> tuple[Buckets | None, RankShare | None]:
        """Note in each record which part of its parameter is here, for a new plan. Return what the
        plan needs to know of ranks that share the state; None: it is not shared.
        """
        return None, None

    def allowed(self, granted: Budgets) -> Budgets:
        """Return the budgets for a new plan: the granted host bytes, less what other holders have
        taken of the limit since.
        """
        host_bytes, limit = granted.host_bytes, HOST.limit_bytes
        held = HOST.used_bytes - sum(pool.capacity_bytes for pool in self.pools)
        if host_bytes is not None and limit is not None:
            host_bytes = min(host_bytes, max(0, limit - held))
        return replace(granted, host_bytes=host_bytes, held_bytes=held)

    def check(self, records: Sequence[Record], plan: Plan) -> None:
        """Refuse parameters and plans that there is no place for. Changes nothing."""

    def redraw(self, draw_up: Callable[[], T]) -> T:
        """Return what `draw_up` draws up for a new plan, if it raises on no rank."""
        return draw_up()

    def open(self, draft: OptimizerDraft) -> Resources:
        """Open what the drawn-up plan needs. `close` is due after an error, too."""
        release_grads = bool(self._config.release_grads)
        self.resources = OptimizerOwnResources(
            draft, self.directories, self.metrics, release_grads, self._watch
        )
        return self.resources

    def close(self) -> None:
        """Close what the plan has opened. Idempotent."""
        resources, self.resources = self.resources, None
        if resources is not None:
            resources.close()

    def alone(self) -> StepCoordinator:
        """Leave the ranks that share the state, and return the coordinator that follows."""
        return self

    def add(
        self, group: Mapping[str, Any], add: Callable[[], None], records: Callable[[], Any]
    ) -> None:
        """Call `add`, which makes a new plan with another group of parameters; among ranks, all do
        or none. records: gives the records that there are after `add`.
        """
        add()

    # --- steps and gradients ----------------------------------------------------------------------

    def begin_step(self, optimizer: torch.optim.Optimizer, look: Look, begin: Begin) -> PendingStep:
        """Begin a step that no rank refuses, with the norm of all gradients if it clips.

        Ranks that have parts of DTensors need each other's parts of the norm. A rank that refuses
        its step before it has sent its part tells the others, so that none waits for it.
        """
        if self._config.max_grad_norm is None:
            return begin(look())
        # With those that have no gradient: every rank must exchange the same list.
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not any(map(is_sharded, params)):
            return begin(look())
        try:
            pending = begin(look())
        except Exception:
            with suppress(StateError):  # the first error is the one to raise
                _sum_of_squares(params, {}, went_well=False)
            raise
        pending.complete(lambda _: _sum_of_squares(params, pending.squares or {}, went_well=True))
        return pending

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unreduced over ranks while the block runs."""
        return nullcontext()

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero or drop the gradients that are in host memory only."""
        if self.resources is not None and self.resources.grad_buffers is not None:
            self.resources.grad_buffers.zero_grad(set_to_none)

    def return_gradients(self) -> None:
        """Return gradients that were averaged here to the parameters, on all ranks together."""

    # --- state of other ranks ---------------------------------------------------------------------

    @property
    def has_lost_ranks(self) -> bool:
        """Whether other ranks have a part of the state and are out of reach."""
        return False

    def meet(self, numbers: Callable[[], list[int]]) -> None:
        """Hold a rendezvous of the ranks before they gather the state of the parameters with these
        numbers.
        """

    def gatherer(self, records: Sequence[Record]) -> OptimizerStateGatherer | None:
        """Make a gatherer for the parts of these records' state that are on other ranks; None:
        there are none.
        """
        return None


def _sum_of_squares(
    params: Sequence[Tensor], squares: Mapping[int, Sequence[float]], went_well: bool
) -> float:
    """Exchange the ranks' parts of the norm and return their sum. Called at most once in a step."""
    own = [
        (placing_of(param), fsum(squares.get(number, ()))) for number, param in enumerate(params)
    ]
    return sum_over_meshes(own, went_well)
