"""The update kernels give the bits of torch's fused CPU optimizers, on every instruction set and
however cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels import (
    ADAMW,
    CASES,
    JUDGED,
    LION,
    SIZES,
    Case,
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
from torch import Tensor

from offload import kernels, rules

pytestmark = pytest.mark.kernels

ISAS = kernels.available_isas()
NATIVE_ISAS = [isa for isa in ISAS if isa != "reference"]
STEPS = 50


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels.forced_isa(request.param):
        yield request.param


@pytest.mark.parametrize("numel", [n for n in SIZES if n < 10_000])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch_fused_to_the_bit(isa: str, case: Case, numel: int) -> None:
    start = torch.randn(numel)
    grads = [torch.randn(numel) for _ in range(STEPS)]
    compare(case, train_ours(case, start, grads), train_torch(case, start, grads))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch_fused_on_a_large_parameter(isa: str, case: Case) -> None:
    numel = SIZES[-1]
    steps = STEPS if isa in NATIVE_ISAS else 2  # plain torch needs a second for a step of this size
    start, grads = torch.randn(numel), [torch.randn(numel) for _ in range(5)]
    repeated = [grads[i % 5] for i in range(steps)]
    compare(case, train_ours(case, start, repeated), train_torch(case, start, repeated))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch_fused_on_special_numbers(isa: str, case: Case) -> None:
    """inf, NaN, denormals, overflow in parameters and gradients: a few steps, then ordinary ones on
    top.
    """
    for numel in (4103, *(7, 15) * 10):  # seven elements in torch's tail, many times over
        start = awkward(numel)
        grads = [awkward(numel) for _ in range(3)] + [torch.randn(numel) for _ in range(3)]
        compare(case, train_ours(case, start, grads), train_torch(case, start, grads))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch_fused_on_denormals_alone(isa: str, case: Case) -> None:
    numel = 1003
    start = torch.randn(numel) * 1e-39
    grads = [torch.randn(numel) * 10.0 ** float(e) for e in (-38, -40, -44, -22, -30)]
    compare(case, train_ours(case, start, grads), train_torch(case, start, grads))


@pytest.mark.parametrize("shift", [0, 1, 3, 7])
@pytest.mark.parametrize("multiple", [8, 1], ids=["multiples of 8", "anywhere"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cuts_and_alignment_do_not_change_bits(
    isa: str, case: Case, multiple: int, shift: int
) -> None:
    for numel in (1, 9, 127, 4099):
        start, grads = torch.randn(numel), [torch.randn(numel) for _ in range(4)]
        whole = train_torch(case, start, grads)
        compare(case, train_ours(case, start, grads, cuts(numel, 6, multiple), shift), whole)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_drawn_settings_equal_torch_fused(data: st.DataObject) -> None:
    """Any betas, rates, sizes, cuts and instruction sets: those one thinks of, and the others."""
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


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_odd_addresses_do_not_change_bits(isa: str, case: Case, half: torch.dtype) -> None:
    for numel in (1, 9, 1003):
        start, grad = torch.randn(numel), torch.randn(numel).to(half)
        states = [torch.zeros(numel) for _ in case.states]
        expected = [start.clone(), *(state.clone() for state in states)]
        got = [misaligned(start), *map(misaligned, states)]
        out, odd_out = torch.zeros(numel, dtype=half), misaligned(torch.zeros(numel, dtype=half))
        kernels.update(case.rule(1), expected[0], grad, *expected[1:], out=out)
        kernels.update(case.rule(1), got[0], misaligned(grad), *got[1:], out=odd_out)
        compare(case, got, expected)
        assert_same_bits(odd_out, out, f"{case.name}: out")


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_a_slice_is_written_and_nothing_around_it(
    isa: str, case: Case, half: torch.dtype | None
) -> None:
    """Every length below three turns of the main loop, in the middle and at the end of its
    parameter, in the middle of buffers that have guards.
    """
    for count in range(50):
        for behind in (0, 64):
            written = [unaligned(torch.zeros(count), 1) for _ in ("param", *case.states)]
            out = None if half is None else unaligned(torch.zeros(count, dtype=half), 1)
            param, *states = written
            grad = torch.ones(count)
            kernels.update(case.rule(1), param, grad, *states, out=out, numel=count + behind)
            for tensor in (*written, *([] if out is None else [out])):
                assert_untouched_around(tensor, f"{case.name}: {count} elements, {tensor.dtype}")
                assert (tensor != 0).all(), f"{case.name}: not all of {count} elements written"


def test_cuts_of_a_large_parameter(isa: str) -> None:
    case, numel = ADAMW, SIZES[-1]
    start, grads = torch.randn(numel), [torch.randn(numel) for _ in range(2)]
    compare(
        case, train_ours(case, start, grads, cuts(numel, 5, 8)), train_torch(case, start, grads)
    )


def lion_published(p: Tensor, g: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    """Algorithm 2 of "Symbolic Discovery of Optimization Algorithms" in double: p_t and m_t."""
    p, g, m = p.double(), g.double(), m.double()
    update = torch.sign(LION["beta1"] * m + (1 - LION["beta1"]) * g)
    p = p - LION["lr"] * (update + LION["weight_decay"] * p)
    return p, LION["beta2"] * m + (1 - LION["beta2"]) * g


@pytest.mark.parametrize("numel", SIZES[:-1])
def test_lion_follows_its_published_formula(isa: str, numel: int) -> None:
    p, m = torch.randn(numel), torch.zeros(numel)
    rule = rules.Lion.at(**LION)
    for _ in range(10):
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
    kernels.update(rules.Lion.at(**{**LION, "weight_decay": 0.0}), p, g, m)
    broken = torch.isnan(p)
    assert broken.nonzero().flatten().tolist() == [3, 17]
    assert torch.equal(p[~broken], torch.ones(18))


@pytest.mark.parametrize("native_isa", NATIVE_ISAS)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", JUDGED, ids=lambda case: case.name)
def test_every_dtype_equals_the_reference(
    case: Case, out_dtype: torch.dtype | None, grad_dtype: torch.dtype, native_isa: str
) -> None:
    """Mixed precision, scaled and sliced: parameter, states and 16-bit output, bit for bit."""
    for numel, shift, scale in (
        (0, 0, 1.0),
        (1, 1, 0.5),
        (17, 0, 0.37),
        (1000, 3, -1.25),
        (70001, 1, 1 / 1024),
    ):
        start = awkward(numel)
        grads = [awkward(numel, grad_dtype) for _ in range(2)]
        results = {}
        for isa in (native_isa, "reference"):
            buffers = [
                unaligned(t, shift) for t in (start, *(torch.zeros(numel) for _ in case.states))
            ]
            out = (
                None if out_dtype is None else unaligned(torch.zeros(numel, dtype=out_dtype), shift)
            )
            with kernels.forced_isa(isa):
                for step, grad in enumerate(grads, start=1):
                    param, *states = buffers
                    kernels.update(
                        case.rule(step),
                        param,
                        unaligned(grad, shift),
                        *states,
                        out=out,
                        scale=scale,
                        maximize=True,
                    )
            results[isa] = [*buffers, *([] if out is None else [out])]
            for tensor in results[isa]:
                assert_untouched_around(tensor, f"{case.name} on {isa}, {numel} elements")
        for name, got, expected in zip(
            ("param", *case.states, "out"), results[native_isa], results["reference"], strict=False
        ):
            assert_same_bits(
                got, expected, f"{case.name} {grad_dtype} -> {out_dtype}, {numel}: {name}"
            )


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
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
def test_the_outcome_does_not_depend_on_the_threads(case: Case) -> None:
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


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
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
