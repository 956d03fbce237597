"""Lion as a `torch.optim.Optimizer`: for use by itself, or wrapped like any other optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from offload.kernels.rules import below_one, finite


class Lion(torch.optim.Optimizer):
    """The Lion optimizer (Chen et al., 2023): its step is the sign of an interpolated momentum, its
    weight decay is decoupled.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        finite(lr=lr, weight_decay=weight_decay, least=0.0)
        below_one(beta1=betas[0], beta2=betas[1])
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step. `closure` computes the loss again, as for every optimizer of torch."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, -param.grad if group["maximize"] else param.grad, group)
        return loss

    def _update(self, param: Tensor, grad: Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
        momentum, (beta1, beta2) = state["exp_avg"], group["betas"]
        mixed = momentum * beta1 + grad * (1 - beta1)
        # Keep a NaN, which torch.sign would turn into a zero: an error must stay visible.
        direction = torch.where(mixed.isnan(), mixed, mixed.sign())
        param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(direction * group["lr"])
        momentum.mul_(beta2).add_(grad, alpha=1 - beta2)
