"""The comparison of two runs of a case: what is compared, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.tools.selftest.bits import require_same_bits
from offload.tools.selftest.check import CheckFailed

Seen = dict[str, Any]


class Differs(AssertionError):
    """A difference between two runs of one case."""


def compare(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise `Differs` unless both have seen the same, to the bit."""
    if got.keys() != expected.keys():
        there = sorted(set(got) - set(expected)), sorted(set(expected) - set(got))
        raise Differs(f"only offloaded: {there[0]}; only plain: {there[1]}")
    for name, value in expected.items():
        _compare(name, got[name], value)


def _compare(name: str, got: Any, expected: Any) -> None:
    if isinstance(got, Tensor) and isinstance(expected, Tensor):
        try:
            require_same_bits(got, expected, name)
        except CheckFailed as error:
            raise Differs(str(error)) from None
    elif type(got) is not type(expected) or got != expected:
        raise Differs(f"{name}: got {_shown(got)}, expected {_shown(expected)}")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {tuple(value.shape)}"
    return repr(value)[:200]


def parameters_of(model: nn.Module) -> Seen:
    """Return copies of all parameters, each made resident with its module; and of all buffers."""
    seen: Seen = {}
    for prefix, module in model.named_modules():
        own = list(module.named_parameters(prefix, recurse=False))
        if own:
            with offload.resident(module), torch.no_grad():
                seen |= {name: param.detach().clone() for name, param in own}
    return seen | {name: buffer.clone() for name, buffer in model.named_buffers()}


def gradients_of(model: nn.Module) -> Seen:
    return {
        f"{name}.grad": None if param.grad is None else param.grad.detach().clone()
        for name, param in model.named_parameters()
    }


def state_of(optimizer: Any) -> Seen:
    """Return `state_dict()`, flat, without the settings that say how torch runs the step."""
    found = optimizer.state_dict()
    seen: Seen = {}
    for number, state in found["state"].items():
        for name, value in state.items():
            seen[f"state {number} {name}"] = _value(value)
    for number, group in enumerate(found["param_groups"]):
        for name, value in group.items():
            if name not in ("fused", "foreach", "differentiable", "param_names"):
                seen[f"group {number} {name}"] = _value(value)
    return seen


def _value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, tuple) else value
