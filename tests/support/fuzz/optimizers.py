"""The optimizer of a case, as the user makes it, and its judge: torch's own arithmetic.

In fp32 the judge is torch's class itself, fused where it has kernels. Where `offload` promises more
than torch has (fp32 masters of 16-bit parameters, the norm in double, Lion), the judge puts that
around torch's class, in plain torch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.kernels import reference, rules
from support.fuzz.cases import FUSED, Case, Optimizer

_HALVES = (torch.bfloat16, torch.float16)


def build(case: Case, model: nn.Module, has_late: bool) -> torch.optim.Optimizer:
    """Build the optimizer of a case as users do. has_late: with the group that is added later."""
    spec = case.optimizer
    params = list(model.parameters())
    late = params[len(params) - spec.late :]
    params = params[: len(params) - spec.late]
    groups: list[dict[str, Any]] = [
        {"params": params[i :: spec.groups]} for i in range(spec.groups)
    ]
    if spec.groups > 1:
        groups[-1]["lr"] = 5e-3
        groups.append({"params": []})
    made = _class_of(spec)(groups, **_settings(spec))
    if has_late:
        made.add_param_group({"params": late})
    return made


def late_params(case: Case, model: nn.Module) -> list[nn.Parameter]:
    params = list(model.parameters())
    return params[len(params) - case.optimizer.late :]


def _class_of(spec: Optimizer) -> Any:
    if spec.kind == "Lion":
        return offload.Lion
    return getattr(torch.optim, "AdamW" if spec.kind == "AMSGrad" else spec.kind)


def _settings(spec: Optimizer) -> dict[str, Any]:
    settings = dict(spec.settings)
    if spec.kind == "AMSGrad":
        settings["amsgrad"] = True
    if spec.kind in FUSED:
        settings["fused"] = True
    elif spec.kind != "Lion":
        settings["foreach"] = False
    if spec.has_tensor_lr:
        settings["lr"] = torch.tensor(settings["lr"])
    return settings


def has_momentum(case: Case) -> bool:
    """Return whether the case is SGD with momentum.

    torch's fused SGD fails on parameters that get their first gradients in different steps.
    """
    settings = dict(case.optimizer.settings)
    return case.optimizer.kind == "SGD" and bool(settings.get("momentum"))


def judge(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Build the judge that the user's optimizer is compared with."""
    made = build(case, model, has_late=False)
    is_half = any(param.dtype in _HALVES for param in model.parameters())
    is_more = case.optimizer.kind == "Lion" or case.loop.max_grad_norm is not None
    if is_half or is_more or has_momentum(case):
        return Masters(made, case.loop.max_grad_norm)
    # A GradScaler then unscales by itself, as it does for the engine's optimizers.
    made._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    return made


class Masters(torch.optim.Optimizer):
    """A torch optimizer on fp32 masters of the parameters that are 16-bit."""

    def __init__(self, inner: torch.optim.Optimizer, max_norm: float | None) -> None:
        self.inner = inner
        self.masters: dict[Tensor, Tensor] = {}
        self.max_norm, self.grad_norm = max_norm, None
        super().__init__([dict(group) for group in inner.param_groups], dict(inner.defaults))
        for param in list(inner.state):  # Adagrad has state before its first step
            self._master(param)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with_grad = [
            p for group in self.param_groups for p in group["params"] if p.grad is not None
        ]
        grads = {p: p.grad for p in with_grad}
        scale = self._scale(grads.values())
        for param, grad in grads.items():
            master = self._master(param)
            _adopt(master, param)
            master.grad = grad.float() * scale if scale != 1.0 else grad.float()
        self._update()
        for param, grad in grads.items():
            if param.dtype in _HALVES:
                param.copy_(self.masters[param])
                self.masters[param].grad = None
            param.grad = grad
        return loss

    def _scale(self, grads: Iterable[Tensor]) -> float:
        if self.max_norm is None:
            return 1.0
        sums: list[float] = []
        for grad in grads:
            found = torch.zeros(-(-grad.numel() // reference.STATS_BLOCK), dtype=torch.float64)
            if grad.numel():
                reference.block_sums(_in_memory(grad).float(), found)
            sums += found.tolist()
        self.grad_norm = math.sqrt(math.fsum(sums))
        scale = rules.to_f32(self.max_norm / (self.grad_norm + 1e-6))
        return 1.0 if self.max_norm / (self.grad_norm + 1e-6) >= 1.0 else scale

    def _master(self, param: Tensor) -> Tensor:
        if param.dtype not in _HALVES:
            return param
        if param not in self.masters:
            self.masters[param] = master = param.detach().float().clone()
            state = self.inner.state.pop(param, {})
            if state:
                self.inner.state[master] = {name: value.float() for name, value in state.items()}
        return self.masters[param]

    def _update(self) -> None:
        """Step the inner optimizer, with a group for each parameter."""
        self.inner.param_groups = []
        for group in self.param_groups:
            params = [self.masters.get(p, p) for p in group["params"]]
            with_grad = [p for p in params if p.grad is not None]
            self.inner.param_groups += [{**group, "params": [p]} for p in with_grad]
        if isinstance(self.inner, offload.Lion):
            _lion(self.inner)
        else:
            self.inner.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the state in the form of `offload`, which has the masters in it."""
        numbers = {p: i for i, p in enumerate(q for g in self.param_groups for q in g["params"])}
        groups = [
            {**group, "params": [numbers[p] for p in group["params"]]}
            for group in self.param_groups
        ]
        found = {}
        for param, number in numbers.items():
            state = dict(self.inner.state.get(self.masters.get(param, param), {}))
            if param in self.masters:
                state["master"] = self.masters[param]
            if state:
                found[number] = state
        return {"state": found, "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = copy.deepcopy(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        self.masters.clear()
        self.inner.state.clear()
        for number, state in saved["state"].items():
            param = params[number]
            if "master" in state:
                self.masters[param] = state.pop("master").float().clone()
            key = self.masters.get(param, param)
            if state:
                self.inner.state[key] = state
        for group, given in zip(self.param_groups, saved["param_groups"], strict=True):
            group.update({k: v for k, v in given.items() if k != "params"})


def _adopt(master: Tensor, param: Tensor) -> None:
    """Take over elements of a 16-bit parameter that are not its rounded master: the user's code has
    set them.
    """
    if master is not param:
        other = master.to(param.dtype).view(torch.int16) != param.view(torch.int16)
        master.copy_(torch.where(other, param.float(), master))


def _in_memory(grad: Tensor) -> Tensor:
    """Return the elements in the order in which they lie in memory."""
    if grad.is_contiguous() or grad.ndim != 2:
        return grad.contiguous().view(-1)
    return grad.t().contiguous().view(-1)


def _lion(inner: torch.optim.Optimizer) -> None:
    """Step as Lion does (Chen et al., 2023), rounded as in `docs/notes/update.md`."""
    for group in inner.param_groups:
        beta1, beta2 = group["betas"]
        rule = rules.LionRule.at(
            lr=group["lr"], beta1=beta1, beta2=beta2, weight_decay=group["weight_decay"]
        )
        for p in group["params"]:
            g = -p.grad if group["maximize"] else p.grad
            state = inner.state[p]
            if not state:
                state["exp_avg"] = torch.zeros_like(p)
            m = state["exp_avg"]
            mixed = reference.fma(rule.beta1, m, g * rule.one_minus_beta1)
            p.copy_(p * rule.decay + reference.sign(mixed) * rule.neg_lr)
            m.copy_(reference.fma(rule.beta2, m, g * rule.one_minus_beta2))
