"""A prepared model and its optimizer: one pool, one store, and the engine that moves data between
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar
from weakref import finalize

import torch
from torch import Tensor, nn

from offload.core.budget import HOST, Share
from offload.core.errors import ConfigError, OffloadError
from offload.core.heap import HEAP, resident_bytes, used_by
from offload.core.locks import steadfast, uninterrupted
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.core.pool import PIECE_ALIGN, Pool
from offload.device.accelerator import used_bytes
from offload.device.device import READS_IN_FLIGHT_BYTES, DeviceTransfer
from offload.distributed.consensus import by_consensus
from offload.distributed.device_network import DeviceNetwork
from offload.distributed.ranks import Ranks
from offload.optim import Session, attach
from offload.optim.consistency import clear_frames
from offload.optim.records import OptimizerDraft
from offload.params.activation_store import DiskActivations, HostActivations
from offload.params.activations import Activations, ActivationStore
from offload.params.engine import Engine
from offload.params.gathered import (
    DeviceGatheredBlockMemory,
    GatheredBlockMemory,
    HostGatheredBlockMemory,
)
from offload.params.hooks import forget_interrupted_backward
from offload.params.mean_gradients import ShardContext
from offload.params.model_methods import ModelBuffers, ReplacedModelMethods
from offload.params.prepare_plan import PreparePlan, same_random
from offload.params.prepared_coordinator import (
    PreparedCoordinator,
    ShardedModelCoordinator,
    no_sync,
)
from offload.params.recompute import Recompute, layers_of
from offload.params.residency import Device
from offload.params.trace import Trace
from offload.planning.layout import round_up
from offload.storage.disk import DiskStore
from offload.storage.files import BLOCK_BYTES
from offload.storage.growing import GrowingStore
from offload.storage.handout import Outgoing

T = TypeVar("T")
_PREPARED = "_offload_prepared"
_NO_SYNC = "no_sync"


def refuse_prepared(model: nn.Module) -> None:
    """Refuse a model of which a part, or the whole, is prepared already."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for name, module in model.named_modules():
        if prepared_of(module) is not None:
            what = f"its {name}" if name else "it"
            raise ConfigError(f"model: {what} is prepared already; offload.close(...) that first")


def prepared_of(module: object) -> Prepared | None:
    """Return what a module was prepared with, as a whole model or as a part of one; None: it is not
    prepared.
    """
    found: Prepared | None = getattr(module, _PREPARED, None)
    return found


class Prepared:
    """A prepared model, with or without an optimizer, and the memory, store and engine that serve
    it.

    It takes over the plan and closes what the plan has open. If the constructor raises, nothing has
    changed.
    """

    def __init__(
        self,
        prepare_plan: PreparePlan,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        ranks: Ranks | None = None,
    ) -> None:
        self.prepare_plan = prepare_plan
        self.ranks = ranks  # the ranks that the model is sharded over; None: not sharded
        self.config, self.units = prepare_plan.config, prepare_plan.units
        self.plan = prepare_plan.plan
        self.shares = self.plan.shares
        self.metrics = Metrics(strict=self.config.strict)
        prepare_plan.chosen.begin(self.metrics)
        if prepare_plan.device_note is not None:
            self.metrics.fall_back("device_memory", prepare_plan.device_note)
        self._unit_of = prepare_plan.unit_of
        self._directories = prepare_plan.directories
        self.pool: Pool | None = None
        self.state_pool: Pool | None = None
        self.store: DiskStore | None = None
        self._spare: DiskStore | None = None
        self.transfer: DeviceTransfer | None = None
        self.buffers: ModelBuffers | None = None
        self.engine: Engine | None = None
        self.recompute: Recompute | None = None
        self._taken: list[Share] = []  # of the budget, for memory that is allocated elsewhere
        self.session: Session | None = None
        self._start = prepare_plan.start
        try:
            if self._start is not None:
                self._start.begin()
            by_consensus(ranks, "memory and disk", self._open_memory)
            self._watch_memory()
            by_consensus(ranks, "device", self._open_device)
            shard_context = self._shard_context()
            with same_random(ranks):
                by_consensus(
                    ranks, "the start of the model", lambda: self._open_model(model, shard_context)
                )
            self._open_activations(model)
            draft, prepare_plan.draft = prepare_plan.draft, None  # it holds state of torch's
            if optimizer is not None and draft is not None:
                by_consensus(
                    ranks, "optimizer state", lambda: self._open_optimizer(optimizer, draft)
                )
            assert self.engine is not None
            self.engine.residency.commit()
        except BaseException:
            if self._start is not None and self.engine is not None:
                self._start.forget(self.engine.residency)
            start = self._start
            self._close_model()
            if start is not None:
                start.restore()
            raise

    def _open_memory(self) -> None:
        shares = self.shares
        # Blocks are leased and released all the time. What the optimizer keeps is in a pool of its
        # own, so that it does not fragment theirs. On the CPU autograd allocates the gradients.
        sharding = self.prepare_plan.sharding
        is_made_here = self.prepare_plan.is_on_cpu and sharding is None
        # For blocks, and for gradients or the staging memory that spilled ones pass through.
        params = shares.params + (shares.staging if is_made_here else shares.gradients)
        self.pool = self._copied_pool(max(params, PIECE_ALIGN))
        if sharding is not None and not sharding.on_device:
            self._take_share(sharding.fixed_bytes, "whole parameters and gradients")
        if is_made_here:
            self._take_share(shares.gradients - shares.staging, "gradients")
        if shares.state:
            self.state_pool = Pool(shares.state, budget=HOST)  # never copied to a device
        memory = [pool.buffer() for pool in (self.pool, self.state_pool) if pool]
        room = self.plan.disk_room_bytes
        if room:
            options = self.prepare_plan.chosen.store_options
            self.store = DiskStore(
                self._directories, room, metrics=self.metrics, memory=memory, **options
            )

    def _copied_pool(self, nbytes: int) -> Pool:
        """Open a pool of memory that is copied to and from the device, if there is one."""
        return Pool(nbytes, budget=HOST, device=self.prepare_plan.device, metrics=self.metrics)

    def _watch_memory(self) -> None:
        """Sample the memory in use, for the timeline. The metrics hold only weak references."""
        watched = {"host: parameters": self.pool, "host: optimizer state": self.state_pool}
        for name, pool in watched.items():
            if pool is not None:
                self.metrics.watch(name, used_by(pool))
        if self.store is not None:
            self.metrics.watch("disk", used_by(self.store))
        if not self.prepare_plan.is_on_cpu:
            self.metrics.watch("device", partial(used_bytes, self.prepare_plan.device))
        self.metrics.watch("process", resident_bytes)
        HEAP.serve(self, self.metrics)

    def _take_share(self, nbytes: int, what: str) -> None:
        """Reserve a share of the budget for memory that is allocated elsewhere, until this object
        is collected.
        """
        share = HOST.take(nbytes, what)
        finalize(self, share.release).atexit = False
        self._taken.append(share)

    def _open_spare(self) -> DiskStore | None:
        """Open a store for frozen blocks that the plan left in their weight files, and that were
        changed all the same.
        """
        stored = {unit.number for unit in self.prepare_plan.stored}
        left = [self.prepare_plan.host_bytes_of(u) for u in self.units if u.number not in stored]
        room = sum(round_up(nbytes, BLOCK_BYTES) for nbytes in left)
        if self._directories and room and self._spare is None:
            LOG.info("weights that were to stay in their files are changed, and are swapped now")
            room += min(room, self.shares.params)
            self._spare = DiskStore(self._directories, room, metrics=self.metrics)
        return self._spare

    def _open_device(self) -> None:
        if self.prepare_plan.is_on_cpu:
            return
        # At most one unit's gradients may wait on the device for their download.
        waiting = max((unit.nbytes for unit in self.units), default=0)
        self.transfer = DeviceTransfer(
            self.prepare_plan.device,
            reads_in_flight_bytes=min(waiting, READS_IN_FLIGHT_BYTES),
            metrics=self.metrics,
        )

    def _open_model(self, model: nn.Module, shard_context: ShardContext | None) -> None:
        assert self.pool is not None
        wanted = self.config.prefetch_depth
        depth = None if wanted == "auto" else int(wanted)
        device = Device(self.transfer, self.plan.device_bytes) if self.transfer else None
        if self._start is not None:
            self._start.open(self.metrics, self.store)
        self.engine = Engine(
            model,
            self.units,
            self.pool,
            self.store,
            self.metrics,
            depth,
            keeps_gradients=self.shares.gradients + self.shares.gradients_on_disk > 0,
            spill=self.prepare_plan.spill,
            start=self._start,
            on=device,
            shard_context=shard_context,
        )
        if not self.prepare_plan.is_on_cpu:
            self.buffers = ModelBuffers(
                model, self.prepare_plan.device
            )  # buffers have their values now
        residency = self.engine.residency
        residency.cache.has_room_for_all = self.shares.holds_all_params
        residency.cache.store.open_spare = self._open_spare
        self.services = ReplacedModelMethods(
            model, residency, self._unit_of, self._directories, self.metrics, self._tell_age
        )
        for module in model.modules():
            object.__setattr__(module, _PREPARED, self)
        if self.ranks is not None and not hasattr(model, _NO_SYNC):  # as in DDP
            object.__setattr__(model, _NO_SYNC, self.no_sync)

    def _tell_age(self) -> None:
        if self.session is not None:
            self.session.consistency.tell("model.state_dict()")

    def check_age(self) -> None:
        """Raise if a step or a load has failed halfway, so that the parameters
        must not be saved.
        """
        if self.session is not None:
            self.session.consistency.check()

    def _shard_context(self) -> ShardContext | None:
        sharding = self.prepare_plan.sharding
        if self.ranks is None or sharding is None:
            return None
        gather_memory: GatheredBlockMemory = HostGatheredBlockMemory(self.ranks)
        if self.transfer is not None:
            network = DeviceNetwork(self.ranks, self.transfer)  # a collective: needs all ranks
            gather_memory = DeviceGatheredBlockMemory(network, self.plan.device_left_bytes)
        return ShardContext(self.ranks, sharding, gather_memory, self.prepare_plan.spilled_units)

    def _open_activations(self, model: nn.Module) -> None:
        assert self.engine is not None
        if self.config.activations == "recompute":
            blocks = self.engine.residency.blocks
            layers = layers_of(model, self.units, self.prepare_plan.has_choice)
            if not layers:
                self.metrics.fall_back(
                    "recomputation of activations",
                    "no layer is in a list of layers, and none was chosen by units=...: all that "
                    "they make is kept",
                )
            self.recompute = Recompute(
                layers,
                lambda unit: tuple(blocks[number].generation for number in unit.needs),
                self.metrics,
                saving=self.engine.saving,
            )
            self.engine.recomputes = True
        elif self.config.activations == "offload":
            device = self.engine.device
            self.engine.activations = Activations(
                self._activation_store(device), device, self.metrics
            )

    def _activation_store(self, device: torch.device) -> ActivationStore:
        """Open the store that activations are offloaded to."""
        nbytes = self.shares.activations
        store = GrowingStore(self._directories, self.metrics) if self._directories else None
        if device.type != "cpu":
            transfer = DeviceTransfer(device, metrics=self.metrics)
            return HostActivations(transfer, self._copied_pool(nbytes), store)
        assert store is not None, "check_preparable has seen it"
        self._take_share(nbytes, "activations")
        return DiskActivations(store, nbytes)

    def _open_optimizer(self, optimizer: torch.optim.Optimizer, draft: OptimizerDraft) -> None:
        assert self.engine is not None
        plan, sharding = self.prepare_plan, self.prepare_plan.sharding
        given = plan, self.engine, self.state_pool, self.store, self
        coordinator = (
            PreparedCoordinator(*given)
            if self.ranks is None or sharding is None
            else ShardedModelCoordinator(self.ranks, sharding, *given)
        )
        for record in draft.records:
            record.note_param()  # it has been taken into the model's memory since
        coordinator.share_out(draft.records)
        session = Session(optimizer, draft, self.config, coordinator)
        try:
            session.updater.take_in(draft.states)
        except BaseException:
            session.close()
            raise
        self.session = session
        attach(optimizer, session)

    # --- for users --------------------------------------------------------------------------------

    def no_sync(self) -> AbstractContextManager[None]:
        assert self.engine is not None
        return no_sync(self.engine)

    @contextmanager
    def resident(self, module: nn.Module) -> Iterator[None]:
        assert self.engine is not None
        own = [self._unit_of[p] for p in module.parameters() if p in self._unit_of]
        units = list({unit.number: unit for unit in own}.values())
        with self.engine.resident(units):
            yield

    @property
    def stores(self) -> list[DiskStore]:
        """All open stores of parameters and optimizer state."""
        return [store for store in (self.store, self._spare) if store is not None]

    @property
    def trace(self) -> Trace:
        """The trace of unit uses."""
        assert self.engine is not None
        return self.engine.residency.prefetch.trace

    @contextmanager
    def at_hand(self, number: int, to_change: bool = False) -> Iterator[None]:
        """Keep the parameters of a unit in host memory while the block runs. to_change: the caller
        changes them there.
        """
        assert self.engine is not None
        residency = self.engine.residency
        with residency.in_host([self.units[number]]):
            if to_change:
                residency.changed(residency.blocks[number])
            yield

    # --- end --------------------------------------------------------------------------------------

    @uninterrupted
    def close(self) -> None:
        """Turn model and optimizer into ordinary ones again. Idempotent."""
        if self.ranks is not None and self.ranks.is_broken:
            LOG.error("close(): other ranks cannot be asked any more: parameters have no values")
        session = self.session
        if session is not None and session.is_alive:
            session.optimizer.close()  # type: ignore[attr-defined]  # ends with `ended`
        else:
            self.ended()

    @uninterrupted
    def ended(self) -> None:
        """Turn the model into an ordinary one again; the optimizer is one already."""
        if self.session is not None:
            self.session.end()
            self.session = None
        self._close_model(is_room_first=True)

    def _close_model(self, is_room_first: bool = False) -> None:
        """Return the parameters to the user's memory and close everything. is_room_first: allocate
        the places of all parameters before anything changes; else allocate each when it is needed.
        """
        if self.engine is not None:
            try:
                with self.services.rooms(is_room_first) as make:
                    self._close_engine(self.engine, make)
            except OffloadError as error:
                clear_frames(error)  # they hold the memory that the next call needs
                raise
        self._close_rest()

    def _close_engine(self, engine: Engine, make: Callable[[Tensor], Outgoing]) -> None:
        """Close the engine and undo what it has attached to the model. make: allocates the places
        of parameters.
        """
        if self.recompute is not None:
            self.recompute.close()
            self.recompute = None
        if engine.activations is not None:
            engine.activations.close()
        self.services.close()
        engine.close(make)
        for module in engine.model.modules():
            object.__delattr__(module, _PREPARED)
        if vars(engine.model).get(_NO_SYNC) == self.no_sync:
            object.__delattr__(engine.model, _NO_SYNC)
        self.engine = None

    @steadfast  # the model has no reference to this object any more: no later call could close it
    def _close_rest(self) -> None:
        """Close everything that exists without an engine, too."""
        forget_interrupted_backward()  # its graph would hold the engine, and memory of it
        for share in self._taken:
            share.release()
        self._taken = []
        if self.buffers is not None:
            self.buffers.return_to_model()
        opened = self.transfer, self.store, self._spare, self._start, self.pool, self.state_pool
        for each in (*opened, self.ranks):  # the store's engine reads the start's files
            if each is not None:
                each.close()
        self.buffers = self.transfer = self._start = None
        self.store = self._spare = self.pool = self.state_pool = None
