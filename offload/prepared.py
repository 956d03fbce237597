"""A model and its optimizer, prepared: one pool, one store, and what moves between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from offload.budget import HOST
from offload.config import Config
from offload.engine import Engine
from offload.errors import ConfigError
from offload.gradients import gradient_bytes
from offload.hooks import watch_gradients
from offload.layout import ParamSpec
from offload.metrics import Metrics
from offload.optim import Session, attach
from offload.optim.choose import choose_recipe
from offload.optim.desk import Places
from offload.optim.ground import Ground
from offload.optim.homes import Homes
from offload.optim.recipe import Record
from offload.optim.records import make_records, spec_of
from offload.optim.tiers import Tiers, is_chunk_key
from offload.planner import Plan, make_plan
from offload.pool import Pool
from offload.shares import Shares, share_out
from offload.store import DiskStore
from offload.units import Unit, find_units
from offload.workbench import Workbench


class Prepared:
    """Opened for a model on the CPU, with an optimizer or without."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        host_bytes: int | None,
        units: Sequence[Unit] | None = None,
        depth: int = 2,
    ) -> None:
        self.units = list(units or find_units(model))
        self.metrics = Metrics(strict=config.strict)
        self._unit_of = {m.param: unit for unit in self.units for m in unit.members}
        specs = self._specs(optimizer)
        shares = self._share_out(specs, host_bytes)
        directories = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
        # Blocks come and go; what the optimizer keeps must not be in their way.
        self.pool = Pool(max(shares.params + shares.gradients, 4096), budget=HOST)
        self.state_pool = Pool(shares.state, budget=HOST) if shares.state else None
        self.store = self._open_store(directories, shares, specs)
        self.engine = Engine(model, self.units, self.pool, self.store, self.metrics, depth)
        self.engine.residency.has_room_for_all = shares.holds_all_params
        self.session: Session | None = None
        if optimizer is not None:
            recipe = choose_recipe(optimizer, elementwise=False)
            self.session = Session(
                optimizer, recipe, config, shares.state, watch_gradients, host=self
            )
            attach(optimizer, self.session)

    def _specs(self, optimizer: torch.optim.Optimizer | None) -> list[ParamSpec]:
        if optimizer is None:
            return []
        records = make_records(optimizer, choose_recipe(optimizer, False), optimizer.state)
        for record in records:
            if record.param not in self._unit_of:
                raise ConfigError(f"{record.name}: the optimizer has it, but the model does not")
        return [spec_of(record, self.unit_of(record.param)) for record in records]

    def _share_out(self, specs: Sequence[ParamSpec], host_bytes: int | None) -> Shares:
        state = make_plan(specs, None, has_disk=False).arena_bytes
        trained = [param for param in self._unit_of if param.requires_grad]
        return share_out(self.units, gradient_bytes(dict(enumerate(trained))), state, host_bytes)

    def _open_store(
        self, directories: Sequence[Path], shares: Shares, specs: Sequence[ParamSpec]
    ) -> DiskStore | None:
        if not directories:
            return None
        # What is in memory may all be on its way, beside the generation before.
        params = sum(-(-unit.nbytes // 4096) * 4096 for unit in self.units) + shares.params
        plan = make_plan(specs, shares.state, has_disk=True)
        memory = [pool.buffer() for pool in (self.pool, self.state_pool) if pool]
        room = params + plan.disk_capacity_bytes
        return DiskStore(directories, room, metrics=self.metrics, memory=memory)

    # --- for the optimizer's session --------------------------------------------------------------

    def unit_of(self, param: Tensor) -> int | None:
        unit = self._unit_of.get(param)  # type: ignore[call-overload]
        return None if unit is None else unit.number

    def make_ground(self, records: Sequence[Record], plan: Plan) -> Ground:
        residency = self.engine.residency
        places = {}
        for record in records:
            unit = self._unit_of[record.param]  # type: ignore[index]
            begin = next(m.begin for m in unit.members if m.param is record.param)
            places[record.number] = residency.blocks[unit.number], begin, record.dtype
        return _SharedGround(self.state_pool, self.store, plan, Workbench(residency, places))

    def close(self) -> None:
        """Leave model and optimizer as ordinary ones. Idempotent."""
        if self.session is not None:
            self.session.optimizer.close()  # type: ignore[attr-defined]
            self.session = None
        self.engine.close()
        if self.store is not None:
            self.store.close()
        self.pool.close()
        if self.state_pool is not None:
            self.state_pool.close()


class _SharedGround:
    """What an optimizer stands on beside its model."""

    def __init__(
        self, pool: Pool | None, store: DiskStore | None, plan: Plan, desks: Workbench
    ) -> None:
        self.pool = pool
        self.store = store
        self.desks: Places | None = desks
        self.homes: Homes | None = None
        self.tiers = Tiers(plan, pool, store)

    def close(self) -> None:
        if self.desks is not None:
            self.desks.close()
        self.desks = None
        if self.store is not None:
            for name in filter(is_chunk_key, self.store.names()):  # the model's blocks stay
                self.store.free(name)
        self.tiers = None  # type: ignore[assignment]  # it holds memory
