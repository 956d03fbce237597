"""The update kernels give the bits of torch's fused CPU optimizers, on every instruction set and
however cut.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import (
    ADAMW,
    BY_NAME,
    CASES,
    JUDGED,
    LION,
    LION_CASE,
    SIZES,
    OptimizerCase,
    adam_case,
    assert_same_bits,
    assert_untouched_around,
    awkward,
    compare,
    cuts,
    misaligned,
    train_ours,
    train_torch,
    unaligned,
)
from support.loops import chosen, tally
from torch import Tensor

from offload import kernels
from offload.kernels import reference, rules

pytestmark = pytest.mark.kernels

ISAS = kernels.available_isas()
NATIVE_ISAS = [isa for isa in ISAS if isa != "reference"]
SMALL = [numel for numel in SIZES if numel < 10_000]
# Three blocks of a lane and some elements, or what no cache takes.
LARGE = chosen(test=3 * 32768 + 11, torture=SIZES[-1])
STEPS = 50
HALVES = [torch.bfloat16, torch.float16]
LIKE = {"ordinary": torch.randn, "special": awkward}
BY_TORCH = [case for case in JUDGED if case is not LION_CASE]
SWEPT = chosen(test=CASES, torture=CASES, quick=BY_TORCH)
Slices = list[tuple[int, int]]


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.forced_isa(request.param):
        yield request.param


class Trained(NamedTuple):
    start: Tensor
    grads: list[Tensor]
    by_torch: list[Tensor]


@cache
def trained(name: str, numel: int, kinds: tuple[str, ...], draw: int = 0) -> Trained:
    """Make a start, a gradient of each kind, and what torch's optimizer makes of them: once for all
    instruction sets.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * numel + draw)
        first = LIKE[kinds[0]](numel)
        grads = [LIKE[kind](numel) for kind in kinds]
    return Trained(first, grads, train_torch(BY_NAME[name], first, grads))


def check(
    case: OptimizerCase, expected: Trained, slices: Slices | None = None, shift: int = 0
) -> None:
    """Check that our kernels come to what torch's optimizer came to, whole or in slices."""
    got = train_ours(case, expected.start, expected.grads, slices, shift)
    compare(case, got, expected.by_torch, f"{expected.start.numel()} elements, cut at {slices}")


@pytest.mark.quick
def test_equals_torch_fused_to_the_bit(isa: str) -> None:
    """Few steps for every size, and as many as a training has for one of them."""
    few = chosen(test=6, torture=STEPS, quick=2)
    for case in SWEPT:
        for numel in SMALL:
            steps = STEPS if numel == 17 else few
            check(case, trained(case.name, numel, ("ordinary",) * steps))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch has borders at more elements than the native core."""
    monkeypatch.setattr(reference, "BLOCK", chosen(test=32768, torture=reference.BLOCK))


@pytest.mark.usefixtures("small_blocks")
def test_equals_torch_fused_on_a_large_parameter(isa: str) -> None:
    """Over the borders of what a lane takes at a time."""
    native_steps = chosen(test=3, torture=STEPS)
    steps = native_steps if isa in NATIVE_ISAS else 2  # plain torch takes its time
    for case in CASES if isa in NATIVE_ISAS else chosen(test=BY_TORCH, torture=CASES):
        start, grads = torch.randn(LARGE), [torch.randn(LARGE) for _ in range(min(5, steps))]
        repeated = [grads[i % 5] for i in range(steps)]
        compare(case, train_ours(case, start, repeated), train_torch(case, start, repeated))


@pytest.mark.quick
def test_equals_torch_fused_on_special_numbers(isa: str) -> None:
    """inf, NaN, denormals, overflow in parameters and gradients: a few steps, then ordinary ones on
    top.
    """
    kinds = ("special",) * 3 + ("ordinary",) * 3
    for case in SWEPT:
        check(case, trained(case.name, 4103, kinds))
        for numel in (7, 15):  # seven elements in torch's tail, many times over
            for draw in range(10):
                check(case, trained(case.name, numel, kinds, draw=draw))


@cache
def trained_on_denormals(name: str) -> Trained:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1003)
        start = torch.randn(1003) * 1e-39
        grads = [torch.randn(1003) * 10.0 ** float(e) for e in (-38, -40, -44, -22, -30)]
    return Trained(start, grads, train_torch(BY_NAME[name], start, grads))


def test_equals_torch_fused_on_denormals_alone(isa: str) -> None:
    for case in CASES:
        check(case, trained_on_denormals(case.name))


@pytest.mark.parametrize("multiple", [8, 1], ids=["multiples of 8", "anywhere"])
def test_cuts_and_alignment_do_not_change_bits(isa: str, multiple: int) -> None:
    """Each case with each size, each size with each shift; torture has each case with both."""
    shifts = (0, 1, 3, 7)
    for number, case in enumerate(CASES):
        for place, numel in enumerate((1, 9, 127, 4099)):
            expected = trained(case.name, numel, ("ordinary",) * 4)
            one = [shifts[(number + place) % len(shifts)]]
            for shift in chosen(test=one, torture=list(shifts)):
                check(case, expected, cuts(numel, 6, multiple), shift)


@settings(max_examples=chosen(test=30, torture=1500))
@given(data=st.data())
def test_drawn_settings_equal_torch_fused(data: st.DataObject) -> None:
    """Any betas, rates, sizes, cuts and instruction sets, not only those that a person would
    choose.
    """
    tally("hypothesis examples")
    case = adam_case(
        "drawn",
        decoupled=data.draw(st.booleans()),
        maximize=data.draw(st.booleans()),
        lr=data.draw(st.floats(0, 10)),
        betas=data.draw(st.tuples(st.floats(0, 0.9999), st.floats(0, 0.99999))),
        eps=data.draw(st.floats(0, 1)),
        weight_decay=data.draw(st.floats(0, 1)),
    )
    numel, pieces = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    scale = 10.0 ** data.draw(st.integers(-30, 30))
    start, grads = torch.randn(numel) * scale, [torch.randn(numel) * scale for _ in range(3)]
    with kernels.forced_isa(data.draw(st.sampled_from(ISAS))):
        got = train_ours(case, start, grads, cuts(numel, pieces), data.draw(st.integers(0, 9)))
    compare(case, got, train_torch(case, start, grads))


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_odd_addresses_do_not_change_bits(isa: str, half: torch.dtype) -> None:
    for case, numel in itertools.product(CASES, (1, 9, 1003)):
        start, grad = torch.randn(numel), torch.randn(numel).to(half)
        states = [torch.zeros(numel) for _ in case.states]
        expected = [start.clone(), *(state.clone() for state in states)]
        got = [misaligned(start), *map(misaligned, states)]
        out, odd_out = torch.zeros(numel, dtype=half), misaligned(torch.zeros(numel, dtype=half))
        kernels.update(case.rule(1), expected[0], grad, *expected[1:], out=out)
        kernels.update(case.rule(1), got[0], misaligned(grad), *got[1:], out=odd_out)
        compare(case, got, expected, f"{numel} elements")
        assert_same_bits(odd_out, out, f"{case.name}, {numel} elements: out")


@pytest.mark.parametrize("half", [None, *HALVES], ids=str)
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_a_slice_is_written_and_nothing_around_it(
    isa: str, case: OptimizerCase, half: torch.dtype | None
) -> None:
    """Every length below three turns of the main loop, in the middle and at the end of its
    parameter, in the middle of buffers that have guards.
    """
    # Plain torch has no loop of its own that could run over.
    counts = range(50) if isa in NATIVE_ISAS else chosen(test=range(0, 50, 7), torture=range(50))
    for count in counts:
        for behind in (0, 64):
            written = [unaligned(torch.zeros(count), 1) for _ in ("param", *case.states)]
            out = None if half is None else unaligned(torch.zeros(count, dtype=half), 1)
            param, *states = written
            grad = torch.ones(count)
            kernels.update(case.rule(1), param, grad, *states, out=out, numel=count + behind)
            for tensor in (*written, *([] if out is None else [out])):
                assert_untouched_around(tensor, f"{case.name}: {count} elements, {tensor.dtype}")
                assert (tensor != 0).all(), f"{case.name}: not all of {count} elements written"


@pytest.mark.usefixtures("small_blocks")
def test_cuts_of_a_large_parameter(isa: str) -> None:
    case, numel = ADAMW, LARGE
    start, grads = torch.randn(numel), [torch.randn(numel) for _ in range(2)]
    compare(
        case, train_ours(case, start, grads, cuts(numel, 5, 8)), train_torch(case, start, grads)
    )


def lion_published(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Compute Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" in double: p_t and
    m_t.
    """
    p, g, m = p.double(), g.double(), m.double()
    update = torch.sign(LION["beta1"] * m + (1 - LION["beta1"]) * g)
    p = p - LION["lr"] * (update + LION["weight_decay"] * p)
    return p, LION["beta2"] * m + (1 - LION["beta2"]) * g


@pytest.mark.parametrize("numel", SMALL)
def test_lion_follows_its_published_formula(isa: str, numel: int) -> None:
    p, m = torch.randn(numel), torch.zeros(numel)
    rule = rules.LionRule.at(**LION)
    for _ in range(chosen(test=5, torture=10)):
        g = torch.randn(numel)
        expected_p, expected_m = lion_published(p, g, m)
        kernels.update(rule, p, g, m)
        # Each fp32 step rounds at most three times; the sign is decided before rounding except at
        # exact ties.
        torch.testing.assert_close(p.double(), expected_p, rtol=3e-7, atol=1e-7)
        torch.testing.assert_close(m.double(), expected_m, rtol=3e-7, atol=1e-7)


def test_lion_hands_nan_on_and_keeps_zero(isa: str) -> None:
    p, m = torch.ones(20), torch.zeros(20)
    g = torch.zeros(20)
    g[3] = g[17] = float("nan")
    kernels.update(rules.LionRule.at(**{**LION, "weight_decay": 0.0}), p, g, m)
    broken = torch.isnan(p)
    assert broken.nonzero().flatten().tolist() == [3, 17]
    assert torch.equal(p[~broken], torch.ones(18))


def mixed(
    case: OptimizerCase,
    start: Tensor,
    grads: list[Tensor],
    out_dtype: torch.dtype | None,
    shift: int,
    scale: float,
) -> list[Tensor]:
    """Return parameter, states and 16-bit output after steps with these gradients, each in memory
    of its own with guards, which are checked.
    """
    zeros = [torch.zeros(len(start)) for _ in case.states]
    param, *states = (unaligned(tensor, shift) for tensor in (start, *zeros))
    out = None if out_dtype is None else unaligned(torch.zeros(len(start), dtype=out_dtype), shift)
    for step, grad in enumerate(grads, start=1):
        rule, grad = case.rule(step), unaligned(grad, shift)
        kernels.update(rule, param, grad, *states, out=out, scale=scale, maximize=True)
    made = [param, *states, *([] if out is None else [out])]
    for tensor in made:
        assert_untouched_around(tensor, f"{case.name}, {len(start)} elements")
    return made


# Size, shift, scale; the last one goes over a border of what a lane takes at a time.
MIXED = [(0, 0, 1.0), (1, 1, 0.5), (17, 0, 0.37), (1000, 3, -1.25)]
MIXED_LARGE = (chosen(test=33001, torture=70001), 1, 1 / 1024)


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_every_dtype_equals_the_reference(case: OptimizerCase) -> None:
    """Mixed precision, scaled and sliced: parameter, states and 16-bit output, bit for bit."""
    pairs = list(itertools.product([torch.float32, *HALVES], [None, *HALVES]))
    for place, (grad_dtype, out_dtype) in enumerate(pairs):
        # Each case has three of the nine pairs large, and each pair is large in some case.
        is_large = chosen(test=place % 3 == JUDGED.index(case) % 3, torture=True)
        for numel, shift, scale in [*MIXED, *([MIXED_LARGE] if is_large else [])]:
            start, grads = awkward(numel), [awkward(numel, grad_dtype) for _ in range(2)]
            with kernels.forced_isa("reference"):
                expected = mixed(case, start, grads, out_dtype, shift, scale)
            for isa in NATIVE_ISAS:
                with kernels.forced_isa(isa):
                    made = mixed(case, start, grads, out_dtype, shift, scale)
                what = f"{case.name} on {isa}, {grad_dtype} -> {out_dtype}, {numel} elements"
                names = ("param", *case.states, "out")[: len(expected)]
                for name, got, wanted in zip(names, made, expected, strict=True):
                    assert_same_bits(got, wanted, f"{what}: {name}")


@pytest.mark.parametrize("half", HALVES, ids=str)
def test_mixed_precision_equals_torch_on_an_fp32_master(isa: str, half: torch.dtype) -> None:
    """16-bit gradients in, exact master, 16-bit parameter out: what one would write with torch
    calls.
    """
    numel, case = 4099, ADAMW
    start = torch.randn(numel)
    grads = [torch.randn(numel).to(half) for _ in range(5)]
    scale = 1 / 512
    expected = train_torch(case, start, [grad.float() * scale for grad in grads])
    param, m, v, out = (
        start.clone(),
        torch.zeros(numel),
        torch.zeros(numel),
        torch.zeros(numel, dtype=half),
    )
    for step, grad in enumerate(grads, start=1):
        kernels.update(case.rule(step), param, grad, m, v, out=out, scale=scale)
    compare(case, [param, m, v], expected)
    assert_same_bits(out, param.to(half), "out is the master rounded to nearest even")


@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_the_outcome_does_not_depend_on_the_threads(case: OptimizerCase) -> None:
    numel = 500_001
    start, grad = torch.randn(numel), torch.randn(numel)
    results = []
    for threads in (1, 2, 3, 7):
        kernels.set_num_threads(threads)
        results.append(train_ours(case, start, [grad, grad]))
    for other in results[1:]:
        compare(case, other, results[0])


@pytest.mark.parametrize("isa", NATIVE_ISAS, indirect=True)
def test_flushing_denormals_in_the_caller_changes_nothing(isa: str) -> None:
    """Otherwise the bits would depend on which thread took which block."""
    case, numel = ADAMW, 100_000
    start, grads = torch.randn(numel) * 1e-38, [torch.randn(numel) * 1e-38]
    expected = train_ours(case, start, grads)
    try:
        assert torch.set_flush_denormal(True)
        got = train_ours(case, start, grads)
    finally:
        torch.set_flush_denormal(False)
    compare(case, got, expected)


def test_autograd_hears_of_the_change() -> None:
    """A tensor that autograd saved must not be changed silently."""
    weight = torch.randn(8, requires_grad=True)
    loss = (weight * weight).sum()
    kernels.update(
        rules.Sgd.at(lr=0.1, momentum=0, dampening=0, weight_decay=0, nesterov=False, first=True),
        weight.detach(),
        torch.ones(8),
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("half", HALVES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 7, 15, 16, 17, 4097])
def test_a_half_parameter_that_somebody_has_set_wins(
    isa: str, numel: int, half: torch.dtype
) -> None:
    """Where it is its master's rounding, the master's own bits stay; elsewhere they are its value.
    Specials, denormals and odd addresses included.
    """
    master = unaligned(awkward(numel), 3)
    half_param = unaligned(master.to(half), 5)
    changed = torch.arange(numel) % 3 == 0
    half_param[changed] = awkward(numel).flip(0)[changed].to(half)
    expected = torch.where(
        half_param.view(torch.int16) == master.to(half).view(torch.int16),
        master,
        half_param.float(),
    )
    rule = rules.Sgd.at(
        lr=0.5, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=True
    )
    grad = torch.randn(numel)
    plain = expected.clone(), torch.empty(numel, dtype=half)
    kernels.update(rule, plain[0], grad, out=plain[1])
    kernels.update(rule, master, grad, out=half_param, adopt=True)
    assert_same_bits(master, plain[0], "master")
    assert_same_bits(half_param, plain[1], "parameter")
    assert_untouched_around(master, "master")
    assert_untouched_around(half_param, "parameter")


def test_adopting_can_be_left_out(isa: str) -> None:
    master, half_param = torch.ones(20), torch.zeros(20, dtype=torch.bfloat16)
    rule = rules.Sgd.at(
        lr=0.5, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=True
    )
    kernels.update(rule, master, torch.zeros(20), out=half_param)
    assert half_param.eq(1).all()
    kernels.update(rule, torch.ones(20), torch.zeros(20), adopt=True)  # there is nothing to adopt
