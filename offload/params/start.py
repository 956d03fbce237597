"""The start of a prepared model: fills its parameters, block by block.

A parameter's values come from the weight files, or are those that it has in memory, or are made by
its modules (`initialise.py`). Meta tensors get memory only in their block, one block after the
other, and stay the objects that the optimizer holds. A block of frozen parameters that the weight
files have in the same type stays in those files: nothing is read for it before it is used, and
nothing is ever written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from os import PathLike

import torch
from torch import Tensor, nn

from offload.core.config import format_size
from offload.core.errors import ConfigError
from offload.core.log import LOG
from offload.core.metrics import Metrics
from offload.params.block import Block
from offload.params.initialise import InitTask, empty_, is_filled, plan_tasks, refuse_empty
from offload.params.matching import WeightMatch, WeightPlace, match
from offload.params.placeholder import is_offloaded, make_placeholder, restore
from offload.params.residency import Residency
from offload.planning.unit import Member, Unit
from offload.storage.disk import DiskStore
from offload.storage.weights import FileRange, WeightBlocks, Weights

_CAST_BYTES = 4 << 20  # size of the staging buffer for values that are cast to another type


class PreparedModelStart:
    """The start of one model. The constructor checks the model and changes nothing. Then call
    `begin`, `open`, `take_in` for each block, and `finish`; call `close` at the end of the model.
    After a failure call `forget`, and `restore` once the model is closed. Until the model is ready
    it is the owner of the placeholders (`Owner`), and refuses every use of their values.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        weights: str | PathLike[str] | None,
        trained: Iterable[Tensor],
    ) -> None:
        self._unit_of = {m.param: unit for unit in units for m in unit.members}
        self._names: dict[Tensor, str] = {m.param: m.name for u in units for m in u.members}
        self._names |= {buffer: name for name, buffer in model.named_buffers()}
        self._weights = Weights(weights) if weights is not None else None
        self._files: WeightBlocks | None = None
        try:
            self._match = match(model, self._weights) if self._weights else WeightMatch()
            self._meta = [tensor for tensor in self._names if tensor.is_meta]
            self._was_meta = set(self._meta)
            self._empty = {t: self._names[t] for t in self._meta if t not in self._match.places}
            self._tasks: list[InitTask] = plan_tasks(model, self._empty)
            for tensor in self._meta:
                self._check_exchangeable(tensor)
        except BaseException:
            self.close()
            raise
        self._buffers = [buffer for buffer in self._names if buffer not in self._unit_of]
        self._swapped: list[Tensor] = []
        self._taken: set[int] = set()
        changing = set(trained)
        self.weight_blocks = {
            unit.number for unit in units if unit.nbytes and self._stays(unit, changing)
        }
        self._total_bytes = sum(
            unit.nbytes for unit in units if unit.number not in self.weight_blocks
        )
        self._done_bytes, self._tenths = 0, 0
        if self.weight_blocks:
            nbytes = sum(units[number].nbytes for number in self.weight_blocks)
            LOG.info("weights: %s stay in %s and are only read", format_size(nbytes), weights)
        if self._match.kept:
            LOG.info("weights: not there, and kept as they are: %s", ", ".join(self._match.kept))

    @staticmethod
    def is_needed(model: nn.Module, weights: object) -> bool:
        """Return whether values come from elsewhere than the model's memory: weight files are
        given, or tensors are on the meta device.
        """
        tensors = [*model.parameters(), *model.buffers()]
        return weights is not None or any(tensor.is_meta for tensor in tensors)

    def _stays(self, unit: Unit, changing: set[Tensor]) -> bool:
        """Return whether the unit's block can be read from the weight files each time: they have
        all its parameters in the same type, and no parameter is in `changing`.
        """
        return self._comes_as_it_is(unit) and all(m.param not in changing for m in unit.members)

    def _check_exchangeable(self, tensor: Tensor) -> None:
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise ConfigError(
                f"{self._names[tensor]}: is on the meta device and has hooks, which would be lost; "
                "register them after prepare"
            )

    def gives(self, param: Tensor) -> bool:
        """Return whether the parameter's values come from the weight files."""
        return param in self._match.places

    # --- owner of placeholders until the model is ready -------------------------------------------

    def name_of(self, param: Tensor) -> str:
        return self._names[param]

    def bring(self, params: Sequence[Tensor]) -> bool:
        return False

    # --- the steps, in order ----------------------------------------------------------------------

    def begin(self) -> None:
        """Turn meta parameters into placeholders on the CPU, and give meta buffers memory there.
        Raises `ConfigError` for a tensor that torch cannot swap, since other objects refer to it.
        """
        for tensor in self._meta:
            is_param = tensor in self._unit_of
            values = (
                _nothing(tensor) if is_param else empty_(torch.empty_like(tensor, device="cpu"))
            )
            try:
                _exchange(tensor, values)
            except RuntimeError as error:
                raise ConfigError(
                    f"{self._names[tensor]}: is on the meta device and cannot be given values "
                    f"({error}); prepare the model before others refer to its tensors"
                ) from error
            self._swapped.append(tensor)
            if is_param:
                make_placeholder(tensor, self)

    def open(self, metrics: Metrics, store: DiskStore | None) -> None:
        if self._weights is not None:
            for file in self._weights.files:  # before any value in memory is released
                file.check_unchanged()
            self._files = WeightBlocks(self._weights, metrics, store.engine if store else None)

    def take_in(self, residency: Residency, block: Block, is_kept: bool) -> None:
        """Give a block its values, unless its modules are to fill it. is_kept: the block must be
        resident when this returns.
        """
        if block.number in self.weight_blocks:
            # Parameters with values in memory keep them until all other blocks are filled: until
            # then the start can fail, and the values would be lost.
            if is_kept or all(m.param in self._was_meta for m in block.unit.members):
                self._adopt(residency, block)
            if is_kept:
                with residency.using([block.unit]):
                    pass
        elif is_kept or not any(m.param in self._empty for m in block.unit.members):
            self._fill_now(residency, block)

    def finish(self, residency: Residency) -> None:
        """Let modules fill the tensors that are still empty, and read the buffers. Raises
        `ConfigError` with the names of the tensors that no module has filled.
        """
        left = dict(self._empty)
        for task in self._tasks:
            touched = {*self._empty, *task.kept}
            own = [self._unit_of[p] for p in task.module.parameters() if p in touched]
            units = {unit.number: unit for unit in own}
            for number in units:
                self._take_in_now(residency, residency.blocks[number])
            with residency.in_host(list(units.values())):
                self._run(residency, task, units, left)
        refuse_empty(left.values())
        for block in residency.blocks:
            if block.number not in self.weight_blocks:
                self._take_in_now(residency, block)  # those left have no elements
        for buffer in self._buffers:
            if buffer in self._match.places:
                with torch.no_grad():
                    self._read(self._match.places[buffer], buffer)
        for block in residency.blocks:
            self._take_in_now(residency, block)

    def _run(
        self, residency: Residency, task: InitTask, units: dict[int, Unit], left: dict[Tensor, str]
    ) -> None:
        for number in units:
            if number not in self.weight_blocks:
                residency.changed(residency.blocks[number])
        tensors = [t for t in (*task.module.parameters(), *task.module.buffers()) if t in left]
        versions = [tensor._version for tensor in tensors]
        task.run()
        for tensor, version in zip(tensors, versions, strict=True):
            if is_filled(tensor, version):
                del left[tensor]

    def _take_in_now(self, residency: Residency, block: Block) -> None:
        """Give a block its values, unless it has them already."""
        if block.number in self._taken:
            return
        if block.number in self.weight_blocks:
            self._adopt(residency, block)
        else:
            self._fill_now(residency, block)

    def _adopt(self, residency: Residency, block: Block) -> None:
        assert self._files is not None
        residency.adopt(block, partial(self._files.original, pieces=self._pieces(block)))
        self._taken.add(block.number)

    def _fill_now(self, residency: Residency, block: Block) -> None:
        if block.partition is not None and self._comes_as_it_is(block.unit):
            residency.take_in(block, partial(self._read_span, block), fills_span=True)
        else:
            residency.take_in(block, partial(self._fill, block))
        self._taken.add(block.number)
        self._done_bytes += block.nbytes
        tenths = 10 * self._done_bytes // max(1, self._total_bytes)
        if tenths > self._tenths:
            self._tenths = tenths
            done, total = format_size(self._done_bytes), format_size(self._total_bytes)
            LOG.info("start: %s of %s of parameters are there (%s)", done, total, block.name)

    def _comes_as_it_is(self, unit: Unit) -> bool:
        """Return whether the weight files have all the unit's parameters, in the same type."""
        places = self._match.places
        return all(
            m.param in places and places[m.param].entry.dtype == m.dtype for m in unit.members
        )

    def _read_span(self, block: Block, memory: Tensor) -> None:
        """Read the block's span alone from the weight files into `memory`."""
        pieces = self._pieces(block)
        if pieces:
            assert self._files is not None
            self._files.original(block.name, pieces).read(memory).wait()

    def _fill(self, block: Block, memory: Tensor) -> None:
        """Fill the memory of a whole block with values from the weight files or from the parameters
        in memory. Parameters that modules are to fill become empty (`empty_`).
        """
        whole = []
        for member, values in block.views(memory):
            place = self._match.places.get(member.param)
            if place is None and member.param in self._empty:
                empty_(values)
            elif place is None:
                values.copy_(member.param.detach())
            elif place.entry.dtype == values.dtype:
                whole.append(self._piece(member, 0, block.unit.nbytes))
            else:
                self._read(place, values)
        if whole:
            assert self._files is not None
            self._files.original(block.name, whole).read(memory).wait()

    def _pieces(self, block: Block) -> list[FileRange]:
        each = [self._piece(member, *block.span) for member in block.unit.members]
        return [piece for piece in each if piece.nbytes]

    def _piece(self, member: Member, begin: int, end: int) -> FileRange:
        """Return the file range of the part of a parameter that lies in the bytes [begin, end) of
        its block, for memory that holds these bytes.
        """
        file, entry = self._match.places[member.param]
        first, last = max(begin, member.begin), min(end, member.begin + entry.nbytes)
        return FileRange(
            file, entry.offset + first - member.begin, first - begin, max(0, last - first)
        )

    def _read(self, place: WeightPlace, values: Tensor) -> None:
        """Read one tensor part by part through a staging buffer of `_CAST_BYTES`, and cast it."""
        assert self._files is not None
        file, entry = place
        flat, size = values.detach().view(-1), entry.dtype.itemsize
        step = _CAST_BYTES // size
        staging = torch.empty(min(step, flat.numel()) * size, dtype=torch.uint8, device="cpu")
        for begin in range(0, flat.numel(), step):
            end = min(begin + step, flat.numel())
            part = staging[: (end - begin) * size]
            piece = FileRange(file, entry.offset + begin * size, 0, part.numel())
            self._files.original(entry.name, [piece]).read(part).wait()
            flat[begin:end].copy_(part.view(entry.dtype))

    # --- the end ----------------------------------------------------------------------------------

    def forget(self, residency: Residency) -> None:
        """Release the blocks whose parameters were all on the meta device: after a failure their
        values need not be returned.
        """
        swapped = set(self._swapped)
        for block in residency.blocks:
            if block.unit.members and all(m.param in swapped for m in block.unit.members):
                residency.forget(block)

    def restore(self) -> None:
        """Put the tensors that were on the meta device back there after a failure. Idempotent."""
        while self._swapped:
            tensor = self._swapped.pop()
            if is_offloaded(tensor):
                restore(tensor, _nothing(tensor))
            _exchange(tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))

    def close(self) -> None:
        """Close the weight files. Call it after the store is closed, whose engine reads them.
        Idempotent.
        """
        if self._files is not None:
            self._files.close()
        elif self._weights is not None:
            self._weights.close()


def _nothing(like: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that takes one element of memory."""
    return torch.zeros((), dtype=like.dtype, device="cpu").expand(like.shape)


def _exchange(tensor: Tensor, values: Tensor) -> None:
    """Swap in other values, also on another device; the tensor stays the same object."""
    fresh = (
        nn.Parameter(values, requires_grad=tensor.requires_grad)
        if isinstance(tensor, nn.Parameter)
        else values
    )
    vars(fresh).update(vars(tensor))
    torch.utils.swap_tensors(tensor, fresh)  # type: ignore[no-untyped-call]
