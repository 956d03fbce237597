"""The plan of what a model and its optimizer will need once prepared.

It is drawn up before anything is allocated, so that a configuration that cannot work is refused
with the arithmetic, and so that `offload.plan` can show it.
"""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from offload.core.config import Config, format_size
from offload.core.errors import ConfigError
from offload.device import available_bytes, find_device, usable_bytes, used_bytes
from offload.optim.choose import choose_recipe
from offload.optim.records import make_records, spec_of
from offload.optim.request import check_wrappable, states_of
from offload.params.device_gradients import staging_bytes
from offload.params.gradients import SpilledGradientParams, place_bytes
from offload.params.mean_gradients import staging_bytes as shard_staging_bytes
from offload.params.model_buffers import buffer_bytes
from offload.params.model_methods import refuse_data_parallel
from offload.params.start import PreparedModelStart
from offload.params.units import Choice, find_units, refuse_lazy
from offload.planning.layout import ELEMENT_BYTES, MASTER, ParamSpec
from offload.planning.limits import check_directories, refuse_unbuilt
from offload.planning.model_plan import ModelPlan
from offload.planning.planner import least_arena_bytes, least_spill_bytes, make_plan, most_numel
from offload.planning.sharding import DEPTH, Sharding
from offload.planning.shares import (
    Shares,
    check_device,
    on_device_bytes,
    share_out,
    spill_room_bytes,
)
from offload.planning.tuning import choose
from offload.planning.unit import Unit

_UNBUILT = (
    "param_dtype",
    "state_dtype",
    "release_grads",
)


class PreparePlan:
    """The plan for one model, with or without an optimizer. It changes nothing.

    place: this rank and the number of ranks, if the model is sharded. `close` closes the weight
    files; call it if the model is not prepared after all.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Config,
        host_bytes: int | None,
        choice: Choice | None = None,
        weights: str | PathLike[str] | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        refuse_lazy(model)
        device = find_device(config.device)
        chosen = choose(config, model.parameters(), device.type, place is not None)
        self.chosen = chosen.in_force(config)
        config = chosen.apply_to(config)
        _check(optimizer, config)
        _refuse_sparse(model, _params_of(optimizer))
        _refuse_data_parallel(model)
        if place is not None:
            _refuse_ddp(model)
        self.config = config
        self.host_bytes = host_bytes
        self.has_choice = choice is not None
        self.directories = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
        unit_bytes = self.chosen.tuning.unit_bytes
        self.units = find_units(model, choice, place is not None, unit_bytes)
        self.unit_of = {m.param: unit for unit in self.units for m in unit.members}
        self.device = device
        self.sharding = self._share_over(place, optimizer is not None)
        self.device_note: str | None = None  # why less of the device is used than was asked for
        self.device_left_bytes = 0  # what blocks and gradients leave, of a sharded model
        self.device_bytes = self._check_device(model)
        self.recipe = choose_recipe(optimizer, elementwise=None) if optimizer is not None else None
        self.specs = self._specs(optimizer)
        self.start: PreparedModelStart | None = None
        if PreparedModelStart.is_needed(model, weights):
            self.start = PreparedModelStart(model, self.units, weights, _params_of(optimizer))
        try:
            self.shares = self._share_out(host_bytes, optimizer is not None)
            has_disk = bool(self.directories)
            self.state_plan = make_plan(
                self.specs,
                self.shares.state,
                has_disk,
                disk_chunk_numel=self.chosen.tuning.chunk_numel,
                most_numel=self.most_chunk_numel,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.start is not None:
            self.start.close()

    @property
    def left_bytes(self) -> int:
        """The bytes of a given host budget that nothing needs, and that gathered blocks
        can have.
        """
        if self.config.host_memory is None or self.host_bytes is None or self.sharding is None:
            return 0
        if self.sharding.on_device:
            return 0  # activations leave a different number of bytes on each rank
        return self.host_bytes - self.shares.total

    def widen(self, nbytes: int) -> None:
        """Give gathered blocks `nbytes` more, on all ranks."""
        assert self.sharding is not None
        self.sharding = self.sharding.with_room(self.units, nbytes)
        self.shares = self._with_whole(self.shares)

    def _with_whole(self, shares: Shares) -> Shares:
        """Add the gathered blocks to the shares of host memory, unless they are on a device."""
        if self.sharding is None or self.sharding.on_device:
            return shares
        return replace(shares, whole=self.sharding.fixed_bytes)

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def stored(self) -> list[Unit]:
        """The units whose blocks may have to be written to the store."""
        weight_blocks = self.start.weight_blocks if self.start is not None else ()
        return [unit for unit in self.units if unit.nbytes and unit.number not in weight_blocks]

    @property
    def disk_room_bytes(self) -> int:
        """The bytes reserved on disk: for the blocks and chunks there, and for new versions in
        flight.
        """
        if not self.directories:
            return 0
        params = sum(-(-self.host_bytes_of(unit) // 4096) * 4096 for unit in self.stored)
        params += min(params, self.shares.params)
        return params + self.state_plan.disk_capacity_bytes + self.spill_room_bytes

    @property
    def most_chunk_numel(self) -> int | None:
        """The most elements of a chunk of state whose gradients fit into the staging memory; None:
        no limit.
        """
        return most_numel(self.shares.staging) if self.shares.spilled else None

    @property
    def spill_room_bytes(self) -> int:
        """The bytes of the store for spilled gradients, and for new versions in flight."""
        if not self.shares.spilled:
            return 0
        return spill_room_bytes(self.shares, self.state_plan.chunks)

    def host_bytes_of(self, unit: Unit) -> int:
        """Return the bytes of a unit's parameters that this rank has in host memory or on disk."""
        return unit.nbytes if self.sharding is None else self.sharding.shard_bytes(unit)

    def own_of(self, param: Tensor) -> tuple[int, int] | None:
        """Return the elements of a parameter that belong to this rank; None: all."""
        unit = self.unit_of.get(param)  # type: ignore[call-overload]
        return None if self.sharding is None or unit is None else self.sharding.own(unit, param)

    @property
    def spilled_units(self) -> frozenset[int]:
        """The units of a sharded model whose gradients are spilled."""
        if self.sharding is None:
            return frozenset()
        trained = self._trained_units(has_optimizer=True)
        return frozenset(trained[n] for n in self.shares.spilled)

    @property
    def spill(self) -> SpilledGradientParams:
        """The spilled gradients of a model that is not sharded, and the memory they pass
        through.
        """
        spilled: frozenset[Tensor] = frozenset()
        if self.sharding is None:
            trained = list(self._trained(has_optimizer=True))
            spilled = frozenset(trained[n] for n in self.shares.spilled)
        return SpilledGradientParams(spilled, self.shares.staging, self.spill_room_bytes)

    @property
    def plan(self) -> ModelPlan:
        """The plan that `offload.plan` shows: what will be in which tier."""
        params = sum(map(self.host_bytes_of, self.units))
        return ModelPlan(
            units=len(self.units),
            param_bytes=params,
            file_bytes=params - sum(map(self.host_bytes_of, self.stored)),
            shares=self.shares,
            state=self.state_plan,
            disk_room_bytes=self.disk_room_bytes,
            device_bytes=self.device_bytes,
            sharding=self.sharding,
            tuned=str(self.chosen) if self.chosen.source else None,
        )

    def _trained(self, has_optimizer: bool) -> list[nn.Parameter]:
        return [p for p in self.unit_of if p.requires_grad and has_optimizer]

    @property
    def _itemsizes(self) -> list[int]:
        """The bytes of an element of each spec's gradient."""
        return [2 if MASTER in spec.fields else ELEMENT_BYTES for spec in self.specs]

    def _trained_units(self, has_optimizer: bool) -> list[int]:
        found = dict.fromkeys(self.unit_of[param].number for param in self._trained(has_optimizer))
        return sorted(found)

    def _share_over(self, place: tuple[int, int] | None, has_optimizer: bool) -> Sharding | None:
        if place is None:
            return None
        wanted = self.config.prefetch_depth
        depth = DEPTH if wanted == "auto" else int(wanted)
        sharding = Sharding(*place, depth=depth, on_device=not self.is_on_cpu)
        return sharding.with_least(self.units, self._trained_units(has_optimizer))

    def _specs(self, optimizer: torch.optim.Optimizer | None) -> list[ParamSpec]:
        self._spec_params: list[Tensor] = []  # the parameter of each spec
        if optimizer is None or self.recipe is None:
            return []
        records = make_records(optimizer, self.recipe, optimizer.state)
        self._spec_params = [record.param for record in records]
        for record in records:
            if record.param not in self.unit_of:
                raise ConfigError(
                    f"{record.name}: the optimizer has it, but the model does not; make the "
                    "optimizer of this model's parameters, before prepare"
                )
            record.own = self.own_of(record.param)
        states_of(optimizer, records, self.recipe)  # refuses state that does not fit the recipe
        return [spec_of(record, self.unit_of[record.param].number) for record in records]  # type: ignore[index]

    def _share_out(self, host_bytes: int | None, has_optimizer: bool) -> Shares:
        state = make_plan(self.specs, None, has_disk=False).arena_bytes
        trained = self._trained(has_optimizer)
        if self.sharding is not None:
            units = [self.units[number] for number in self._trained_units(has_optimizer)]
            gradients = [self.sharding.shard_bytes(unit) for unit in units]
            staging = shard_staging_bytes(self.sharding, units)
        else:
            gradients = [place_bytes(param) for param in trained]
            staging = 0 if self.is_on_cpu else staging_bytes(trained)
        # Weights that stay in their own files need no room in the store.
        has_disk = bool(self.directories) or (not self.stored and not state)
        shares = share_out(
            self.units,
            gradients,
            state,
            host_bytes,
            has_disk,
            self.config.activations == "offload",
            staging,
            self._least_state_bytes(),
            least_spill_bytes(self.specs, self._itemsizes),
            self.host_bytes_of,
            *self._gathered(),
        )
        return self._with_whole(shares)

    def _gathered(self) -> tuple[int, str]:
        """Return the host memory for gathered blocks and unsharded gradients, and the arithmetic of
        it.
        """
        sharding = self.sharding
        if sharding is None or sharding.on_device:
            return 0, ""
        return sharding.fixed_bytes, (
            f"on each rank; gathered from {sharding.count} ranks one unit needs "
            f"{format_size(sharding.whole_bytes)} with {sharding.depth} more ahead, and whole "
            f"gradients on their way {format_size(sharding.gradient_bytes)} (a lower "
            "prefetch_depth needs less)"
        )

    def _least_state_bytes(self) -> int:
        """Return the least memory that the optimizer state can pass through, on the rank that needs
        most.
        """
        if self.sharding is None:
            return least_arena_bytes(self.specs)
        ranks = [replace(self.sharding, rank=rank) for rank in range(self.sharding.count)]
        return max(least_arena_bytes(self._specs_on(sharding)) for sharding in ranks)

    def _specs_on(self, sharding: Sharding) -> list[ParamSpec]:
        """Return the specs of another rank's shards of the optimizer's parameters."""
        each = zip(self.specs, self._spec_params, strict=True)
        return [
            replace(spec, own=spec.own and sharding.own(self.unit_of[param], param))  # type: ignore[index]
            for spec, param in each
        ]

    def _check_device(self, model: nn.Module) -> int:
        """Return the byte limit for everything on the device; raise `CapacityError` if it is too
        small.
        """
        if self.is_on_cpu:
            return 0
        wanted = self.config.device_memory
        available = available_bytes(self.device)
        limit = usable_bytes(self.device) if wanted is None else int(wanted)
        if limit > available:
            limit = usable_bytes(self.device)
            self.device_note = (
                f"{format_size(int(wanted or 0))} are allowed, {self.device} has "
                f"{format_size(available)} for this process: {format_size(limit)} of them are "
                "used; end what else is on the device, or give a smaller device_memory"
            )
        own = [*model.parameters(), *model.buffers()]
        own += [p.grad for p in model.parameters() if p.grad is not None]
        there = sum(on_device_bytes(t.nbytes) for t in own if t.device == self.device)
        others = max(0, used_bytes(self.device) - there)
        if self.sharding is not None:
            self.device_left_bytes = self.sharding.left_on_device(
                buffer_bytes(model), others, limit
            )
        else:
            check_device(self.units, buffer_bytes(model), others, limit)
        return limit


def _refuse_data_parallel(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
            refuse_data_parallel(module.device_ids)


def _refuse_ddp(model: nn.Module) -> None:
    """Refuse a sharded model with a module in `DistributedDataParallel`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise ConfigError(
                f"{name or 'the model'}: is in DistributedDataParallel, which averages gradients "
                "over ranks, as prepare does by itself; prepare the model without it, or give "
                "process_group=False, which prepares a whole model on each rank"
            )


def _refuse_sparse(model: nn.Module, params: list[Tensor]) -> None:
    """Refuse trained embeddings with sparse gradients: gradient buffers are of whole parameters."""
    trained = {param for param in params if param.requires_grad}
    for name, module in model.named_modules():
        is_sparse = isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        if is_sparse and module.weight in trained:
            raise ConfigError(
                f"{f'{name}.' if name else ''}weight: its gradients would be sparse, which is not "
                f'supported; make them dense: model.get_submodule("{name}").sparse = False'
            )


def _check(optimizer: torch.optim.Optimizer | None, config: Config) -> None:
    """Refuse settings that `prepare` does not support."""
    if optimizer is not None:
        check_wrappable(optimizer)
    refuse_unbuilt(config, _UNBUILT, "prepare")
    is_on_cpu = find_device(config.device).type == "cpu"
    if config.device_memory is not None:
        Config.of(config, device=find_device(config.device))  # refuses it on the CPU
    if config.activations == "offload" and not config.nvme and is_on_cpu:
        raise ConfigError(
            'activations: "offload" needs nvme=... for a model on the CPU, since they are in host '
            'memory already; give a directory on a fast drive, or ask for "recompute"'
        )
    check_directories(config)


def _params_of(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    groups = optimizer.param_groups if optimizer is not None else []
    return [param for group in groups for param in group["params"]]
