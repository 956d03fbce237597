"""The resident blocks of a model that is sharded over ranks.

Host memory and the store have this rank's shard of each block. Before a unit is used its blocks are
all-gathered, in host memory or on a device, and those of the next units are prefetched in the same
way. A gathered block needs no shard in memory until its update. Outside of runs all parameters are
placeholders, since an external edit of a gathered copy would be lost; `exposed` shows their values,
compares the changes over the ranks and takes them in.

Which all-gathers begin, and in which order, depends on the order of uses alone, which must be the
same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import takewhile

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import OffloadError, StateError
from offload.core.log import LOG
from offload.core.ticket import split
from offload.distributed import Ranks, by_consensus, each_by_consensus
from offload.params.block import Block, Presence, pinned
from offload.params.external_edits import take_in_rebound, untangle
from offload.params.gathered import Claim, GatheredBlockMemory
from offload.params.gathered_host import whole_in_host
from offload.params.gathered_tier import GatheredTier
from offload.params.prefetch import HORIZON, look_ahead, next_uses
from offload.params.residency import Residency, ResidencyParts
from offload.params.trace import Phase, Use
from offload.planning.sharding import Sharding
from offload.planning.unit import Unit
from offload.storage.engine import Priority
from offload.storage.outgoing import Outgoing
from offload.storage.weight_blocks import WeightBlock

_RENDEZVOUS_S = 60.0  # deadline of calls that a program easily makes on one rank only


class ShardedResidency(Residency):
    """The residency of a sharded model: this rank's shard of each block, and the gathered blocks.
    gather_memory: the memory of the gathered blocks, which the model computes with.
    """

    def __init__(
        self,
        parts: ResidencyParts,
        ranks: Ranks,
        sharding: Sharding,
        gather_memory: GatheredBlockMemory,
    ) -> None:
        self._ranks = ranks
        self._sharding = sharding
        self._gather_memory = gather_memory
        super().__init__(parts)
        self.tier = GatheredTier(
            self.blocks,
            gather_memory,
            [sharding.whole_of(block.unit) for block in self.blocks],
            sharding.whole_bytes,
            sharding.depth,
            parts.owner,
            parts.metrics,
            self._take_back,
            self._lock,
        )
        self._exposed: set[int] = set()  # blocks whose parameters the user's code sees
        # Blocks whose parameters still have their own values, in case that `prepare` fails.
        self._uncommitted: set[int] = set()
        self._is_committed = False
        self._original_devices: dict[
            Tensor, torch.device
        ] = {}  # devices of the parameters before `prepare`, if they are used on a device

    def _make_blocks(self, units: Sequence[Unit]) -> list[Block]:
        return [
            Block(unit, partition=self._sharding.partition_of(unit), rank=self._sharding.rank)
            for unit in units
        ]

    @property
    def never_drops(self) -> bool:
        return False

    # --- units in use -----------------------------------------------------------------------------

    def use(self, unit: Unit, phase: Phase) -> None:
        needed = self._needed([unit])
        with self._lock, self.tier.pinned(needed):
            self.visit(unit, phase)
            self._show(needed)
            self.tier.pin(needed)  # until `done`

    def visit(self, unit: Unit, phase: Phase) -> None:
        """Begin to gather the blocks of a unit, and of the next units. Autograd has references to
        the blocks and asks for their memory; the parameters stay placeholders, also when backward
        ends with an exception.
        """
        with self._lock:
            self.prefetch.note_use(phase, unit.number)
            needed = self._needed([unit])
            with self.tier.pinned(needed):
                self._upload(needed)
                self._gather_ahead()

    def done(self, unit: Unit) -> None:
        with self._lock:
            self.tier.unpin(self._needed([unit]))

    @contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        needed = self._needed(units)
        with self.tier.pinned(needed):
            with self._lock:
                self._bring(needed)
            yield

    def _needed(self, units: Sequence[Unit]) -> list[Block]:
        return [self.blocks[n] for n in sorted({n for unit in units for n in unit.needs})]

    def memory_of(self, block: Block) -> Tensor:
        with self._lock:
            if block.on_device is Presence.AWAY:
                with self.tier.pinned([block]):
                    self._upload([block])
            return self.tier.memory_of(block)

    def _bring(self, needed: Sequence[Block]) -> None:
        self._upload(needed)
        self._show(needed)

    def _show(self, needed: Sequence[Block]) -> None:
        with self.prefetch.waiting():
            for block in needed:
                self.tier.attach(block)

    def _upload(self, needed: Sequence[Block]) -> None:
        """Begin to gather those of these blocks that are neither gathered nor in flight; make room
        for them first.
        """
        absent = [block for block in needed if block.on_device is Presence.AWAY]
        self._metrics.count("parameter_misses", len(absent))
        self._metrics.count("parameter_hits", len(needed) - len(absent))
        self.tier.make_room(needed, self._uses_of_all())
        for block in absent:
            self._gather(block)

    def _gather(self, block: Block) -> None:
        """Begin to gather a block. If this rank's shard is not in host memory, fetch it first: the
        all-gather begins when it has been read.
        """
        with pinned([block], self._lock):
            self._fetch(block, Priority.WAITED_FOR)
        assert block.memory is not None
        after = None
        if block.in_host is Presence.COMING and block.reading is not None:
            block.reading, after = split(block.reading)
        # A separate tensor keeps the memory alive even if the block is evicted.
        self.tier.gather(block, block.memory.detach(), after)

    def block_of(self, tensor: Tensor) -> Block | None:
        return self.tier.block_of(tensor)

    def changed(self, block: Block) -> None:
        """Note that the values of this rank's shard have changed: it is dirty. The gathered copy
        stays; the callers that know that all ranks do the same release it.
        """
        with self._lock:
            self._note_change(block)

    # --- prefetch ---------------------------------------------------------------------------------

    def _uses_of_all(self) -> dict[int, int]:
        return super()._uses()

    def _uses(self) -> dict[int, int]:
        """Return the next uses of shards: of blocks that are not gathered."""
        uses = self._uses_of_all()
        return {n: at for n, at in uses.items() if self.blocks[n].on_device is Presence.AWAY}

    def _gather_ahead(self) -> None:
        """Prefetch along the trace, but not beyond the end of a backward pass: the update that
        follows would make the gathered copies stale.
        """
        ahead: Iterator[Use] = self.trace.ahead()
        if self.trace.last is not None and self.trace.last.phase is Phase.BACKWARD:
            ahead = takewhile(lambda use: use.phase is Phase.BACKWARD, ahead)
        numbers = (number for use in ahead for number in self.blocks[use.unit].unit.needs)
        self._gather_soon(next_uses(numbers, len(self.blocks)))

    def _gather_soon(self, uses: dict[int, int]) -> None:
        for block in self.tier.look_ahead(uses):
            self._gather(block)
        if self.has_room_for_all and all(b.in_host is Presence.HERE for b in self.blocks):
            return
        self._follow(look_ahead(self._tier(), self._uses(), self.prefetch.depth))

    def left_in_backward(self) -> set[int]:
        """Return the numbers of the blocks that the trace expects to be used before the present
        backward pass ends.
        """
        found: set[int] = set()
        most = HORIZON * len(self.blocks) + HORIZON
        for use, _ in zip(self.trace.ahead(), range(most), strict=False):
            if use.phase is not Phase.BACKWARD:
                break
            found |= set(self.blocks[use.unit].unit.needs)
        return found

    def look_ahead(self) -> None:
        """Show the new values of exposed parameters after an update, and prefetch the blocks that
        are needed next.
        """
        with self._lock:
            for number in sorted(self._exposed):
                if self.blocks[number].on_device is Presence.AWAY:
                    self._bring([self.blocks[number]])
            self._gather_soon(self._uses_of_all())

    def _may_go(self, block: Block) -> bool:
        return not block.pins and block.in_host is Presence.HERE

    def _is_held_elsewhere(self, block: Block) -> bool:
        return False  # no code outside of the engine sees a shard

    def _evict(self, block: Block) -> bool:
        """Evict a shard from host memory, after writing it back if it is dirty; the gathered copy
        stays. Return False if it is pinned.
        """
        if block.pins:
            return False
        self.tier.await_own(block)
        self.block_store.save(block)
        self.block_store.settle(block)
        self._forget_memory(block)
        self._metrics.count("parameter_drops")
        return True

    def await_arrival(self, block: Block) -> None:
        super().await_arrival(block)
        self.tier.await_own(block)  # no collective or copy reads the shard any more

    # --- the update -------------------------------------------------------------------------------

    def updating(self, blocks: Sequence[Block]) -> None:
        """Release the gathered copies of these blocks, since the update makes them stale on all
        ranks.
        """
        with self._lock:
            for block in sorted(blocks, key=lambda block: block.number):
                self.tier.forget(block)
                block.generation += 1  # even if this rank's shard has no element of it

    # --- external edits ---------------------------------------------------------------------------

    def watch_edits(self) -> None:
        self.hide()

    def hide(self) -> None:
        """Make all parameters placeholders, except the exposed ones."""
        with self._lock:
            for block in self.blocks:
                if block.is_attached and block.number not in self._exposed:
                    self.tier.detach(block)

    def collect_edits(self) -> None:
        """Take in the external edits of exposed parameters."""
        with self._lock:
            for number in sorted(self._exposed):
                if self.blocks[number].is_attached:
                    self._take_back(self.blocks[number])

    def note_edit(self, block: Block) -> None:
        """Do nothing: here an edit is found when the block is detached."""

    @contextmanager
    def exposed(self, units: Sequence[Unit]) -> Iterator[None]:
        fresh = [block for block in self._needed(units) if block.number not in self._exposed]
        with self._room_for_all_of(units), self.using(units):
            before = self._sums(fresh)
            self._exposed |= {block.number for block in fresh}
            try:
                yield
            except BaseException:  # other ranks may not be here; each rank keeps its own values
                self._end_exposing(fresh)
                raise
            self._compare(fresh, before)

    @contextmanager
    def in_host(self, units: Sequence[Unit], only_looks: bool = False) -> Iterator[None]:
        if not only_looks:
            with self.exposed(units) if self._is_committed else self._to_be_filled(units):
                yield
            return
        fresh = [block for block in self._needed(units) if not block.is_attached]
        with self._room_for_all_of(units):
            try:
                with self.using(units):
                    yield
            finally:
                with self._lock:
                    for block in fresh:
                        self.tier.detach(block)

    @contextmanager
    def _to_be_filled(self, units: Sequence[Unit]) -> Iterator[None]:
        """Let modules fill parameters in host memory while `prepare` runs, on whichever device they
        are used later.
        """
        if self.device.type == "cpu":
            with self.exposed(units):
                yield
            return
        blocks = self._needed(units)
        with whole_in_host(blocks, self._ranks, self._own_to_change, self.tier.hide):
            yield
        for block in blocks:
            self.changed(block)

    def _own_to_change(self, block: Block) -> Tensor:
        self.await_arrival(block)
        return self.host_memory_of(block)

    @contextmanager
    def _room_for_all_of(self, units: Sequence[Unit]) -> Iterator[None]:
        """Widen the budget of gathered blocks while the block runs, if these units at once need
        more than units one by one. If a rank has no memory left, all ranks raise: `CapacityError`
        there, `StateError` on the others.
        """
        nbytes = self.tier.excess_bytes(self._needed(units))
        if not nbytes:
            yield
            return
        shares: list[Claim] = []

        def take() -> None:
            shares.append(self._gather_memory.take(nbytes, "parameters that are resident at once"))

        try:
            by_consensus(self._ranks, "resident", take)
            with self.tier.widened(nbytes):
                yield
        finally:
            for share in shares:
                share.release()

    def _sums(self, blocks: Sequence[Block]) -> list[int]:
        """Return the checksums of gathered blocks, as the user's code sees them."""
        with self._lock:
            found = []
            for block in blocks:
                memory = self.tier.memory_of(block)[: block.unit.nbytes].cpu()
                found.append(kernels.checksum(memory) if block.unit.nbytes else 0)
            return found

    def _compare(self, blocks: Sequence[Block], before: Sequence[int]) -> None:
        """Take in the changes of these blocks if they are the same on all ranks. Otherwise discard
        them and raise `StateError`.
        """

        def look() -> list[int]:
            self._take_in_rebound(blocks)
            return self._sums(blocks)

        each = each_by_consensus(
            self._ranks, "parameters that were changed", look, others=StateError
        )
        other = [b for b, *sums in zip(blocks, *each, strict=True) if len(set(sums)) > 1]
        if other:
            with self._lock:
                for block in blocks:
                    self.tier.note_seen(block)  # discards the changes
                    self._exposed.discard(block.number)
                    self.tier.forget(block)
            raise StateError(
                f"{other[0].name}: its parameters were given other values on one rank than on "
                f"another ({len(other)} units differ), so they are refused on all ranks; every "
                "rank must "
                "make the same changes"
            )
        self._end_exposing(blocks)

    def _take_in_rebound(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            shown = [b for b in blocks if b.unit.nbytes and b.is_attached]
            untangle([(block, self.tier.memory_of(block)) for block in shown])
            for block in shown:
                take_in_rebound(block, self.tier.memory_of(block))

    def _end_exposing(self, blocks: Sequence[Block]) -> None:
        with self._lock:
            for block in blocks:
                try:
                    self._take_back(block)
                finally:
                    self._exposed.discard(block.number)
                    self.tier.note_seen(block)
                    self.tier.detach(block)

    def _take_back(self, block: Block) -> None:
        """Copy this rank's part of the parameters to its shard, if it differs."""
        if not block.unit.nbytes or not block.is_attached:
            return
        whole, (begin, end) = self.tier.memory_of(block), block.span
        take_in_rebound(block, whole)
        mine, theirs = self.host_memory_of(block)[: end - begin], whole[begin:end].cpu()
        if not torch.equal(mine, theirs):
            self.block_store.settle(block)
            self.tier.await_own(block)
            mine.copy_(theirs)
            self.changed(block)
        self.tier.note_seen(block)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(
        self,
        block: Block,
        fill: Callable[[Tensor], None] | None = None,
        fills_span: bool = False,
    ) -> None:
        """Give the block host memory for this rank's shard, filled with the parameters' present
        values, of which only the shard is read, or by `fill` if given. fills_span: `fill` expects
        memory of the block's `span` only.
        """
        self._note_original_devices(block)
        with self._lock:
            memory = self._room_for(block, may_evict=True).zero_()
            begin, end = block.span
            if fill is not None and fills_span:
                fill(memory[: end - begin])
            elif fill is not None:
                whole = torch.zeros(block.unit.nbytes, dtype=torch.uint8, device="cpu")
                fill(whole)
                memory[: end - begin].copy_(whole[begin:end])
            for member in block.unit.members if fill is None else ():
                first, last = max(begin, member.begin), min(end, member.begin + member.nbytes)
                if first < last:
                    values = member.param.detach().view(-1).view(torch.uint8)
                    source = values[first - member.begin : last - member.begin]
                    memory[first - begin : last - begin].copy_(source)
            self._take_place(block, memory)
            block.move_in_host(Presence.HERE)
            if fill is None:
                self._uncommitted.add(block.number)
            else:
                self.tier.hide(block)

    def _note_original_devices(self, block: Block) -> None:
        for member in block.unit.members if self.device.type != "cpu" else ():
            self._original_devices[member.param] = member.param.device

    def original_device_of(self, param: Tensor) -> torch.device:
        return self._original_devices.get(param, self.device)

    def commit(self) -> None:
        with self._lock:
            self._is_committed = True
            while self._uncommitted:
                self.tier.hide(self.blocks[self._uncommitted.pop()])

    def adopt(self, block: Block, find: Callable[[str], WeightBlock]) -> None:
        self._note_original_devices(block)
        with self._lock:
            self.block_store.adopt(block, find)
            self.tier.hide(block)

    def _attach(self, block: Block) -> None:
        """Do nothing: parameters never lie in a shard."""

    def _detach(self, block: Block) -> None:
        block.is_attached = False
        self.tier.hide(block)

    def keep(self, block: Block) -> None:
        """Keep the gathered copy until an update makes it stale."""
        self.tier.kept.add(block.number)

    def forget(self, block: Block) -> None:
        with self._lock:
            self.tier.forget(block)
            with suppress(OffloadError):
                self.tier.await_own(block)
            super().forget(block)

    def in_order_of_return(self) -> list[Block]:
        """Return the blocks in the same order on all ranks, after a rendezvous of the ranks, which
        must all call `close()`. Logs an error if one does not.
        """
        if not self._uncommitted and not self._ranks.is_broken:
            try:
                self._ranks.exchange(None, "close()", deadline_s=_RENDEZVOUS_S)
            except OffloadError as error:
                LOG.error(
                    "close(): parameters have no values any more: call it on every rank, each has "
                    "a part of them (%s)",
                    error,
                )
        return self.blocks

    def return_to_model(self, block: Block, make: Callable[[Tensor], Outgoing]) -> None:
        """Gather the block and leave the parameters with their whole values, on every rank. If the
        other ranks cannot be reached any more, the parameters stay placeholders. A block that is
        not committed has its parameters' own values still: only the shard is released.
        """
        with self._lock:
            if block.number in self._uncommitted:
                self._uncommitted.discard(block.number)
                if block.in_host is Presence.HERE:
                    self.block_store.settle(block)
                    self._forget_memory(block)
                self.block_store.forget(block)
                return
            if self._ranks.is_broken:
                self.forget(block)
                return
            if not self.is_here(block):
                return
            whole = self.memory_of(block)
            self._hand_out(block, whole, make)
            self.block_store.settle(block)
            block.is_attached = block.is_stored = False
            self.tier.kept.discard(block.number)
            self.tier.forget(block)
            self._arrive(block)
            self.tier.await_own(block)  # then the next block can have its memory
            if block.in_host is Presence.HERE:
                self._forget_memory(block)
