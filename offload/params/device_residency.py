"""Which blocks are on the device, and which in host memory on their way there.

Two stages work at once: blocks are prefetched from the store to host memory further ahead than they
are uploaded from there to the device. A block on the device needs no host memory until its update.
Outside of runs all parameters are placeholders, since a change of a copy on the device would be
lost; `exposed` shows their values on the device and takes back what has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from offload.core.errors import CapacityError, OffloadError
from offload.core.holders import holders
from offload.device import DeviceTransfer
from offload.params.block import Block, Presence, pinned
from offload.params.device_tier import DeviceTier
from offload.params.external_edits import take_in_rebound, untangle
from offload.params.placeholder import restore
from offload.params.prefetch import look_ahead
from offload.params.residency import Residency, ResidencyParts
from offload.params.trace import Phase
from offload.planning.unit import Unit, UnitSizes
from offload.storage.outgoing import Outgoing
from offload.storage.weight_blocks import WeightBlock

_PIECE_BYTES = 8 << 20  # compared with the device at a time
_DEPTH = 2  # blocks ahead on the device, if the user gave no depth


class DeviceResidency(Residency):
    """The blocks of one model that runs on a device.

    The prefetch depth of `parts` is how many units ahead are uploaded. Host memory has as many
    more, or, if it is None, a depth that is derived while the model runs. limit_bytes: for
    everything on the device.
    """

    def __init__(self, parts: ResidencyParts, transfer: DeviceTransfer, limit_bytes: int) -> None:
        depth = parts.depth
        super().__init__(replace(parts, depth=None if depth is None else 2 * depth))
        self.tier = DeviceTier(
            self.blocks,
            transfer,
            limit_bytes,
            UnitSizes.of(parts.units).least_device_bytes,
            parts.owner,
            parts.metrics,
            _DEPTH if depth is None else depth,
            self._take_back,
            self._lock,
        )
        self._foreseen: dict[int, int] = {}
        self._foreseen_at = (-1, -1)
        self._exposed: set[int] = set()  # blocks that user code sees
        self._shown: dict[int, int] = {}  # generations of blocks whose parameters show host memory
        self._original_devices: dict[Tensor, torch.device] = {}  # before they were prepared

    @property
    def never_drops(self) -> bool:
        return False

    # --- what is needed now -----------------------------------------------------------------------

    def use(self, unit: Unit, phase: Phase) -> None:
        with self._lock:
            self.prefetch.note_use(phase, unit.number)
            needed = [self.blocks[number] for number in unit.needs]
            with self.tier.pinned(needed):
                with self.tier.moving((phase, unit.number)):
                    self._bring(needed)
                self.tier.pin(needed)  # until `done`

    def expect(self, numel: int) -> None:
        with self._lock:
            self.tier.device_budget.expect(numel)

    def visit(self, unit: Unit, phase: Phase) -> None:
        """Upload the blocks of a unit. Autograd has references to them and asks for the memory
        itself: the parameters stay placeholders, also when backward ends with an exception.
        """
        with self._lock:
            self.prefetch.note_use(phase, unit.number)
            needed = [self.blocks[number] for number in unit.needs]
            with self.tier.moving((phase, unit.number)), self.tier.pinned(needed):
                self._upload(needed)

    def done(self, unit: Unit) -> None:
        with self._lock:
            self.tier.unpin(self.blocks[number] for number in unit.needs)

    @contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        needed = self._needed(units)
        with self.tier.pinned(needed):
            with self._lock, self.tier.moving():
                self._bring(needed)
            yield

    def _needed(self, units: Sequence[Unit]) -> list[Block]:
        return [self.blocks[n] for n in sorted({n for unit in units for n in unit.needs})]

    def memory_of(self, block: Block) -> Tensor:
        with self._lock:
            if block.on_device is Presence.AWAY:
                with self.tier.moving(), self.tier.pinned([block]):
                    self._upload([block])
            return self.tier.memory_of(block)

    def _bring(self, needed: Sequence[Block]) -> None:
        self._upload(needed)
        for block in needed:
            self.tier.attach(block)

    def _upload(self, needed: Sequence[Block]) -> None:
        """Make sure that all these blocks are on the device, or that their upload has begun."""
        absent = [block for block in needed if block.on_device is Presence.AWAY]
        self._metrics.count("device_misses", len(absent))
        self._metrics.count("device_hits", len(needed) - len(absent))
        self.tier.reserve(needed, self._uses_of_all())
        with pinned(absent, self._lock):
            self._fill(absent)

    def _fill(self, absent: Sequence[Block]) -> None:
        """Fetch these blocks to host memory, and upload them from there to their memory on the
        device. When this raises, those that are not uploaded have no device memory.
        """
        waiting = list(absent)  # for host memory
        try:
            for block in absent:
                is_away = block.in_host is Presence.AWAY
                self._metrics.count("parameter_misses" if is_away else "parameter_hits")
                if block.in_host is Presence.HERE:  # before what must be read
                    self.tier.fill(block)
                    waiting.remove(block)
            self._fetch_held(waiting, absent)
            self._fetch_ahead()
            while waiting:
                self._arrive(waiting[0])
                self.tier.fill(waiting[0])
                del waiting[0]
        except BaseException:
            for block in waiting:
                self.tier.forget(block)
            raise

    def _fetch_held(self, wanted: Sequence[Block], held: Sequence[Block]) -> None:
        """Start to fetch the blocks that are wanted into host memory. held: the blocks that the
        caller has pinned once for this.
        """
        try:
            self._fetch_all(wanted)
        except CapacityError:  # there may be room, but not contiguous
            self._evict_all(held)
            self._fetch_all(wanted)

    def block_of(self, tensor: Tensor) -> Block | None:
        return self.tier.block_of(tensor)

    def changed(self, block: Block) -> None:
        """Note that the block's values in host memory have changed: the store's and the device's
        are stale.
        """
        with self._lock:
            super().changed(block)
            if block.number not in self._shown:
                self.tier.stale(block)

    # --- what will be needed ----------------------------------------------------------------------

    def _uses(self) -> dict[int, int]:
        """Return the next uses of host memory: those of blocks that are not on the device."""
        uses = self._uses_of_all()
        return {n: at for n, at in uses.items() if self.blocks[n].on_device is Presence.AWAY}

    def _uses_of_all(self) -> dict[int, int]:
        now = self.trace.hits, self.trace.misses  # one more with every use
        if now != self._foreseen_at:
            self._foreseen, self._foreseen_at = super()._uses(), now
        return self._foreseen

    def _fetch_ahead(self) -> None:
        uses = self._uses_of_all()
        self._take_in_what_has_come()
        self.tier.fetch_ahead(uses)
        left = self._uses()
        soon = sum(number in left for number in islice(uses, self.prefetch.depth))
        self._follow(look_ahead(self._tier(), left, soon))

    def look_ahead(self) -> None:
        """Upload new values to the device ahead of their use."""
        with self._lock, self.tier.moving():
            self._fetch_ahead()

    def _take_in_what_has_come(self) -> None:
        """End the reads that the store has finished: those blocks can be uploaded."""
        for block in self.blocks:
            if block.in_host is Presence.COMING and self.has_come(block):
                try:
                    self._arrive(block)
                except OffloadError:  # the use of the block reads again, and raises
                    self._metrics.count("prefetches_failed")

    def _may_go(self, block: Block) -> bool:
        if block.pins or block.in_host is not Presence.HERE:
            return False
        return not self._is_held_elsewhere(block)

    def _is_held_elsewhere(self, block: Block) -> bool:
        return block.memory is not None and holders(block.memory) > 1

    def _evict(self, block: Block) -> bool:
        """Evict a block from host memory; its copy on the device stays."""
        if block.pins:
            return False
        self.tier.await_upload(block)
        if self._is_held_elsewhere(block):
            return False
        self.block_store.save(block)
        self.block_store.settle(block)
        self._forget_memory(block)
        self._metrics.count("parameter_drops")
        return True

    # --- external edits ---------------------------------------------------------------------------

    def watch_edits(self) -> None:
        with self._lock:
            self.hide()
            self.tier.device_budget.end_run()

    def hide(self) -> None:
        """Make all parameters placeholders, except those that are exposed."""
        with self._lock:
            for block in self.blocks:
                if block.is_attached and block.number not in self._exposed:
                    self.tier.detach(block)

    def collect_edits(self) -> None:
        """Take back the changes of parameters that are exposed."""
        with self._lock:
            for number in self._exposed:
                self._take_back(self.blocks[number])

    def note_edit(self, block: Block) -> None:
        """Do nothing: here edits are found when the unit is done."""

    @contextmanager
    def exposed(self, units: Sequence[Unit]) -> Iterator[None]:
        needed = self._needed(units)
        fresh = [block for block in needed if block.number not in self._exposed]
        with pinned(needed, self._lock):  # changes have host memory to go to
            with self._lock:
                self._fetch_held(needed, needed)
                for block in needed:
                    self._arrive(block)
            with self.using(units):
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
                stack.callback(self.tier.detach, block)
            shown = [b for b in blocks if b.nbytes and b.is_attached]
            untangle([(block, self.tier.memory_of(block)) for block in shown])
            for block in blocks:
                stack.callback(self._exposed.discard, block.number)
                stack.callback(self._take_back, block)

    def _take_back(self, block: Block) -> None:
        """Copy the parameters' values on the device to the block in host memory if they differ."""
        if not block.nbytes or not block.is_attached:
            return
        memory = self.host_memory_of(block)
        copy, is_other = self.tier.memory_of(block), False
        take_in_rebound(block, copy)
        for begin in range(0, block.nbytes, _PIECE_BYTES):
            ours, theirs = (one[begin : begin + _PIECE_BYTES] for one in (memory, copy))
            theirs = theirs.cpu()
            if not torch.equal(ours, theirs):
                if not is_other:
                    self.block_store.settle(block)
                    is_other = True
                ours.copy_(theirs)
        if is_other:
            super().changed(block)
        self.tier.note_seen(block)

    @contextmanager
    def in_host(self, units: Sequence[Unit], only_looks: bool = False) -> Iterator[None]:
        """Show the parameters in host memory inside the `with`; a change of them there is a change
        of the block itself.
        """
        needed = self._needed(units)
        with pinned(needed, self._lock):
            try:
                with self._lock:
                    self._fetch_held(needed, needed)
                    for block in needed:
                        self._arrive(block)
                        self._show(block)
                yield
            finally:
                with self._lock:
                    for block in needed:
                        self._hide(block)

    def await_arrival(self, block: Block) -> None:
        super().await_arrival(block)
        self.tier.await_upload(block)  # the device has its copy of what is about to change

    def _show(self, block: Block) -> None:
        self._take_back(block)
        self.tier.await_upload(block)
        self._shown[block.number] = block.generation
        assert block.memory is not None
        for member, values in block.views(block.memory):
            restore(member.param, values)

    def _hide(self, block: Block) -> None:
        generation = self._shown.pop(block.number, None)
        if generation is None:
            return
        if block.is_attached:
            self.tier.refresh(block)
            return
        self.tier.hide(block)
        if block.generation != generation:
            self.tier.stale(block)

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(
        self,
        block: Block,
        fill: Callable[[Tensor], None] | None = None,
        fills_span: bool = False,
    ) -> None:
        self._note_original_devices(block)
        super().take_in(block, fill)

    def adopt(self, block: Block, find: Callable[[str], WeightBlock]) -> None:
        self._note_original_devices(block)
        super().adopt(block, find)

    def _note_original_devices(self, block: Block) -> None:
        for member in block.unit.members:
            self._original_devices[member.param] = member.param.device

    def _detach(self, block: Block) -> None:
        """Make the parameters placeholders. No code sees them in host memory here: nothing to take
        back.
        """
        block.is_attached = False
        self.tier.hide(block)

    def _attach(self, block: Block) -> None:
        """Keep the parameters placeholders: host memory is never shown."""
        self.tier.hide(block)

    def keep(self, block: Block) -> None:
        """Never evict the block from the device."""
        self.tier.kept.add(block.number)

    def original_device_of(self, param: Tensor) -> torch.device:
        """Return the device that the parameter was on before, and is returned to."""
        return self._original_devices[param]

    def return_to_model(self, block: Block, make: Callable[[Tensor], Outgoing]) -> None:
        with self._lock:
            if not self.is_here(block):
                return
            self.tier.forget(block)
            self.tier.await_upload(block)
            super().return_to_model(block, make)
