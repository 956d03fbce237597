"""The caller's floating-point settings: kernels neither follow nor change them."""

from __future__ import annotations

import contextlib
import ctypes
import platform
from collections.abc import Callable, Iterator

import pytest
import torch
from support.kernels import assert_same_bits
from torch import Tensor

from offload import kernels
from offload.kernels import rules

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of x86's fenv.h"),
]

NEAREST, DOWNWARD, UPWARD, TOWARD_ZERO = 0x000, 0x400, 0x800, 0xC00
NUMEL = 100_003  # four blocks, so that a team has something to share

RULES: list[rules.Rule] = [
    rules.Adam.at(3, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-30, weight_decay=0.1, decoupled=True),
    rules.Sgd.at(
        lr=0.3, momentum=0.9, dampening=0.1, weight_decay=0.1, nesterov=False, first=False
    ),
    rules.Adagrad.at(2, lr=0.1, lr_decay=0.0, eps=1e-30, weight_decay=0.1),
    rules.LionRule.at(lr=2e-38, beta1=0.9, beta2=0.99, weight_decay=0.1),
]


@pytest.fixture(params=[isa for isa in kernels.available_isas() if isa != "reference"])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.forced_isa(request.param):
        yield request.param


def flushes() -> bool:
    """Return whether this thread's arithmetic makes zero of a denormal."""
    return float.fromhex("0x1p-1022") * float("0.5") == 0.0


def rounding() -> int:
    """Return the mode in which this thread's arithmetic rounds (not what the C library says)."""
    one, little = float("1"), float.fromhex("0x1p-60")
    up, negative_up = one + little > 1.0, -one - little < -1.0
    if up:
        return UPWARD
    if negative_up:
        return DOWNWARD
    return TOWARD_ZERO if one - little < 1.0 else NEAREST


@contextlib.contextmanager
def caller_rounds(mode: int) -> Iterator[None]:
    libm = ctypes.CDLL("libm.so.6")
    assert libm.fesetround(mode) == 0
    try:
        yield
    finally:
        libm.fesetround(NEAREST)


@contextlib.contextmanager
def caller_flushes() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def every_call(threads: int) -> list[tuple[str, Callable[[], None], list[Tensor]]]:
    """Prepare each kernel on numbers whose results are inexact and partly denormal: its name, the
    call, and the tensors that it writes. Call it before the settings change, which torch's
    operations follow.
    """
    generator = torch.Generator().manual_seed(5)
    grad = torch.randn(NUMEL, generator=generator) * 1e-38
    calls: list[tuple[str, Callable[[], None], list[Tensor]]] = []
    for rule in RULES:
        written = [grad * 3, *(grad.abs() for _ in rule.states)]

        def update(rule: rules.Rule = rule, written: list[Tensor] = written) -> None:
            kernels.update(rule, written[0], grad, *written[1:], threads=threads)

        calls.append((rule.kernel, update, written))
    half, sums = torch.zeros(NUMEL, dtype=torch.float16), torch.zeros(7, dtype=torch.float64)
    wide = torch.randn(NUMEL, generator=generator) * 1e-6  # denormal or inexact in fp16

    def block_sums() -> None:
        found = kernels.grad_stats(wide, threads=threads).block_sums
        sums.copy_(torch.tensor(found, dtype=torch.float64))

    calls.append(("cast", lambda: kernels.cast(wide, half, threads=threads), [half]))
    calls.append(("block_sums", block_sums, [sums.view(torch.float32)]))
    return calls


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("mode", [UPWARD, DOWNWARD, TOWARD_ZERO, "flush"])
def test_results_do_not_follow_the_caller_and_the_caller_keeps_its_settings(
    isa: str, mode: int | str, threads: int
) -> None:
    kernels.set_num_threads(2)
    usual, other = every_call(threads), every_call(threads)
    for _, call, _ in usual:
        call()
    kept = []
    with caller_flushes() if mode == "flush" else caller_rounds(int(mode)):
        for name, call, _ in other:
            call()
            kept.append((name, flushes() if mode == "flush" else rounding() == mode))
    assert not flushes() and rounding() == NEAREST
    assert all(same for _, same in kept), f"settings changed by: {kept}"
    for (name, _, expected), (_, _, got) in zip(usual, other, strict=True):
        for theirs, ours in zip(expected, got, strict=True):
            assert_same_bits(ours, theirs, f"{name} under {mode}")
