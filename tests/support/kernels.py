"""Torch's optimizers beside the update kernels that must match them, at odd sizes and addresses.

Numbers, guarded memory and cases are those of `offload selftest`; here are more of them.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from offload import kernels
from offload.tools.selftest.bits import (
    LION,
    LION_CASE,
    SPECIAL,
    OptimizerCase,
    adagrad_case,
    adam_case,
    awkward,
    require_untouched_around,
    sgd_case,
    train_torch,
    unaligned,
)
from offload.tools.selftest.check import CheckFailed
from support.bits import assert_same_bits

__all__ = [
    "LION",
    "SPECIAL",
    "adagrad_case",
    "adam_case",
    "assert_same_bits",
    "awkward",
    "train_torch",
    "unaligned",
]

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 4097, 1048579]


def assert_untouched_around(copy: Tensor, what: str) -> None:
    """Raise AssertionError if memory before or behind `copy`, a tensor of `unaligned`, changed."""
    try:
        require_untouched_around(copy, what)
    except CheckFailed as error:
        raise AssertionError(str(error)) from None


def misaligned(tensor: Tensor) -> Tensor:
    """Return a copy at an odd address, as a file format may hand it out."""
    memory = bytearray(tensor.nbytes + 1)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1)
    copy.copy_(tensor)
    return copy


def cuts(numel: int, pieces: int, multiple: int = 1) -> list[tuple[int, int]]:
    """Cut [0, numel) into at most `pieces` random slices, inside at multiples of `multiple`."""
    inner = torch.randint(0, numel // multiple + 1, (pieces - 1,)) * multiple
    edges = sorted({0, numel, *inner.tolist()})
    return list(itertools.pairwise(edges))


CASES = [
    *(
        case
        for decoupled in (True, False)
        for case in (
            adam_case("plain", decoupled),
            adam_case("decay", decoupled, weight_decay=0.1),
            adam_case("maximize", decoupled, weight_decay=0.01, maximize=True),
            adam_case("tensor_lr", decoupled, weight_decay=0.1, lr=torch.tensor(3e-4)),
            adam_case("beta1=0.5", decoupled, betas=(0.5, 0.95), eps=1e-3),
            adam_case("beta1=0.3", decoupled, betas=(0.3, 0.9), weight_decay=0.1),
            adam_case("beta1=0", decoupled, betas=(0.0, 0.99), eps=0.0),
            adam_case("beta1 rounds to half", decoupled, betas=(0.5 + 1e-9, 0.999)),
            adam_case("large", decoupled, lr=30.0, betas=(0.99, 0.5), weight_decay=1e-6),
        )
    ),
    sgd_case("plain"),
    sgd_case("decay", weight_decay=0.1, maximize=True),
    sgd_case("momentum", momentum=0.9, weight_decay=0.01),
    sgd_case("dampening", momentum=0.7, dampening=0.3, maximize=True),
    sgd_case("nesterov", momentum=0.9, nesterov=True, weight_decay=0.1),
    adagrad_case("plain"),
    adagrad_case("decay", lr_decay=0.01, weight_decay=0.1, eps=1e-6),
    adagrad_case("maximize", lr_decay=0.1, maximize=True),
]
BY_NAME = {case.name: case for case in CASES}
ADAMW = BY_NAME["AdamW decay"]
JUDGED = [
    ADAMW,
    *(
        BY_NAME[name]
        for name in (
            "Adam beta1=0.3",
            "SGD plain",
            "SGD dampening",
            "SGD nesterov",
            "Adagrad decay",
        )
    ),
    LION_CASE,
]


def train_ours(
    case: OptimizerCase,
    start: Tensor,
    grads: list[Tensor],
    slices: list[tuple[int, int]] | None = None,
    shift: int = 0,
) -> list[Tensor]:
    """Train as `train_torch` does, with kernels.update.

    Each slice is in memory of its own that starts `shift` elements off.
    """
    numel = start.numel()
    slices = [(0, numel)] if slices is None else slices
    pieces = [
        [unaligned(start[a:b], shift), *(unaligned(torch.zeros(b - a), shift) for _ in case.states)]
        for a, b in slices
    ]
    for step, grad in enumerate(grads, start=1):
        rule = case.rule(step)
        for (a, b), (param, *states) in zip(slices, pieces, strict=True):
            piece = unaligned(grad[a:b], shift)
            kernels.update(
                rule, param, piece, *states, maximize=case.maximize, offset=a, numel=numel
            )
            assert_same_bits(piece, grad[a:b], "the gradient must not change")
    for piece in pieces:
        for name, tensor in zip(("param", *case.states), piece, strict=True):
            assert_untouched_around(tensor, f"{case.name}: {name}")
    if not pieces:
        return [start.clone() for _ in range(1 + len(case.states))]
    return [torch.cat(parts) for parts in zip(*pieces, strict=True)]


def compare(
    case: OptimizerCase, got: list[Tensor], expected: list[Tensor], where: str = ""
) -> None:
    for name, ours, theirs in zip(("param", *case.states), got, expected, strict=True):
        assert_same_bits(ours, theirs, f"{case.name} {where}: {name}")
