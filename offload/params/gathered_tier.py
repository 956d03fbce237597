"""The blocks of a model that is shared out over ranks, whole: gathered to compute with.

A gather needs all ranks, and nobody asks the others before. So which blocks are there, and in which
order they come, is a pure function of the order of uses and of numbers that all ranks agree on:
nothing here looks at a clock, at what has come, or at who holds what. A block that goes while
somebody still has a view of it leaves its memory to him. Nothing is ever written back: the slices
are the truth. While parameters are not in use they are guarded.
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
from offload.params.block import Block, Presence
from offload.params.copies import Copies
from offload.params.gathered import Gathered, GatherMemory
from offload.params.placeholder import Owner
from offload.params.prefetch import Moves, TierState, look_ahead, make_room

NETWORK = "network"  # the cause of waits for other ranks


class GatheredTier(Copies):
    """Of one model's blocks. place: where they are whole. sizes: what each takes there.
    budget_bytes: for all that are whole, the same on all ranks. depth: blocks ahead that are
    gathered.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        place: GatherMemory,
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
        # Copies of slices to a device, until waited for: also of blocks that have gone again.
        self._uploads: dict[int, Ticket[None]] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes[number] for number in self._gather_memory)

    # --- what is needed now -----------------------------------------------------------------------

    def make_room(self, needed: Sequence[Block], uses: Mapping[int, int]) -> None:
        """For all of these at once; others go for it if they must."""
        self._current = frozenset(block.number for block in needed)
        self._let_go_of_slices()
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
                f"others that are in use hold {format_size(held)}; raise "
                f"{'host_memory' if self._device.type == 'cpu' else 'device_memory'}"
            )
        for number in chosen or ():
            self.evict(self._blocks[number])

    def excess_bytes(self, needed: Sequence[Block]) -> int:
        """What the budget lacks for all of these at once; the same on all ranks."""
        numbers = {block.number for block in needed} | self.kept
        numbers |= {block.number for block in self._blocks if block.device_pins}
        return max(0, sum(self._sizes[number] for number in numbers) - self.budget_bytes)

    @contextmanager
    def widened(self, nbytes: int) -> Iterator[None]:
        """So many more may be taken inside."""
        with self._lock:
            self.budget_bytes += nbytes
        try:
            yield
        finally:
            with self._lock:
                self.budget_bytes -= nbytes
                for number in make_room(self._tier(), {}, 0) or ():
                    self.evict(self._blocks[number])

    def _let_go_of_slices(self) -> None:
        """A copy that is over holds host memory until somebody has looked."""
        self._place.poll()
        for number in [n for n, upload in self._uploads.items() if upload.done]:
            self._uploads.pop(number).wait()

    def gather(self, block: Block, own: Tensor, after: Ticket[None] | None) -> None:
        """Start to fill a block from all ranks. own: this rank's slice, once `after` has ended; it
        stays as it is until `await_own`.
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
        """Wait until a block that was asked for is there. It is away again when that raises."""
        if block.on_device is not Presence.COMING:
            return
        try:
            with self._metrics.span(NETWORK):
                upload = self._gather_memory[block.number].arrive()
        except Exception:  # after an interrupt it is still on its way
            self._forget_memory(block)
            raise
        if upload is not None:
            self._uploads[block.number] = upload  # behind an earlier one, on the same stream
        block.move_on_device(Presence.HERE)

    def memory_of(self, block: Block) -> Tensor:
        """The whole block's bytes, for what computes now; they stay as long as the tensor is
        held.
        """
        self.arrive(block)
        return self._gather_memory[block.number].use()

    def address_of(self, block: Block) -> int:
        return self._gather_memory[block.number].address

    def await_own(self, block: Block) -> None:
        """Wait until nothing reads this rank's slice in host memory any more."""
        self.arrive(block)
        upload = self._uploads.pop(block.number, None)
        if upload is not None:
            with self._metrics.span("device copy"):
                upload.wait()

    # --- what will be needed ----------------------------------------------------------------------

    def look_ahead(self, uses: Mapping[int, int]) -> Sequence[Block]:
        """Drop what must go for what is needed next, and say what that is."""
        moves: Moves = look_ahead(self._tier(), uses, self._depth)
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

    # --- going ------------------------------------------------------------------------------------

    def evict(self, block: Block) -> None:
        self.forget(block)
        self._metrics.count("gathered_drops")

    def forget(self, block: Block) -> None:
        """Give the whole block up, if it is there or on its way."""
        if block.on_device is Presence.COMING:
            with suppress(OffloadError):  # whoever needs it gathers again, and is told
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
