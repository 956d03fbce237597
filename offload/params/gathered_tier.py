"""The tier that holds the gathered blocks of a sharded model while it computes with them.

Host memory and the store have this rank's shard of each block; the blocks are all-gathered from
them, in host memory or on a device, before a unit is used and for the next units. Nothing is ever
written back: the shards are authoritative, and a gathered block needs none in memory until its
update.

An all-gather needs all ranks, and the ranks do not agree on it beforehand. Therefore which blocks
are gathered, and in which order, is a pure function of the order of uses, which must be the same on
all ranks, and of numbers that all ranks agree on: nothing here depends on a clock, on which
transfers have ended, or on references to tensors. If user code still holds a view of a block that
is evicted, the memory stays alive for that view.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

import torch
from torch import Tensor

from offload import kernels
from offload.core.config import format_size
from offload.core.errors import CapacityError, OffloadError, StateError
from offload.core.log import LOG
from offload.core.ticket import split
from offload.distributed.consensus import NETWORK, by_consensus, each_by_consensus
from offload.params.block import Block, Presence, pinned
from offload.params.copies import Copies
from offload.params.external_edits import take_in_rebound, untangle
from offload.params.gathered import Gathered, Release
from offload.params.host_cache import HostCache
from offload.params.mean_gradients import ShardContext
from offload.params.prefetch import look_ahead, make_room
from offload.params.trace import Phase

_RENDEZVOUS_S = 60.0  # deadline of calls that a program easily makes on one rank only


class GatheredTier(Copies[Gathered]):
    """The tier of one model's gathered blocks, in device or host memory. The limit for all of them
    and the prefetch depth are the same on all ranks.
    """

    escaped = "gathered_views_escaped"

    def __init__(self, cache: HostCache, shard_context: ShardContext) -> None:
        sharding = shard_context.sharding
        sizes = [sharding.whole_of(block.unit) for block in cache.blocks]
        super().__init__(cache, shard_context.gather_memory.device, sizes)
        self.peak_bytes = 0
        self.budget_bytes = sharding.whole_bytes
        self._ranks, self._memory = shard_context.ranks, shard_context.gather_memory
        self._depth = sharding.depth
        # Blocks whose parameters still have their own values, in case that `prepare` fails.
        self._uncommitted: set[int] = set()
        self._is_committed = False

    # --- fetch ------------------------------------------------------------------------------------

    def bring(self, needed: Sequence[Block], use: tuple[Phase, int] | None, is_shown: bool) -> None:
        """Begin to gather those of these blocks that are neither gathered nor in flight, and, if
        this is a use, those of the next uses; make room for them first.
        """
        absent = [block for block in needed if block.on_device is Presence.AWAY]
        self._metrics.count("parameter_misses", len(absent))
        self._metrics.count("parameter_hits", len(needed) - len(absent))
        self._make_room(needed, self._cache.prefetch.uses())
        for block in absent:
            self._gather(block)
        if use is not None:
            # The update that follows a backward pass would make the gathered copies stale.
            self._gather_ahead(self._cache.prefetch.uses_before_update())
        if is_shown:
            with self._cache.prefetch.waiting():
                for block in needed:
                    self.attach(block)

    def _make_room(self, needed: Sequence[Block], uses: Mapping[int, int]) -> None:
        """Evict blocks until all of `needed` fit into the budget at once; raise `CapacityError` if
        they cannot.
        """
        self._current = frozenset(block.number for block in needed)
        self._memory.poll()
        self._has_uploaded()
        absent = [block.number for block in needed if block.on_device is Presence.AWAY]
        nbytes = sum(self._sizes[number] for number in absent)
        chosen = make_room(self._tier_within(self.budget_bytes), uses, nbytes)
        if chosen is None and nbytes:
            held = sum(self._sizes[n] for n in self._buffers if not self._may_go(self._blocks[n]))
            raise CapacityError(
                f"{needed[0].name}: whole parameters that are used now need "
                f"{format_size(nbytes)} ({nbytes} bytes); of {format_size(self.budget_bytes)} "
                f"pinned ones hold {format_size(held)}; raise "
                f"{'host_memory' if self.device.type == 'cpu' else 'device_memory'}"
            )
        for number in chosen or ():
            self._evict(self._blocks[number])

    def _gather(self, block: Block) -> None:
        """Start the all-gather of a block. If this rank's shard is not in host memory, fetch it
        first: the all-gather begins when it has been read.
        """
        with pinned([block], self._lock):
            self._cache.fetch([block], [block])
        assert block.memory is not None
        after = None
        if block.in_host is Presence.COMING and block.reading is not None:
            block.reading, after = split(block.reading)
        # A separate tensor keeps the memory alive even if the block is evicted.
        own, what = block.memory.detach(), f"parameters of {block.name}"
        self._buffers[block.number] = self._memory.gather(block.whole_bytes, own, what, after)
        block.copying = partial(self._await_own, block)
        self._place(block, self._buffers[block.number].address)
        self._metrics.count("gathered_bytes", block.whole_bytes)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def _arrive(self, block: Block) -> None:
        """Wait until the all-gather of a block is enqueued or done, if one is in flight. If that
        raises an `Exception`, the block is evicted; after an interrupt it is still in flight.
        """
        if block.on_device is not Presence.COMING:
            return
        try:
            with self._metrics.span(NETWORK):
                upload = self._buffers[block.number].arrive()
        except Exception:  # not an interrupt: after that the all-gather is still in flight
            self._release(block)
            raise
        if upload is not None:
            self._uploads[block.number] = upload  # behind an earlier one, on the same stream
        block.move_on_device(Presence.HERE)

    def _memory_here(self, block: Block) -> Tensor:
        self._arrive(block)
        return self._buffers[block.number].use()

    def _await_own(self, block: Block) -> None:
        """Wait until nothing reads this rank's shard in host memory any more."""
        self._arrive(block)
        self.await_upload(block)

    # --- prefetch ---------------------------------------------------------------------------------

    def _gather_ahead(self, uses: Mapping[int, int]) -> None:
        """Evict the blocks that must make room for these uses, begin to gather the next ones, and
        fetch the shards of those behind them.
        """
        moves = look_ahead(self._tier_within(self.budget_bytes), uses, self._depth)
        for number in moves.evict:
            self._evict(self._blocks[number])
        for number in moves.fetch:
            self._gather(self._blocks[number])
        self._cache.look_ahead(self._cache.prefetch.depth)

    def _evict(self, block: Block) -> None:
        self.forget(block)
        self._metrics.count("gathered_drops")

    def forget(self, block: Block) -> None:
        """Release a block's memory; if its all-gather is in flight, wait for it first."""
        with suppress(OffloadError):  # the next use gathers it again, and raises then
            self._arrive(block)
        super().forget(block)

    # --- the update -------------------------------------------------------------------------------

    def collect_edits(self, updated: Sequence[Block] = ()) -> None:
        """Take back the changes of parameters that are exposed, and release the gathered copies
        that are updated: they become stale on all ranks.
        """
        super().collect_edits()
        with self._lock:
            for block in sorted(updated, key=lambda block: block.number):
                self.forget(block)
                block.generation += 1  # even if this rank's shard has no element of it

    def end_update(self) -> None:
        """Show the new values of exposed parameters, and prefetch the blocks that are needed
        next.
        """
        self.watch_edits()
        with self._lock:
            for number in sorted(self._exposed):
                if self._blocks[number].on_device is Presence.AWAY:
                    self.bring([self._blocks[number]], None, is_shown=True)
            self._gather_ahead(self._cache.prefetch.uses())

    # --- external edits ---------------------------------------------------------------------------

    @contextmanager
    def exposed(self, needed: Sequence[Block]) -> Iterator[None]:
        """Expose the parameters of these blocks inside the `with`, and take their changes in if
        they are the same on all ranks.
        """
        fresh = [block for block in needed if block.number not in self._exposed]
        with self._room_for_all_of(needed), super().exposed(needed):
            yield
            self._compare(fresh)

    @contextmanager
    def in_host(self, needed: Sequence[Block], only_looks: bool = False) -> Iterator[None]:
        if not only_looks:
            with self.exposed(needed) if self._is_committed else self._to_be_filled(needed):
                yield
            return
        fresh = [block for block in needed if not block.is_attached]
        with self._room_for_all_of(needed), self.pinned(needed):
            try:
                with self._lock:
                    self.bring(needed, None, is_shown=True)
                yield
            finally:
                with self._lock:
                    for block in fresh:
                        self.detach(block)

    @contextmanager
    def _to_be_filled(self, blocks: Sequence[Block]) -> Iterator[None]:
        """Let modules fill parameters in host memory while `prepare` runs, on whichever device they
        are used later: there they draw the CPU's random numbers, as they do on one rank. For that
        the blocks are gathered outside of the budget. What the modules do must be the same on all
        ranks (`StateError` if it is not); each rank then copies its shard of the result.
        """
        if self.device.type == "cpu":
            with self.exposed(blocks):
                yield
            return
        places = [(block, self._gather_in_host(block)) for block in blocks]
        try:
            for block, whole in places:
                block.show(whole)
            yield
            untangle(places)
            for block, whole in places:
                take_in_rebound(block, whole)
            self._check_same(places)
            for block, whole in places:
                begin, end = block.span
                self._own_to_change(block)[: end - begin].copy_(whole[begin:end])
        finally:
            for block in blocks:
                self.hide(block)
        with self._lock:
            for block in blocks:
                self.changed(block)

    def _own_to_change(self, block: Block) -> Tensor:
        self._cache.await_arrival(block)
        return self._cache.memory_of(block)

    def _gather_in_host(self, block: Block) -> Tensor:
        whole = torch.empty(block.whole_bytes, dtype=torch.uint8, device="cpu")
        if block.whole_bytes:
            own, what = self._own_to_change(block), f"parameters of {block.name}"
            self._ranks.gather(whole, own, what).wait()
        return whole

    def _check_same(self, places: Sequence[tuple[Block, Tensor]]) -> None:
        each = self._ranks.exchange(_checksums(places), "parameters that were filled")
        for (block, _), *found in zip(places, *each, strict=True):
            if len(set(found)) > 1:
                raise StateError(
                    f"{block.name}: its modules gave it other values on one rank than on another; "
                    "every rank must fill parameters alike"
                )

    @contextmanager
    def _room_for_all_of(self, needed: Sequence[Block]) -> Iterator[None]:
        """Widen the budget of gathered blocks while the block runs, if these blocks at once need
        more than units one by one; afterwards evict what exceeds it. If a rank has no memory left,
        all ranks raise: `CapacityError` there, `StateError` on the others.
        """
        nbytes = self._excess_bytes(needed)
        if not nbytes:
            yield
            return
        claims: list[Release] = []

        def take() -> None:
            claims.append(self._memory.take(nbytes, "parameters that are resident at once"))

        try:
            by_consensus(self._ranks, "resident", take)
            with self._lock:
                self.budget_bytes += nbytes
            try:
                yield
            finally:
                with self._lock:
                    self.budget_bytes -= nbytes
                    for number in make_room(self._tier_within(self.budget_bytes), {}, 0) or ():
                        self._evict(self._blocks[number])
        finally:
            for release in claims:
                release()

    def _excess_bytes(self, needed: Sequence[Block]) -> int:
        """Return by how many bytes the budget is too small for all of these blocks at once, beside
        those that are pinned or kept. The same on all ranks.
        """
        numbers = {block.number for block in needed} | self.kept
        numbers |= {block.number for block in self._blocks if block.device_pins}
        return max(0, sum(self._sizes[number] for number in numbers) - self.budget_bytes)

    def _compare(self, blocks: Sequence[Block]) -> None:
        """Raise `StateError`, and discard the changes of these blocks, if they are not the same on
        all ranks.
        """
        each = each_by_consensus(
            self._ranks,
            "parameters that were changed",
            lambda: self._sums_of(blocks),
            others=StateError,
        )
        other = [b for b, *sums in zip(blocks, *each, strict=True) if len(set(sums)) > 1]
        if other:
            with self._lock:
                for block in blocks:
                    self._note_seen(block)  # discards the changes
                    self.forget(block)
            raise StateError(
                f"{other[0].name}: its parameters were given other values on one rank than on "
                f"another ({len(other)} units differ), so they are refused on all ranks; every "
                "rank must "
                "make the same changes"
            )

    def _sums_of(self, blocks: Sequence[Block]) -> list[int]:
        """Take in what the user's code has assigned, and return the checksums of the blocks."""
        with self._lock:
            self._untangle(blocks)
            for block in blocks:
                if block.unit.nbytes and block.is_attached:
                    take_in_rebound(block, self._memory_here(block))
            return _checksums((block, self._memory_here(block)) for block in blocks)

    # --- beginning and end ------------------------------------------------------------------------

    def take_over(self, block: Block, has_own_values: bool) -> None:
        if has_own_values:
            self._uncommitted.add(block.number)
        else:
            self.hide(block)

    def commit(self) -> None:
        """Take the parameters' own values from them: preparing has succeeded on all ranks."""
        self._is_committed = True
        while self._uncommitted:
            self.hide(self._blocks[self._uncommitted.pop()])

    def meet(self) -> None:
        """Wait for all ranks, which must all call `close()`. Logs an error if one does not."""
        if self._uncommitted or self._ranks.is_broken:
            return
        try:
            self._ranks.exchange(None, "close()", deadline_s=_RENDEZVOUS_S)
        except OffloadError as error:
            LOG.error(
                "close(): parameters have no values any more: call it on every rank, each has "
                "a part of them (%s)",
                error,
            )

    def values_to_return(self, block: Block) -> Tensor | None:
        """Gather the block; None: there are no values to return. Parameters that are not committed
        have their own still; where the other ranks cannot be reached any more, they become
        placeholders.
        """
        if block.number in self._uncommitted:
            self._uncommitted.discard(block.number)
            return None
        if self._ranks.is_broken:
            self.forget(block)
            self.hide(block)
            return None
        return self.memory_of(block)


def _checksums(places: Iterable[tuple[Block, Tensor]]) -> list[int]:
    """Compute the checksums of gathered blocks, each in its memory, without the padding."""
    whole = ((block.unit.nbytes, memory) for block, memory in places)
    return [kernels.checksum(memory[:nbytes].cpu()) if nbytes else 0 for nbytes, memory in whole]
