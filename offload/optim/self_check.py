"""The self check of the kernels: for the first steps, plain torch repeats part of every slice's
update.

The bits must be the same. It is meant for a new machine, a new compiler, or a doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import StateError
from offload.kernels import reference, rules
from offload.optim.recipe import SliceUpdate

SAMPLE_NUMEL = 4096  # of each slice: its last elements, where torch's kernels run other code


@contextmanager
def checked(work: SliceUpdate, rule: rules.Rule, scale: float) -> Iterator[None]:
    """Repeat the end of a slice's update, which the block does, in plain torch. Raises `StateError`
    where the bits differ.
    """
    count = work.master.numel()
    last = slice(max(0, count - SAMPLE_NUMEL), count)
    names = {"parameter": work.master, **work.states}
    if work.out is not None:
        names["16-bit parameter"] = work.out
    again = {name: tensor[last].clone() for name, tensor in names.items()}
    grad = work.grad[last].clone()
    yield
    states = [again[name] for name in rule.states]
    state0, state1, *_ = [*states, None, None]
    tail = work.record.local.numel() // kernels.TORCH_WIDTH * kernels.TORCH_WIDTH
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
