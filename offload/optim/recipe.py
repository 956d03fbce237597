"""Recipes: what an optimizer's step does to a slice of a parameter, and which state it needs.

A recipe is made once for an optimizer. The native ones call the kernels; `choose.py` has the one
that runs the torch class itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError, StateError
from offload.core.tensors import is_same_order
from offload.distributed.placing import local_of, placing_of
from offload.kernels import reference, rules
from offload.planning.layout import MASTER
from offload.storage.engine import KnownSums

Group = dict[str, Any]  # a param_group of torch's
_SAMPLE_NUMEL = 4096  # of each slice that is checked: its end, where torch runs other code


@dataclass
class Record:
    """A parameter and what is kept for it beside its chunks."""

    number: int
    name: str
    param: Tensor
    group: Group
    fields: tuple[str, ...]  # the recipe's state fields, without the master weights
    is_frozen: bool = False  # requires_grad was False when the plan was made
    has_state: bool = False  # its slices of the chunks, step and scalars are valid
    step: float = 0.0  # updates so far
    scalars: dict[str, Any] = field(default_factory=dict)  # other state that is not elementwise
    original_device: torch.device | None = (
        None  # in a prepared model: it returns there at close; its gradient is in host memory
    )
    own: tuple[int, int] | None = None  # the elements whose state this rank owns; None: all
    unit: int | None = None  # the number of the prepared model's unit that owns the parameter

    def __post_init__(self) -> None:
        self.note_param()

    def note_param(self) -> None:
        """Note the parameter as it is now; a later `model.to(...)` may change it."""
        self.placing = placing_of(self.param)  # None: it is no DTensor
        local = self.local
        self.dtype, self.device, self.shape = local.dtype, local.device, local.shape
        self.stride = local.stride()  # chunks have the elements in the order of memory

    @property
    def local(self) -> Tensor:
        """The parameter, or this rank's part of a DTensor. Do not keep it: FSDP2 exchanges it."""
        return self.param if self.placing is None else local_of(self.param)

    def check_unchanged(self) -> bool:
        """Refuse the parameter if its state does not fit it any more, since it has another shape,
        placing or, where ranks share its state, order of memory. Return whether it has the dtype,
        device and order of memory that the plan was made for.
        """
        placing, local = placing_of(self.param), local_of(self.param)
        stride = local.stride()
        if local.shape != self.shape:
            raise ConfigError(
                f"{self.name}: expected the shape {tuple(self.shape)} that it had when it "
                f"was wrapped, got {tuple(local.shape)}; its state does not fit any more"
            )
        if placing != self.placing:
            raise ConfigError(
                f"{self.name}: expected {self.placing or 'an ordinary tensor'} as when it "
                f"was wrapped, got {placing or 'an ordinary tensor'}; its state does not fit "
                "any more"
            )
        if self.own is not None and not is_same_order(self.shape, stride, self.stride):
            raise ConfigError(
                f"{self.name}: expected the order of memory that it had when it was wrapped "
                f"(strides {self.stride}), got strides {stride}; each rank has a "
                "part of its state by that order: change it back. For another order, close() "
                "the optimizer on all ranks before, and wrap or prepare again after"
            )
        return (local.dtype, local.device, stride) == (self.dtype, self.device, self.stride)

    @property
    def own_range(self) -> tuple[int, int]:
        """The elements whose state belongs to this rank."""
        return self.own or (0, self.shape.numel())

    @property
    def device_bytes(self) -> int:
        """The bytes of one element on a device; 0 if the parameter is in host memory or frozen. Its
        gradient has the same dtype.
        """
        return 0 if self.local.is_cpu or self.is_frozen else self.local.element_size()

    @property
    def is_half(self) -> bool:
        return self.local.dtype != torch.float32


@dataclass(frozen=True)
class SliceUpdate:
    """A slice to update, as flat tensors of its elements. begin: the index of its first element."""

    record: Record
    begin: int
    master: Tensor  # fp32: the parameter itself, or the exact master of a 16-bit one
    grad: Tensor
    states: Mapping[str, Tensor]
    out: Tensor | None  # the 16-bit parameter
    scale: float
    sums: Mapping[str, KnownSums]  # receive the checksums of master and states; may be empty


class Recipe(Protocol):
    """The step of one optimizer, applied slice by slice."""

    def begin_step(self, records: Sequence[Record]) -> None:
        """Begin a step: read the hyper-parameters of these records, which may have changed. Nothing
        else may have.
        """

    def end_step(self, records: Sequence[Record]) -> None:
        """Note that all slices of these parameters have been updated."""
        return None

    def fields(self, group: Group) -> tuple[str, ...]:
        """Return the names of the elementwise state that the group's parameters need."""

    def initial(self, record: Record, field: str) -> float:
        """Return the first value of a field of a parameter that has no state yet."""
        return 0.0

    def check_scalars(self, record: Record, state: Mapping[str, Any]) -> None:
        """Raise `ConfigError` if `take_scalars` could not take this state."""
        return None

    def update(self, work: SliceUpdate) -> None:
        """Apply one step to a slice; `work.record.step` counts this step already."""

    def scalar_state(self, record: Record) -> dict[str, Any]:
        """Return the state that a `state_dict` holds beside the fields."""

    def take_scalars(self, record: Record, state: Mapping[str, Any]) -> None:
        """Set step and scalars of the record from a parameter's state in a `state_dict`."""


class NativeRecipe(Recipe):
    """A recipe that calls the kernels. It makes a rule once a step per group and step count.
    is_checked: plain torch repeats part of every slice's update, and the bits must be the same.
    """

    counts_steps: ClassVar[bool] = True

    def __init__(self) -> None:
        self.is_checked = False
        self._rules: dict[tuple[int, float], rules.Rule] = {}

    def begin_step(self, records: Sequence[Record]) -> None:
        self._rules.clear()
        for record in records:
            key = id(record.group), record.step
            if key not in self._rules:
                self._rules[key] = self.rule(record)

    def rule(self, record: Record) -> rules.Rule:
        raise NotImplementedError

    def update(self, work: SliceUpdate) -> None:
        record = work.record
        rule = self._rules[id(record.group), record.step]
        maximize = bool(record.group.get("maximize", False))
        sums = [work.sums.get(name) for name in (MASTER, *rule.states)] if work.sums else ()
        scale = -work.scale if maximize else work.scale
        with _checked(work, rule, scale) if self.is_checked else nullcontext():
            kernels.update(
                rule,
                work.master,
                work.grad,
                *(work.states[name] for name in rule.states),
                out=work.out,
                scale=work.scale,
                maximize=maximize,
                adopt=True,
                offset=work.begin,
                numel=record.shape.numel(),
                sums=sums,
            )

    def scalar_state(self, record: Record) -> dict[str, Any]:
        if not self.counts_steps:
            return {}
        # As in torch's optimizers: a 16-bit default dtype could not count.
        is_double = torch.get_default_dtype() == torch.float64
        dtype = torch.float64 if is_double else torch.float32
        return {"step": torch.tensor(record.step, dtype=dtype, device="cpu")}

    def check_scalars(self, record: Record, state: Mapping[str, Any]) -> None:
        if self.counts_steps:
            if "step" not in state:
                got = list(state)
                raise ConfigError(f"state of {record.name}: expected a step count, got {got}")
            rules.to_float(f"step of {record.name}", state["step"])

    def take_scalars(self, record: Record, state: Mapping[str, Any]) -> None:
        # Without a count it only matters that there was a step.
        record.step = rules.to_float("step", state["step"]) if self.counts_steps else 1.0


class AdamRecipe(NativeRecipe):
    def __init__(self, decoupled: bool) -> None:
        super().__init__()
        self._decoupled = decoupled

    def fields(self, group: Group) -> tuple[str, ...]:
        # With amsgrad another recipe is needed: a field named here that has no plan is refused.
        return ("exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group.get("amsgrad") else []))

    def rule(self, record: Record) -> rules.Rule:
        group = record.group
        beta1, beta2 = group["betas"]
        return rules.Adam.at(
            record.step,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=bool(group.get("decoupled_weight_decay", self._decoupled)),
        )


class SgdRecipe(NativeRecipe):
    counts_steps = False

    def fields(self, group: Group) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()

    def rule(self, record: Record) -> rules.Rule:
        group = record.group
        return rules.Sgd.at(
            lr=group["lr"],
            momentum=group["momentum"],
            dampening=group["dampening"],
            weight_decay=group["weight_decay"],
            nesterov=bool(group["nesterov"]),
            first=record.step == 1.0,
        )


class AdagradRecipe(NativeRecipe):
    def fields(self, group: Group) -> tuple[str, ...]:
        return ("sum",)

    def initial(self, record: Record, field: str) -> float:
        return float(record.group.get("initial_accumulator_value", 0.0))

    def rule(self, record: Record) -> rules.Rule:
        group = record.group
        return rules.Adagrad.at(
            record.step,
            lr=group["lr"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
        )


class LionRecipe(NativeRecipe):
    counts_steps = False

    def fields(self, group: Group) -> tuple[str, ...]:
        return ("exp_avg",)

    def rule(self, record: Record) -> rules.Rule:
        group = record.group
        beta1, beta2 = group["betas"]
        return rules.LionRule.at(
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"]
        )


@contextmanager
def _checked(work: SliceUpdate, rule: rules.Rule, scale: float) -> Iterator[None]:
    """Repeat the end of a slice's update, which the block does, in plain torch: a check for a new
    machine, a new compiler, or a doubt. Raises `StateError` where the bits differ.
    """
    count = work.master.numel()
    last = slice(max(0, count - _SAMPLE_NUMEL), count)
    names = {"parameter": work.master, **work.states}
    if work.out is not None:
        names["16-bit parameter"] = work.out
    again = {name: tensor[last].clone() for name, tensor in names.items()}
    grad = work.grad[last].clone()
    yield
    states = [again[name] for name in rule.states]
    state0, state1, *_ = [*states, None, None]
    tail = work.record.shape.numel() // kernels.TORCH_WIDTH * kernels.TORCH_WIDTH
    tensors = again["parameter"], grad, state0, state1, again.get("16-bit parameter")
    tail_begin = min(max(tail - work.begin - last.start, 0), grad.numel())
    buffers = reference.Buffers.of(tensors, scale, tail_begin, adopt=work.out is not None)
    getattr(reference, rule.kernel)(buffers, rule)
    for name, tensor in names.items():
        if not _same(tensor[last], again[name]):
            raise StateError(
                f"self_check: {name} of {work.record.name}: the {kernels.isa()} kernel and plain "
                "torch come to different bits; force another instruction set with OFFLOAD_ISA, "
                "and report it with the output of `offload doctor`"
            )


def _same(one: Tensor, other: Tensor) -> bool:
    word = torch.int32 if one.element_size() == 4 else torch.int16
    equal = (one.view(word) == other.view(word)) | (one.isnan() & other.isnan())
    return bool(equal.all())
