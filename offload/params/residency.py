"""The blocks that are resident in host memory: those needed now, and those prefetched.

`use` fetches a unit's parameters and pins them until `done`; `memory_of` fetches a block's bytes
for a moment, when code needs them outside of a use. In between the trace predicts the next units,
`prefetch` decides which blocks to fetch and evict, and all stay within the pool. A block is never
evicted while other code still holds a view of it. Any thread may call; a lock lets in one at a
time.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from offload.core.errors import CapacityError, OffloadError
from offload.core.holders import holders
from offload.core.locks import nap
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.params.block import Block, Presence, pin, pinned, unpin
from offload.params.block_store import KEY, BlockStore
from offload.params.external_edits import ExternalEdits
from offload.params.placeholder import Owner, make_placeholder, restore
from offload.params.prefetch import PrefetchMoves, TierState, look_ahead, make_room, next_uses
from offload.params.prefetch_depth import PrefetchDepth
from offload.params.trace import Phase, Trace
from offload.planning.unit import Member, Unit
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.outgoing import InMemory, Outgoing
from offload.storage.weight_blocks import WeightBlock

_LINGER_S, _LINGER_STEP_S = 1.0, 0.01  # wait for views that other code is about to release


@dataclass(frozen=True)
class ResidencyParts:
    """The parts that a residency is made of. owner: the owner of the placeholders. depth: the
    prefetch depth in units; None: derived while training runs.
    """

    units: Sequence[Unit]
    pool: Pool
    store: DiskStore | None
    trace: Trace
    owner: Owner
    metrics: Metrics
    depth: int | None


class Residency:
    """The blocks of one model, in host memory and in the store."""

    def __init__(self, parts: ResidencyParts) -> None:
        metrics = parts.metrics
        self.blocks = self._make_blocks(parts.units)
        self.device = parts.owner.device
        self.trace = parts.trace
        self._sizes = [block.nbytes for block in self.blocks]
        names = [unit.name for unit in parts.units]
        self.prefetch = PrefetchDepth(metrics, parts.trace, self._sizes, KEY, parts.depth, names)
        self.block_store = BlockStore(parts.store, metrics)
        self._pool = parts.pool
        self._owner = parts.owner
        self._metrics = metrics
        self._current: frozenset[int] = frozenset()  # blocks of the latest use
        self._by_address: dict[int, Block] = {}
        self._lock = threading.RLock()
        self.has_room_for_all = False  # True: nothing is ever evicted
        self._edits = ExternalEdits(self.block_store.settle)

    def _make_blocks(self, units: Sequence[Unit]) -> list[Block]:
        return [Block(unit) for unit in units]

    @property
    def never_drops(self) -> bool:
        """Whether parameters stay resident in the tier that they are used in, never evicted."""
        return self.has_room_for_all

    # --- units in use -----------------------------------------------------------------------------

    def use(self, unit: Unit, phase: Phase) -> None:
        """Fetch the parameters of a unit, wait for them, and pin them until `done`. Nothing stays
        pinned when it raises.
        """
        with self._lock:
            self.prefetch.note_use(phase, unit.number)
            needed = [self.blocks[number] for number in unit.needs]
            with pinned(needed, self._lock):
                self._bring(needed)
                self._pin_for_run(needed, 1)  # until `done`

    def expect(self, numel: int) -> None:
        """Note that a run of the model on `numel` elements begins. In host memory it makes no
        difference.
        """

    def visit(self, unit: Unit, phase: Phase) -> None:
        """Fetch the parameters of a unit for code that runs before the next use of any unit."""
        self.use(unit, phase)
        self.done(unit)

    def done(self, unit: Unit) -> None:
        with self._lock:
            self._pin_for_run([self.blocks[number] for number in unit.needs], -1)

    def _pin_for_run(self, blocks: Sequence[Block], change: int) -> None:
        here = threading.get_ident()
        for block in blocks:
            block.runner = here if not block.runs or block.runner == here else None
            block.runs += change
            block.pins += change
            assert block.pins >= block.runs >= 0, f"{block.name}: done more often than used"

    @contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep the blocks that these units own resident, all at once, while the block runs. This
        is not a use in the order of the model: the trace does not record it.
        """
        needed = [self.blocks[n] for n in sorted({unit.number for unit in units})]
        with pinned(needed, self._lock):
            with self._lock:
                self._bring(needed)
            yield

    @contextmanager
    def exposed(self, units: Sequence[Unit]) -> Iterator[None]:
        """Expose the parameters of these units, all at once, to the user's code, which may change
        them; find its edits afterwards.
        """
        with self.using(units):
            self.watch_edits()
            try:
                yield
            finally:
                self.collect_edits()

    @contextmanager
    def in_host(self, units: Sequence[Unit], only_looks: bool = False) -> Iterator[None]:
        """Keep the parameters of these units, all at once, in host memory while the block runs.
        only_looks: the caller does not change them.
        """
        with self.using(units):
            yield

    def memory_of(self, block: Block) -> Tensor:
        """Return the block's bytes in the tier that it is used in; fetch them if need be. The block
        is not evicted as long as the caller holds the tensor.
        """
        return self.host_memory_of(block)

    def host_memory_of(self, block: Block) -> Tensor:
        """Return the block's bytes in host memory, whichever tier it is used in; fetch them if need
        be. The block is not evicted as long as the caller holds the tensor.
        """
        with self._lock:
            if block.in_host is not Presence.HERE:
                with pinned([block], self._lock):
                    self._fetch(block, Priority.WAITED_FOR)
                    self._arrive(block)
            assert block.memory is not None
            return block.memory.detach()

    def try_begin(self, block: Block) -> bool:
        """Begin to fetch a block into host memory and pin it until `end`. Return False, and pin
        nothing, if there is no room. Does not wait for the read.
        """
        with self._lock:
            try:
                with pinned([block], self._lock):
                    self._fetch(block, Priority.PREFETCH)
                    pin([block])  # until `end`
            except CapacityError:
                return False
            return True

    def has_come(self, block: Block) -> bool:
        with self._lock:
            return block.reading is None or block.reading.done

    def await_arrival(self, block: Block) -> None:
        """Wait until the block is in host memory and may be changed: no write reads it any more."""
        with self._lock:
            self._arrive(block)
            self.block_store.settle(block)

    def updating(self, blocks: Sequence[Block]) -> None:
        """Note that the update of these blocks begins, on all ranks if there are several."""

    def end(self, block: Block, has_changed: bool) -> None:
        """Unpin a block after `try_begin`. Begin to write back its values if they have changed,
        unless host memory has room for all blocks.
        """
        with self._lock:
            unpin([block])
            if has_changed and block.in_host is Presence.HERE:  # else it was not fetched
                self.changed(block)
                if not self.has_room_for_all:
                    self.block_store.save(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block in whose memory a tensor lies, if any."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def changed(self, block: Block) -> None:
        """Note that the values in memory have changed: the block is dirty, and a tensor that
        autograd saved of it is out of date.
        """
        with self._lock:
            self._note_change(block)
            if block.is_attached:  # for autograd's check of saved tensors
                increment_version([member.param for member in block.unit.members])
                block.version = block.version_now

    def _note_change(self, block: Block) -> None:
        self.block_store.changed(block)
        block.generation += 1
        block.seen = None

    # --- external edits of resident parameters ----------------------------------------------------

    def note_edit(self, block: Block) -> None:
        """Look for changes that a layer made in place to its own parameters while it ran. Finds
        those that torch counts in the version of a parameter.
        """
        with self._lock:
            if block.is_attached and block.version != block.version_now:
                self._note_change(block)
                block.version = block.version_now

    def watch_edits(self) -> None:
        """Begin to look for external edits: take a checksum of each attached block that has none
        yet and is written back or being written, since the user's code may change parameters from
        now on. Costs one read of their bytes. Does nothing if host memory has room for all blocks.
        """
        if self.has_room_for_all:
            return  # no block is ever read from the store again
        with self._lock:
            for block in self.blocks:
                self.note_edit(block)
            self._edits.begin(self.blocks)

    def hide(self) -> None:
        """Note that a recomputation has ended and backward goes on: user code cannot reach
        parameters now. In host memory there is nothing to do.
        """

    def collect_edits(self) -> None:
        """Find the external edits since `watch_edits`, made in place or by `param.data = ...`, and
        mark their blocks dirty.
        """
        with self._lock:
            if not self.has_room_for_all:
                # Note the changes that torch has counted now, not at the end of the run: tensors
                # that autograd saves in the run would be taken for those of other values.
                for block in self.blocks:
                    self.note_edit(block)
            for block in self._edits.find(b for b in self.blocks if b.is_attached and b.nbytes):
                self.changed(block)
            self._edits.end()

    def _bring(self, needed: Sequence[Block]) -> None:
        """Fetch these blocks, wait for them and attach them; the caller has pinned each once."""
        self._current = frozenset(block.number for block in needed)
        for block in needed:
            if block.in_host is Presence.AWAY:
                self._metrics.count("parameter_misses")
            elif not block.is_attached:
                self._metrics.count("parameter_hits")
        try:
            self._fetch_all(needed)
        except CapacityError:  # there may be room, but not contiguous
            self._evict_all(needed)
            self._fetch_all_at_last(needed)
        self._fetch_ahead()
        for block in needed:
            self._arrive(block)
            self._attach(block)

    def _fetch_all(self, needed: Sequence[Block]) -> None:
        for block in sorted(needed, key=lambda block: -block.nbytes):  # largest contiguous range
            self._fetch(block, Priority.WAITED_FOR)

    def _fetch_all_at_last(self, needed: Sequence[Block]) -> None:
        try:
            self._fetch_all(needed)
        except CapacityError:
            if not self._gets_memory_back():
                raise
            self._fetch_all(needed)

    def _evict_all(self, needed: Sequence[Block]) -> None:
        """Evict every block that may be evicted, the needed ones included, against fragmentation of
        the pool.
        """
        self._metrics.count("memory_in_pieces")
        unpin(needed)
        try:
            for block in self.blocks:
                self._evict_if_unused(block)
        finally:
            pin(needed)

    # --- prefetch ---------------------------------------------------------------------------------

    def _uses(self) -> dict[int, int]:
        ahead = (
            number for use in self.trace.ahead() for number in self.blocks[use.unit].unit.needs
        )
        return next_uses(ahead, len(self.blocks))

    def _fetch_ahead(self) -> None:
        if self.has_room_for_all and all(b.in_host is Presence.HERE for b in self.blocks):
            return
        self._follow(look_ahead(self._tier(), self._uses(), self.prefetch.depth))

    def look_ahead(self) -> None:
        """Prefetch again after an update has changed blocks: copies of them may have to be fetched
        again. In host memory none has.
        """

    def _follow(self, moves: PrefetchMoves) -> None:
        for number in moves.evict:
            if not self._evict(self.blocks[number]):
                return
        for number in moves.fetch:
            try:
                self._fetch(self.blocks[number], Priority.PREFETCH, may_evict=False)
            except CapacityError:  # free, but not contiguous
                self._metrics.count("prefetches_without_room")
                return

    def _tier(self) -> TierState:
        held = {b.number for b in self.blocks if b.in_host is not Presence.AWAY}
        pinned = {n for n in held if not self._may_go(self.blocks[n])}
        stats = self._pool.stats()
        free = stats.capacity_bytes - stats.used_bytes
        budget = free + sum(self._sizes[number] for number in held)
        return TierState(self._sizes, budget, held, pinned)

    def _may_go(self, block: Block) -> bool:
        if block.pins or block.number in self._current or block.in_host is not Presence.HERE:
            return False
        return not self._is_held_elsewhere(block)

    def _is_held_elsewhere(self, block: Block) -> bool:
        if block.memory is None:
            return False
        own = 1 + (len(block.unit.members) if block.is_attached else 0)
        return holders(block.memory) > own

    # --- fetch and evict --------------------------------------------------------------------------

    def _fetch(self, block: Block, priority: Priority, may_evict: bool = True) -> None:
        """Begin to fetch a block into host memory, unless it is resident or in flight."""
        if block.in_host is not Presence.AWAY:
            return
        memory = self._room_for(block, may_evict)
        self.block_store.read(block, memory, priority)
        self._take_place(block, memory)
        block.move_in_host(Presence.COMING)

    def _take_place(self, block: Block, memory: Tensor) -> None:
        block.memory = memory
        if block.nbytes:
            self._by_address[memory.data_ptr()] = block

    def _room_for(self, block: Block, may_evict: bool) -> Tensor:
        """Return host memory for a block; evict other blocks for it if `may_evict`. Raises
        `CapacityError` where there is no room.
        """
        if not block.nbytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        while True:
            try:
                with self._pool.lease(block.nbytes, what=block.name) as lease:
                    return lease.tensor()
            except CapacityError as error:
                if not may_evict or not (self._evict_farthest() or self._evict_after_a_while()):
                    self._tell_who_holds(error)
                    raise

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

    def _evict_farthest(self) -> bool:
        tier = self._tier()
        chosen = make_room(tier, self._uses(), tier.free_bytes + 1)
        for number in chosen or ():
            if self._evict(self.blocks[number]):
                return True
        # Then blocks that were prefetched, or were in use until now.
        if any(self._evict_if_unused(block) for block in self.blocks):
            return True
        return any(self._take_from_run(block) for block in self.blocks)

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
        self._metrics.count("parameters_taken_from_runs", int(is_gone))
        return is_gone

    def _evict_if_unused(self, block: Block) -> bool:
        """Evict the block unless it is pinned or held; return whether it was evicted. Waits for a
        read in flight.
        """
        if block.pins:
            return False
        self._arrive(block)
        return block.in_host is Presence.HERE and self._evict(block)

    def _arrive(self, block: Block) -> None:
        """Wait for a read in flight; the block is in host memory then. If the read fails, release
        its memory and raise.
        """
        if block.in_host is not Presence.COMING:
            return
        try:
            with self.prefetch.waiting():
                self.block_store.await_read(block)
        except BaseException:
            self._forget_memory(block)
            raise
        block.move_in_host(Presence.HERE)

    def _attach(self, block: Block) -> None:
        """Restore the parameters: their values are those in the block's memory."""
        if not block.is_attached:
            assert block.memory is not None
            for member, values in block.views(block.memory):
                restore(member.param, values)
            block.is_attached = True
            block.version = block.version_now

    def _detach(self, block: Block) -> None:
        block.seen = None
        for member in block.unit.members:
            make_placeholder(member.param, self._owner)
        block.is_attached = False

    def _evict(self, block: Block) -> bool:
        """Evict a block from host memory, after writing it back if it is dirty. Return False if it
        stays: it is pinned, other code holds a view of it, or there is no store to write it to.
        """
        if block.pins or self._is_held_elsewhere(block):
            return False
        self.note_edit(block)
        for edited in self._edits.find([block] if block.is_attached else []):
            self.changed(edited)
        if not self.block_store.can_take(block):
            return False  # its weight file has older values, and there is no drive
        self.block_store.save(block)
        self.block_store.settle(block)
        self._detach(block)
        self._forget_memory(block)
        self._metrics.count("parameter_drops")
        return True

    def _forget_memory(self, block: Block) -> None:
        if block.memory is not None and block.nbytes:
            del self._by_address[block.memory.data_ptr()]
        block.memory = None
        block.move_in_host(Presence.AWAY)

    def save(self, block: Block) -> None:
        """Begin to write back a block's values, unless the store has them."""
        with self._lock:
            self.block_store.save(block)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(
        self,
        block: Block,
        fill: Callable[[Tensor], None] | None = None,
        fills_span: bool = False,
    ) -> None:
        """Give the block host memory, filled with the parameters' present values, or by `fill` if
        given. fills_span: `fill` expects memory of the block's `span` only.
        """
        with self._lock:
            memory = self._room_for(block, may_evict=True)
            if fill is not None:
                fill(memory)
            for member, values in block.views(memory) if fill is None else ():
                values.copy_(member.param.detach())
            self._take_place(block, memory)
            block.move_in_host(Presence.HERE)
            self._attach(block)

    def adopt(self, block: Block, find: Callable[[str], WeightBlock]) -> None:
        """Have a block read from its weight file as long as its values are unchanged. The block is
        not resident. find: returns the place in the file.
        """
        with self._lock:
            self.block_store.adopt(block, find)
            self._detach(block)

    def forget(self, block: Block) -> None:
        """Leave the parameters as placeholders for good and release the block's memory: its values
        are not needed again.
        """
        with self._lock:
            with suppress(OffloadError):
                self.block_store.settle(block)
                self._arrive(block)
            self._detach(block)
            self.block_store.forget(block)
            if block.in_host is not Presence.AWAY:
                self._forget_memory(block)

    def original_device_of(self, param: Tensor) -> torch.device:
        """Return the device on which the parameter is an ordinary one, before `prepare` and after
        `close`.
        """
        return self.device

    def keep(self, block: Block) -> None:
        """Pin the block for good: it is never evicted."""
        with self._lock:
            pin([block])

    def commit(self) -> None:
        """Note that preparing the model has succeeded, on all ranks if there are several."""

    def in_order_of_return(self) -> list[Block]:
        """Return the blocks in the order of `return_to_model`: resident ones first, since they make
        room for the others.
        """
        return sorted(self.blocks, key=lambda block: block.memory is None)

    def is_here(self, block: Block) -> bool:
        """Return whether this residency still holds the block's values, or this rank's part of
        them, in memory or in the store: `return_to_model` has not returned them yet.
        """
        return block.in_host is not Presence.AWAY or block.is_stored

    def return_to_model(self, block: Block, make: Callable[[Tensor], Outgoing]) -> None:
        """Make the block's parameters ordinary ones with values in memory of their own, and leave
        the block empty. make: returns a place in host memory for values like those given. Does
        nothing the second time.
        """
        with self._lock:
            if not self.is_here(block):
                return
            if block.is_attached:
                self._edits.take_in_rebound(block)
            memory = self.host_memory_of(block)
            self._hand_out(block, memory, make)
            self.block_store.settle(block)
            block.is_attached = block.is_stored = False
            block.seen = None
            del memory
            self._forget_memory(block)

    def _hand_out(self, block: Block, memory: Tensor, make: Callable[[Tensor], Outgoing]) -> None:
        """Copy the values in `memory` to places of their own and restore the parameters there. As
        long as a copy may raise, no parameter has changed.
        """
        places: list[tuple[Member, Outgoing]] = []
        for member, values in block.views(memory):
            original_device = self.original_device_of(member.param)
            is_host = original_device.type == "cpu"
            place = (
                make(values)
                if is_host
                else InMemory(torch.empty_like(values, device=original_device))
            )
            place.fill(values)
            places.append((member, place))
        for _, place in places:
            place.sync()  # the values in memory are released next
        for member, place in places:
            restore(member.param, place.tensor)
