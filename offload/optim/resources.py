"""The resources of an optimizer while a plan is in force: memory, disk, and transfers to its
devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from offload.core.budget import HOST
from offload.core.heap import HEAP, resident_bytes, used_by
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.device import DeviceTransfer
from offload.optim.export import OptimizerStateGatherer
from offload.optim.grad_buffers import GradBuffers
from offload.optim.recipe import Record
from offload.optim.staging import DeviceStaging, StagingProvider
from offload.optim.tiers import Tiers
from offload.planning.state_plan import Plan, grad_buffer_bytes, verdicts_bytes
from offload.storage.disk import DiskStore

T = TypeVar("T")

# Registers a function to be called with the number of each parameter whose gradient has arrived;
# returns the hook handles, whose `remove` ends it.
Watch = Callable[[Mapping[int, Tensor], Callable[[int], None]], list[Any]]


# The same with a second function, called when a backward pass with such gradients has ended.
WatchPasses = Callable[[Mapping[int, Tensor], Callable[[int], None], Callable[[], None]], list[Any]]


class Resources(Protocol):
    """The resources of one optimizer: opened for records and a plan, and closed once."""

    pool: Pool | None  # of optimizer state
    copies: Pool | None  # of copies to and from devices, where there are any
    store: DiskStore | None
    tiers: Tiers
    staging_buffers: StagingProvider | None  # None: parameters are updated in place
    grad_buffers: GradBuffers | None

    def close(self) -> None:
        """Release everything. Idempotent."""


class ParamOwner(Protocol):
    """The interface of a prepared model, which owns the memory, the disk and the parameters."""

    metrics: Metrics

    def unit_of(self, param: Tensor) -> int | None:
        """Return the number of the unit that owns the parameter."""

    def original_device_of(self, param: Tensor) -> torch.device:
        """Return the device of the parameter after the model is closed and is an ordinary one
        again.
        """

    def own_of(self, param: Tensor) -> tuple[int, int] | None:
        """Return the parameter's elements that belong to this rank; None: all."""

    def by_consensus(self, look: Callable[[], T], tell: Callable[[T], Mapping[str, object]]) -> T:
        """Return the result of `look`, if it raises on no rank and if `tell` describes it alike on
        all ranks.
        """

    def sum_over_ranks(self, value: float) -> float:
        """Sum the values of all ranks; return the value itself where there is one rank only."""

    def no_sync(self) -> AbstractContextManager[None]:
        """Leave gradients unreduced while the block runs."""

    def gatherer(self, records: Sequence[Record]) -> OptimizerStateGatherer | None:
        """Make a gatherer for the parts of these records' state that are on other ranks; None:
        there are no other ranks.
        """

    @property
    def has_lost_ranks(self) -> bool:
        """Whether other ranks hold a part of everything and are out of reach."""

    def check_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse a step that would go wrong."""

    def check(self, records: Sequence[Record], plan: Plan) -> None:
        """Refuse parameters and plans that the model was not prepared for. Changes nothing."""

    def make_resources(self, records: Sequence[Record], plan: Plan) -> Resources: ...

    def ended(self) -> None:
        """Note that the optimizer is a plain one again."""


class OptimizerOwnResources:
    """A pool and a store that belong to the optimizer alone. Nothing stays open when the
    constructor raises.
    """

    def __init__(
        self,
        records: Sequence[Record],
        plan: Plan,
        directories: Sequence[Path],
        metrics: Metrics,
        release_grads: bool,
        watch: Watch,
        store_options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._plan = plan
        self._metrics = metrics
        self._hooks: list[Any] = []
        self.staging_buffers: StagingProvider | None = None
        self.grad_buffers: GradBuffers | None = None
        self.transfers: Mapping[torch.device, DeviceTransfer] = {}
        self.store: DiskStore | None = None
        self.pool: Pool | None = None
        self.copies: Pool | None = None
        try:
            self._open_pools(records)
            if plan.disk_bytes:
                assert self.pool is not None, "what is on disk passes through buffers"
                memory = [self.pool.buffer()]
                room = plan.disk_capacity_bytes
                self.store = DiskStore(
                    directories, room, metrics=metrics, memory=memory, **store_options
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
        if not devices:
            return
        memory = [
            self._lease(self._plan.staging_buffer_bytes, "a staging buffer")
            for _ in range(self._plan.staging_buffers)
        ]
        self.transfers = transfers = {d: DeviceTransfer(d, metrics=self._metrics) for d in devices}
        self.staging_buffers = staging_buffers = DeviceStaging(
            records, memory, transfers, self._plan.grads_are_here
        )
        if self._plan.has_grad_buffers:
            places = {
                r.number: self._home(r) for r in records if r.device_bytes and r.param.numel()
            }
            verdicts = self._lease(verdicts_bytes(self._plan.params), "verdicts on gradients")
            self.grad_buffers = GradBuffers(
                records, places, verdicts, transfers, self._metrics, release_grads, staging_buffers
            )
            params = {number: records[number].param for number in places}
            self._hooks = watch(params, self.grad_buffers.arrived)

    def _home(self, record: Record) -> Tensor:
        memory = self._lease(
            grad_buffer_bytes(self._plan.params[record.number]), f"of {record.name}"
        )
        return memory.view(record.dtype)[: record.param.numel()]

    def _lease(self, nbytes: int, what: str) -> Tensor:
        assert self.copies is not None, "a plan for devices has memory for their copies"
        with self.copies.lease(nbytes, what=what) as lease:  # the tensor keeps the memory
            return lease.tensor()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.grad_buffers is not None:
            self.grad_buffers.close()
        if self.store is not None:
            self.store.close()
        if self.staging_buffers is not None:
            self.staging_buffers.close()
        self.staging_buffers = self.grad_buffers = self.store = None
        self.transfers = {}
        self.tiers = None  # type: ignore[assignment]  # it holds memory
        for pool in (self.pool, self.copies):
            if pool is not None:
                pool.close()
        self.pool = self.copies = None
