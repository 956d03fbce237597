"""The update of all parameters of one optimizer, and the way of its state in and out.

Knows the optimizer's groups and gradients, the recipe and the tiers; runs chunks through the
pipeline. After an error in the middle of a step parameters and state are of two ages; then it says
so to `Soundness`, and refuses to step and to export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload import kernels
from offload.errors import ConfigError
from offload.layout import MASTER, Slice
from offload.metrics import Metrics
from offload.optim.desk import Desk, Places
from offload.optim.flat import flat, in_order_of
from offload.optim.ground import Ground
from offload.optim.incoming import is_there
from offload.optim.pipeline import Act, Pipeline
from offload.optim.recipe import Recipe, Record, Work
from offload.optim.saver import Saver, Sink
from offload.optim.soundness import LOAD, STEP, Soundness
from offload.optim.source import Wholes, read_slice
from offload.optim.tiers import Piece

GRADS = (torch.float32, torch.bfloat16, torch.float16)


class Held(NamedTuple):
    """The state of one parameter: names of its fields, and all that is not elementwise."""

    record: Record
    fields: tuple[str, ...]
    scalars: dict[str, Any]


class Updater:
    def __init__(
        self,
        records: Sequence[Record],
        recipe: Recipe,
        ground: Ground,
        metrics: Metrics,
        soundness: Soundness,
    ) -> None:
        self.records = records
        self.metrics = metrics
        self.grad_norm: float | None = None
        self._recipe = recipe
        self._tiers, self._desks, self._homes = ground.tiers, ground.desks, ground.homes
        self._soundness = soundness

    # --- the step ---------------------------------------------------------------------------------

    def step(self, max_grad_norm: float | None) -> None:
        """Update every parameter that has a gradient."""
        self._soundness.check()
        grads = {r.number: _gradient(r) for r in self.records if r.param.grad is not None}
        if self._homes is not None:
            grads = dict(sorted((grads | self._homes.held()).items()))
        for number in grads:
            self._check_fields(self.records[number])
        with self.metrics.span("gradient norm"):
            scale = self._clip_scale(grads, max_grad_norm)
        if self._homes is not None:
            self._homes.fetch(grads)
        fresh = {number for number in grads if not self.records[number].has_state}
        stepping = [self.records[number] for number in grads]
        before = [record.step for record in stepping]
        try:
            for record, step in zip(stepping, before, strict=True):
                record.step = step + 1.0
            self._recipe.begin_step(stepping)  # may refuse a hyper-parameter
        except BaseException:
            for record, step in zip(stepping, before, strict=True):
                record.step = step
            raise
        try:
            for record in stepping:
                record.has_state = True
            for number in grads:
                self._update_without_chunk(number, grads[number], fresh, scale)
            if self._desks is not None:
                self._desks.begin_step(grads, self._homes.by_number if self._homes else {})
            act = partial(self._update, grads, fresh, scale)
            self._pass_over(grads, act, "update", self._desks)
            if self._desks is not None:
                self._desks.end_step()
            for number in grads:
                self._recipe.end_step(self.records[number])
            if self._homes is not None:
                self._homes.end_step()
        except BaseException as error:
            self._soundness.lose(STEP, error, stepping)
            self._break_off()
            raise
        self._count(grads)

    def _break_off(self) -> None:
        try:
            if self._desks is not None:
                self._desks.break_off()
        except Exception:  # the first error is the one to tell
            self.metrics.count("errors_after_an_error")

    def _count(self, grads: Mapping[int, Tensor]) -> None:
        specs = self._tiers.plan.params
        touched = sum(specs[n].touched_bytes(grad.element_size()) for n, grad in grads.items())
        self.metrics.count("updated_bytes", touched)
        self.metrics.count("steps")

    def _check_fields(self, record: Record) -> None:
        fields = self._recipe.fields(record.group)
        if fields != record.fields:
            raise ConfigError(
                f"{record.name}: its group needs the state {fields or 'nothing'} now, the plan was "
                f"made for {record.fields or 'nothing'}; close() and wrap the optimizer again"
            )

    def _clip_scale(self, grads: Mapping[int, Tensor], max_norm: float | None) -> float:
        if max_norm is None:
            return 1.0
        here = [kernels.grad_stats(self._in_host(n, grads[n])) for n in grads if grads[n].is_cpu]
        sums = [partial_sum for one in here for partial_sum in one.block_sums]
        there: dict[torch.device, list[Tensor]] = {}
        for grad in grads.values():
            if not grad.is_cpu:
                norm = torch.linalg.vector_norm(grad, dtype=torch.float64)
                there.setdefault(grad.device, []).append(norm)
        for norms in there.values():
            sums += torch.stack(norms).square().tolist()  # the CPU waits for the device here
        total = kernels.GradStats.of(sums)
        self.grad_norm = total.norm
        scale = max_norm / (total.norm + 1e-6)
        return 1.0 if scale >= 1.0 else scale  # also NaN, which torch hands on as well

    def _in_host(self, number: int, grad: Tensor) -> Tensor:
        """The same gradient in host memory, once it is there."""
        if self._homes is not None and number in self._homes.by_number:
            return self._homes.settle(number)
        return grad.cpu()

    def _pass_over(
        self,
        numbers: Iterable[int],
        act: Act,
        doing: str,
        desks: Places | None = None,
        only_looks: bool = False,
    ) -> None:
        """Run the chunks that hold state of these parameters through the pipeline."""
        wanted = set(numbers)
        chunks = [
            chunk
            for chunk in self._tiers.plan.chunks
            if any(part.param in wanted for part in chunk.slices)
        ]
        Pipeline(self._tiers, desks, self.metrics, doing, only_looks).run(chunks, act)

    def _update(
        self,
        grads: Mapping[int, Tensor],
        fresh: set[int],
        scale: float,
        piece: Piece,
        desk: Desk | None,
    ) -> bool:
        for part in piece.chunk.slices:
            if part.param in grads:
                record = self.records[part.param]
                if desk is not None and part in desk.slices:
                    param, grad = desk.slices[part]
                else:
                    param = flat(record.param)[part.begin : part.end]
                    grad = grads[part.param][part.begin : part.end]
                fields = piece.fields(part)
                self._update_slice(record, part, param, grad, fields, record.number in fresh, scale)
        return True

    def _update_without_chunk(
        self, number: int, grad: Tensor, fresh: set[int], scale: float
    ) -> None:
        """A parameter without elements, or in host memory and without elementwise state."""
        spec, record = self._tiers.plan.params[number], self.records[number]
        if not spec.numel or not (spec.fields or spec.has_desk):
            nothing = {field: torch.empty(0) for field in spec.fields}
            whole = Slice(number, 0, spec.numel, 0)
            here = flat(record.param) if spec.numel else torch.empty(0, dtype=record.dtype)
            grad = self._in_host(number, grad)  # itself, or nothing
            self._update_slice(record, whole, here, grad, nothing, number in fresh, scale)

    def _update_slice(
        self,
        record: Record,
        part: Slice,
        param: Tensor,
        grad: Tensor,
        fields: dict[str, Tensor],
        is_fresh: bool,
        scale: float,
    ) -> None:
        """All tensors are in host memory and have the slice's elements."""
        master = fields.pop(MASTER, None)
        if is_fresh:
            for name, field in fields.items():
                field.fill_(self._recipe.initial(record, name))
            if master is not None:
                master.copy_(param)
        self._recipe.update(
            Work(
                record=record,
                begin=part.begin,
                master=param if master is None else master,
                grad=grad,
                states=fields,
                out=None if master is None else param,
                scale=scale,
            )
        )

    # --- state in and out -------------------------------------------------------------------------

    def export(self, make: Callable[[Record], Tensor]) -> dict[int, dict[str, Any]]:
        """The state of every parameter that has some, by number, shaped as torch's own. make: gives
        the memory of one field, with shape and strides of the parameter.
        """
        self._soundness.check()
        found: dict[int, dict[str, Any]] = {}
        targets: dict[int, dict[str, Tensor]] = {}
        for held in self.held():
            number = held.record.number
            targets[number] = {field: make(held.record) for field in held.fields}
            found[number] = {**held.scalars, **targets[number]}

        def copy_out(piece: Piece, _: Desk | None) -> bool:
            for part in piece.chunk.slices:
                for field, values in piece.fields(part).items():
                    if part.param in targets:
                        flat(targets[part.param][field])[part.begin : part.end].copy_(values)
            return False

        self._pass_over(targets, copy_out, "state out", only_looks=True)
        return found

    def held(self) -> list[Held]:
        """What there is of every parameter that has state."""
        found = []
        for record in self.records:
            fields = self._tiers.plan.params[record.number].fields
            scalars = self._recipe.scalar_state(record)
            if record.has_state and (fields or scalars):
                found.append(Held(record, fields, scalars))
        return found

    def begin_saving(self, sink: Sink) -> Saver:
        """The fields of all that is held now, on their way to `sink`. One at a time: the one before
        is waited for.
        """
        self._soundness.check()
        self._tiers.settle()
        return Saver(self._tiers, self.records, self.metrics, sink)

    def settle(self) -> None:
        """Return when no saving needs our chunks any more."""
        self._tiers.settle()

    def take_in(self, states: Mapping[int, Mapping[str, Any]]) -> None:
        """Make these states the parameters' own, by number; all others have none. They have been
        checked with `check_states`. Fields are tensors, or sources, which are read as they are
        needed.
        """
        known = {n for n, state in states.items() if is_there(self.records[n], state)}
        # Not a closure: the frames of an error would hold it, and it our memory.
        copy_in = partial(self._copy_in, {number: states[number] for number in known}, Wholes())
        self._tiers.settle()  # before the records change
        try:
            for record in self.records:
                record.has_state, record.step, record.scalars = False, 0.0, {}
            for number in known:
                self.records[number].has_state = True
                self._recipe.take_scalars(self.records[number], states[number])
            self._tiers.forget()  # so that nothing is read that is about to be replaced
            self._pass_over(known, copy_in, "state in")
        except BaseException as error:
            self._soundness.lose(LOAD, error)
            raise

    def _copy_in(
        self,
        states: Mapping[int, Mapping[str, Any]],
        wholes: Wholes,
        piece: Piece,
        desk: Desk | None,
    ) -> bool:
        for part in piece.chunk.slices:
            if part.param in states:
                self._fill(self.records[part.param], part, states[part.param], piece, wholes)
        return True

    def _fill(
        self, record: Record, part: Slice, state: Mapping[str, Any], piece: Piece, wholes: Wholes
    ) -> None:
        for field, target in piece.fields(part).items():
            if field == MASTER and field not in state:
                target.copy_(self._values(record, part))
            elif isinstance(state[field], Tensor):
                target.copy_(in_order_of(state[field], record.param)[part.begin : part.end])
            else:
                read_slice(state[field], record, part, target, wholes)

    def _values(self, record: Record, part: Slice) -> Tensor:
        if self._desks is not None:
            return self._desks.values(part)
        return flat(record.param)[part.begin : part.end]


def _gradient(record: Record) -> Tensor:
    grad = record.param.grad
    assert grad is not None
    if grad.layout != torch.strided:
        raise ConfigError(
            f"{record.name}: its gradient is sparse ({grad.layout}), which is not supported; make "
            "it dense: nn.Embedding(..., sparse=False), or p.grad = p.grad.to_dense()"
        )
    place = record.param.device if record.home is None else torch.device("cpu")
    allowed = GRADS if place.type == "cpu" else (record.dtype,)
    if grad.device != place or grad.dtype not in allowed:
        raise ConfigError(
            f"{record.name}: expected a gradient of {' or '.join(map(str, allowed))} on "
            f"{place}, got {grad.dtype} on {grad.device}"
        )
    return in_order_of(grad.resolve_neg(), record.param)
