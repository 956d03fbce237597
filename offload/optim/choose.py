"""Which recipe an optimizer gets, and which optimizers are refused."""

from __future__ import annotations

import torch

from offload.errors import ConfigError
from offload.optim.generic import GenericRecipe
from offload.optim.lion import Lion
from offload.optim.recipe import AdagradRecipe, AdamRecipe, LionRecipe, Recipe, SgdRecipe

_GENERIC = ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
_REFUSED = {
    "LBFGS": "it keeps a history over all parameters",
    "Adafactor": "it factors second moments over rows and columns",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients",
}


def choose_recipe(optimizer: torch.optim.Optimizer, elementwise: bool) -> Recipe:
    """The recipe for exactly this class: one below it may do something else in its `step`."""
    kind = type(optimizer)
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigError("optimizer: differentiable=True cannot be offloaded; set it to False")
    if kind in (torch.optim.Adam, torch.optim.AdamW) and not amsgrad:
        return AdamRecipe(decoupled=kind is torch.optim.AdamW)
    if kind is torch.optim.SGD:
        return SgdRecipe()
    if kind is torch.optim.Adagrad:
        return AdagradRecipe()
    if kind is Lion:
        return LionRecipe()
    name = kind.__name__
    if name in _REFUSED and kind.__module__.startswith("torch."):
        raise ConfigError(
            f"optimizer: {name} cannot be offloaded: {_REFUSED[name]}; take one that treats every "
            "element by itself, such as AdamW or offload.Lion"
        )
    known = kind.__module__.startswith("torch.optim") and (name in _GENERIC or amsgrad)
    if known or elementwise:
        return GenericRecipe(kind, optimizer)
    raise ConfigError(
        f"optimizer: {kind.__module__}.{name} is not known; if its step treats every element of a "
        "parameter by itself, say wrap(..., elementwise=True)"
    )
