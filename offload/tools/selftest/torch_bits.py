"""Torch's fused optimizers on the CPU, whose bits ours must have, and the rules that match them."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.kernels import rules
from offload.tools.selftest.check import NotRun

_WIDE = ("AVX2", "AVX512")


def without_promise() -> str | None:
    """Return why torch's fused kernels may differ from ours in the last bits on this CPU; None:
    they do not.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"torch's fused kernels have other last bits on {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(_WIDE):
        return f"torch runs with {capability} here; its last bits are ours from AVX2 on"
    return None


def require_promise() -> None:
    """Raise `NotRun` if torch's fused kernels may differ from ours in the last bits."""
    why = without_promise()
    if why is not None:
        raise NotRun(why)


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer with settings. optimizer: makes torch's own; None: torch has none like it. rule:
    makes our rule of a step. states: the names of its state tensors.
    """

    name: str
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None
    rule: Callable[[int], rules.Rule]
    states: tuple[str, ...]
    maximize: bool = False


def adam_case(name: str, decoupled: bool, maximize: bool = False, **options: Any) -> OptimizerCase:
    """Make a case of AdamW if the decay is decoupled, else of Adam."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    values = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options}
    beta1, beta2 = values["betas"]
    named = {key: values[key] for key in ("lr", "eps", "weight_decay")}
    return OptimizerCase(
        f"{kind.__name__} {name}",
        lambda params: kind(params, **values, maximize=maximize, fused=True),
        lambda step: rules.Adam.at(step, beta1=beta1, beta2=beta2, decoupled=decoupled, **named),
        ("exp_avg", "exp_avg_sq"),
        maximize,
    )


def sgd_case(name: str, maximize: bool = False, **options: Any) -> OptimizerCase:
    plain = dict.fromkeys(("momentum", "dampening", "weight_decay"), 0.0)
    values: dict[str, Any] = {"lr": 0.03, "nesterov": False, **plain, **options}
    return OptimizerCase(
        f"SGD {name}",
        lambda params: torch.optim.SGD(params, **values, maximize=maximize, fused=True),
        lambda step: rules.Sgd.at(first=step == 1, **values),
        ("momentum_buffer",) if values["momentum"] else (),
        maximize,
    )


def adagrad_case(name: str, maximize: bool = False, **options: Any) -> OptimizerCase:
    values = {"lr": 0.02, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, **options}
    return OptimizerCase(
        f"Adagrad {name}",
        lambda params: torch.optim.Adagrad(params, **values, maximize=maximize, fused=True),
        lambda step: rules.Adagrad.at(step, **values),
        ("sum",),
        maximize,
    )


LION = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
LION_CASE = OptimizerCase("Lion", None, lambda step: rules.LionRule.at(**LION), ("exp_avg",))


CASES = (
    adam_case("with decay", True, weight_decay=0.1),
    adam_case("plain", True),
    adam_case("beta1=0.5", True, betas=(0.5, 0.95), eps=1e-3),
    adam_case("beta1=0", True, betas=(0.0, 0.99), eps=0.0),
    adam_case("with decay", False, weight_decay=0.1),
    adam_case("beta1=0.3", False, betas=(0.3, 0.9), weight_decay=0.1, maximize=True),
    sgd_case("plain", weight_decay=0.1, maximize=True),
    sgd_case("with dampening", momentum=0.7, dampening=0.3),
    sgd_case("nesterov", momentum=0.9, nesterov=True, weight_decay=0.1),
    adagrad_case("with decay", lr_decay=0.01, weight_decay=0.1, eps=1e-6),
    LION_CASE,
)


def train_torch(case: OptimizerCase, start: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Train with torch's own fused optimizer; return the parameter and the states."""
    assert case.optimizer is not None
    param = torch.nn.Parameter(start.clone())
    optimizer = case.optimizer([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    # torch has no momentum buffer for an empty parameter; ours is empty, as `start` is.
    return [param.detach(), *(state.get(name, start.clone()) for name in case.states)]
