"""The storage below host memory for blocks: the store, or the weight files that they were loaded
from.

A block that is never changed is read from its own files each time. If it is changed all the same,
it is written to a spare store from then on: the first store reserved no room for it. `host_cache`
decides which blocks stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.autograd.graph import increment_version

from offload.core.metrics import Metrics
from offload.params.block import Block
from offload.storage.disk import DiskStore
from offload.storage.engine import Priority
from offload.storage.weights import WeightBlock


class BlockStore:
    """The storage of one model's blocks. store: None if host memory has room for all of them. One
    thread at a time.
    """

    def __init__(self, store: DiskStore | None, metrics: Metrics) -> None:
        self.open_spare: Callable[[], DiskStore | None] = lambda: None  # for strayed blocks
        self._store = store
        self._spare: DiskStore | None = None
        self._metrics = metrics
        self._weight_blocks: dict[int, WeightBlock] = {}  # of blocks read from weight files
        self._strayed: set[int] = set()  # blocks that were, until their values changed

    def adopt(self, block: Block, find: Callable[[str], WeightBlock]) -> None:
        """Have a block read from its weight file as long as its values do not change. find: returns
        the block's place in the files, by the key that the block has in a store.
        """
        self._weight_blocks[block.number] = find(block.key)
        block.is_stored = True

    # --- reading ----------------------------------------------------------------------------------

    def read(self, block: Block, memory: Tensor, priority: Priority) -> None:
        """Start to fill `memory` with the block's bytes; its `reading` ends with that."""
        if block.number in self._weight_blocks:
            block.reading = self._weight_blocks[block.number].read(memory, priority)
        elif block.nbytes:
            store = self._store_of(block)
            assert store is not None and block.is_stored, f"{block.name}: nowhere"
            block.reading = store.read(block.key, memory, priority)

    # --- writing ----------------------------------------------------------------------------------

    def save(self, block: Block) -> bool:
        """Start to write the block's bytes to the store, unless it has them. Return False if they
        have no place outside of memory.
        """
        if block.is_stored or block.writing is not None or not block.nbytes:
            return True
        store = self._store_of(block)
        if store is None:
            return False
        assert block.memory is not None
        block.writing = store.write(block.key, block.memory)
        return True

    def settle(self, block: Block) -> None:
        """Wait until no write reads the block's memory any more and the store has its bytes."""
        ticket, block.writing = block.writing, None
        if ticket is not None:
            with self._metrics.span("parameter write", block.name):
                ticket.wait()
            block.is_stored = True

    def changed(self, block: Block, is_counted: bool = False) -> None:
        """Note that the block's bytes in memory have changed: the stored ones are stale, and so is
        a tensor that autograd saved of it. Waits for a write in flight. is_counted: the parameters'
        versions tell of the change already.
        """
        self.settle(block)
        if block.is_attached:
            if not is_counted:  # for autograd's check of saved tensors
                increment_version([member.param for member in block.unit.members])
            block.version = block.version_now
        block.is_stored = False
        block.generation += 1
        block.seen = None
        if self._weight_blocks.pop(block.number, None) is not None:
            self._strayed.add(block.number)

    def forget(self, block: Block) -> None:
        """Note that the block's bytes will not be read again."""
        block.is_stored = False
        self._weight_blocks.pop(block.number, None)

    def _store_of(self, block: Block) -> DiskStore | None:
        if block.number not in self._strayed:
            return self._store
        if self._spare is None:
            self._spare = self.open_spare()
        return self._spare
