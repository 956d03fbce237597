"""Which blocks are resident, and where their parameters show their values.

`use` makes the parameters of a unit resident and pins them until `done`. Three parts know where the
bytes are: the tier that the model computes in (`host_tier.py`, `device_tier.py`,
`gathered_tier.py`), below it the blocks in host memory (`host_cache.py`), and below that the store.
Calls go down only. Any thread may call; a lock lets in one at a time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import CapacityError
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.device.accelerator import DeviceGauge
from offload.device.device import DeviceTransfer
from offload.params.block import KEY, Block, Presence, pin
from offload.params.block_store import BlockStore
from offload.params.device_tier import DeviceTier
from offload.params.gathered_tier import GatheredTier
from offload.params.host_cache import HostCache
from offload.params.host_tier import HostTier
from offload.params.mean_gradients import ShardContext
from offload.params.placeholder import Owner, restore
from offload.params.prefetch import PrefetchDepth
from offload.params.trace import Phase, Trace
from offload.planning.unit import Member, Unit, UnitSizes
from offload.storage.disk import DiskStore
from offload.storage.handout import InMemory, Outgoing
from offload.storage.weights import WeightBlock


@dataclass(frozen=True)
class Device:
    """The device that a model runs on, if not the CPU. limit_bytes: for everything on it. gauge:
    measures it if no other model uses it.
    """

    transfer: DeviceTransfer
    limit_bytes: int
    gauge: DeviceGauge | None = None


class Residency:
    """The residency of one model's blocks. tier: where the model computes with them."""

    def __init__(self, cache: HostCache, tier: HostTier | DeviceTier | GatheredTier) -> None:
        self.blocks, self.prefetch = cache.blocks, cache.prefetch
        self.cache, self.tier = cache, tier
        self._lock = cache.lock
        # Devices of the parameters before `prepare`, if they are used on another than the CPU.
        self._original_devices: dict[Tensor, torch.device] = {}

    # --- units in use -----------------------------------------------------------------------------

    def use(self, unit: Unit, phase: Phase, is_run: bool = True) -> None:
        """Make the parameters of a unit resident, wait for them, and pin them until `done`. Nothing
        stays pinned when it raises.

        is_run: False for code that runs before the next use of any unit, where nothing is pinned.
        Autograd has references to copies on a device and asks for their memory: those parameters
        stay placeholders, also when backward ends with an exception.
        """
        needed = [self.blocks[number] for number in unit.needs]
        with self._lock, self.tier.pinned(needed):
            self.prefetch.note_use(phase, unit.number)
            self.tier.bring(needed, (phase, unit.number), is_shown=is_run)
            if is_run:
                self.tier.pin_for_run(needed, 1)  # until `done`

    def done(self, unit: Unit) -> None:
        with self._lock:
            self.tier.pin_for_run([self.blocks[number] for number in unit.needs], -1)

    @contextmanager
    def using(self, units: Sequence[Unit]) -> Iterator[None]:
        """Keep the blocks of these units resident, all at once, while the block runs. This is not a
        use in the order of the model: the trace does not record it.
        """
        needed = self._own_blocks(units)
        with self.tier.pinned(needed):
            with self._lock:
                self.tier.bring(needed, None, is_shown=True)
            yield

    def _own_blocks(self, units: Sequence[Unit]) -> list[Block]:
        """Return the blocks that these units own, not those that they only use."""
        return [self.blocks[n] for n in sorted({unit.number for unit in units})]

    def exposed(self, units: Sequence[Unit]) -> AbstractContextManager[None]:
        """Expose the parameters of these units, all at once, to the user's code, which may change
        them inside the `with`; take in its edits afterwards.
        """
        return self.tier.exposed(self._own_blocks(units))

    def in_host(
        self, units: Sequence[Unit], only_looks: bool = False
    ) -> AbstractContextManager[None]:
        """Keep the parameters of these units, all at once, in host memory inside the `with`.
        only_looks: the caller does not change them.
        """
        return self.tier.in_host(self._own_blocks(units), only_looks)

    # --- changes ----------------------------------------------------------------------------------

    def changed(self, block: Block) -> None:
        """Note that the values in host memory have changed: what the store has of the block is
        stale, and so is a tensor that autograd saved of it.
        """
        with self._lock:
            self.tier.changed(block)

    def end(self, block: Block, has_changed: bool) -> None:
        """Unpin a block after `HostCache.try_begin`. Begin to write back its values if they have
        changed, unless host memory has room for all blocks.
        """
        with self._lock:
            pin([block], -1)
            if has_changed and block.in_host is Presence.HERE:  # else it was not fetched
                self.tier.changed(block)
                if not self.cache.has_room_for_all and not self.cache.store.save(block):
                    raise CapacityError(
                        f"{block.name}: does not fit in host memory beside the others; raise "
                        "host_memory, or give nvme=... a directory on a fast drive"
                    )

    # --- beginning and end ------------------------------------------------------------------------

    def take_in(
        self,
        block: Block,
        fill: Callable[[Tensor], None] | None = None,
        fills_span: bool = False,
    ) -> None:
        """Give the block host memory, filled with the parameters' present values, of which only the
        block's span is read, or by `fill` if given. fills_span: `fill` expects memory of the span
        only.
        """
        self._note_original_devices(block)
        with self._lock:
            self.cache.take_in(block, fill, fills_span)
            self.tier.take_over(block, has_own_values=fill is None)

    def adopt(self, block: Block, find: Callable[[str], WeightBlock]) -> None:
        """Have a block read from its weight file as long as its values are unchanged. The block is
        not resident. find: returns the place in the file.
        """
        self._note_original_devices(block)
        with self._lock:
            self.cache.store.adopt(block, find)
            self.tier.hide(block)

    def _note_original_devices(self, block: Block) -> None:
        for member in block.unit.members if self.tier.device.type != "cpu" else ():
            self._original_devices[member.param] = member.param.device

    def original_device_of(self, param: Tensor) -> torch.device:
        """Return the device on which the parameter is an ordinary one, before `prepare` and after
        `close`.
        """
        return self._original_devices.get(param, self.tier.device)

    def commit(self) -> None:
        """Note that preparing the model has succeeded, on all ranks if there are several."""
        if isinstance(self.tier, GatheredTier):
            with self._lock:
                self.tier.commit()

    def forget(self, block: Block) -> None:
        """Leave the parameters as placeholders for good and release the block's memory: its values
        are not needed again.
        """
        with self._lock:
            self.tier.forget(block)
            self.cache.release(block)
            self.tier.hide(block)

    def in_order_of_return(self) -> list[Block]:
        """Return the blocks in the order of `return_to_model`: resident ones first, since they make
        room for the others. Ranks must do it together and have one order.
        """
        if isinstance(self.tier, GatheredTier):
            self.tier.meet()
            return list(self.blocks)
        return sorted(self.blocks, key=lambda block: block.memory is None)

    def return_to_model(self, block: Block, make: Callable[[Tensor], Outgoing]) -> None:
        """Make the block's parameters ordinary ones with values in memory of their own, and leave
        the block empty. make: returns a place in host memory for values like those given. Does
        nothing the second time.
        """
        with self._lock:
            if not block.is_here:
                return
            memory = self.tier.values_to_return(block)
            if memory is not None:
                self._hand_out(block, memory, make)
                self.cache.store.settle(block)
            del memory
            block.is_attached, block.seen = False, None
            self.tier.forget(block)
            self.cache.release(block)

    def _hand_out(self, block: Block, memory: Tensor, make: Callable[[Tensor], Outgoing]) -> None:
        """Copy the values in `memory` to places of their own and restore the parameters there. As
        long as a copy may raise, no parameter has changed.
        """
        places: list[tuple[Member, Outgoing]] = []
        for member, values in block.views(memory):
            device = self.original_device_of(member.param)
            is_host = device.type == "cpu"
            place = make(values) if is_host else InMemory(torch.empty_like(values, device=device))
            place.fill(values)
            places.append((member, place))
        for _, place in places:
            place.sync()  # the values in memory are released next
        for member, place in places:
            restore(member.param, place.tensor)


def make_residency(
    units: Sequence[Unit],
    pool: Pool,
    store: DiskStore | None,
    metrics: Metrics,
    owner: Owner,
    depth: int | None,
    on: Device | None = None,
    shard_context: ShardContext | None = None,
    now_s: Callable[[], float] | None = None,
    checksum: Callable[[Tensor], int] | None = None,
) -> Residency:
    """Make the residency of a model. owner: of the placeholders. depth: the prefetch depth in
    units; None: derived while training runs. now_s, checksum: the clock and the checksum of
    blocks, if not the usual ones.
    """
    if shard_context is None:
        blocks = [Block(unit) for unit in units]
    else:
        cut, rank = shard_context.sharding.partition_of, shard_context.sharding.rank
        blocks = [Block(unit, partition=cut(unit), rank=rank) for unit in units]
    # Blocks are fetched to host memory further ahead than they are uploaded from there.
    is_uploaded = on is not None and shard_context is None
    ahead = 2 * depth if is_uploaded and depth is not None else depth
    trace = Trace(_fingerprint(units), len(units))
    sizes = [block.nbytes for block in blocks]
    prefetch = PrefetchDepth(metrics, trace, sizes, KEY, ahead, units, now_s)
    below = BlockStore(store, metrics)
    is_on_cpu = shard_context is None and on is None
    looks = (checksum or kernels.checksum) if is_on_cpu else None
    cache = HostCache(blocks, pool, below, prefetch, owner, metrics, looks)
    tier: HostTier | DeviceTier | GatheredTier
    if shard_context is not None:
        tier = GatheredTier(cache, shard_context)
    elif on is not None:
        least = UnitSizes.of(units).least_device_bytes
        tier = DeviceTier(cache, on.transfer, on.limit_bytes, least, depth, on.gauge)
    else:
        tier = HostTier(cache)
    return Residency(cache, tier)


def _fingerprint(units: Sequence[Unit]) -> str:
    """Hash the names, shapes and dtypes of all parameters, and how they are grouped into units."""
    lines = [
        f"{unit.number} {m.name} {tuple(m.param.shape)} {m.param.dtype} {unit.needs}"
        for unit in units
        for m in unit.members
    ]
    # Names are any texts, also those that no file could hold.
    return hashlib.sha256("\n".join(lines).encode(errors="surrogatepass")).hexdigest()[:16]
