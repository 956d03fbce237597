"""Which blocks are in memory: what is needed now, and ahead of time what will be.

`use` brings a unit's parameters and keeps them until `done`; `memory_of` brings a block's bytes for
a moment, wherever somebody turns out to need them. In between the trace says what comes next, the
scheduler what to fetch and evict, and everything stays within the pool. A block that somebody else
still holds a view of is never taken away. Any thread; one at a time.
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
from offload.params.prefetch import Moves, TierState, look_ahead, make_room, next_uses
from offload.params.prefetch_depth import PrefetchDepth
from offload.params.trace import Phase, Trace
from offload.planning.unit import Member, Unit
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.memory import MemoryStore
from offload.storage.outgoing import InMemory, Outgoing
from offload.storage.weight_blocks import WeightBlock

_LINGER_S, _LINGER_STEP_S = 1.0, 0.01  # for views that others are about to let go of


@dataclass(frozen=True)
class Parts:
    """What a residency works with. owner: answers for parameters that are away. depth: units ahead
    of the one in use that are fetched; None: derived while it runs.
    """

    units: Sequence[Unit]
    pool: Pool
    store: DiskStore | MemoryStore | None
    trace: Trace
    owner: Owner
    metrics: Metrics
    depth: int | None


class Residency:
    """The blocks of one model, in host memory and in the store."""

    def __init__(self, parts: Parts) -> None:
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
        self.has_room_for_all = False  # nothing ever goes
        self._edits = ExternalEdits(self.block_store.settle)

    def _make_blocks(self, units: Sequence[Unit]) -> list[Block]:
        return [Block(unit) for unit in units]

    @property
    def never_drops(self) -> bool:
        """Whether parameters stay where they are used for good."""
        return self.has_room_for_all

    # --- what is needed now -----------------------------------------------------------------------

    def use(self, unit: Unit, phase: Phase) -> None:
        """Bring the parameters of a unit, and keep them until `done`. Nothing is kept when it
        raises.
        """
        with self._lock:
            self.prefetch.note_use(phase, unit.number)
            needed = [self.blocks[number] for number in unit.needs]
            with pinned(needed, self._lock):
                self._bring(needed)
                self._pin_for_run(needed, 1)  # until `done`

    def expect(self, numel: int) -> None:
        """A run begins, with so many elements. Here that makes no difference."""

    def visit(self, unit: Unit, phase: Phase) -> None:
        """Bring the parameters of a unit for what happens before the next use of any."""
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
        """What all these own, at once, apart from the order in which the model runs."""
        needed = [self.blocks[n] for n in sorted({unit.number for unit in units})]
        with pinned(needed, self._lock):
            with self._lock:
                self._bring(needed)
            yield

    @contextmanager
    def exposed(self, units: Sequence[Unit]) -> Iterator[None]:
        """All these at once, for code that we do not see: it may change them."""
        with self.using(units):
            self.watch_edits()
            try:
                yield
            finally:
                self.collect_edits()

    @contextmanager
    def in_host(self, units: Sequence[Unit], only_looks: bool = False) -> Iterator[None]:
        """All these at once, with their parameters in host memory. only_looks: not to change."""
        with self.using(units):
            yield

    def memory_of(self, block: Block) -> Tensor:
        """The block's bytes where they are used; they stay as long as the tensor is held."""
        return self.host_memory_of(block)

    def host_memory_of(self, block: Block) -> Tensor:
        """The same in host memory, wherever the block is used."""
        with self._lock:
            if block.in_host is not Presence.HERE:
                with pinned([block], self._lock):
                    self._fetch(block, Priority.WAITED_FOR)
                    self._arrive(block)
            assert block.memory is not None
            return block.memory.detach()

    def try_begin(self, block: Block) -> bool:
        """Start a block's way into host memory and keep it until `end`; False where there is no
        room.
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
        """All these will be updated, on all ranks if there are some."""

    def end(self, block: Block, has_changed: bool) -> None:
        """It need not be kept any more; new values go to the store unless there is room for all."""
        with self._lock:
            unpin([block])
            if has_changed and block.in_host is Presence.HERE:  # else it has not come
                self.changed(block)
                if not self.has_room_for_all:
                    self.block_store.save(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        """The block that a tensor lies in."""
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def changed(self, block: Block) -> None:
        """Its values are others now; the store's are old."""
        with self._lock:
            self._note_change(block)
            if block.is_attached:  # autograd must know of it, too
                increment_version([member.param for member in block.unit.members])
                block.version = block.version_now

    def _note_change(self, block: Block) -> None:
        self.block_store.changed(block)
        block.generation += 1
        block.seen = None

    # --- what others do to parameters that are in memory ------------------------------------------

    def note_edit(self, block: Block) -> None:
        """Find what a layer has done in place to its own parameters while it runs, as far as torch
        counts it.
        """
        with self._lock:
            if block.is_attached and block.version != block.version_now:
                self._note_change(block)
                block.version = block.version_now

    def watch_edits(self) -> None:
        """From now on code that we do not see may change parameters that are in memory."""
        if self.has_room_for_all:
            return  # what is in memory is never taken from the store again
        with self._lock:
            for block in self.blocks:
                self.note_edit(block)
            self._edits.begin(self.blocks)

    def hide(self) -> None:
        """A recomputation has ended, backward goes on: nobody else can get at parameters."""

    def collect_edits(self) -> None:
        """Find what was changed since `watch_edits`, by whatever means."""
        with self._lock:
            if not self.has_room_for_all:
                # What torch has counted is a change from now on, not from the end of the run: what
                # the run keeps would be taken for that of other values.
                for block in self.blocks:
                    self.note_edit(block)
            for block in self._edits.find(b for b in self.blocks if b.is_attached and b.nbytes):
                self.changed(block)
            self._edits.end()

    def _bring(self, needed: Sequence[Block]) -> None:
        """All these, which are pinned once for it."""
        self._current = frozenset(block.number for block in needed)
        for block in needed:
            if block.in_host is Presence.AWAY:
                self._metrics.count("parameter_misses")
            elif not block.is_attached:
                self._metrics.count("parameter_hits")
        try:
            self._fetch_all(needed)
        except CapacityError:  # there may be room, but not in one piece
            self._evict_all(needed)
            self._fetch_all_at_last(needed)
        self._fetch_ahead()
        for block in needed:
            self._arrive(block)
            self._attach(block)

    def _fetch_all(self, needed: Sequence[Block]) -> None:
        for block in sorted(needed, key=lambda block: -block.nbytes):  # it needs the largest piece
            self._fetch(block, Priority.WAITED_FOR)

    def _fetch_all_at_last(self, needed: Sequence[Block]) -> None:
        try:
            self._fetch_all(needed)
        except CapacityError:
            if not self._gets_memory_back():
                raise
            self._fetch_all(needed)

    def _evict_all(self, needed: Sequence[Block]) -> None:
        """Empty the memory of everything that may go, what is needed included."""
        self._metrics.count("memory_in_pieces")
        unpin(needed)
        try:
            for block in self.blocks:
                self._evict_if_unused(block)
        finally:
            pin(needed)

    # --- what will be needed ----------------------------------------------------------------------

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
        """Blocks have changed: what is needed next may have to come again. Here nothing has."""

    def _follow(self, moves: Moves) -> None:
        for number in moves.evict:
            if not self._evict(self.blocks[number]):
                return
        for number in moves.fetch:
            try:
                self._fetch(self.blocks[number], Priority.PREFETCH, may_evict=False)
            except CapacityError:  # free, but not in one piece
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

    # --- moving -----------------------------------------------------------------------------------

    def _fetch(self, block: Block, priority: Priority, may_evict: bool = True) -> None:
        """Start a block's way into host memory, unless it is there or under way."""
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
        """Host memory for a block; others go for it if they must."""
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
        """Whether a block has gone whose views nobody needs any more: frames of an error that was
        caught hold some until garbage is collected, and a thread of autograd's holds a graph for a
        moment after backward has returned.
        """
        return bool(self._held_elsewhere()) and self._comes_to_pass(self._evict_farthest)

    def _gets_memory_back(self) -> bool:
        """Whether memory has come free that no block has: such frames hold that of blocks that
        never came, too.
        """
        before = self._pool.stats().used_bytes
        return self._comes_to_pass(lambda: self._pool.stats().used_bytes < before)

    def _comes_to_pass(self, has: Callable[[], bool]) -> bool:
        """Whether it has, a while after garbage was collected."""
        gc.collect()
        until_s = time.monotonic() + _LINGER_S
        while not has():
            if time.monotonic() > until_s:
                return False
            nap(_LINGER_STEP_S)
        return True

    def _held_elsewhere(self) -> list[Block]:
        """Blocks that nothing here needs, whose views others hold."""
        return [b for b in self.blocks if b.pins == b.runs and self._is_held_elsewhere(b)]

    def _tell_who_holds(self, error: CapacityError) -> None:
        held = [block.name for block in self._held_elsewhere()]
        if held:
            error.args = (
                f"{error}; somebody holds views of the parameters of {', '.join(held[:5])}, which "
                "therefore cannot go: a checkpointed function that uses parameters outside of "
                "their own module, a custom autograd function (ctx.save_for_backward), or other "
                "code, which must evict them",
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
        # What was fetched ahead, or was in use until now.
        if any(self._evict_if_unused(block) for block in self.blocks):
            return True
        return any(self._take_from_run(block) for block in self.blocks)

    def _take_from_run(self, block: Block) -> bool:
        """Take a block away from the units that run with it, which want the parameters of others
        beside their own: they get it again when they touch it. Whether it has gone. Another
        thread may be in the middle of a kernel that reads it: what runs there is left alone.
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
        """Whether it has gone; what is on its way is waited for."""
        if block.pins:
            return False
        self._arrive(block)
        return block.in_host is Presence.HERE and self._evict(block)

    def _arrive(self, block: Block) -> None:
        """Wait until the block is in host memory."""
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
        """Let the parameters be seen with their values."""
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
        """Take a block out of host memory, unless somebody else holds a view of it."""
        if block.pins or self._is_held_elsewhere(block):
            return False
        self.note_edit(block)
        for edited in self._edits.find([block] if block.is_attached else []):
            self.changed(edited)
        if not self.block_store.can_take(block):
            return False  # its own file has other values, and there is no disk
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
        """Start the way of a block's values to the store, unless it has them."""
        with self._lock:
            self.block_store.save(block)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(
        self,
        block: Block,
        fill: Callable[[Tensor], None] | None = None,
        fills_span: bool = False,
    ) -> None:
        """Make the parameters' present values the block's own, or what `fill` puts there.
        fills_span: it wants memory of the block's `span` only.
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
        """Have a block read from where it came, as long as nobody changes it. It is away."""
        with self._lock:
            self.block_store.adopt(block, find)
            self._detach(block)

    def forget(self, block: Block) -> None:
        """Leave the parameters without values: nobody will need them."""
        with self._lock:
            with suppress(OffloadError):
                self.block_store.settle(block)
                self._arrive(block)
            self._detach(block)
            self.block_store.forget(block)
            if block.in_host is not Presence.AWAY:
                self._forget_memory(block)

    def original_device_of(self, param: Tensor) -> torch.device:
        """Where the parameter is when it is an ordinary one."""
        return self.device

    def keep(self, block: Block) -> None:
        """Never let it go."""
        with self._lock:
            pin([block])

    def commit(self) -> None:
        """The start has come to a good end, on all ranks if there are some."""

    def in_order_of_return(self) -> list[Block]:
        """What is there makes room for the rest."""
        return sorted(self.blocks, key=lambda block: block.memory is None)

    def is_here(self, block: Block) -> bool:
        """Whether we have its values, or have part of them: they have not gone back yet."""
        return block.in_host is not Presence.AWAY or block.is_stored

    def give_back(self, block: Block, make: Callable[[Tensor], Outgoing]) -> None:
        """Leave the parameters with values of their own, in places like theirs that `make` gives.
        The block is empty then. Nothing where it was done before.
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
        """The same for the values in `memory`. As long as it may raise, nothing has changed."""
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
            place.settle()  # we are about to forget them
        for member, place in places:
            restore(member.param, place.tensor)
