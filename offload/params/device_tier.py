"""The blocks that are on the device: copies to compute with, whose originals are in host memory or
below.

Device memory is taken from the transfer and filled from host memory on its own stream; the stream
that computes waits for it, the CPU does not. Nothing is ever written back: to evict a block is to
release its memory. A block of which other code holds a view stays. Parameters that are not in use
are placeholders, in whichever tier the bytes of their block are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.core.locks import attempt
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.device import HOLDERS, DeviceBuffer, DeviceFullError, DeviceGauge, DeviceTransfer
from offload.params.block import Block, Presence
from offload.params.copies import Copies
from offload.params.device_budget import DeviceBudget
from offload.params.placeholder import Owner, restore
from offload.params.prefetch import TierState, look_ahead, make_room
from offload.params.trace import Phase
from offload.planning.unit import on_device_bytes

_TIERS: WeakSet[DeviceTier] = WeakSet()  # of all models; they make room for one another


class DeviceTier(Copies):
    """The device copies of one model's blocks.

    limit_bytes: for everything on the device.
    least_bytes: for blocks, until the memory of everything else is known.
    depth: blocks ahead that are prefetched.
    take_back: called with a block that was changed on the device, before its copy there is
    released.
    lock: callers hold it.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        transfer: DeviceTransfer,
        limit_bytes: int,
        least_bytes: int,
        owner: Owner,
        metrics: Metrics,
        depth: int,
        take_back: Callable[[Block], None],
        lock: threading.RLock,
    ) -> None:
        super().__init__(transfer.device, owner, take_back, lock)
        self.transfer = transfer
        self.depth = depth
        self._blocks = blocks
        self._sizes = [on_device_bytes(block.nbytes) for block in blocks]
        self._metrics = metrics
        self._buffers: dict[int, DeviceBuffer] = {}
        self._uploads: dict[int, Ticket[None]] = {}  # copies out of host memory, until waited for
        gauge = DeviceGauge(transfer.memory)
        self.device_budget = DeviceBudget(
            gauge, limit_bytes, least_bytes, len(blocks), self._reclaimable
        )
        _TIERS.add(self)
        HOLDERS.add(self)

    # --- what is needed now -----------------------------------------------------------------------

    @contextmanager
    def moving(self, use: tuple[Phase, int] | None = None) -> Iterator[None]:
        """Account for device memory that blocks take or release inside. Wrap every such section in
        it.
        """
        self.transfer.poll()
        for number in [n for n, ticket in self._uploads.items() if ticket.done]:
            self._uploads.pop(number).wait()  # it holds the host memory
        with self.device_budget.moving(use):
            yield

    def reserve(self, needed: Sequence[Block], uses: Mapping[int, int]) -> None:
        """Allocate device memory for all these blocks, to be filled; evict other blocks if there is
        no room. When this raises, none of them has any.
        """
        self._current = frozenset(block.number for block in needed)
        absent = [block for block in needed if block.on_device is Presence.AWAY]
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
                f"{self.transfer.device}: parameters that are used now need {format_size(nbytes)} "
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
        if block.nbytes:
            self._by_address[buffer.address] = block
        block.move_on_device(Presence.COMING)

    def fill(self, block: Block) -> None:
        """Start to upload a block that is resident in host memory."""
        assert block.memory is not None and block.in_host is Presence.HERE, block.name
        self._uploads[block.number] = self._buffers[block.number].fill(block.memory)

    def memory_of(self, block: Block) -> Tensor:
        """Return the block's bytes on the device, for the current stream; they stay as long as the
        tensor is held.
        """
        memory = self._buffers[block.number].use()
        if block.on_device is Presence.COMING:
            block.move_on_device(Presence.HERE)
        return memory

    def address_of(self, block: Block) -> int:
        return self._buffers[block.number].address

    # --- what will be needed ----------------------------------------------------------------------

    def fetch_ahead(self, uses: Mapping[int, int]) -> None:
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
            self.fill(self._blocks[number])

    def _tier(self) -> TierState:
        held = {b.number for b in self._blocks if b.on_device is not Presence.AWAY}
        pinned = {n for n in held if not self._may_go(self._blocks[n])}
        escaped = self.transfer.memory.used_bytes - sum(self._sizes[n] for n in held)
        budget = self.device_budget.blocks_bytes - max(0, escaped)
        return TierState(self._sizes, budget, held, pinned)

    def _may_go(self, block: Block) -> bool:
        if block.device_pins or block.number in self._current or block.number in self.kept:
            return False
        return not self._is_held_elsewhere(block)

    def _is_held_elsewhere(self, block: Block) -> bool:
        own = len(block.unit.members) if block.is_attached else 0
        return self._buffers[block.number].views > own

    # --- other models on the same device ----------------------------------------------------------

    def _peers(self) -> list[DeviceTier]:
        device = self.transfer.device
        return [t for t in _TIERS if t is not self and t.transfer.device == device]

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
        if device != self.transfer.device:
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
                f"memory of {self.transfer.device}",
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

    def forget(self, block: Block) -> None:
        """Release the block's device memory, if it has any, after changes there are taken back.
        Views that other code holds stay valid.
        """
        if block.on_device is Presence.AWAY:
            return
        if block.is_attached:
            self.detach(block)
        buffer = self._buffers.pop(block.number)
        self._by_address.pop(buffer.address, None)
        block.move_on_device(Presence.AWAY)
        if not buffer.release():
            self._metrics.count("device_views_escaped")

    def stale(self, block: Block) -> None:
        """Drop or refresh the device copy, since the block's values in host memory have changed."""
        if block.device_pins and block.is_attached:
            self.refresh(block)
        elif block.on_device is not Presence.AWAY:
            self.note_seen(block)  # changes to the old copy are not wanted
            with self.moving():
                self.forget(block)

    def refresh(self, block: Block) -> None:
        """Copy the values in host memory to the parameters that are attached."""
        self.fill(block)
        for member, values in block.views(self.memory_of(block)):
            restore(member.param, values)
        self.note_seen(block)

    def await_upload(self, block: Block) -> None:
        """Wait until no upload reads the block's host memory."""
        ticket = self._uploads.pop(block.number, None)
        if ticket is not None:
            with self._metrics.span("device copy"):
                ticket.wait()
