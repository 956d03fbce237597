"""What several test files use: exact comparison, awkward numbers, guarded slices of memory that
start anywhere, and torch's optimizers beside the rules that must match them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload import kernels, rules

GUARD = 0xA5  # the byte around every copy that `unaligned` makes
SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 4097, 1048579]

_WORDS = {4: torch.int32, 2: torch.int16}

# Infinity, NaN, zeros, the smallest and largest denormals and normals, numbers whose squares over-
# and underflow.
SPECIAL = [
    *(
        sign * value
        for value in (float("inf"), 0.0, 1e-45, 1.1754942e-38, 1.1754944e-38)
        for sign in (1, -1)
    ),
    *(
        sign * value
        for value in (3.4028235e38, 1e-30, 2e19, 65504.0, 65520.0, 6e-8)
        for sign in (1, -1)
    ),
    float("nan"),
]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit; any NaN matches any NaN."""
    word = _WORDS[a.element_size()]
    equal = (a.view(word) == b.view(word)) | (torch.isnan(a) & torch.isnan(b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(equal.all())


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    if same_bits(got, expected):
        return
    word = _WORDS[got.element_size()]
    wrong = (got.view(word) != expected.view(word)) & ~(torch.isnan(got) & torch.isnan(expected))
    index = int(wrong.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {got.numel()} elements differ, first at {index}: "
        f"got {got[index].item()!r}, expected {expected[index].item()!r}"
    )


def awkward(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ordinary numbers with a special one in every seventh place and in the last seven, which is
    where torch's kernels run other code.
    """
    values = torch.randn(numel)
    special = torch.tensor(SPECIAL)
    places = torch.tensor(sorted({*range(0, numel, 7), *range(max(0, numel - 7), numel)})).long()
    values[places] = special[torch.randint(len(special), (len(places),))]
    return values.to(dtype)


def unaligned(tensor: Tensor, shift: int) -> Tensor:
    """A copy that starts `shift` elements behind a 64-byte boundary, with guards on both sides that
    `assert_untouched_around` looks at.
    """
    memory = torch.empty(tensor.numel() + 128 + shift, dtype=tensor.dtype)
    memory.view(torch.uint8).fill_(GUARD)
    start = 64 + (-memory.data_ptr() % 64) // tensor.element_size() + shift
    copy = memory[start : start + tensor.numel()]
    copy.copy_(tensor)
    return copy


def assert_untouched_around(copy: Tensor, what: str) -> None:
    """Nobody has written before or behind `copy`, a tensor of `unaligned`."""
    memory = torch.empty(0, dtype=torch.uint8).set_(copy.untyped_storage())
    begin = copy.storage_offset() * copy.element_size()
    end = begin + copy.nbytes
    assert begin >= 64 and memory.numel() - end >= 64, f"{what} has no guards"
    assert (memory[:begin] == GUARD).all(), f"{what}: written before its begin"
    assert (memory[end:] == GUARD).all(), f"{what}: written behind its end"


def misaligned(tensor: Tensor) -> Tensor:
    """A copy at an odd address, as a file format may hand it out."""
    memory = bytearray(tensor.nbytes + 1)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1)
    copy.copy_(tensor)
    return copy


def cuts(numel: int, pieces: int, multiple: int = 1) -> list[tuple[int, int]]:
    """[0, numel) in at most `pieces` random slices; inner borders are multiples of `multiple`."""
    inner = torch.randint(0, numel // multiple + 1, (pieces - 1,)) * multiple
    edges = sorted({0, numel, *inner.tolist()})
    return list(itertools.pairwise(edges))


@dataclass
class Case:
    """One torch optimizer, and the rule that must match it at every step."""

    name: str
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer]
    rule: Callable[[int], rules.Rule]
    states: tuple[str, ...]
    maximize: bool = False


def adam_case(
    name: str, *, decoupled: bool, maximize: bool = False, tensor_lr: bool = False, **options: Any
) -> Case:
    torch_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    lr = torch.tensor(options.pop("lr", 1e-3)) if tensor_lr else options.pop("lr", 1e-3)
    betas = options.pop("betas", (0.9, 0.999))
    eps, weight_decay = options.pop("eps", 1e-8), options.pop("weight_decay", 0.0)
    assert not options

    def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch_class(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            maximize=maximize,
            fused=True,
        )

    def rule(step: int) -> rules.Rule:
        return rules.Adam.at(
            step,
            lr=lr,
            beta1=betas[0],
            beta2=betas[1],
            eps=eps,
            weight_decay=weight_decay,
            decoupled=decoupled,
        )

    return Case(
        f"{torch_class.__name__}-{name}", optimizer, rule, ("exp_avg", "exp_avg_sq"), maximize
    )


def sgd_case(name: str, *, lr: float = 0.03, maximize: bool = False, **options: Any) -> Case:
    settings = {
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        **options,
    }

    def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=lr, maximize=maximize, fused=True, **settings)

    def rule(step: int) -> rules.Rule:
        return rules.Sgd.at(lr=lr, first=step == 1, **settings)

    states = ("momentum_buffer",) if settings["momentum"] else ()
    return Case(f"SGD-{name}", optimizer, rule, states, maximize)


def adagrad_case(name: str, *, lr: float = 0.02, maximize: bool = False, **options: Any) -> Case:
    settings = {"lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, **options}

    def optimizer(params: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=lr, maximize=maximize, fused=True, **settings)

    def rule(step: int) -> rules.Rule:
        return rules.Adagrad.at(step, lr=lr, **settings)

    return Case(f"Adagrad-{name}", optimizer, rule, ("sum",), maximize)


CASES = [
    *(
        case
        for decoupled in (True, False)
        for case in (
            adam_case("plain", decoupled=decoupled),
            adam_case("decay", decoupled=decoupled, weight_decay=0.1),
            adam_case("maximize", decoupled=decoupled, weight_decay=0.01, maximize=True),
            adam_case("tensor_lr", decoupled=decoupled, weight_decay=0.1, tensor_lr=True, lr=3e-4),
            adam_case("beta1=0.5", decoupled=decoupled, betas=(0.5, 0.95), eps=1e-3),
            adam_case("beta1=0.3", decoupled=decoupled, betas=(0.3, 0.9), weight_decay=0.1),
            adam_case("beta1=0", decoupled=decoupled, betas=(0.0, 0.99), eps=0.0),
            adam_case("beta1 rounds to half", decoupled=decoupled, betas=(0.5 + 1e-9, 0.999)),
            adam_case("large", decoupled=decoupled, lr=30.0, betas=(0.99, 0.5), weight_decay=1e-6),
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


LION = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}


LION_CASE = Case("Lion", torch.optim.SGD, lambda step: rules.Lion.at(**LION), ("exp_avg",))
BY_NAME = {case.name: case for case in CASES}
ADAMW = BY_NAME["AdamW-decay"]
JUDGED = [
    ADAMW,
    *(
        BY_NAME[name]
        for name in (
            "Adam-beta1=0.3",
            "SGD-plain",
            "SGD-dampening",
            "SGD-nesterov",
            "Adagrad-decay",
        )
    ),
    LION_CASE,
]


def train_torch(case: Case, start: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Parameter and states after torch's own fused optimizer."""
    param = torch.nn.Parameter(start.clone())
    optimizer = case.optimizer([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    # torch keeps no state for an empty parameter's momentum; ours is empty too.
    return [
        param.detach(),
        *(state[name] if state.get(name) is not None else start.clone() for name in case.states),
    ]


def train_ours(
    case: Case,
    start: Tensor,
    grads: list[Tensor],
    slices: list[tuple[int, int]] | None = None,
    shift: int = 0,
) -> list[Tensor]:
    """The same with kernels.update, each slice in memory of its own that starts `shift` elements
    off.
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


def compare(case: Case, got: list[Tensor], expected: list[Tensor], where: str = "") -> None:
    for name, ours, theirs in zip(("param", *case.states), got, expected, strict=True):
        assert_same_bits(ours, theirs, f"{case.name} {where}: {name}")
