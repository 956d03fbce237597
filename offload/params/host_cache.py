"""The blocks that are resident in host memory: those needed now, and those prefetched.

`prefetch` predicts which blocks are needed next; by that blocks are fetched and evicted, all within
the pool. A block is never evicted while other code still holds a view of it. A model on the CPU
computes with its parameters here; for others the blocks here are what the tier above copies.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from offload.core.errors import CapacityError, OffloadError
from offload.core.locks import nap
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.tensors import holders
from offload.params.block import Block, Presence, pin, pinned
from offload.params.block_store import BlockStore
from offload.params.external_edits import ExternalEdits
from offload.params.placeholder import Owner, make_placeholder
from offload.params.prefetch import PrefetchDepth, TierState, look_ahead, make_room
from offload.storage.engine import Priority

_LINGER_S, _LINGER_STEP_S = 1.0, 0.01  # wait for views that other code is about to release


class HostCache:
    """The blocks of one model in host memory. Where no lock is taken, the caller holds `lock`.

    owner: the owner of the placeholders. checksum: finds external edits of parameters, which are
    used in this memory; None: they are used in a tier above it.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        pool: Pool,
        store: BlockStore,
        prefetch: PrefetchDepth,
        owner: Owner,
        metrics: Metrics,
        checksum: Callable[[Tensor], int] | None,
    ) -> None:
        self.blocks = blocks
        self.store = store
        self.prefetch = prefetch
        self.owner = owner
        self.metrics = metrics
        self.lock = threading.RLock()
        self.has_room_for_all = False  # True: nothing is ever evicted
        self.current: frozenset[int] = frozenset()  # blocks of the latest use in this memory
        self.edits = ExternalEdits(store, checksum) if checksum is not None else None
        self._pool = pool
        self._sizes = [block.nbytes for block in blocks]
        self.by_address: dict[int, Block] = {}  # blocks by the address of their memory

    # --- fetch ------------------------------------------------------------------------------------

    def memory_of(self, block: Block) -> Tensor:
        """Return the block's bytes; fetch them if need be. The block is not evicted as long as the
        caller holds the tensor.
        """
        with self.lock:
            if block.in_host is not Presence.HERE:
                with pinned([block], self.lock):
                    self._fetch(block, Priority.WAITED_FOR)
                    self.arrive(block)
            assert block.memory is not None
            return block.memory.detach()

    def fetch(self, wanted: Sequence[Block], held: Sequence[Block]) -> None:
        """Begin to fetch the blocks that are wanted. held: the blocks that the caller has pinned
        once for this; they are evicted, too, if there may be room, but not contiguous.
        """
        largest_first = sorted(wanted, key=lambda block: -block.nbytes)  # of contiguous memory
        for attempt in range(3):
            try:
                for block in largest_first:
                    self._fetch(block, Priority.WAITED_FOR)
                return
            except CapacityError:
                if attempt == 0:
                    self._evict_all(held)
                elif attempt == 2 or not self._gets_memory_back():
                    raise

    def _evict_all(self, held: Sequence[Block]) -> None:
        """Evict every block that may be evicted, those that are held included, against
        fragmentation of the pool.
        """
        self.metrics.count("memory_in_pieces")
        pin(held, -1)
        try:
            for block in self.blocks:
                self._evict_if_unused(block)
        finally:
            pin(held)

    def _fetch(self, block: Block, priority: Priority, may_evict: bool = True) -> None:
        """Begin to fetch a block, unless it is resident or in flight."""
        if block.in_host is not Presence.AWAY:
            return
        memory = self._room_for(block, may_evict)
        self.store.read(block, memory, priority)
        self._place(block, memory, Presence.COMING)

    def _place(self, block: Block, memory: Tensor, presence: Presence) -> None:
        block.memory = memory
        if block.nbytes:
            self.by_address[memory.data_ptr()] = block
        block.move_in_host(presence)

    def arrive(self, block: Block) -> None:
        """Wait for a read in flight; the block is in host memory then. If the read fails, release
        its memory and raise.
        """
        if block.in_host is not Presence.COMING:
            return
        try:
            with self.prefetch.waiting():
                ticket, block.reading = block.reading, None
                if ticket is not None:
                    with self.metrics.span("parameter read", block.name):
                        ticket.wait()
        except BaseException:
            self._forget_memory(block)
            raise
        block.move_in_host(Presence.HERE)

    def look_ahead(self, depth: int) -> None:
        """Prefetch the blocks of the next `depth` uses, as far as memory allows."""
        if self.has_room_for_all and all(b.in_host is Presence.HERE for b in self.blocks):
            return
        moves = look_ahead(self._tier(), self.uses(), depth)
        for number in moves.evict:
            if not self.evict(self.blocks[number]):
                return
        for number in moves.fetch:
            try:
                self._fetch(self.blocks[number], Priority.PREFETCH, may_evict=False)
            except CapacityError:  # free, but not contiguous
                self.metrics.count("prefetches_without_room")
                return

    def uses(self) -> dict[int, int]:
        """Return the next uses of this memory: those of blocks without a copy to compute with."""
        uses = self.prefetch.uses()
        return {n: at for n, at in uses.items() if self.blocks[n].on_device is Presence.AWAY}

    def _tier(self) -> TierState:
        held = {b.number for b in self.blocks if b.in_host is not Presence.AWAY}
        pinned = {n for n in held if not self._may_go(self.blocks[n])}
        stats = self._pool.stats()
        return TierState(self._sizes, stats.capacity_bytes - stats.used_bytes, held, pinned)

    def _may_go(self, block: Block) -> bool:
        if block.pins or block.number in self.current or block.in_host is not Presence.HERE:
            return False
        return not self._is_held_elsewhere(block)

    def _is_held_elsewhere(self, block: Block) -> bool:
        if block.memory is None or block.partition is not None:
            return False  # no code outside of the engine sees a shard
        shows = self.edits is not None and block.is_attached
        return holders(block.memory) > 1 + (len(block.unit.members) if shows else 0)

    # --- the update -------------------------------------------------------------------------------

    def try_begin(self, block: Block) -> bool:
        """Begin to fetch a block and pin it, for its update. Return False, and pin nothing, if
        there is no room. Does not wait for the read.
        """
        with self.lock:
            try:
                with pinned([block], self.lock):
                    self._fetch(block, Priority.PREFETCH)
                    pin([block])  # until the update of the block has ended
            except CapacityError:
                return False
            return True

    def await_arrival(self, block: Block) -> None:
        """Wait until the block is in host memory and may be changed: no write, copy or collective
        reads it any more.
        """
        with self.lock:
            self.arrive(block)
            self.store.settle(block)
            if block.copying is not None:
                self.await_copy(block)

    def await_copy(self, block: Block) -> None:
        """Wait until nothing reads the block's memory for the copy to compute with."""
        if block.copying is not None:
            block.copying()
            block.copying = None

    # --- evict ------------------------------------------------------------------------------------

    def evict(self, block: Block) -> bool:
        """Evict a block, after writing it back if it is dirty. Return False if it stays: it is
        pinned, other code holds a view of it, or there is no store to write it to.
        """
        if block.pins:
            return False
        if block.copying is not None:
            self.await_copy(block)
        if self._is_held_elsewhere(block):
            return False
        if self.edits is not None:
            self.edits.note(block)
            self.edits.take_in([block])
        if not self.store.save(block):
            return False  # its weight file has older values, and there is no drive
        self.store.settle(block)
        if self.edits is not None:
            self.hide(block)
        self._forget_memory(block)
        self.metrics.count("parameter_drops")
        return True

    def _room_for(self, block: Block, may_evict: bool) -> Tensor:
        """Return host memory for a block; evict other blocks for it if `may_evict`. Raises
        `CapacityError` where there is no room.
        """
        if not block.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        lease = self._pool.try_lease(block.nbytes)
        while lease is None and may_evict:
            if not self._evict_farthest() and not self._evict_after_a_while():
                break
            lease = self._pool.try_lease(block.nbytes)
        try:  # nothing else holds the lease, which ends with its tensor
            return (lease or self._pool.lease(block.nbytes, what=block.name)).tensor()
        except CapacityError as error:
            self._tell_who_holds(error)
            raise

    def _evict_farthest(self) -> bool:
        tier = self._tier()
        chosen = make_room(tier, self.uses(), tier.free_bytes + 1)
        for number in chosen or ():
            if self.evict(self.blocks[number]):
                return True
        # Then blocks that were prefetched, or were in use until now.
        if any(self._evict_if_unused(block) for block in self.blocks):
            return True
        return any(self._take_from_run(block) for block in self.blocks)

    def _evict_if_unused(self, block: Block) -> bool:
        """Evict the block unless it is pinned or held; return whether it was evicted. Waits for a
        read in flight.
        """
        if block.pins:
            return False
        self.arrive(block)
        return block.in_host is Presence.HERE and self.evict(block)

    def _take_from_run(self, block: Block) -> bool:
        """Evict a block of units that are running, since they need the parameters of other units
        beside their own; they fetch it again when they touch it. Return whether it was evicted.
        A block that runs in another thread stays: a kernel there may be reading it.
        """
        if not block.runs or block.pins > block.runs or block.runner != threading.get_ident():
            return False
        block.pins = 0
        try:
            is_gone = self._evict_if_unused(block)
        finally:
            block.pins = block.runs
        self.metrics.count("parameters_taken_from_runs", int(is_gone))
        return is_gone

    def _evict_after_a_while(self) -> bool:
        """Collect garbage, wait for stale views of blocks to be released, and return whether a
        block was evicted then. The frames of a caught exception hold views until garbage
        collection, and an autograd thread holds a graph for a moment after backward has returned.
        """
        return bool(self._held_elsewhere()) and self._comes_to_pass(self._evict_farthest)

    def _gets_memory_back(self) -> bool:
        """Return whether memory that belongs to no block is released within a while. The frames of
        a caught exception also hold the memory of blocks whose fetch failed.
        """
        before = self._pool.stats().used_bytes
        return self._comes_to_pass(lambda: self._pool.stats().used_bytes < before)

    def _comes_to_pass(self, has: Callable[[], bool]) -> bool:
        """Collect garbage and wait up to `_LINGER_S` for `has`; return whether it came true."""
        gc.collect()
        until_s = time.monotonic() + _LINGER_S
        while not has():
            if time.monotonic() > until_s:
                return False
            nap(_LINGER_STEP_S)
        return True

    def _held_elsewhere(self) -> list[Block]:
        """Return the blocks that at most running units pin, but whose views other code holds."""
        return [b for b in self.blocks if b.pins == b.runs and self._is_held_elsewhere(b)]

    def _tell_who_holds(self, error: CapacityError) -> None:
        held = [block.name for block in self._held_elsewhere()]
        if held:
            error.args = (
                f"{error}; other code holds views of the parameters of {', '.join(held[:5])}, "
                "which "
                "cannot be evicted: a checkpointed function that uses parameters outside of "
                "their own module, a custom autograd function (ctx.save_for_backward), or other "
                "code, which must release them",
            )
        needed = [b for b in self.blocks if b.pins > b.runs and b.memory is not None]
        if needed:
            each = ", ".join(f"{b.name} ({b.nbytes} bytes)" for b in needed[:5])
            error.args = (
                f"{error}; needed at the same moment: {each}; raise host_memory, or have them "
                "fetched together: units=... takes what encloses them",
            )

    def _forget_memory(self, block: Block) -> None:
        if block.memory is not None:
            self.by_address.pop(block.memory.data_ptr(), None)
        block.memory = None
        block.move_in_host(Presence.AWAY)

    # --- parameters that are used in host memory --------------------------------------------------

    def attach(self, block: Block) -> None:
        """Restore the parameters: their values are those in the block's memory."""
        assert block.memory is not None
        block.show(block.memory)
        block.is_attached = True
        block.version = block.version_now

    def hide(self, block: Block) -> None:
        """Make the parameters placeholders."""
        block.seen = None
        for member in block.unit.members:
            make_placeholder(member.param, self.owner)
        block.is_attached = False

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(
        self, block: Block, fill: Callable[[Tensor], None] | None, fills_span: bool
    ) -> None:
        """Give the block memory, filled with the parameters' present values, of which only the
        block's span is read, or by `fill` if given. fills_span: `fill` expects memory of the span
        only.
        """
        memory, (begin, end) = self._room_for(block, may_evict=True), block.span
        own = memory[: end - begin]
        if block.partition is not None:
            memory.zero_()  # the padding
        if fill is None:
            _copy_params(block, own)
        elif fills_span or block.partition is None:
            fill(own)
        else:
            whole = torch.zeros(block.unit.nbytes, dtype=torch.uint8, device="cpu")
            fill(whole)
            own.copy_(whole[begin:end])
        self._place(block, memory, Presence.HERE)

    def release(self, block: Block) -> None:
        """Release the block's memory and its bytes in the store: they are not needed again."""
        for end in (self.await_copy, self.store.settle, self.arrive):
            with suppress(OffloadError):
                end(block)
        self.store.forget(block)
        if block.in_host is not Presence.AWAY:
            self._forget_memory(block)


def _copy_params(block: Block, own: Tensor) -> None:
    """Copy the parameters' values, as far as they are in the block's span, to `own`."""
    begin, end = block.span
    for member in block.unit.members:
        first, last = max(begin, member.begin), min(end, member.begin + member.nbytes)
        if first < last:
            values = member.param.detach().reshape(-1).view(torch.uint8)
            part = values[first - member.begin : last - member.begin]
            own[first - begin : last - begin].copy_(part)
