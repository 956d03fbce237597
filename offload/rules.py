"""Update rules as the scalars that a kernel needs.

Hyper-parameters are doubles. The few numbers that enter the arithmetic of a step are computed from
them here, in double, and rounded to fp32 once: that, and the order of operations in the kernels,
decides the bits (they are those of `torch.optim` with `fused=True` on CPU). A rule is made once for
a parameter group and a step, with `at`, and then applied to any number of slices by
`kernels.update`. The field order of each class is the argument order of the native call.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from offload.errors import ConfigError


def to_f32(value: float) -> float:
    """`value` rounded to the nearest fp32 number (overflow gives infinity, as in C)."""
    return ctypes.c_float(value).value


Number = float | Tensor  # a tensor of one element, as optimizers allow for learning rates and steps


def to_float(name: str, value: Number) -> float:
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ConfigError(
                f"{name}: expected one number, got a tensor of shape {tuple(value.shape)}"
            )
        return float(value.item())
    return float(value)


def check_finite(**values: float) -> None:
    for name, value in values.items():
        if not math.isfinite(value):
            raise ConfigError(f"{name}: expected a finite number, got {value}")


def check_beta(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ConfigError(f"{name}: expected a number in [0, 1), got {value}")


def check_step(step: float) -> None:
    if not (math.isfinite(step) and step >= 1.0):
        raise ConfigError(f"step: expected 1 for the first update or more, got {step}")


@dataclass(frozen=True)
class Adam:
    """Adam (`decoupled=False`: decay enters the gradient) and AdamW (`decoupled=True`). step: 1 at
    the first update.
    """

    kernel: ClassVar[str] = "adam"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lerp_weight: float
    beta2: float
    one_minus_beta2: float
    bias2_sqrt: float
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
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> Adam:
        step, lr = to_float("step", step), to_float("lr", lr)
        check_step(step)
        check_finite(lr=lr, eps=eps, weight_decay=weight_decay)
        check_beta(beta1=beta1, beta2=beta2)
        weight = to_f32(1.0 - beta1)
        # torch.lerp starts from the nearer end: from the gradient when the weight is one half or
        # more.
        from_grad = weight >= 0.5
        return cls(
            lerp_weight=to_f32(weight - 1.0) if from_grad else weight,
            beta2=to_f32(beta2),
            one_minus_beta2=to_f32(1.0 - beta2),
            bias2_sqrt=to_f32(math.sqrt(1.0 - beta2**step)),
            eps=to_f32(eps),
            neg_step_size=to_f32(-(lr / (1.0 - beta1**step))),
            decay=to_f32(1.0 - lr * weight_decay if decoupled else weight_decay),
            lerp_from_grad=from_grad,
            decoupled=decoupled,
            has_decay=weight_decay != 0.0,
        )


@dataclass(frozen=True)
class Sgd:
    """SGD with momentum, dampening and Nesterov's variant. first: no momentum yet, the buffer is
    only written.
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
        momentum: float,
        dampening: float,
        weight_decay: float,
        nesterov: bool,
        first: bool,
    ) -> Sgd:
        lr = to_float("lr", lr)
        check_finite(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay)
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
    """Adagrad; `lr` is the rate after its own decay."""

    kernel: ClassVar[str] = "adagrad"
    states: ClassVar[tuple[str, ...]] = ("sum",)

    lr: float
    eps: float
    decay: float
    has_decay: bool

    @classmethod
    def at(
        cls, step: Number, *, lr: Number, lr_decay: float, eps: float, weight_decay: float
    ) -> Adagrad:
        step, lr = to_float("step", step), to_float("lr", lr)
        check_step(step)
        check_finite(lr=lr, lr_decay=lr_decay, eps=eps, weight_decay=weight_decay)
        return cls(
            lr=to_f32(lr / (1.0 + (step - 1.0) * lr_decay)),
            eps=to_f32(eps),
            decay=to_f32(weight_decay),
            has_decay=weight_decay != 0.0,
        )


@dataclass(frozen=True)
class Lion:
    """Lion (Chen et al., 2023): the sign of an interpolated momentum, with decoupled decay."""

    kernel: ClassVar[str] = "lion"
    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    neg_lr: float
    decay: float

    @classmethod
    def at(cls, *, lr: Number, beta1: float, beta2: float, weight_decay: float) -> Lion:
        lr = to_float("lr", lr)
        check_finite(lr=lr, weight_decay=weight_decay)
        check_beta(beta1=beta1, beta2=beta2)
        return cls(
            beta1=to_f32(beta1),
            one_minus_beta1=to_f32(1.0 - beta1),
            beta2=to_f32(beta2),
            one_minus_beta2=to_f32(1.0 - beta2),
            neg_lr=to_f32(-lr),
            decay=to_f32(1.0 - lr * weight_decay),
        )


Rule = Adam | Sgd | Adagrad | Lion
