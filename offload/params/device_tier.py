"""The blocks that are on the device: copies to compute with, whose originals are in host memory or
below.

Two stages work at once: blocks are prefetched from the store to host memory further ahead than they
are uploaded from there to the device. Device memory is taken from the transfer and filled on its
own stream; the stream that computes waits for it, the CPU does not. Nothing is ever written back:
to evict a block is to release its memory. A block of which other code holds a view stays; one on
the device needs no host memory until its update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from weakref import WeakSet

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError, OffloadError
from offload.core.locks import attempt
from offload.device.accelerator import DeviceGauge
from offload.device.buffer import HOLDERS, DeviceBuffer, DeviceFullError
from offload.device.device import DeviceTransfer
from offload.params.block import Block, Presence, pinned
from offload.params.copies import Copies
from offload.params.device_budget import DeviceBudget
from offload.params.host_cache import HostCache
from offload.params.prefetch import TierState, look_ahead, make_room
from offload.params.trace import Phase
from offload.planning.unit import on_device_bytes

_DEPTH = 2  # blocks ahead on the device, if the user gave no depth
_TIERS: WeakSet[DeviceTier] = WeakSet()  # of all models; they make room for one another


class DeviceTier(Copies[DeviceBuffer]):
    """The device copies of one model's blocks.

    limit_bytes: for everything on the device.
    least_bytes: for blocks, until the memory of everything else is known.
    depth: blocks ahead that are uploaded; None: the default.
    gauge: measures a device that no other model uses; None: that of the transfer is measured, and
    models there make room for one another.
    """

    escaped = "device_views_escaped"

    def __init__(
        self,
        cache: HostCache,
        transfer: DeviceTransfer,
        limit_bytes: int,
        least_bytes: int,
        depth: int | None,
        gauge: DeviceGauge | None = None,
    ) -> None:
        sizes = [on_device_bytes(block.nbytes) for block in cache.blocks]
        super().__init__(cache, transfer.device, sizes)
        self.transfer = transfer
        self.depth = _DEPTH if depth is None else depth
        self._shown: dict[int, int] = {}  # generations of blocks whose parameters show host memory
        self.device_budget = DeviceBudget(
            gauge or DeviceGauge(transfer.memory),
            limit_bytes,
            least_bytes,
            len(self._blocks),
            self._reclaimable,
        )
        if gauge is None:
            _TIERS.add(self)
            HOLDERS.add(self)

    def expect(self, numel: int) -> None:
        """Note that a run of the model on `numel` elements begins."""
        with self._lock:
            self.device_budget.expect(numel)

    # --- what is needed now -----------------------------------------------------------------------

    @contextmanager
    def moving(self, use: tuple[Phase, int] | None = None) -> Iterator[None]:
        """Account for device memory that blocks take or release inside. Wrap every such section in
        it.
        """
        self.transfer.poll()
        self._has_uploaded()
        with self.device_budget.moving(use):
            yield

    def bring(self, needed: Sequence[Block], use: tuple[Phase, int] | None, is_shown: bool) -> None:
        """Make sure that all these blocks are on the device, or that their upload has begun."""
        with self.moving(use):
            absent = [block for block in needed if block.on_device is Presence.AWAY]
            self._metrics.count("device_misses", len(absent))
            self._metrics.count("device_hits", len(needed) - len(absent))
            self._current = frozenset(block.number for block in needed)
            self._reserve(absent)
            with pinned(absent, self._lock):
                self._upload(absent)
            for block in needed if is_shown else ():
                self.attach(block)

    def _reserve(self, absent: Sequence[Block]) -> None:
        """Allocate device memory for all these blocks, to be filled; evict other blocks if there is
        no room. When this raises, none of them has any.
        """
        uses = self._cache.prefetch.uses()
        self._make_room(sum(self._sizes[block.number] for block in absent), uses)
        try:
            for block in absent:
                self._allocate(block)
        except BaseException:
            for block in absent:
                self.forget(block)
            raise

    def _make_room(self, nbytes: int, uses: Mapping[int, int]) -> None:
        tier = self._tier()
        chosen = make_room(tier, uses, nbytes)
        for number in tier.held - tier.pinned if chosen is None else chosen:
            self.evict(self._blocks[number])
        held, others = self.transfer.memory.used_bytes, self.device_budget.others_bytes
        limit = self.device_budget.limit_bytes
        if nbytes and held + others + nbytes > limit:
            raise CapacityError(
                f"{self.device}: parameters that are used now need {format_size(nbytes)} "
                f"({nbytes} bytes); of {format_size(limit)} activations, gradients and others hold "
                f"{format_size(others)}, pinned parameters {format_size(held)}; raise "
                "device_memory, or use a smaller batch"
            )

    def _allocate(self, block: Block, is_urgent: bool = True) -> None:
        for peer in self._peers():
            excess = self.device_budget.excess_bytes(self._sizes[block.number])
            if excess > 0:
                peer.give_way(excess)
        buffer = self.transfer.allocate(block.nbytes, block.name, is_urgent)
        self._buffers[block.number] = buffer
        self._place(block, buffer.address)

    def _upload(self, absent: Sequence[Block]) -> None:
        """Fetch these blocks to host memory, and upload them from there to their memory on the
        device. When this raises, those that are not uploaded have no device memory.
        """
        waiting = list(absent)  # for host memory
        try:
            for block in absent:
                is_away = block.in_host is Presence.AWAY
                self._metrics.count("parameter_misses" if is_away else "parameter_hits")
                if block.in_host is Presence.HERE:  # before what must be read
                    self._fill(block)
                    waiting.remove(block)
            self._cache.fetch(waiting, absent)
            self._fetch_ahead()
            while waiting:
                self._cache.arrive(waiting[0])
                self._fill(waiting[0])
                del waiting[0]
        except BaseException:
            for block in waiting:
                self.forget(block)
            raise

    def _fill(self, block: Block) -> None:
        """Start to upload a block that is resident in host memory."""
        assert block.memory is not None and block.in_host is Presence.HERE, block.name
        self._uploads[block.number] = self._buffers[block.number].fill(block.memory)
        block.copying = partial(self.await_upload, block)

    def _memory_here(self, block: Block) -> Tensor:
        memory = self._buffers[block.number].use()
        if block.on_device is Presence.COMING:
            block.move_on_device(Presence.HERE)
        return memory

    # --- what will be needed ----------------------------------------------------------------------

    def _fetch_ahead(self) -> None:
        uses = self._cache.prefetch.uses()
        self._take_in_what_has_come()
        self._upload_ahead(uses)
        soon = islice(uses, self._cache.prefetch.depth)
        self._cache.look_ahead(sum(self._blocks[n].on_device is Presence.AWAY for n in soon))

    def _take_in_what_has_come(self) -> None:
        """End the reads that the store has finished: those blocks can be uploaded."""
        for block in self._blocks:
            if block.in_host is Presence.COMING and (block.reading is None or block.reading.done):
                try:
                    self._cache.arrive(block)
                except OffloadError:  # the use of the block reads again, and raises
                    self._metrics.count("prefetches_failed")

    def _upload_ahead(self, uses: Mapping[int, int]) -> None:
        """Start to upload the blocks that are used next and are in host memory already."""
        moves = look_ahead(self._tier(), uses, self.depth)
        ready = [n for n in moves.fetch if self._blocks[n].in_host is Presence.HERE]
        if not ready:
            return
        for number in moves.evict:
            if not self.evict(self._blocks[number]):
                return
        for number in ready:
            try:
                self._allocate(self._blocks[number], is_urgent=False)
            except DeviceFullError:  # less memory than was allowed; not to be tried at every use
                self._metrics.count("device_prefetches_without_room")
                self._learn_limit(self._sizes[number])
                return
            self._fill(self._blocks[number])

    def _tier(self) -> TierState:
        escaped = self.transfer.memory.used_bytes - self.held_bytes
        return self._tier_within(self.device_budget.blocks_bytes - max(0, escaped))

    def _may_go(self, block: Block) -> bool:
        return super()._may_go(block) and not self._is_held_elsewhere(block)

    def _is_held_elsewhere(self, block: Block) -> bool:
        own = len(block.unit.members) if block.is_attached else 0
        return self._buffers[block.number].views > own

    # --- other models on the same device ----------------------------------------------------------

    def _peers(self) -> list[DeviceTier]:
        tiers = _TIERS if self in _TIERS else ()
        return [t for t in tiers if t is not self and t.device == self.device]

    def _reclaimable(self) -> int:
        return sum(peer.idle_bytes for peer in self._peers())

    def _idle(self) -> list[Block]:
        """List the blocks on the device that are not in use, the largest first."""
        found = [self._blocks[number] for number in self._buffers]
        found = [b for b in found if not b.device_pins and not self._is_held_elsewhere(b)]
        return sorted(found, key=lambda block: block.nbytes, reverse=True)

    def make_way(self, device: torch.device, nbytes: int) -> None:
        """Evict idle blocks, since another allocation of `nbytes` found the device full, and let
        blocks have less from now on.
        """
        if device != self.device:
            return
        with attempt(self._lock) as is_idle:  # never waits for another
            if not is_idle:
                return
            with self.moving():
                self._learn_limit(nbytes)
                for block in [b for b in self._idle() if self._may_go(b)]:
                    self.evict(block)

    def _learn_limit(self, nbytes: int) -> None:
        """Lower the budget: it allowed `nbytes` more than the device has."""
        if self.device_budget.lower(nbytes):
            self._metrics.note(
                f"memory of {self.device}",
                f"it was full when {format_size(nbytes)} more were wanted within device_memory of "
                f"{format_size(self.device_budget.limit_bytes)}: other processes, the device's own "
                "libraries and fragmentation take memory, too; fewer parameters stay there from "
                "now on; "
                "lower device_memory",
            )

    @property
    def idle_bytes(self) -> int:
        """The bytes that would be evicted for another model."""
        with attempt(self._lock) as is_idle:  # two models may ask each other
            return sum(self._sizes[block.number] for block in self._idle()) if is_idle else 0

    def give_way(self, nbytes: int) -> None:
        """Evict idle blocks for another model until `nbytes` are released, as far as possible."""
        with attempt(self._lock) as is_idle:  # two models may ask each other
            if not is_idle:
                return
            with self.moving():
                for block in self._idle():
                    if nbytes > 0 and self.evict(block):
                        nbytes -= self._sizes[block.number]

    # --- eviction ---------------------------------------------------------------------------------

    def evict(self, block: Block) -> bool:
        """Evict a block from the device. Return False if it is in use or other code holds a view of
        it.
        """
        if block.device_pins or self._is_held_elsewhere(block):
            self._metrics.count("device_drops_refused")
            return False
        self.forget(block)
        self._metrics.count("device_drops")
        return True

    # --- changes ----------------------------------------------------------------------------------

    def changed(self, block: Block) -> None:
        super().changed(block)
        if block.number not in self._shown:
            self._stale(block)

    def _stale(self, block: Block) -> None:
        """Drop or refresh the device copy, since the block's values in host memory have changed."""
        if block.device_pins and block.is_attached:
            self._refresh(block)
        elif block.on_device is not Presence.AWAY:
            self._note_seen(block)  # changes to the old copy are not wanted
            with self.moving():
                self.forget(block)

    def _refresh(self, block: Block) -> None:
        """Copy the values in host memory to the parameters that are attached."""
        self._fill(block)
        block.show(self._memory_here(block))
        self._note_seen(block)

    def end_update(self) -> None:
        """Upload new values ahead of their use."""
        self.watch_edits()
        with self._lock, self.moving():
            self._fetch_ahead()

    def watch_edits(self, is_in_backward: bool = False) -> None:
        with self._lock:
            super().watch_edits(is_in_backward)
            if not is_in_backward:
                self.device_budget.end_run()

    @contextmanager
    def exposed(self, needed: Sequence[Block]) -> Iterator[None]:
        with self._fetched(needed), super().exposed(needed):  # changes have memory to go to
            yield

    @contextmanager
    def in_host(self, needed: Sequence[Block], only_looks: bool = False) -> Iterator[None]:
        """Show the parameters in host memory inside the `with`; a change of them there is a change
        of the block itself.
        """
        with self._fetched(needed):
            try:
                with self._lock:
                    for block in needed:
                        self._show(block)
                yield
            finally:
                with self._lock:
                    for block in needed:
                        self._end_showing(block)

    @contextmanager
    def _fetched(self, needed: Sequence[Block]) -> Iterator[None]:
        with pinned(needed, self._lock):
            with self._lock:
                self._cache.fetch(needed, needed)
                for block in needed:
                    self._cache.arrive(block)
            yield

    def _show(self, block: Block) -> None:
        self._take_back(block)
        self._cache.await_copy(block)
        self._shown[block.number] = block.generation
        assert block.memory is not None
        block.show(block.memory)

    def _end_showing(self, block: Block) -> None:
        generation = self._shown.pop(block.number, None)
        if generation is None:
            return
        if block.is_attached:
            self._refresh(block)
            return
        self.hide(block)
        if block.generation != generation:
            self._stale(block)

    # --- beginning and end ------------------------------------------------------------------------

    def take_over(self, block: Block, has_own_values: bool) -> None:
        self.hide(block)

    def values_to_return(self, block: Block) -> Tensor:
        self.forget(block)
        self._cache.await_copy(block)
        return self._cache.memory_of(block)
