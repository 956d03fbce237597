"""What a wrapped optimizer holds: plan, memory, store, and the updater on top of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.budget import HOST
from offload.config import Config
from offload.errors import ConfigError, StateError
from offload.layout import MASTER, ParamSpec
from offload.metrics import Metrics, Snapshot
from offload.optim.desk import Desks
from offload.optim.flat import is_dense
from offload.optim.homes import Homes
from offload.optim.recipe import NativeRecipe, Recipe, Record
from offload.optim.self_check import checked
from offload.optim.tiers import Tiers
from offload.optim.updater import Updater
from offload.planner import Plan, home_bytes, make_plan, verdicts_bytes
from offload.pool import Pool
from offload.store import DiskStore
from offload.store.mapped import mapped_tensor
from offload.transfer import DeviceTransfer

# Has the function called with the number of each parameter whose gradient has come; what it returns
# is to be removed.
Watch = Callable[[Mapping[int, Tensor], Callable[[int], None]], list[Any]]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Session:
    """Opened for one optimizer. `reopen` makes it anew when there are other parameters."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        config: Config,
        host_memory_bytes: int | None,
        watch: Watch,
        chunk_numel: int | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.config = config
        self.metrics = Metrics(strict=config.strict)
        self.last_step: Snapshot | None = None
        self.last_disk_bytes = 0, 0
        self.supported_scaling: bool | None = None  # what the plain optimizer says of itself
        self.incoming: Mapping[int, Mapping[str, Any]] | None = None  # during load_state_dict
        self._recipe = recipe
        self._desks: Desks | None = None
        self._homes: Homes | None = None
        self._watch_gradients = watch
        self._hooks: list[Any] = []
        self._directories: list[Path] = [Path(path) for path in config.nvme or ()]  # type: ignore[union-attr]
        self._host_memory_bytes = host_memory_bytes
        self._chunk_numel = chunk_numel
        self._open(*self._draw_up(optimizer.state))

    def _draw_up(self, with_state: Container[Tensor]) -> tuple[list[Record], Plan]:
        """Records and plan for the optimizer as it is now. Changes nothing."""
        records = make_records(self.optimizer, self._recipe, with_state)
        plan = make_plan(
            [spec_of(record) for record in records],
            self._host_memory_bytes,
            has_disk=bool(self._directories),
            chunk_numel=self._chunk_numel,
            needs_homes=self.config.release_grads,
        )
        if self.config.release_grads and not plan.has_homes:
            raise ConfigError(
                "release_grads: all parameters are in host memory, where their gradients are used "
                "in place; leave it out"
            )
        return records, plan

    def _open(self, records: list[Record], plan: Plan) -> None:
        self.plan = plan
        arena, disk = self.plan.arena_bytes, self.plan.disk_bytes
        self.pool = Pool(arena, budget=HOST) if arena else None
        self.store: DiskStore | None = None
        try:
            if disk:
                assert self.pool is not None, "what is on disk passes through buffers"
                self.store = DiskStore(
                    self._directories,
                    self.plan.disk_capacity_bytes,
                    metrics=self.metrics,
                    memory=[self.pool.buffer()],
                )
            tiers = Tiers(self.plan, self.pool, self.store)
            self._open_devices(records)
        except BaseException:
            self.close()
            raise
        self.updater = Updater(records, self._recipe, tiers, self._desks, self._homes, self.metrics)

    def _open_devices(self, records: list[Record]) -> None:
        """Desks, homes and transfers for parameters that are on devices."""
        devices = {record.device for record in records if record.device_bytes}
        if not devices:
            return
        memory = [self._lease(self.plan.desk_bytes, "a desk") for _ in range(self.plan.desks)]
        transfers = {d: DeviceTransfer(d, metrics=self.metrics) for d in devices}
        self._desks = Desks(records, memory, transfers, self.plan.has_homes)
        if self.plan.has_homes:
            homes = {r.number: self._home(r) for r in records if r.device_bytes and r.param.numel()}
            verdicts = self._lease(verdicts_bytes(self.plan.params), "verdicts on gradients")
            self._homes = Homes(
                records,
                homes,
                verdicts,
                transfers,
                self.metrics,
                bool(self.config.release_grads),
                self._desks,
            )
            params = {number: records[number].param for number in homes}
            self._hooks = self._watch_gradients(params, self._homes.arrived)

    def _home(self, record: Record) -> Tensor:
        memory = self._lease(home_bytes(self.plan.params[record.number]), f"of {record.name}")
        return memory.view(record.dtype)[: record.param.numel()]

    def _lease(self, nbytes: int, what: str) -> Tensor:
        assert self.pool is not None, "a plan that holds memory has a pool"
        with self.pool.lease(nbytes, what=what) as lease:  # the tensor keeps the memory
            return lease.tensor()

    def step(self) -> None:
        self._look_again()
        before = self.metrics.snapshot(), self.disk_bytes()
        self._watch(before[0].counts.get("steps", 0))
        self.updater.step(self.config.max_grad_norm)
        self.last_step = self.metrics.snapshot() - before[0]
        moved = self.disk_bytes()
        self.last_disk_bytes = moved[0] - before[1][0], moved[1] - before[1][1]

    def _look_again(self) -> None:
        """Make the plan anew where somebody has exchanged, thawed, moved or cast a parameter."""
        self.updater.check_sound()
        if self.optimizer.state:
            raise StateError(
                "optimizer.state: something was put there, but the state of a wrapped optimizer is "
                "elsewhere; use load_state_dict, or close() first"
            )
        self._check_shapes()
        now, records = _each_param(self.optimizer), self.updater.records
        same = len(now) == len(records) and all(
            param is record.param for (param, _, _), record in zip(now, records, strict=True)
        )
        if not same or any(
            r.has_moved or (r.is_frozen and r.param.grad is not None) for r in records
        ):
            self.reopen()
        for record, (_, group, _) in zip(self.updater.records, now, strict=True):
            record.group = group  # may be another dict since

    def _check_shapes(self) -> None:
        for record in self.updater.records:
            if record.param.shape != record.shape:
                raise ConfigError(
                    f"{record.name}: expected the shape {tuple(record.shape)} that it had when it "
                    f"was wrapped, got {tuple(record.param.shape)}; its state does not fit any more"
                )

    def disk_bytes(self) -> tuple[int, int]:
        """Bytes read and written since the store was opened."""
        if self.store is None:
            return 0, 0
        stats = self.store.stats()
        return stats.read_bytes, stats.written_bytes

    def _watch(self, steps_done: int) -> None:
        """Have the first steps checked, if that was asked for."""
        if isinstance(self._recipe, NativeRecipe) and self.config.self_check:
            wanted = steps_done < self.config.self_check
            self._recipe.watch = checked if wanted else lambda *_: nullcontext()

    def forget_gradients(self) -> None:
        """Drop those that are in host memory only."""
        if self._homes is not None:
            self._homes.forget()

    # --- state ------------------------------------------------------------------------------------

    def export(self) -> dict[Tensor, dict[str, Any]]:
        """The state by parameter, as torch keeps it."""
        self._check_shapes()
        states = self.updater.export(self._make)
        return {self.updater.records[number].param: state for number, state in states.items()}

    def _make(self, record: Record) -> Tensor:
        """Memory for one field of a parameter's state that leaves us."""
        if self.store is None:
            return torch.empty_strided(record.shape, record.stride, dtype=torch.float32)
        return mapped_tensor(self._directories[0], record.shape, record.stride)

    def checked(self, state_dict: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        """The states of a `state_dict` by the numbers of our parameters, if they fit."""
        groups = state_dict["param_groups"]
        saved = [number for group in groups for number in group["params"]]
        numbers = {number: index for index, number in enumerate(saved)}
        states = {
            numbers[key]: state for key, state in state_dict["state"].items() if key in numbers
        }
        if len(saved) == len(self.updater.records):  # torch says what is wrong otherwise
            self._check_groups(groups)
            self.updater.check_states(states)
        return states

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """The groups that come need the state that ours have room for."""
        each = [group for group in groups for _ in group["params"]]
        for record, group in zip(self.updater.records, each, strict=True):
            fields = self._recipe.fields(dict(group))
            if fields != record.fields:
                raise ConfigError(
                    f"{record.name}: its group in the state_dict needs the state "
                    f"{fields or 'nothing'}, the plan was made for {record.fields or 'nothing'}; "
                    "close(), load into the plain optimizer, and wrap that"
                )

    def take_in(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        # The groups have been replaced by those of the state_dict.
        for record, (_, group, _) in zip(
            self.updater.records, _each_param(self.optimizer), strict=True
        ):
            record.group = group
        records = self.updater.records
        if any(record.is_frozen and record.number in states for record in records):
            fresh = self._draw_up({records[number].param for number in states})
            self.close()
            self._open(*fresh)
        self.updater.take_in(states)

    def reopen(self) -> None:
        """Make the plan anew, for the optimizer as it is now; state goes over to it."""
        states = self.export()
        fresh = self._draw_up(states)  # refused before anything is given up
        self.close()
        self._open(*fresh)
        numbers = {record.param: record.number for record in self.updater.records}
        here = {numbers[param]: state for param, state in states.items() if param in numbers}
        self.updater.take_in(here)

    def check_addable(self, group: Mapping[str, Any]) -> None:
        params = group["params"]
        for param in [params] if isinstance(params, Tensor) else params:
            tensor = param[1] if isinstance(param, tuple) else param
            if isinstance(tensor, Tensor):
                check_param("a parameter of the new group", tensor)

    def close(self) -> None:
        """Give memory and disk back. Idempotent."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._homes is not None:
            self._homes.close()
        if self.store is not None:
            self.store.close()
        if self._desks is not None:
            self._desks.close()
        self._desks = self._homes = None
        self.updater = None  # type: ignore[assignment]  # it holds the memory
        if self.pool is not None:
            self.pool.close()
        self.store = self.pool = None


def make_records(
    optimizer: torch.optim.Optimizer, recipe: Recipe, with_state: Container[Tensor]
) -> list[Record]:
    """One for each parameter. A frozen one gets no room, unless it has state or a gradient."""
    params = [param for param, _, _ in _each_param(optimizer)]
    if len(set(params)) < len(params):
        raise ConfigError("optimizer: a parameter is there twice; give each once")
    return [
        Record(
            number,
            name,
            param,
            group,
            recipe.fields(group),
            is_frozen=not param.requires_grad and param.grad is None and param not in with_state,
        )
        for number, (param, group, name) in enumerate(_each_param(optimizer))
    ]


def _each_param(
    optimizer: torch.optim.Optimizer,
) -> list[tuple[Tensor, dict[str, Any], str]]:
    found = []
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [
            f"group {index} param {i} {tuple(p.shape)}" for i, p in enumerate(group["params"])
        ]
        found += [(p, group, name) for p, name in zip(group["params"], names, strict=True)]
    return found


def spec_of(record: Record) -> ParamSpec:
    check_param(record.name, record.param)
    if record.is_frozen:
        return ParamSpec(record.name, record.param.numel(), ())  # nothing comes or goes
    fields = ((MASTER,) if record.is_half else ()) + record.fields
    return ParamSpec(record.name, record.param.numel(), fields, record.device_bytes)


def check_param(name: str, param: Tensor) -> None:
    """Refuse what the update cannot handle."""
    if param.dtype not in DTYPES:
        raise ConfigError(
            f"{name}: expected a parameter of float32, bfloat16 or float16, got {param.dtype}"
        )
    if param.is_meta:
        raise ConfigError(f"{name}: is on the meta device and has no values; fill it first")
    if param.layout != torch.strided or not is_dense(param):
        raise ConfigError(
            f"{name}: expected a parameter whose elements lie next to one another, got shape "
            f"{tuple(param.shape)} with strides {param.stride()}; make it contiguous"
        )
