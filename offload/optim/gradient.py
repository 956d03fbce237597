"""The check of gradients at a step: which ones an update can use."""

from __future__ import annotations

import torch

from offload.core.errors import ConfigError
from offload.distributed import local_of, placing_of
from offload.optim.flat import in_order_of
from offload.optim.gradient_handle import GradientHandle
from offload.optim.gradient_source import Gradient
from offload.optim.recipe import Record

GRADS = (torch.float32, torch.bfloat16, torch.float16)


def gradient_of(record: Record) -> Gradient:
    """Return a parameter's gradient, flat, in the order of the parameter's memory; refuse one that
    no update can use. The parameter must have one. For a DTensor it is this rank's part. For a
    gradient that is not in memory it is the handle of its values (`SpilledGradientInput`).
    """
    given = record.param.grad
    assert given is not None
    if isinstance(given, GradientHandle):
        return given.input  # has the parameter's own shape and dtype
    placing = placing_of(given)
    if placing != record.placing:
        raise ConfigError(
            f"{record.name}: expected a gradient that is {record.placing or 'an ordinary tensor'}, "
            f"got {placing or 'an ordinary tensor'}; give it the parameter's own, by "
            "p.grad = p.grad.redistribute(placements=p.placements), say"
        )
    grad = local_of(given)
    if grad.layout != torch.strided:
        raise ConfigError(
            f"{record.name}: its gradient is sparse ({grad.layout}), which is not supported; make "
            "it dense: nn.Embedding(..., sparse=False), or p.grad = p.grad.to_dense()"
        )
    if grad.shape != record.shape:  # torch refuses to set such a one, but may exchange its data
        raise ConfigError(
            f"{record.name}: expected a gradient whose part here has the shape "
            f"{tuple(record.shape)}, got {tuple(grad.shape)}"
        )
    place = record.local.device if record.original_device is None else torch.device("cpu")
    allowed = GRADS if place.type == "cpu" else (record.dtype,)
    if grad.device != place or grad.dtype not in allowed:
        raise ConfigError(
            f"{record.name}: expected a gradient of {' or '.join(map(str, allowed))} on "
            f"{place}, got {grad.dtype} on {grad.device}"
        )
    return in_order_of(grad.resolve_neg(), record.local)
