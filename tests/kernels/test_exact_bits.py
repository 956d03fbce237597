"""Single roundings and single signs that random numbers do not find: each was wrong once, or would
be without a line of its own in the kernels.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.kernels import adagrad_case, assert_same_bits, compare, train_ours, train_torch
from support.loops import chosen
from torch import Tensor

from offload import kernels
from offload.kernels import rules

pytestmark = pytest.mark.kernels

ISAS = kernels.available_isas()
NATIVE_ISAS = [isa for isa in ISAS if isa != "reference"]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.forced_isa(request.param):
        yield request.param


def step_of_torch(
    optimizer: torch.optim.Optimizer, param: Tensor, grad: Tensor, step: int, **states: Tensor
) -> list[Tensor]:
    """Return parameter and states after torch's step number `step`, from the given states."""
    optimizer.state[param] = {
        "step": torch.tensor(float(step - 1)),
        **{name: state.clone() for name, state in states.items()},
    }
    param.grad = grad.clone()
    optimizer.step()
    return [param.detach(), *(optimizer.state[param][name] for name in states)]


@pytest.mark.parametrize(
    "lr,weight_decay",
    [(10.0, 0.1), (1000.0, 0.001), (0.1, 10.0), (100.0, 0.01), (0.3, 1 / 0.3), (0.7, 1 / 0.7)],
)
def test_the_decay_of_adamw_is_rounded_once_in_double(
    isa: str, lr: float, weight_decay: float
) -> None:
    """1 - lr*weight_decay is no zero but the rounding error of the product: torch's compiler fuses
    the two.
    """
    param = torch.nn.Parameter(torch.full((11,), 3.0))
    optimizer = torch.optim.AdamW([param], lr=lr, weight_decay=weight_decay, fused=True)
    zeros = torch.zeros(11)
    expected = step_of_torch(optimizer, param, zeros, 1, exp_avg=zeros, exp_avg_sq=zeros)
    rule = rules.Adam.at(
        1,
        lr=lr,
        beta1=0.9,
        beta2=0.999,
        eps=1e-8,
        weight_decay=weight_decay,
        decoupled=True,
    )
    got = [torch.full((11,), 3.0), zeros.clone(), zeros.clone()]
    kernels.update(rule, got[0], zeros, *got[1:])
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs, f"lr {lr}, weight_decay {weight_decay}")


def test_the_rate_of_adagrad_is_rounded_once_in_double(isa: str) -> None:
    lr, lr_decay, step = 0.09768183830967112, 0.04005331933048717, 80
    param = torch.nn.Parameter(torch.zeros(11))
    optimizer = torch.optim.Adagrad([param], lr=lr, lr_decay=lr_decay, fused=True)
    grad = torch.ones(11)
    expected = step_of_torch(optimizer, param, grad, step, sum=torch.zeros(11))
    rule = rules.Adagrad.at(step, lr=lr, lr_decay=lr_decay, eps=1e-10, weight_decay=0.0)
    got = [torch.zeros(11), torch.zeros(11)]
    kernels.update(rule, got[0], grad, got[1])
    for ours, theirs in zip(got, expected, strict=True):
        assert_same_bits(ours, theirs, "Adagrad at step 80")


def test_adagrad_over_many_steps_with_a_decaying_rate(isa: str) -> None:
    case = adagrad_case("many steps", lr=0.09768183830967112, lr_decay=0.04005331933048717)
    start, grads = torch.randn(23), [torch.randn(23) for _ in range(100)]
    compare(case, train_ours(case, start, grads), train_torch(case, start, grads))


@pytest.mark.parametrize("decoupled", [True, False], ids=["AdamW", "Adam"])
@pytest.mark.parametrize("beta1", [0.0, 1e-9, 2.0**-26, 2.0**-25])
def test_the_sign_of_zero_when_momentum_is_the_gradient(
    isa: str, beta1: float, decoupled: bool
) -> None:
    """1 - beta1 is 1 in fp32: what is left is zero times a difference, and its sign differs between
    torch's vectors and its last numel % 8 elements.
    """
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45])
    grad, momentum = (t.flatten() for t in torch.meshgrid(numbers, numbers, indexing="ij"))
    for shift in range(0, 42, 7):  # each of the 36 pairs comes into the seven elements of the tail
        g, m = grad.roll(shift)[:31], momentum.roll(shift)[:31]
        start, zeros = torch.zeros(len(g)), torch.zeros(len(g))
        param = torch.nn.Parameter(start.clone())
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = kind([param], lr=0.1, betas=(beta1, 0.9), weight_decay=0.0, fused=True)
        expected = step_of_torch(optimizer, param, g, 2, exp_avg=m, exp_avg_sq=zeros)
        rule = rules.Adam.at(
            2,
            lr=0.1,
            beta1=beta1,
            beta2=0.9,
            eps=1e-8,
            weight_decay=0.0,
            decoupled=decoupled,
        )
        got = [start.clone(), m.clone(), zeros.clone()]
        kernels.update(rule, got[0], g, *got[1:])
        for name, ours, theirs in zip(("param", "m", "v"), got, expected, strict=True):
            assert_same_bits(ours, theirs, f"beta1 {beta1}, {len(g)} elements: {name}")


# --- the division by a known divisor -----------------------------------------------------------


def divisors() -> list[float]:
    """List values that sqrt(1 - beta2**step) can take, the hardest mantissas (all ones, all zeros,
    1 more), and drawn ones.
    """
    settings = [
        (beta2, step)
        for beta2 in (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1 - 1e-7, 1 - 2.0**-53)
        for step in (1, 2, 3, 17, 1000, 10**6, 10**9)
    ]
    real = {rules.to_f32(math.sqrt(1.0 - beta2**step)) for beta2, step in settings}
    hard = {1 - 2.0**-24, 0.5, 0.5 + 2.0**-24, 0.75, 2.0**-13 * (1 - 2.0**-24), 1 / 3}
    drawn = np.random.default_rng(3).random(12, dtype=np.float32).tolist()
    return sorted({*real, *map(rules.to_f32, hard), *drawn})


def adam_that_shows_its_denominator(divisor: float) -> rules.Adam:
    """Return a rule whose step is p - m / (sqrt(v) / divisor), with m and v left as they are."""
    rule = rules.Adam.at(
        1, lr=1.0, beta1=0.5, beta2=0.5, eps=0.0, weight_decay=0.0, decoupled=False
    )
    return dataclasses.replace(
        rule,
        lerp_weight=0.0,
        lerp_from_grad=False,
        beta2=1.0,
        one_minus_beta2=0.0,
        bias2_sqrt=divisor,
        bias2_sqrt_inverse=rules.to_f32(1.0 / divisor),
        neg_step_size=-1.0,
    )


def check_division(divisor: float, roots: np.ndarray) -> None:
    """Check that sqrt(v) / divisor, for v = roots**2, is what a plain fp32 division gives.

    m is a little less than the quotient: then m / quotient lies below 1, where fp32 numbers are
    denser than the quotients, and a last bit of the quotient shows.
    """
    with np.errstate(all="ignore"):
        v = roots * roots
        quotient = np.sqrt(v) / np.float32(divisor)
        m = np.where((quotient > 0) & np.isfinite(quotient), quotient * np.float32(0.999), 1)
        m = m.astype(np.float32)
        expected = np.float32(0) - m / quotient
    p, tensors = torch.zeros(len(v)), [torch.from_numpy(t.copy()) for t in (m, v)]
    kernels.update(adam_that_shows_its_denominator(divisor), p, torch.zeros(len(v)), *tensors)
    assert_same_bits(tensors[1], torch.from_numpy(v), "v must stay as it is")
    assert_same_bits(p, torch.from_numpy(expected), f"m / (sqrt(v) / {divisor!r})")


STRIDE = chosen(test=64, torture=8)
SOME = (1 << 23) // STRIDE + 7


@pytest.mark.parametrize("native_isa", NATIVE_ISAS)
def test_the_division_without_a_division_is_correctly_rounded(native_isa: str) -> None:
    """A dense set of mantissas for each divisor, and every one for the hardest divisors."""
    every = np.arange(1 << 23, dtype=np.uint32) + np.uint32(127 << 23)
    with kernels.forced_isa(native_isa):
        assert len(divisors()) >= 36
        for index, divisor in enumerate(divisors()):
            hard = divisor == rules.to_f32(1 - 2.0**-24)
            some = every if hard else np.resize(every[index % STRIDE :: STRIDE], SOME)
            check_division(divisor, some.view(np.float32))


def test_the_division_without_a_division_at_the_ends_of_the_range(isa: str) -> None:
    """Zero, infinity, NaN, denormals; vectors and single elements."""
    rng = np.random.default_rng(5)
    exponents = rng.integers(-74, 64, 20_011)
    roots = np.ldexp(1 + rng.random(20_011), exponents).astype(np.float32)
    special = [0.0, math.inf, math.nan, 3.8e-23, 1e-22, 1.08e-19, 1.8446743e19]
    roots[-7:] = special
    for place, value in enumerate(special):
        roots[100 * place : 100 * place + 100 : 9] = value
    for divisor in divisors():
        check_division(divisor, roots)
