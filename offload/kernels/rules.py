"""Update rules as the scalars that a kernel needs.

Hyper-parameters are doubles. The few numbers that enter the arithmetic of a step are computed from
them here, in double, and rounded to fp32 once: that, and the order of operations in the kernels,
decides the bits (they are those of `torch.optim` with `fused=True` on CPU). A rule is made once for
a parameter group and a step, with `at`, and then applied to any number of slices by
`kernels.update`. A learning rate may be negative, as torch allows once an optimizer has been made:
schedulers that end at zero may miss it by a rounding error. The field order of each class is the
argument order of the native call.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

import torch
from torch import Tensor

from offload.core.errors import ConfigError


def to_f32(value: float) -> float:
    """Round `value` to the nearest fp32 number (overflow gives infinity, as in C)."""
    return ctypes.c_float(value).value


def fma(a: float, b: float, c: float) -> float:
    """Compute `a*b + c` in double, rounded once: torch's compiler fuses these, and the last bit may
    differ.

    A zero result is positive, as it is in C for the products and sums used here.
    """
    try:
        return float(Fraction(a) * Fraction(b) + Fraction(c))
    except OverflowError:
        return a * b + c


Number = float | Tensor  # a tensor of one element, as optimizers allow for learning rates and steps


def shown(value: object) -> str:
    """Format `value` for a message; a tensor by its type, since its repr may run foreign code."""
    return f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)


def to_float(name: str, value: Number) -> float:
    """Return `value` as a double; a tensor of one element counts as its number."""
    if isinstance(value, Tensor):
        return _only_element(name, value)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ConfigError(f"{name}: expected a number, got {value!r}") from error


def _only_element(name: str, tensor: Tensor) -> float:
    with torch._C.DisableTorchFunction():
        try:
            shape = tuple(tensor.shape)
            if tensor.numel() == 1:
                return float(tensor)
        except Exception as error:  # meta, nested, or an error of a subclass's own code
            raise ConfigError(
                f"{name}: expected a number, got {shown(tensor)} that has none: {error}"
            ) from error
    raise ConfigError(f"{name}: expected one number, got a tensor of shape {shape}")


def finite(*, least: float = -math.inf, **values: Number) -> list[float]:
    """Return the values as doubles, in order; each must be finite. least: 0.0 for those that torch
    requires to be zero or more.
    """
    numbers = {name: to_float(name, value) for name, value in values.items()}
    for name, number in numbers.items():
        if not math.isfinite(number):
            raise ConfigError(f"{name}: expected a finite number, got {number}")
    for name, number in numbers.items():
        if number < least:
            raise ConfigError(f"{name}: expected zero or more, got {number}")
    return list(numbers.values())


def check_flags(**values: object) -> None:
    """Check that each value is a bool: the native core would take any object for true."""
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ConfigError(f"{name}: expected True or False, got {shown(value)}")


def below_one(**values: Number) -> list[float]:
    """Return the values as doubles, in order; each must be in [0, 1), as betas are."""
    numbers = {name: to_float(name, value) for name, value in values.items()}
    for name, number in numbers.items():
        if not 0.0 <= number < 1.0:
            raise ConfigError(f"{name}: expected a number in [0, 1), got {number}")
    return list(numbers.values())


def step_count(step: Number) -> float:
    """Return the step as a double: 1 at the first update."""
    number = to_float("step", step)
    if not (math.isfinite(number) and number >= 1.0):
        raise ConfigError(f"step: expected 1 for the first update or more, got {number}")
    return number


@dataclass(frozen=True)
class Adam:
    """The rule of Adam (`decoupled=False`: decay enters the gradient) and AdamW (`True`)."""

    kernel: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
    bias2_sqrt_inverse: float
    eps: float
    neg_step_size: float
    decay: float
    lerp_from_grad: bool
    decoupled: bool
    has_decay: bool

    @classmethod
    def at(
        cls,
        step: Number,
        *,
        lr: Number,
        beta1: Number,
        beta2: Number,
        eps: Number,
        weight_decay: Number,
        decoupled: bool,
    ) -> Adam:
        check_flags(decoupled=decoupled)
        step = step_count(step)
        (lr,) = finite(lr=lr)
        eps, weight_decay = finite(eps=eps, weight_decay=weight_decay, least=0.0)
        beta1, beta2 = below_one(beta1=beta1, beta2=beta2)
        weight = to_f32(1.0 - beta1)
        # torch.lerp starts from the nearer end: from the gradient for a weight of one half or more.
        from_grad = weight >= 0.5
        bias2_sqrt = to_f32(math.sqrt(1.0 - beta2**step))
        return cls(
            lerp_weight=to_f32(weight - 1.0) if from_grad else weight,
            beta2=to_f32(beta2),
            one_minus_beta2=to_f32(1.0 - beta2),
            bias2_sqrt=bias2_sqrt,
            bias2_sqrt_inverse=to_f32(1.0 / bias2_sqrt),
            eps=to_f32(eps),
            neg_step_size=to_f32(-(lr / (1.0 - beta1**step))),
            decay=to_f32(fma(-lr, weight_decay, 1.0) if decoupled else weight_decay),
            lerp_from_grad=from_grad,
            decoupled=decoupled,
            has_decay=weight_decay != 0.0,
        )


@dataclass(frozen=True)
class Sgd:
    """The rule of SGD with momentum, dampening and Nesterov's variant.

    first: there is no momentum yet; the buffer is only written.
    """

    kernel: ClassVar[str] = "sgd"

    neg_lr: float
    decay: float
    momentum: float
    one_minus_dampening: float
    has_decay: bool
    has_momentum: bool
    nesterov: bool
    first: bool

    @property
    def states(self) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.has_momentum else ()

    @classmethod
    def at(
        cls,
        *,
        lr: Number,
        momentum: Number,
        dampening: Number,
        weight_decay: Number,
        nesterov: bool,
        first: bool,
    ) -> Sgd:
        check_flags(nesterov=nesterov, first=first)
        lr, dampening = finite(lr=lr, dampening=dampening)
        momentum, weight_decay = finite(momentum=momentum, weight_decay=weight_decay, least=0.0)
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ConfigError(
                f"nesterov: needs momentum above 0 and no dampening, got momentum={momentum}, "
                f"dampening={dampening}"
            )
        return cls(
            neg_lr=to_f32(-lr),
            decay=to_f32(weight_decay),
            momentum=to_f32(momentum),
            one_minus_dampening=to_f32(1.0 - dampening),
            has_decay=weight_decay != 0.0,
            has_momentum=momentum != 0.0,
            nesterov=nesterov,
            first=first,
        )


@dataclass(frozen=True)
class Adagrad:
    """The rule of Adagrad; `lr` is the rate after its own decay."""

    kernel: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[str, ...]] = ("sum",)

    lr: float
    eps: float
    decay: float
    has_decay: bool

    @classmethod
    def at(
        cls, step: Number, *, lr: Number, lr_decay: Number, eps: Number, weight_decay: Number
    ) -> Adagrad:
        step = step_count(step)
        (lr,) = finite(lr=lr)
        lr_decay, eps, weight_decay = finite(
            lr_decay=lr_decay, eps=eps, weight_decay=weight_decay, least=0.0
        )
        return cls(
            lr=to_f32(lr / fma(step - 1.0, lr_decay, 1.0)),
            eps=to_f32(eps),
            decay=to_f32(weight_decay),
            has_decay=weight_decay != 0.0,
        )


@dataclass(frozen=True)
class LionRule:
    """The rule of Lion (Chen et al., 2023): the sign of an interpolated momentum, with decoupled
    decay.
    """

    kernel: ClassVar[str] = "lion"
    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    neg_lr: float
    decay: float

    @classmethod
    def at(cls, *, lr: Number, beta1: Number, beta2: Number, weight_decay: Number) -> LionRule:
        (lr,) = finite(lr=lr)
        (weight_decay,) = finite(weight_decay=weight_decay, least=0.0)
        beta1, beta2 = below_one(beta1=beta1, beta2=beta2)
        return cls(
            beta1=to_f32(beta1),
            one_minus_beta1=to_f32(1.0 - beta1),
            beta2=to_f32(beta2),
            one_minus_beta2=to_f32(1.0 - beta2),
            neg_lr=to_f32(-lr),
            decay=to_f32(1.0 - lr * weight_decay),
        )


Rule = Adam | Sgd | Adagrad | LionRule
