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

import torch
from torch import Tensor

from offload.block import Block, DevicePins, Presence
from offload.config import format_size
from offload.errors import CapacityError, OffloadError
from offload.guard import Owner, guard_on_device, nowhere, unguard
from offload.holders import holders
from offload.metrics import Metrics
from offload.scheduler import Moves, Tier, look_ahead, make_room
from offload.shard import Ranks
from offload.ticket import Ticket

NETWORK = "network"  # the cause of waits for other ranks


class GatheredTier(DevicePins):
    """Of one model's blocks. budget_bytes: for whole blocks, the same on all ranks. depth: blocks
    ahead that are gathered. take_back: is called with a block whose parameters were changed, before
    they are seen no more. lock: whoever calls has it.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        ranks: Ranks,
        budget_bytes: int,
        depth: int,
        owner: Owner,
        metrics: Metrics,
        take_back: Callable[[Block], None],
        lock: threading.RLock,
    ) -> None:
        self.kept: set[int] = set()  # blocks that stay while they are good
        self.peak_bytes = 0
        self._blocks = blocks
        self._sizes = [block.whole_bytes for block in blocks]
        self._ranks = ranks
        self.budget_bytes = budget_bytes
        self._depth = depth
        self._owner = owner
        self._metrics = metrics
        self._take_back = take_back
        self._lock = lock
        self._memory: dict[int, Tensor] = {}
        self._coming: dict[int, Ticket[None]] = {}
        self._by_address: dict[int, Block] = {}
        self._versions: dict[int, int] = {}  # of what is attached, when it was
        self._current: frozenset[int] = frozenset()  # blocks of the latest use
        self._nowhere: dict[torch.dtype, Tensor] = {}

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes[number] for number in self._memory)

    # --- what is needed now -----------------------------------------------------------------------

    def make_room(self, needed: Sequence[Block], uses: Mapping[int, int]) -> None:
        """For all of these at once; others go for it if they must."""
        self._current = frozenset(block.number for block in needed)
        absent = [block.number for block in needed if block.on_device is Presence.AWAY]
        nbytes = sum(self._sizes[number] for number in absent)
        chosen = make_room(self._tier(), uses, nbytes)
        if chosen is None and nbytes:
            held = sum(self._sizes[n] for n in self._memory if not self._may_go(self._blocks[n]))
            raise CapacityError(
                f"{needed[0].name}: whole parameters that are used now need "
                f"{format_size(nbytes)} ({nbytes} bytes); of {format_size(self.budget_bytes)} "
                f"others that are in use hold {format_size(held)}; raise host_memory"
            )
        for number in chosen or ():
            self.drop(self._blocks[number])

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
                    self.drop(self._blocks[number])

    def gather(self, block: Block, own: Tensor, after: Ticket[None] | None) -> None:
        """Start to fill a block from all ranks. own: this rank's slice, once `after` has ended; it
        stays until the block has arrived.
        """
        memory = torch.empty(block.whole_bytes, dtype=torch.uint8)
        if block.whole_bytes:
            self._coming[block.number] = self._ranks.gather(
                memory, own, f"parameters of {block.name}", after
            )
            self._by_address[memory.data_ptr()] = block
        self._memory[block.number] = memory
        block.move_on_device(Presence.COMING)
        self._metrics.count("gathered_bytes", block.whole_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def arrive(self, block: Block) -> None:
        """Wait until a block that was asked for is there. It is away again when that raises."""
        if block.on_device is not Presence.COMING:
            return
        ticket = self._coming.pop(block.number, None)
        try:
            if ticket is not None:
                with self._metrics.span(NETWORK):
                    ticket.wait()
        except BaseException:
            self._forget_memory(block)
            raise
        block.move_on_device(Presence.HERE)

    def memory_of(self, block: Block) -> Tensor:
        """The whole block's bytes; they stay as long as the tensor is held."""
        self.arrive(block)
        return self._memory[block.number].detach()

    def block_of(self, tensor: Tensor) -> Block | None:
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    # --- what will be needed ----------------------------------------------------------------------

    def look_ahead(self, uses: Mapping[int, int]) -> Sequence[Block]:
        """Drop what must go for what is needed next, and say what that is."""
        moves: Moves = look_ahead(self._tier(), uses, self._depth)
        for number in moves.drop:
            self.drop(self._blocks[number])
        return [self._blocks[number] for number in moves.fetch]

    def _tier(self) -> Tier:
        held = set(self._memory)
        pinned = {number for number in held if not self._may_go(self._blocks[number])}
        return Tier(self._sizes, self.budget_bytes, held, pinned)

    def _may_go(self, block: Block) -> bool:
        busy = block.device_pins or block.number in self._current
        return not busy and block.number not in self.kept

    # --- what is seen -----------------------------------------------------------------------------

    def attach(self, block: Block) -> None:
        """Let the parameters be seen with their values."""
        memory = self.memory_of(block)
        if not block.is_attached:
            for member, values in block.views(memory):
                unguard(member.param, values)
            self.note_seen(block)
            block.is_attached = True

    def detach(self, block: Block) -> None:
        """Let the parameters be seen no more; the bytes stay."""
        if block.is_attached and (
            _versions(block) != self._versions[block.number]
            or block.strangers(self._memory[block.number].data_ptr())
        ):
            self._take_back(block)
        self.hide(block)
        block.is_attached = False

    def hide(self, block: Block) -> None:
        for member in block.unit.members:
            dtype = member.dtype
            if dtype not in self._nowhere:
                self._nowhere[dtype] = nowhere(dtype)
            guard_on_device(member.param, self._owner, self._nowhere[dtype])

    def note_seen(self, block: Block) -> None:
        """What was done to its parameters so far is known."""
        self._versions[block.number] = _versions(block)

    # --- going ------------------------------------------------------------------------------------

    def drop(self, block: Block) -> None:
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
        if holders(self._memory[block.number]) > 1:
            self._metrics.count("gathered_views_escaped")
        self._forget_memory(block)

    def _forget_memory(self, block: Block) -> None:
        memory = self._memory.pop(block.number)
        self._by_address.pop(memory.data_ptr(), None)
        block.move_on_device(Presence.AWAY)


def _versions(block: Block) -> int:
    """Grows whenever somebody writes to a parameter in place."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(member.param._version for member in block.unit.members)
