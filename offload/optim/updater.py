"""The update of all parameters of one optimizer, and the import and export of its state.

It knows the optimizer's groups and gradients, the recipe and the tiers, and runs chunks through the
pipeline. After an error in the middle of a step some slices are a step ahead of others; then it
tells `Consistency`, and refuses to step and to export.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError
from offload.core.metrics import Metrics
from offload.core.tensors import flat
from offload.optim.consistency import LOAD, STEP, Consistency
from offload.optim.coordinator import PendingStep, Resources
from offload.optim.export import ParamOptimizerState, Targets
from offload.optim.gradient_handle import gradient_of
from offload.optim.gradient_source import Gradient, in_memory
from offload.optim.pipeline import Act, Pipeline
from offload.optim.recipe import Recipe, Record, SliceUpdate
from offload.optim.saver import Saver, Sink
from offload.optim.source import FieldReader, is_there
from offload.optim.staging import NO_STAGING, StagingBuffer, StagingProvider
from offload.optim.tiers import HostChunk
from offload.planning.layout import MASTER, Slice
from offload.storage.engine import KnownSums


class Updater:
    """The updater of one optimizer's parameters while a plan is in force. max_norm: what gradients
    are clipped to; None: they are not.
    """

    def __init__(
        self,
        records: Sequence[Record],
        recipe: Recipe,
        resources: Resources,
        metrics: Metrics,
        consistency: Consistency,
        max_norm: float | None,
    ) -> None:
        self.records = records
        self.metrics = metrics
        self.grad_norm: float | None = None
        self._recipe, self._consistency, self._max_norm = recipe, consistency, max_norm
        self._tiers, self._staging_buffers = resources.tiers, resources.staging_buffers
        self._grad_buffers, self._sharded = resources.grad_buffers, resources.sharded
        self._grads_are_own = resources.grads_are_own
        specs = self._tiers.plan.params
        # Without elements on this rank, or in host memory without elementwise state.
        self._without_chunk = {
            number
            for number, spec in enumerate(specs)
            if not spec.own_numel or not (spec.fields or spec.has_staging_buffer)
        }
        # Bytes that an update reads and writes beside the gradient, and the elements of that.
        self._touched = [(spec.touched_bytes(grad_bytes=0), spec.own_numel) for spec in specs]

    # --- the step ---------------------------------------------------------------------------------

    def gradients(self) -> dict[int, Gradient]:
        """Return the gradient of every parameter that has one, flat; raise where one cannot be
        used.
        """
        if self._sharded is not None and self._sharded.reducer is not None:
            return {}  # they are reduced after the consensus
        grads: dict[int, Gradient] = {
            r.number: gradient_of(r) for r in self.records if r.param.grad is not None
        }
        if self._grad_buffers is not None:
            grads = dict(sorted((grads | self._grad_buffers.held()).items()))
        return grads

    def begin(self, grads: Mapping[int, Gradient]) -> PendingStep:
        """Begin a step: all that may be refused is refused here, and then nothing has changed."""
        stepping = [self.records[number] for number in grads]
        for record in stepping:
            fields = self._recipe.fields(record.group)
            if fields != record.fields:
                raise ConfigError(
                    f"{record.name}: its group needs the state {fields or 'nothing'} now, the plan "
                    f"was made for {record.fields or 'nothing'}; close(), then wrap or prepare "
                    "again"
                )
        with self.metrics.span("gradient norm"):
            squares = sum_squares = None
            if self._max_norm is not None:
                squares = self._squares(grads)
                sums = [one for each in squares.values() for one in each]
                sum_squares = kernels.GradStats.of(sums).sum_squares
        if self._grad_buffers is not None:
            self._grad_buffers.fetch(in_memory(grads))
        pending = PendingStep(
            grads=dict(grads),
            fresh={record.number for record in stepping if not record.has_state},
            stepping=stepping,
            before=[record.step for record in stepping],
            squares=squares,
            sum_squares=sum_squares,
        )
        try:
            for record in stepping:
                record.step += 1.0
            self._recipe.begin_step(stepping)  # may refuse a hyper-parameter
        except BaseException:
            pending.undo()
            raise
        return pending

    def carry_out(self, pending: PendingStep) -> None:
        """Update every parameter that has a gradient."""
        if pending.sum_squares is not None and self._max_norm is not None:
            self.grad_norm = math.sqrt(pending.sum_squares)
            scale = self._max_norm / (self.grad_norm + 1e-6)
            pending.scale = 1.0 if scale >= 1.0 else scale  # a NaN scale stays, as in torch
        grads, buffers, sharded = pending.grads, self._grad_buffers, self._sharded
        try:
            for record in pending.stepping:
                record.has_state = True
            if sharded is not None:
                sharded.begin_update(grads)
            for number in grads:
                if number in self._without_chunk:
                    self._update_without_chunk(pending, number)
            self._staging_buffers.begin_step(grads, buffers.by_number if buffers else {})
            self._pass_over(grads, partial(self._update, pending), "update", self._staging_buffers)
            self._staging_buffers.end_step()
            self._recipe.end_step(pending.stepping)
            if buffers is not None:
                buffers.end_step()
            if sharded is not None:
                sharded.end_update()
        except BaseException as error:
            self._consistency.lose(STEP, error, pending.stepping)
            self._break_off(error)
            raise
        touched = ((self._touched[n], grad) for n, grad in grads.items())
        nbytes = sum(state + numel * grad.element_size() for (state, numel), grad in touched)
        self.metrics.count("updated_bytes", nbytes)
        self.metrics.count("steps")

    def _break_off(self, error: BaseException) -> None:
        try:
            self._staging_buffers.break_off()
            if self._sharded is not None:
                self._sharded.break_off(error)
        except Exception:  # the first error is the one to raise
            self.metrics.count("errors_after_an_error")

    def _squares(self, grads: Mapping[int, Gradient]) -> dict[int, Sequence[float]]:
        """Compute sums of squares over blocks of this rank's part of each gradient, by number."""
        sums: dict[int, Sequence[float]] = {}
        there: dict[torch.device, dict[int, Tensor]] = {}
        for number, grad in grads.items():
            if not isinstance(grad, Tensor):
                sums[number] = grad.block_sums()
            elif grad.is_cpu:
                if self._grad_buffers is not None and number in self._grad_buffers.by_number:
                    grad = self._grad_buffers.settle(number)  # its copy may be in flight
                own = self._part(grad, number, *self.records[number].own_range)
                sums[number] = kernels.grad_stats(own).block_sums
            else:
                own = self._part(grad, number, *self.records[number].own_range)
                norm = torch.linalg.vector_norm(own, dtype=torch.float64)
                there.setdefault(grad.device, {})[number] = norm
        for norms in there.values():
            squares = torch.stack(list(norms.values())).square()
            # The CPU waits for the device here.
            sums.update({n: (one,) for n, one in zip(norms, squares.tolist(), strict=True)})
        return sums

    def _part(self, grad: Gradient, number: int, begin: int, end: int) -> Tensor:
        """Return the elements [begin, end) of a parameter from its gradient, which is in memory and
        may begin with this rank's.
        """
        assert isinstance(grad, Tensor), "what is cold comes over a staging buffer"
        own = self.records[number].own if self._grads_are_own else None
        first = own[0] if own else 0
        return grad[begin - first : end - first]

    def _pass_over(
        self,
        numbers: Iterable[int],
        act: Act,
        doing: str,
        staging_buffers: StagingProvider = NO_STAGING,
        only_looks: bool = False,
    ) -> None:
        """Run the chunks that hold state of these parameters through the pipeline."""
        wanted = set(numbers)
        chunks = [
            chunk
            for chunk in self._tiers.plan.chunks
            if any(part.param in wanted for part in chunk.slices)
        ]
        Pipeline(self._tiers, staging_buffers, self.metrics, doing, only_looks).run(chunks, act)

    def _update(
        self, pending: PendingStep, piece: HostChunk, staging_buffer: StagingBuffer | None
    ) -> bool:
        if self._sharded is not None:
            # before this chunk: the last one's new values are on their way to the device
            self._sharded.advance()
        for part in piece.chunk.slices:
            number = part.param
            if number in pending.grads:
                if staging_buffer is not None and part in staging_buffer.slices:
                    param, grad = staging_buffer.slices[part]
                else:
                    param = flat(self.records[number].local)[part.begin : part.end]
                    grad = self._part(pending.grads[number], number, part.begin, part.end)
                fields, sums = piece.fields(part), piece.sums_of(part)
                self._update_slice(pending, part, param, grad, fields, sums)
        return True

    def _update_without_chunk(self, pending: PendingStep, number: int) -> None:
        """Update a parameter that has no chunk: one without elements on this rank, whose step count
        advances all the same, or one in host memory without elementwise state.
        """
        spec, record = self._tiers.plan.params[number], self.records[number]
        nothing = {
            field: torch.empty(0, dtype=torch.float32, device="cpu") for field in spec.fields
        }
        begin, end = spec.own or (0, spec.numel)
        here = ours = torch.empty(0, dtype=record.dtype, device="cpu")
        if end:  # the whole gradient, or nothing
            here = flat(record.local)[begin:end]
            ours = self._part(pending.grads[number], number, begin, end)
        self._update_slice(pending, Slice(number, begin, end, 0), here, ours, nothing, {})

    def _update_slice(
        self,
        pending: PendingStep,
        part: Slice,
        param: Tensor,
        grad: Tensor,
        fields: dict[str, Tensor],
        sums: Mapping[str, KnownSums],
    ) -> None:
        """Update one slice. All tensors are in host memory and have the slice's elements."""
        record = self.records[part.param]
        master = fields.pop(MASTER, None)
        if part.param in pending.fresh:
            for name, field in fields.items():
                field.fill_(self._recipe.initial(record, name))
            if master is not None:
                master.copy_(param)
        self._recipe.update(
            SliceUpdate(
                record=record,
                begin=part.begin,
                master=param if master is None else master,
                grad=grad,
                states=fields,
                out=None if master is None else param,
                scale=pending.scale,
                sums=sums,
            )
        )
        if self._sharded is not None:
            self._sharded.updated(part.param, part.end - part.begin)

    # --- state in and out -------------------------------------------------------------------------

    def copy_out(self, targets: Targets) -> None:
        """Write the elements of these fields that are here to their targets, slice by slice."""
        self._consistency.check()

        def copy(piece: HostChunk, _: StagingBuffer | None) -> bool:
            for part in piece.chunk.slices:
                wanted = targets.get(part.param, {})
                for field, values in piece.fields(part).items():
                    if field in wanted:
                        wanted[field].write(part.begin, values)
            return False

        self._pass_over(targets, copy, "state out", only_looks=True)

    def held(self) -> list[ParamOptimizerState]:
        """Return what state there is, for every parameter that has some."""
        found = []
        for record in self.records:
            fields = self._tiers.plan.params[record.number].fields
            scalars = self._recipe.scalar_state(record)
            if record.has_state and (fields or scalars):
                found.append(ParamOptimizerState(record, fields, scalars))
        return found

    def begin_saving(self, sink: Sink) -> Saver:
        """Begin a snapshot of all state held now, which `sink` receives. One at a time: waits for
        the snapshot before.
        """
        self._consistency.check()
        self._tiers.settle()
        return Saver(self._tiers, self.records, self.metrics, sink)

    def settle(self) -> None:
        """Wait until no snapshot needs the chunks any more."""
        self._tiers.settle()

    def take_in(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace the state of all parameters by these states, by number; a parameter without one
        has none then. `check_states` has checked them. Fields are tensors, or sources, which are
        read slice by slice.
        """
        known = {n for n, state in states.items() if is_there(self.records[n], state)}
        # Not a closure: the frames of an error would hold it, and with it the tiers' memory.
        copy_in = partial(self._copy_in, {n: states[n] for n in known}, FieldReader())
        self._tiers.settle()  # before the records change
        try:
            for record in self.records:
                record.has_state, record.step, record.scalars = False, 0.0, {}
            for number in known:
                self.records[number].has_state = True
                self._recipe.take_scalars(self.records[number], states[number])
            self._tiers.forget()  # so that no chunk is read that is about to be replaced
            self._pass_over(known, copy_in, "state in")
        except BaseException as error:
            self._consistency.lose(LOAD, error)
            raise

    def _copy_in(
        self,
        states: Mapping[int, Mapping[str, Any]],
        reader: FieldReader,
        piece: HostChunk,
        staging_buffer: StagingBuffer | None,
    ) -> bool:
        for part in piece.chunk.slices:
            if part.param not in states:
                continue
            record, state = self.records[part.param], states[part.param]
            for field, target in piece.fields(part).items():
                if field == MASTER and field not in state:
                    target.copy_(self._staging_buffers.values(part))
                else:
                    reader.read(state[field], record, part, target)
        return True
