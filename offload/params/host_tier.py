"""The tier of a model on the CPU: parameters are used in host memory, where the cache has them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from offload.params.block import Block, Presence, pin, pinned
from offload.params.external_edits import take_in_rebound
from offload.params.host_cache import HostCache
from offload.params.trace import Phase


class HostTier:
    """The blocks that a model computes with in host memory. A cache without checksums of external
    edits serves none.
    """

    device = torch.device("cpu")

    def __init__(self, cache: HostCache) -> None:
        assert cache.edits is not None, "parameters are used in its memory"
        self._cache, self._edits = cache, cache.edits
        self.memory_of, self.changed, self.hide = cache.memory_of, cache.store.changed, cache.hide
        self.pinned = partial(pinned, lock=cache.lock)

    @property
    def never_drops(self) -> bool:
        """Whether parameters stay resident in the tier that they are used in, never evicted."""
        return self._cache.has_room_for_all

    # --- units in use -----------------------------------------------------------------------------

    def pin_for_run(self, blocks: Sequence[Block], change: int) -> None:
        here = threading.get_ident()
        for block in blocks:
            block.runner = here if not block.runs or block.runner == here else None
            block.runs += change
            assert block.pins >= block.runs >= 0, f"{block.name}: done more often than used"
        pin(blocks, change)

    def bring(self, needed: Sequence[Block], use: tuple[Phase, int] | None, is_shown: bool) -> None:
        """Fetch these blocks, wait for them and attach them; the caller has pinned each once."""
        cache = self._cache
        cache.current = frozenset(block.number for block in needed)
        for block in needed:
            if block.in_host is Presence.AWAY:
                cache.metrics.count("parameter_misses")
            elif not block.is_attached:
                cache.metrics.count("parameter_hits")
        cache.fetch(needed, needed)
        cache.look_ahead(cache.prefetch.depth)
        for block in needed:
            cache.arrive(block)
            if not block.is_attached:
                cache.attach(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        """Return the block in whose memory a tensor lies, if any; take in what a layer has changed
        in place in it.
        """
        block = self._cache.by_address.get(tensor.untyped_storage().data_ptr())
        if block is not None:
            with self._cache.lock:
                self._edits.note(block)
        return block

    # --- external edits ---------------------------------------------------------------------------

    def watch_edits(self, is_in_backward: bool = False) -> None:
        """Begin to look for external edits, since the user's code may change parameters from now
        on. Costs one read of the bytes of blocks that are written back. Does nothing in backward,
        nor if host memory has room for all blocks: no block is ever read from the store again.
        """
        if not self._cache.has_room_for_all and not is_in_backward:
            with self._cache.lock:
                self._edits.begin(self._cache.blocks)

    def collect_edits(self, updated: Sequence[Block] = ()) -> None:
        """Find the external edits since `watch_edits`, made in place or by `param.data = ...`, and
        mark their blocks dirty. updated: the blocks whose update begins now.
        """
        blocks = self._cache.blocks
        with self._cache.lock:
            # Note the changes that torch has counted now, not at the end of the run: tensors that
            # autograd saves in the run would be taken for those of other values.
            for block in blocks if not self._cache.has_room_for_all else ():
                self._edits.note(block)
            self._edits.take_in(block for block in blocks if block.nbytes)
            self._edits.may_come = False

    @contextmanager
    def exposed(self, needed: Sequence[Block]) -> Iterator[None]:
        """Expose the parameters of these blocks inside the `with`, and take in their changes."""
        with self.in_host(needed):
            self.watch_edits()
            try:
                yield
            finally:
                self.collect_edits()

    @contextmanager
    def in_host(self, needed: Sequence[Block], only_looks: bool = False) -> Iterator[None]:
        with self.pinned(needed):
            with self._cache.lock:
                self.bring(needed, None, is_shown=True)
            yield

    end_update = watch_edits

    # --- beginning and end ------------------------------------------------------------------------

    def take_over(self, block: Block, has_own_values: bool) -> None:
        """Make the block in host memory the parameters' one source of values. has_own_values: they
        have had them in memory of their own until now.
        """
        self._cache.attach(block)

    def keep(self, block: Block) -> None:
        """Pin the block for good: it is never evicted."""
        with self._cache.lock:
            pin([block])

    def values_to_return(self, block: Block) -> Tensor:
        """Return the memory with the block's present values, to leave the engine."""
        if block.is_attached:
            take_in_rebound(block, settle=self._cache.store.settle)
        return self._cache.memory_of(block)

    def forget(self, block: Block) -> None:
        """Do nothing: a block has no copy here to compute with."""
