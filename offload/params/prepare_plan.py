"""The plan of what a model and its optimizer will need once prepared.

It is drawn up before anything is allocated, so that a configuration that cannot work is refused
with the arithmetic, and so that `offload.plan` can show it. Ranks that prepare a model together
reach consensus on it before anything changes: if one rank raises, all raise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path

import torch
from torch import Tensor, nn

from offload import kernels
from offload.core.config import Config, format_size
from offload.core.errors import ConfigError, StateError
from offload.device.accelerator import available_bytes, find_device, usable_bytes, used_bytes
from offload.distributed.consensus import (
    by_consensus,
    check_alike,
    each_by_consensus,
    told_checksum,
)
from offload.distributed.ranks import Ranks, ranks_of
from offload.optim.agreement import START_ALIKE, VALUES
from offload.optim.choose import choose_recipe
from offload.optim.opening import check_wrappable
from offload.optim.recipe import Recipe, Record
from offload.optim.records import OptimizerDraft, States, facts_of, make_records
from offload.optim.source import states_of
from offload.params.gradients import SpilledGradientParams, place_bytes, staging_bytes
from offload.params.mean_gradients import staging_bytes as shard_staging_bytes
from offload.params.model_methods import buffer_bytes, refuse_data_parallel
from offload.params.start import PreparedModelStart
from offload.params.units import Choice, find_units, refuse_lazy
from offload.planning.layout import ParamSpec
from offload.planning.limits import check_directories, refuse_unbuilt
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.sharding import DEPTH, Sharding
from offload.planning.training import TrainingPlan, plan_training
from offload.planning.tuning import choose
from offload.planning.unit import Unit, UnitSizes, on_device_bytes

_UNBUILT = ("param_dtype", "state_dtype", "release_grads")


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
        self.unit_of: dict[Tensor, Unit] = {
            m.param: unit for unit in self.units for m in unit.members
        }
        self.device = device
        self._trained = [p for p in self.unit_of if p.requires_grad and optimizer is not None]
        self.sharding = self._share_over(place)
        self.device_note: str | None = None  # why less of the device is used than was asked for
        recipe, records, states = self._records(optimizer)
        self.start: PreparedModelStart | None = None
        if PreparedModelStart.is_needed(model, weights):
            self.start = PreparedModelStart(model, self.units, weights, _params_of(optimizer))
        try:
            self.plan = self._planned(model, records)
        except BaseException:
            self.close()
            raise
        self.draft: OptimizerDraft | None = None  # until the optimizer is opened
        if recipe is not None:
            state, budgets = self.plan.state, self.plan.budgets
            self.draft = OptimizerDraft(recipe, records, state, budgets, self.chosen, states=states)

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
        return self.host_bytes - self.plan.shares.total

    def widen(self, nbytes: int) -> None:
        """Give gathered blocks `nbytes` more, on all ranks."""
        assert self.sharding is not None
        self.sharding = self.sharding.with_room(self.units, nbytes)
        self.plan = self.plan.with_sharding(self.sharding)

    @property
    def is_on_cpu(self) -> bool:
        return self.device.type == "cpu"

    @property
    def stored(self) -> list[Unit]:
        """The units whose blocks may have to be written to the store."""
        weight_blocks = self.start.weight_blocks if self.start is not None else ()
        return [unit for unit in self.units if unit.nbytes and unit.number not in weight_blocks]

    def host_bytes_of(self, unit: Unit) -> int:
        """Return the bytes of a unit's parameters that this rank has in host memory or on disk."""
        return unit.nbytes if self.sharding is None else self.sharding.shard_bytes(unit)

    def own_of(self, param: Tensor) -> tuple[int, int] | None:
        """Return the elements of a parameter that belong to this rank; None: all."""
        unit = self.unit_of.get(param)
        return None if self.sharding is None or unit is None else self.sharding.own(unit, param)

    @property
    def spilled_units(self) -> frozenset[int]:
        """The units of a sharded model whose gradients are spilled."""
        if self.sharding is None:
            return frozenset()
        return frozenset(self._trained_units[n] for n in self.plan.shares.spilled)

    @property
    def spill(self) -> SpilledGradientParams:
        """The spilled gradients of a model that is not sharded, and the memory they pass
        through.
        """
        shares, spilled = self.plan.shares, frozenset[Tensor]()
        if self.sharding is None:
            spilled = frozenset(self._trained[n] for n in shares.spilled)
        return SpilledGradientParams(spilled, shares.staging, self.plan.spill_room_bytes)

    @property
    def _trained_units(self) -> list[int]:
        return sorted({self.unit_of[param].number for param in self._trained})

    def _share_over(self, place: tuple[int, int] | None) -> Sharding | None:
        if place is None:
            return None
        wanted = self.config.prefetch_depth
        depth = DEPTH if wanted == "auto" else int(wanted)
        sharding = Sharding(*place, depth=depth, on_device=not self.is_on_cpu)
        return sharding.with_least(self.units, self._trained_units)

    def _records(
        self, optimizer: torch.optim.Optimizer | None
    ) -> tuple[Recipe | None, list[Record], States]:
        """Return the recipe, the records and the states that the optimizer has already."""
        if optimizer is None:
            return None, [], {}
        recipe = choose_recipe(optimizer, elementwise=None)
        records = make_records(optimizer, recipe, optimizer.state)
        for record in records:
            if record.param not in self.unit_of:
                raise ConfigError(
                    f"{record.name}: the optimizer has it, but the model does not; make the "
                    "optimizer of this model's parameters, before prepare"
                )
            record.unit = self.unit_of[record.param].number
            record.own = self.own_of(record.param)
        return recipe, records, states_of(optimizer, records, recipe)

    def _planned(self, model: nn.Module, records: Sequence[Record]) -> TrainingPlan:
        budgets = Budgets(
            self.host_bytes,
            self._limit_on_device(),
            len(self.directories),
            self.config.activations,
            chunk_numel=self.chosen.tuning.chunk_numel,
        )
        plan = plan_training(self._facts(model, records), budgets)
        return replace(plan, tuned=str(self.chosen) if self.chosen.source else None)

    def _facts(self, model: nn.Module, records: Sequence[Record]) -> TrainingFacts:
        """Gather the facts that the plan depends on."""
        sharding, in_files = self.sharding, self.start.weight_blocks if self.start else set()
        facts = facts_of(records, self.config)
        if sharding is not None:
            units = [self.units[number] for number in self._trained_units]
            gradients = map(sharding.shard_bytes, units)
            staging = shard_staging_bytes(sharding, units)
        else:
            gradients = map(place_bytes, self._trained)
            staging = 0 if self.is_on_cpu else staging_bytes(self._trained)
        return replace(
            facts,
            is_prepared=True,
            units=UnitSizes.of(self.units, self.host_bytes_of, in_files),
            gradients=tuple(gradients),
            staging_bytes=staging,
            sharding=sharding,
            params_of_ranks=self._params_of_ranks(facts.params, records),
            buffer_bytes=buffer_bytes(model),
            others_bytes=0 if self.is_on_cpu else self._used_by_others(model),
        )

    def _params_of_ranks(
        self, specs: Sequence[ParamSpec], records: Sequence[Record]
    ) -> tuple[tuple[ParamSpec, ...], ...]:
        """Return the parameters with what each rank has of them."""
        if self.sharding is None:
            return ()
        each = [
            (spec, self.unit_of[record.param], record.param)
            for spec, record in zip(specs, records, strict=True)
        ]
        ranks = [replace(self.sharding, rank=rank) for rank in range(self.sharding.count)]
        return tuple(
            tuple(replace(s, own=s.own and rank.own(unit, param)) for s, unit, param in each)
            for rank in ranks
        )

    def _limit_on_device(self) -> int | None:
        """Return the byte limit for everything on the device; None: there is none."""
        if self.is_on_cpu:
            return None
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
        return limit

    def _used_by_others(self, model: nn.Module) -> int:
        """Return the bytes on the device that are not the model's."""
        own = [*model.parameters(), *model.buffers()]
        own += [p.grad for p in model.parameters() if p.grad is not None]
        there = sum(on_device_bytes(t.nbytes) for t in own if t.device == self.device)
        return max(0, used_bytes(self.device) - there)


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


# --- among ranks ----------------------------------------------------------------------------------


@contextmanager
def connected_ranks(process_group: object) -> Iterator[Ranks | None]:
    """Keep the ranks of a group connected while the block runs, and afterwards unless it raises."""
    ranks = ranks_of(process_group)
    try:
        yield ranks
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def plan_by_consensus(
    ranks: Ranks | None, host_bytes: int | None, make: Callable[[int | None], PreparePlan]
) -> PreparePlan:
    """Make the plan for the least budget of host memory that any rank has, check that it is the
    same on all ranks, and give the gathered blocks the room that all ranks have left.

    All that later decides about a collective must be the same on all ranks: the units, the least of
    all budgets, the room for gathered blocks. The ranks must begin with equal parameters.
    """
    if ranks is None:
        return make(host_bytes)
    allowed = [
        n for n in ranks.exchange(host_bytes, "host memory that is allowed") if n is not None
    ]
    prepare_plan = by_consensus(ranks, "prepare", lambda: make(min(allowed, default=None)))
    try:
        _check_same(ranks, prepare_plan)
        left = [
            max(0, n) for n in ranks.exchange(prepare_plan.left_bytes, "host memory that is left")
        ]
        prepare_plan.widen(min(left))
    except BaseException:
        prepare_plan.close()
        raise
    return prepare_plan


def _check_same(ranks: Ranks, prepare_plan: PreparePlan) -> None:
    structure = {"the model's structure": [_digest(prepare_plan), len(prepare_plan.units)]}
    check_alike(
        "prepare",
        ranks.exchange(structure, "the model's structure"),
        "every rank must prepare the same model, with the same optimizer groups and frozen "
        "parameters",
    )
    remedy = "give every rank the same, apart from the budgets"
    check_alike("config", ranks.exchange(_settings(prepare_plan), "config"), remedy)
    sums = each_by_consensus(
        ranks, "the first values", lambda: _sums(prepare_plan), others=StateError
    )
    check_alike("prepare", sums, START_ALIKE)


def _digest(prepare_plan: PreparePlan) -> str:
    lines = [
        f"{unit.number} {unit.needs} {m.name} {tuple(m.shape)} {m.dtype} {m.param.requires_grad}"
        for unit in prepare_plan.units
        for m in unit.members
    ]
    specs = prepare_plan.plan.facts.params
    lines += [f"{spec.name} {spec.numel} {spec.fields} {spec.unit}" for spec in specs]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _settings(prepare_plan: PreparePlan) -> dict[str, object]:
    """Return the settings that must be equal on all ranks, so that all act alike."""
    config = prepare_plan.config
    return {
        "device": prepare_plan.device.type,
        "nvme": config.nvme is not None,
        "prefetch_depth": config.prefetch_depth,
        "activations": config.activations,
        "max_grad_norm": config.max_grad_norm,
        "self_check": config.self_check,
    }


def _sums(prepare_plan: PreparePlan) -> dict[str, str]:
    """Return checksums of the parameters' values by name, without those that the weights or their
    modules give.
    """
    members = [m for unit in prepare_plan.units for m in unit.members]
    start = prepare_plan.start
    return {
        f"{VALUES} {m.name}": told_checksum(kernels.checksum(m.param.detach().cpu()))
        for m in members
        if m.param.numel() and not m.param.is_meta and not (start and start.gives(m.param))
    }


@contextmanager
def same_random(ranks: Ranks | None) -> Iterator[None]:
    """Let all ranks draw the random numbers of rank 0 while the block runs.

    Afterwards each rank continues with its own state, as before; a rank whose state was that of
    rank 0 continues from rank 0's new state.
    """
    if ranks is None:
        yield
        return
    before = torch.get_rng_state()
    first = bytes.fromhex(ranks.exchange(before.numpy().tobytes().hex(), "random state")[0])
    state = torch.frombuffer(bytearray(first), dtype=torch.uint8)
    torch.set_rng_state(state)
    try:
        yield
    finally:
        if not torch.equal(before, state):
            torch.set_rng_state(before)
