"""Where the bytes of blocks come from and go to: the store, or the files that they came from.

A block that nobody changes is read from its own files each time. One that somebody changes all the
same goes to a spare store from then on: in the first no room was reserved for it. Who stays in
memory is the business of `residency`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from offload.core.errors import CapacityError
from offload.core.metrics import Metrics
from offload.params.block import Block
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.memory import MemoryStore
from offload.storage.weight_blocks import WeightBlock

KEY = "parameters "  # how the names of blocks begin in a store


class BlockStore:
    """Of one model's blocks. store: None where they all have room in memory. One thread at a
    time.
    """

    def __init__(self, store: DiskStore | MemoryStore | None, metrics: Metrics) -> None:
        self.open_spare: Callable[[], DiskStore | None] = lambda: None  # for blocks that strayed
        self._store = store
        self._spare: DiskStore | None = None
        self._metrics = metrics
        self._weight_blocks: dict[
            int, WeightBlock
        ] = {}  # of blocks that are read from where they came
        self._strayed: set[int] = set()  # blocks that were, until somebody changed them

    def adopt(self, block: Block, find: Callable[[str], WeightBlock]) -> None:
        """Have a block read from where it came, as long as nobody changes it. find: gives the
        place, which is called like the block.
        """
        self._weight_blocks[block.number] = find(_key(block))
        block.is_stored = True

    # --- reading ----------------------------------------------------------------------------------

    def read(self, block: Block, memory: Tensor, priority: Priority) -> None:
        """Start to fill `memory` with the block's bytes; `await_read` tells when that is over."""
        if block.number in self._weight_blocks:
            block.reading = self._weight_blocks[block.number].read(memory, priority)
        elif block.nbytes:
            store = self._store_of(block)
            assert store is not None and block.is_stored, f"{block.name}: nowhere"
            block.reading = store.read(_key(block), memory, priority)

    def await_read(self, block: Block) -> None:
        """Nothing is under way afterwards, also when it raises."""
        ticket, block.reading = block.reading, None
        if ticket is not None:
            with self._metrics.span("parameter read", block.name):
                ticket.wait()

    # --- writing ----------------------------------------------------------------------------------

    def is_safe(self, block: Block) -> bool:
        """Whether the block's bytes are elsewhere, too, or on their way there."""
        return block.is_stored or block.writing is not None or not block.nbytes

    def can_take(self, block: Block) -> bool:
        """Whether there is a place for the block's bytes but memory."""
        return self.is_safe(block) or self._store_of(block) is not None

    def save(self, block: Block) -> None:
        """Start the way of a block's bytes to the store, unless it has them."""
        if self.is_safe(block):
            return
        store = self._store_of(block)
        if store is None:
            raise CapacityError(
                f"{block.name}: does not fit in host memory beside the others; raise host_memory, "
                "or give nvme=... a directory on a fast drive"
            )
        assert block.memory is not None
        block.writing = store.write(_key(block), block.memory)

    def settle(self, block: Block) -> None:
        """Wait until nothing reads the block's memory any more, and the store has it."""
        ticket, block.writing = block.writing, None
        if ticket is not None:
            with self._metrics.span("parameter write", block.name):
                ticket.wait()
            block.is_stored = True

    def changed(self, block: Block) -> None:
        """The block's bytes in memory are others now; what is stored is old."""
        self.settle(block)
        block.is_stored = False
        if self._weight_blocks.pop(block.number, None) is not None:
            self._strayed.add(block.number)

    def forget(self, block: Block) -> None:
        """Nobody will want its bytes."""
        block.is_stored = False
        self._weight_blocks.pop(block.number, None)

    def _store_of(self, block: Block) -> DiskStore | MemoryStore | None:
        if block.number not in self._strayed:
            return self._store
        if self._spare is None:
            self._spare = self.open_spare()
        return self._spare


def _key(block: Block) -> str:
    return f"{KEY}{block.number}: {block.name}"
