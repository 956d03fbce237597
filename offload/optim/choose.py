"""The choice of an optimizer's recipe, and the optimizers that are refused."""

from __future__ import annotations

import torch

from offload.core.errors import ConfigError
from offload.optim.generic import GenericRecipe
from offload.optim.lion import Lion
from offload.optim.recipe import AdagradRecipe, AdamRecipe, LionRecipe, Recipe, SgdRecipe

_SUITABLE = "take one that treats every element by itself, such as AdamW or offload.Lion"
_GENERIC = ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
_REFUSED = {
    "LBFGS": "it keeps a history over all parameters",
    "Adafactor": "it factors second moments over rows and columns",
    "Muon": "it orthogonalises whole matrices",
    "SparseAdam": "it takes sparse gradients",
}
# Packages whose steps work on blocks of quantised numbers, or with kernels for GPUs only.
_REFUSED_PACKAGES = ("bitsandbytes", "torchao")


def choose_recipe(optimizer: torch.optim.Optimizer, elementwise: bool | None) -> Recipe:
    """Choose the recipe for exactly this class: a subclass may do something else in its `step`.
    elementwise: True if the user declares that the step treats every element by itself; None if
    the caller (prepare) has no such argument.
    """
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
    if name in _REFUSED:  # by name, whichever package defines the class
        raise ConfigError(f"optimizer: {name} cannot be offloaded: {_REFUSED[name]}; {_SUITABLE}")
    package = kind.__module__.partition(".")[0]
    if package in _REFUSED_PACKAGES:
        raise ConfigError(
            f"optimizer: {kind.__module__}.{name} cannot be offloaded: {package} updates blocks of "
            "a parameter, or of its quantised state, on the device; take torch.optim.AdamW, whose "
            "state is then kept outside of the device in full precision"
        )
    known = kind.__module__.startswith("torch.optim") and (name in _GENERIC or amsgrad)
    if known or elementwise:
        return GenericRecipe(kind, optimizer)
    raise ConfigError(f"optimizer: {kind.__module__}.{name} is not known; {_opt_in(elementwise)}")


def _opt_in(elementwise: bool | None) -> str:
    said = "if its step treats every element of a parameter by itself"
    if elementwise is None:
        return (
            f"for prepare, {_SUITABLE}; {said}, offload.wrap(optimizer, elementwise=True) moves "
            "its state alone, without the model"
        )
    return f"{said}, say elementwise=True; else {_SUITABLE}"
