"""The tier that holds the gathered blocks of a sharded model while it computes with them.

An all-gather needs all ranks, and the ranks do not agree on it beforehand. Therefore which blocks
are gathered, and in which order, is a pure function of the order of uses and of numbers that all
ranks agree on: nothing here depends on a clock, on which transfers have ended, or on references to
tensors. If user code still holds a view of a block that is evicted, the memory stays alive for that
view. Nothing is ever written back: the shards are authoritative. Parameters are placeholders while
they are not in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from torch import Tensor

from offload.core.config import format_size
from offload.core.errors import CapacityError, OffloadError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.distributed import NETWORK
from offload.params.block import Block, Presence
from offload.params.copies import Copies
from offload.params.gathered import Gathered, GatheredBlockMemory
from offload.params.placeholder import Owner
from offload.params.prefetch import PrefetchMoves, TierState, look_ahead, make_room


class GatheredTier(Copies):
    """The tier of one model's gathered blocks, in device or host memory.

    place: allocates and fills their memory. sizes: bytes that each block takes there, by number.
    budget_bytes: limit for all gathered blocks, the same on all ranks. depth: prefetch depth, in
    blocks.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        place: GatheredBlockMemory,
        sizes: Sequence[int],
        budget_bytes: int,
        depth: int,
        owner: Owner,
        metrics: Metrics,
        take_back: Callable[[Block], None],
        lock: threading.RLock,
    ) -> None:
        super().__init__(place.device, owner, take_back, lock)
        self.peak_bytes = 0
        self.budget_bytes = budget_bytes
        self._blocks = blocks
        self._place = place
        self._sizes = sizes
        self._depth = depth
        self._metrics = metrics
        self._gather_memory: dict[int, Gathered] = {}
        # Uploads of shards, until they are waited for; also those of blocks evicted since then.
        self._uploads: dict[int, Ticket[None]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes[number] for number in self._gather_memory)

    # --- fetch ------------------------------------------------------------------------------------

    def make_room(self, needed: Sequence[Block], uses: Mapping[int, int]) -> None:
        """Evict blocks until all of `needed` fit into the budget at once; raise `CapacityError` if
        they cannot.
        """
        self._current = frozenset(block.number for block in needed)
        self._end_uploads()
        absent = [block.number for block in needed if block.on_device is Presence.AWAY]
        nbytes = sum(self._sizes[number] for number in absent)
        chosen = make_room(self._tier(), uses, nbytes)
        if chosen is None and nbytes:
            held = sum(
                self._sizes[n] for n in self._gather_memory if not self._may_go(self._blocks[n])
            )
            raise CapacityError(
                f"{needed[0].name}: whole parameters that are used now need "
                f"{format_size(nbytes)} ({nbytes} bytes); of {format_size(self.budget_bytes)} "
                f"pinned ones hold {format_size(held)}; raise "
                f"{'host_memory' if self._device.type == 'cpu' else 'device_memory'}"
            )
        for number in chosen or ():
            self.evict(self._blocks[number])

    def excess_bytes(self, needed: Sequence[Block]) -> int:
        """Return by how many bytes the budget is too small for all of these blocks at once, beside
        those that are pinned or kept. The same on all ranks.
        """
        numbers = {block.number for block in needed} | self.kept
        numbers |= {block.number for block in self._blocks if block.device_pins}
        return max(0, sum(self._sizes[number] for number in numbers) - self.budget_bytes)

    @contextmanager
    def widened(self, nbytes: int) -> Iterator[None]:
        """Raise the budget by `nbytes` while the block runs; afterwards evict what exceeds it."""
        with self._lock:
            self.budget_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self.budget_bytes -= nbytes
                for number in make_room(self._tier(), {}, 0) or ():
                    self.evict(self._blocks[number])

    def _end_uploads(self) -> None:
        """Collect the tickets of uploads that have ended: until then they hold host memory."""
        self._place.poll()
        for number in [n for n, upload in self._uploads.items() if upload.done]:
            self._uploads.pop(number).wait()

    def gather(self, block: Block, own: Tensor, after: Ticket[None] | None) -> None:
        """Start the all-gather of a block. own: this rank's shard, whose values are valid once
        `after` has ended; it must not change before `await_own` returns.
        """
        what = f"parameters of {block.name}"
        whole = self._place.gather(block.whole_bytes, own, what, after)
        if block.whole_bytes:
            self._by_address[whole.address] = block
        self._gather_memory[block.number] = whole
        block.move_on_device(Presence.COMING)
        self._metrics.count("gathered_bytes", block.whole_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def arrive(self, block: Block) -> None:
        """Wait until the all-gather of a block is enqueued or done, if one is in flight. If that
        raises an `Exception`, the block is evicted; after an interrupt it is still in flight.
        """
        if block.on_device is not Presence.COMING:
            return
        try:
            with self._metrics.span(NETWORK):
                upload = self._gather_memory[block.number].arrive()
        except Exception:  # not an interrupt: after that the all-gather is still in flight
            self._forget_memory(block)
            raise
        if upload is not None:
            self._uploads[block.number] = upload  # behind an earlier one, on the same stream
        block.move_on_device(Presence.HERE)

    def memory_of(self, block: Block) -> Tensor:
        """Return the gathered block's bytes, for a computation that starts now. They stay valid as
        long as the caller holds the tensor. Waits for the all-gather.
        """
        self.arrive(block)
        return self._gather_memory[block.number].use()

    def address_of(self, block: Block) -> int:
        return self._gather_memory[block.number].address

    def await_own(self, block: Block) -> None:
        """Wait until nothing reads this rank's shard in host memory any more."""
        self.arrive(block)
        upload = self._uploads.pop(block.number, None)
        if upload is not None:
            with self._metrics.span("device copy"):
                upload.wait()

    # --- prefetch ---------------------------------------------------------------------------------

    def look_ahead(self, uses: Mapping[int, int]) -> Sequence[Block]:
        """Evict the blocks that must make room for the next uses, and return the blocks to
        prefetch.
        """
        moves: PrefetchMoves = look_ahead(self._tier(), uses, self._depth)
        for number in moves.evict:
            self.evict(self._blocks[number])
        return [self._blocks[number] for number in moves.fetch]

    def _tier(self) -> TierState:
        held = set(self._gather_memory)
        pinned = {number for number in held if not self._may_go(self._blocks[number])}
        return TierState(self._sizes, self.budget_bytes, held, pinned)

    def _may_go(self, block: Block) -> bool:
        busy = block.device_pins or block.number in self._current
        return not busy and block.number not in self.kept

    # --- eviction ---------------------------------------------------------------------------------

    def evict(self, block: Block) -> None:
        self.forget(block)
        self._metrics.count("gathered_drops")

    def forget(self, block: Block) -> None:
        """Release a block's memory; if its all-gather is in flight, wait for it first."""
        if block.on_device is Presence.COMING:
            with suppress(OffloadError):  # the next use gathers it again, and raises then
                self.arrive(block)
        if block.on_device is Presence.AWAY:
            return
        if block.is_attached:
            self.detach(block)
        self._forget_memory(block)

    def _forget_memory(self, block: Block) -> None:
        whole = self._gather_memory.pop(block.number)
        if block.whole_bytes:
            self._by_address.pop(whole.address, None)
        block.move_on_device(Presence.AWAY)
        if not whole.release():
            self._metrics.count("gathered_views_escaped")
