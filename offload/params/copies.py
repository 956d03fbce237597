"""Copies of blocks to compute with. The parameters are views of a copy while it is in use, and
placeholders while it is not, since a change of a copy would be lost: `exposed` shows their values
to the user's code and takes back what has changed. Subclasses decide where a copy's memory is and
how it is filled (`device_tier.py`, `gathered_tier.py`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from offload.core.ticket import Ticket
from offload.device.buffer import DeviceBuffer
from offload.params.block import Block, Presence, pin_on_device, pinned
from offload.params.external_edits import take_in_rebound, untangle
from offload.params.gathered import Gathered
from offload.params.host_cache import HostCache
from offload.params.placeholder import make_placeholder, placeholder_storage
from offload.params.prefetch import TierState
from offload.params.trace import Phase

_PIECE_BYTES = 8 << 20  # compared with the host's values at a time


Memory = TypeVar("Memory", Gathered, DeviceBuffer)


class Copies(ABC, Generic[Memory]):
    """The copies of one model's blocks, on one device. cache: the blocks in host memory that they
    are filled from; where no lock is taken, the caller holds its lock. sizes: bytes that each copy
    takes, by the number of the block.
    """

    never_drops = False  # a copy may be evicted while its unit does not run
    pin_for_run = staticmethod(pin_on_device)
    escaped: str  # what counts copies whose memory other code still holds when they are released

    def __init__(self, cache: HostCache, device: torch.device, sizes: Sequence[int]) -> None:
        self.device = device
        self.kept: set[int] = set()  # blocks whose copies stay as long as they are valid
        self._cache, self._blocks, self._lock = cache, cache.blocks, cache.lock
        self._metrics = cache.metrics
        self.pinned = partial(pinned, lock=cache.lock, pin=pin_on_device)
        self._sizes = sizes
        self._buffers: dict[int, Memory] = {}
        self._uploads: dict[int, Ticket[None]] = {}  # copies out of host memory, until waited for
        self._by_address: dict[int, Block] = {}
        self._versions: dict[int, int] = {}  # of what is attached, when it was
        self._current: frozenset[int] = frozenset()  # blocks of the latest use
        self._exposed: set[int] = set()  # blocks whose parameters the user's code sees
        self._placeholder_storage: dict[torch.dtype, Tensor] = {}

    # --- units in use -----------------------------------------------------------------------------

    @abstractmethod
    def bring(self, needed: Sequence[Block], use: tuple[Phase, int] | None, is_shown: bool) -> None:
        """Make sure that all these blocks have copies here, or that they are being filled. use:
        whose blocks they are, in the order of the model. is_shown: attach the parameters to them.
        """

    @abstractmethod
    def _memory_here(self, block: Block) -> Tensor:
        """Return the copy's bytes, to compute with now; they stay as long as the tensor is held."""

    def memory_of(self, block: Block) -> Tensor:
        """Return the block's bytes here; make a copy if there is none. The block is not evicted as
        long as the caller holds the tensor.
        """
        with self._lock:
            if block.on_device is Presence.AWAY:
                with self.pinned([block]):
                    self.bring([block], None, is_shown=False)
            return self._memory_here(block)

    def block_of(self, tensor: Tensor) -> Block | None:
        return self._by_address.get(tensor.untyped_storage().data_ptr())

    def attach(self, block: Block) -> None:
        """Make the parameters views of the copy, for the computation that runs now."""
        memory = self._memory_here(block)
        if not block.is_attached:
            block.show(memory)
            self._note_seen(block)
            block.is_attached = True

    def detach(self, block: Block) -> None:
        """Make the parameters placeholders, after changes are taken back. The copy's bytes stay
        where they are.
        """
        if block.is_attached and (
            block.version_now != self._versions[block.number]
            or block.strangers(self._buffers[block.number].address)
        ):  # changed, or no longer the views that were attached
            self._take_back(block)
        self.hide(block)
        block.is_attached = False

    def hide(self, block: Block) -> None:
        for member in block.unit.members:
            dtype = member.dtype
            if dtype not in self._placeholder_storage:
                self._placeholder_storage[dtype] = placeholder_storage(dtype, self.device)
            owner = self._cache.owner
            make_placeholder(member.param, owner, self._placeholder_storage[dtype])

    def _note_seen(self, block: Block) -> None:
        """Note that all changes to the block's parameters so far are taken in."""
        self._versions[block.number] = block.version_now

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes[number] for number in self._buffers)

    def _tier_within(self, budget_bytes: int) -> TierState:
        held = set(self._buffers)
        pinned = {number for number in held if not self._may_go(self._blocks[number])}
        return TierState(self._sizes, budget_bytes - self.held_bytes, held, pinned)

    def _may_go(self, block: Block) -> bool:
        is_busy = block.device_pins or block.number in self._current
        return not is_busy and block.number not in self.kept

    def _has_uploaded(self) -> None:
        """Collect the tickets of uploads that have ended: until then they hold host memory."""
        for number in [n for n, upload in self._uploads.items() if upload.done]:
            self._uploads.pop(number).wait()

    def await_upload(self, block: Block) -> None:
        """Wait until no upload reads the block's host memory."""
        upload = self._uploads.pop(block.number, None)
        if upload is not None:
            with self._metrics.span("device copy"):
                upload.wait()

    # --- external edits ---------------------------------------------------------------------------

    def watch_edits(self, is_in_backward: bool = False) -> None:
        """Make all parameters placeholders, except those that are exposed: the user's code runs
        from now on, or backward goes on after a recomputation.
        """
        with self._lock:
            for block in self._blocks:
                if block.is_attached and block.number not in self._exposed:
                    self.detach(block)

    def collect_edits(self, updated: Sequence[Block] = ()) -> None:
        """Take back the changes of parameters that are exposed. updated: the blocks whose update
        begins now, on all ranks if there are several.
        """
        with self._lock:
            for number in sorted(self._exposed):
                self._take_back(self._blocks[number])

    @contextmanager
    def exposed(self, needed: Sequence[Block]) -> Iterator[None]:
        """Expose the parameters of these blocks inside the `with`, and take their changes back."""
        fresh = [block for block in needed if block.number not in self._exposed]
        with self.pinned(needed):
            with self._lock:
                self.bring(needed, None, is_shown=True)
                self._exposed |= {block.number for block in fresh}
            try:
                yield
            finally:
                self._end_exposing(fresh)

    def _end_exposing(self, blocks: Sequence[Block]) -> None:
        """End the exposure of blocks. Go on with the rest if one cannot be taken back: its old
        values stay then.
        """
        with self._lock, ExitStack() as stack:
            for block in blocks:
                stack.callback(self.detach, block)
            self._untangle(blocks)
            for block in blocks:
                stack.callback(self._exposed.discard, block.number)
                stack.callback(self._take_back, block)

    def _untangle(self, blocks: Sequence[Block]) -> None:
        shown = [block for block in blocks if block.unit.nbytes and block.is_attached]
        untangle([(block, self._memory_here(block)) for block in shown])

    def _take_back(self, block: Block) -> None:
        """Copy the parameters' values in the block's span to host memory if they differ there."""
        if not block.unit.nbytes or not block.is_attached:
            return
        whole, (first, last), is_other = self._memory_here(block), block.span, False
        take_in_rebound(block, whole)
        memory = self._cache.memory_of(block)
        for begin in range(first, last, _PIECE_BYTES):
            end = min(last, begin + _PIECE_BYTES)
            ours, theirs = memory[begin - first : end - first], whole[begin:end].cpu()
            if not torch.equal(ours, theirs):
                if not is_other:
                    self._cache.await_arrival(block)
                    is_other = True
                ours.copy_(theirs)
        if is_other:
            self._cache.store.changed(block)
        self._note_seen(block)

    def changed(self, block: Block) -> None:
        self._cache.store.changed(block)

    # --- beginning and end ------------------------------------------------------------------------

    def keep(self, block: Block) -> None:
        """Keep the block's copy as long as it is valid."""
        self.kept.add(block.number)

    def _place(self, block: Block, address: int) -> None:
        if block.whole_bytes:
            self._by_address[address] = block
        block.move_on_device(Presence.COMING)

    def forget(self, block: Block) -> None:
        """Release the copy's memory, if there is one, after changes there are taken back. Views
        that other code holds stay valid.
        """
        if block.on_device is Presence.AWAY:
            return
        if block.is_attached:
            self.detach(block)
        self._release(block)

    def _release(self, block: Block) -> None:
        buffer = self._buffers.pop(block.number)
        self._by_address.pop(buffer.address, None)
        block.move_on_device(Presence.AWAY)
        if not buffer.release():
            self._metrics.count(self.escaped)
