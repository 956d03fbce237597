"""The coordinator of an optimizer whose parameters belong to a prepared model.

The model owns memory, disk and parameters. Where ranks share the model, they reach consensus before
each step, and each has the state of its own elements.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.pool import Pool
from offload.distributed.consensus import check_alike, checksum_of, each_by_consensus
from offload.distributed.ranks import Ranks
from offload.optim.agreement import settings_sum
from offload.optim.coordinator import (
    Begin,
    Look,
    ParamOwner,
    PendingStep,
    Resources,
    StepCoordinator,
)
from offload.optim.export import OptimizerStateGatherer
from offload.optim.gradient_source import Gradient
from offload.optim.recipe import Record
from offload.optim.records import OptimizerDraft
from offload.optim.source import FieldPart
from offload.optim.tiers import Tiers, is_chunk_key
from offload.params.block_staging import BlockStaging, SpilledGradientReader
from offload.params.engine import Engine
from offload.params.hooks import watch_gradients
from offload.params.prepare_plan import PreparePlan
from offload.params.sharded_gradients import NO_SCALER, ShardedGradients
from offload.params.spill import slot_bytes
from offload.planning.layout import slices_by_param
from offload.planning.planner import Budgets
from offload.planning.sharding import Sharding
from offload.planning.state_plan import Plan
from offload.planning.unit import Member, Unit
from offload.storage.disk import DiskStore

T = TypeVar("T")
_NO_SCALER_ON_DEVICE = (
    "cannot be used with a model on a device whose gradients are in host "
    "memory: torch reads the scale there before it has come; train in bfloat16, which "
    "needs none"
)


class PreparedCoordinator(StepCoordinator):
    """The coordinator of the optimizer of one prepared model, of which no other rank has a part.
    pool, store: of the optimizer's state.
    """

    def __init__(
        self,
        prepare_plan: PreparePlan,
        engine: Engine,
        pool: Pool | None,
        store: DiskStore | None,
        owner: ParamOwner,
    ) -> None:
        super().__init__(prepare_plan.config, engine.metrics, watch_gradients)
        self.owner = owner
        self._prepare_plan, self._engine = prepare_plan, engine
        self._pool, self._disk = pool, store
        self._units = prepare_plan.unit_of
        self._records: Sequence[Record] = ()  # of the plan in force
        if not prepare_plan.is_on_cpu:
            self.scaler_refusal = partial(StateError, f"GradScaler: {_NO_SCALER_ON_DEVICE}")

    # --- from plan to plan ------------------------------------------------------------------------

    def share_out(self, records: Sequence[Record]) -> tuple[None, None]:
        """Note in each record its unit, its device after the model is an ordinary one again, and
        the elements that this rank has.
        """
        for record in records:
            if record.param in self._units:
                record.unit = self._units[record.param].number
                record.original_device = self._engine.residency.original_device_of(record.param)
                record.own = self._prepare_plan.own_of(record.param)
        return None, None

    def allowed(self, granted: Budgets) -> Budgets:
        return granted  # a share of the model's pool

    def check(self, records: Sequence[Record], plan: Plan) -> None:
        for record in records:
            if record.unit is None:
                raise ConfigError(
                    f"{record.name}: is not of the model that was prepared; close() and prepare "
                    "them again, together"
                )
        needed = plan.disk_capacity_bytes
        reserved = self._prepare_plan.plan.state.disk_capacity_bytes
        if needed > reserved:
            raise CapacityError(
                f"nvme: the optimizer state needs {needed} bytes of disk now, {reserved} were "
                "reserved for it; parameters that were frozen, or in no optimizer, when the model "
                "was prepared have no room: close() and prepare again"
            )

    def open(self, draft: OptimizerDraft) -> Resources:
        staging = self._make_staging(draft.records, draft.plan)
        self._records = draft.records
        self.resources = _SharedResources(self._pool, self._disk, draft.plan, staging)
        return self.resources

    def _make_staging(self, records: Sequence[Record], plan: Plan) -> BlockStaging:
        residency, gradients = self._engine.residency, self._engine.gradients
        places, firsts = {}, {}
        for record in records:
            unit = self._units[record.param]
            block = residency.blocks[unit.number]
            begin = next(m.begin for m in unit.members if m.param is record.param)
            places[record.number] = block, begin - block.span[0], record.dtype
            firsts[record.number] = record.own[0] if record.own else 0
        staging: SpilledGradientReader | None = None
        if gradients.area is not None:
            slices = slices_by_param(plan.chunks)
            owner = gradients if isinstance(gradients, ShardedGradients) else gradients.area
            owner.cut_for(
                {
                    records[number].param: [(part.begin, part.end) for _, part in each]
                    for number, each in slices.items()
                }
            )
            spilled, units = self._prepare_plan.spill.params, self._prepare_plan.spilled_units
            sizes = {  # bytes per element of each parameter whose gradient is spilled
                record.number: record.dtype.itemsize
                for record in records
                if record.param in spilled or record.unit in units
            }
            gradients.area.divide(slot_bytes(plan.chunks, sizes))
            staging = SpilledGradientReader(gradients.area, firsts)
        return BlockStaging(residency, places, staging, firsts)

    def no_sync(self) -> AbstractContextManager[None]:
        return no_sync(self._engine)


class ShardedModelCoordinator(PreparedCoordinator):
    """The coordinator of the optimizer of a model that is sharded over ranks."""

    def __init__(self, ranks: Ranks, sharding: Sharding, *given: Any) -> None:
        super().__init__(*given)
        self._of_model, self._sharding = ranks, sharding
        self.scaler_refusal = partial(StateError, f"GradScaler: {NO_SCALER}")

    def redraw(self, draw_up: Callable[[], T]) -> T:
        return self._by_consensus(draw_up, lambda drawn: {})

    def begin_step(self, optimizer: torch.optim.Optimizer, look: Look, begin: Begin) -> PendingStep:
        pending = begin(self._by_consensus(look, self._facts))
        pending.complete(lambda value: self._of_model.sum([value], "gradient norm")[0])
        return pending

    def _facts(self, grads: Mapping[int, Gradient]) -> dict[str, object]:
        """Return what must be the same on all ranks."""
        return {
            "hyper-parameters": settings_sum(self._records),
            "which parameters have gradients": checksum_of(list(grads)),
        }

    def _by_consensus(self, act: Callable[[], T], tell: Callable[[T], Mapping[str, object]]) -> T:
        """Return the result of `act`, if it raises on no rank and if `tell` describes it alike on
        all ranks.
        """
        found: list[T] = []

        def act_and_tell() -> Mapping[str, object]:
            found.append(act())
            return tell(found[0])

        said = each_by_consensus(self._of_model, "step", act_and_tell, others=StateError)
        check_alike("step", said, "every rank must do the same", StateError)
        return found[0]

    @property
    def has_lost_ranks(self) -> bool:
        return self._of_model.is_broken

    def gatherer(self, records: Sequence[Record]) -> OptimizerStateGatherer:
        return UnitGatherer(self._of_model, self._sharding, self._prepare_plan.units, records)


def no_sync(engine: Engine) -> AbstractContextManager[None]:
    """Leave gradients unreduced over ranks while the block runs."""
    gradients = engine.gradients
    return gradients.no_sync() if isinstance(gradients, ShardedGradients) else nullcontext()


class _SharedResources(Resources):
    """The resources of an optimizer that shares pool and store with its model."""

    grads_are_own = True

    def __init__(
        self, pool: Pool | None, store: DiskStore | None, plan: Plan, staging: BlockStaging
    ) -> None:
        self.pool, self.store = pool, store
        self.staging_buffers = staging
        self.tiers = Tiers(plan, pool, store)

    def close(self) -> None:
        if self.staging_buffers is not None:
            self.staging_buffers.break_off()
        if self.store is not None:
            for name in filter(is_chunk_key, self.store.names()):  # blocks of the model stay
                self.store.free(name)
        self.staging_buffers = self.tiers = None  # type: ignore[assignment]  # they hold memory


class UnitGatherer:
    """An all-gather of sharded optimizer state, one field of one unit in memory at a time. All
    ranks have state of the same parameters. records: those of the parameters with state; there may
    be more.
    """

    def __init__(
        self, ranks: Ranks, sharding: Sharding, units: Sequence[Unit], records: Sequence[Record]
    ) -> None:
        self._ranks, self._sharding = ranks, sharding
        numbers = {record.param: record.number for record in records}
        self._places: dict[int, tuple[Unit, Member]] = {}
        self.groups: list[list[int]] = []
        for unit in units:
            held = {numbers[m.param]: (unit, m) for m in unit.members if m.param in numbers}
            self._places.update(held)
            self.groups.append(list(held))

    def whole(self, field: str, own: Mapping[int, FieldPart]) -> Mapping[int, Tensor]:
        ranks, (unit, first) = self._ranks, self._places[next(iter(own))]
        size = first.dtype.itemsize
        numel = self._sharding.partition_of(unit).shard_bytes // size
        rows = torch.zeros(ranks.count, numel, dtype=torch.float32, device="cpu")
        found: dict[int, Tensor] = {}
        for number, part in own.items():
            member = self._places[number][1]
            begin = member.begin // size
            found[number] = rows.view(-1)[begin : begin + member.shape.numel()]
            found[number][part.begin : part.begin + part.values.numel()].copy_(part.values)
        ranks.gather(rows, rows[ranks.rank], f"{field} of {unit.name}").wait()
        return found
