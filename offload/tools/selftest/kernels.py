"""Checks of the native core: each instruction set gives the same bits, and those of torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from offload import kernels
from offload.tools.selftest.bits import (
    CASES,
    OptimizerCase,
    awkward,
    cuts,
    normal,
    require_promise,
    require_same_bits,
    require_untouched_around,
    train_torch,
    unaligned,
    zeros,
)
from offload.tools.selftest.check import NotRun, PassedCheck, Setting, require, require_equal

SIZES = (0, 1, 7, 8, 9, 15, 16, 17, 1003, 4097, 70_001)
HALVES = (torch.bfloat16, torch.float16)
GRADS = (torch.float32, *HALVES)
OUTS = (None, *HALVES)
STEPS = 3
_THIN = 7  # a quick run takes every 7th combination; 7 divides no number of combinations


def _require_all(got: Sequence[Tensor], expected: Sequence[Tensor], what: str) -> int:
    """Compare the tensors bit by bit; return the number of elements."""
    pairs = zip(got, expected, strict=True)
    return sum(require_same_bits(ours, theirs, what) for ours, theirs in pairs)


# --- updates --------------------------------------------------------------------------------------


def reference(setting: Setting) -> PassedCheck:
    """Compare every instruction set with plain torch: awkward sizes, numbers and addresses, and
    16-bit gradients and outputs.
    """
    isas, count = [isa for isa in kernels.available_isas() if isa != "reference"], 0
    if not isas:
        raise NotRun(f"there is no native core to compare: {kernels.native_error()}")
    combinations = itertools.product(CASES, SIZES, GRADS, OUTS)
    chosen = itertools.islice(combinations, 0, None, _THIN if setting.is_quick else 1)
    for number, (case, numel, grad_dtype, out_dtype) in enumerate(chosen):
        start = awkward(numel)
        grads = [awkward(numel, grad_dtype) for _ in range(2)]
        what = f"{case.name}, {numel} elements, {grad_dtype} -> {out_dtype}"
        shift, scale, threads = number % 5, (1.0, 0.37, 1 / 1024)[number % 3], 1 + number % 3
        expected = _updated("reference", case, start, grads, out_dtype, 0, scale, 1, what)
        for isa in isas:
            got = _updated(isa, case, start, grads, out_dtype, shift, scale, threads, what)
            count += _require_all(got, expected, f"{isa}, {what}")
    return PassedCheck(f"elements beside plain torch, on {', '.join(isas)}", count)


def _updated(
    isa: str,
    case: OptimizerCase,
    start: Tensor,
    grads: list[Tensor],
    out_dtype: torch.dtype | None,
    shift: int,
    scale: float,
    threads: int,
    what: str,
) -> list[Tensor]:
    """Return the parameter, the states and the 16-bit output after one step for each gradient.
    Raises `CheckFailed` if a byte outside of them was written.
    """
    states = [zeros(start.numel()) for _ in case.states]
    written = [unaligned(tensor, shift) for tensor in (start, *states)]
    out = None
    if out_dtype is not None:
        out = unaligned(zeros(start.numel(), dtype=out_dtype), shift)
    with kernels.forced_isa(isa):
        for step, grad in enumerate(grads, start=1):
            kernels.update(
                case.rule(step),
                written[0],
                unaligned(grad, shift),
                *written[1:],
                out=out,
                scale=scale,
                maximize=case.maximize,
                threads=threads,
            )
    written += [] if out is None else [out]
    for tensor in written:
        require_untouched_around(tensor, f"{isa}, {what}")
    return written


def torch_fused(setting: Setting) -> PassedCheck:
    """Compare every instruction set, and plain torch, with torch.optim with fused=True."""
    require_promise()
    count, isas = 0, kernels.available_isas()
    combinations = itertools.product(CASES, SIZES, (True, False))
    chosen = itertools.islice(combinations, 0, None, _THIN if setting.is_quick else 1)
    for case, numel, is_awkward in chosen:
        if case.optimizer is None:
            continue
        make = awkward if is_awkward else normal
        start, grads = make(numel), [make(numel) for _ in range(STEPS)]
        expected = train_torch(case, start, grads)
        what = f"{case.name}, {numel} elements, beside torch"
        for isa in isas:
            got = _updated(isa, case, start, grads, None, 1, 1.0, 2, what)
            count += _require_all(got, expected, f"{isa}, {what}")
    return PassedCheck(f"elements beside torch.optim, fused, on {', '.join(isas)}", count)


def slices(setting: Setting) -> PassedCheck:
    """Check that the bits depend neither on how a parameter is cut into slices nor on the number of
    threads.
    """
    count, numel = 0, 20_011
    for case in CASES[:: 3 if setting.is_quick else 1]:
        start, grads = normal(numel), [normal(numel) for _ in range(STEPS)]
        states = [zeros(numel) for _ in case.states]
        whole, cut = ([tensor.clone() for tensor in (start, *states)] for _ in range(2))
        for step, grad in enumerate(grads, start=1):
            rule = case.rule(step)
            kernels.update(rule, whole[0], grad, *whole[1:], threads=1)
            for begin, end in cuts(numel, 5):
                piece = [tensor[begin:end] for tensor in cut]
                kernels.update(
                    rule, piece[0], grad[begin:end], *piece[1:], offset=begin, numel=numel
                )
        count += _require_all(cut, whole, f"{case.name}, cut into slices")
    return PassedCheck("elements of parameters cut anywhere", count)


# --- statistics and casts -------------------------------------------------------------------------


def statistics(setting: Setting) -> PassedCheck:
    """Check sums of squares: near the exact sum, and the same bits with every instruction set and
    number of threads; and that one non-finite element is found at any place.
    """
    count = 0
    sizes = (0, 5, 4097, 100_003)[: 3 if setting.is_quick else 4]
    for dtype, numel in itertools.product(GRADS, sizes):
        grad = unaligned(normal(numel).to(dtype), 3)
        exact = math.fsum((grad.double() ** 2).tolist())
        seen = set()
        for isa, threads in itertools.product(kernels.available_isas(), (1, 2, 5)):
            with kernels.forced_isa(isa):
                stats = kernels.grad_stats(grad, threads=threads)
            seen.add(stats.block_sums)
            count += 1
            # A block adds fewer than 520 numbers in a row; each addition rounds by 2**-53 at most.
            is_near = abs(stats.sum_squares - exact) <= 520 * 2**-53 * exact
            what = f"sum of squares of {numel} elements of {dtype} on {isa}"
            require(is_near and stats.finite, what, got=stats.sum_squares, expected=exact)
        require_equal(len(seen), 1, f"sums of {numel} elements of {dtype}")
    count += _find_broken_elements(setting)
    return PassedCheck("sums of squares and broken elements", count)


def _find_broken_elements(setting: Setting) -> int:
    count, numel = 0, kernels.STATS_BLOCK + 45
    places = [*range(70), *range(70, numel, 4999 if setting.is_quick else 997), numel - 1]
    for isa, dtype in itertools.product(kernels.available_isas(), GRADS):
        for place, value in itertools.product(places, (math.inf, -math.inf, math.nan)):
            if isa == "reference" and place % 9:
                continue  # slow, and all elements run the same code
            grad = torch.ones(numel, dtype=dtype, device="cpu")
            grad[place] = value
            with kernels.forced_isa(isa):
                stats = kernels.grad_stats(grad)
            what = f"{value} as element {place} of {dtype} on {isa}"
            require(not stats.finite, what, got="finite", expected="not finite")
            count += 1
    return count


def casts(setting: Setting) -> PassedCheck:
    """Compare casts with torch's: of every 16-bit number, its neighbours in fp32, the midpoints
    between 16-bit numbers with their neighbours, and special numbers.
    """
    count = 0
    for half, isa in itertools.product(HALVES, kernels.available_isas()):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu").view(half)
        middle = 1 << 15 if half == torch.bfloat16 else 1 << 12
        words = every.float().view(torch.int32)
        around = [(words + d + m).view(torch.float32) for d in (-1, 0, 1) for m in (0, middle)]
        wide = unaligned(torch.cat([*around, awkward(4097)]), 1)
        narrow = unaligned(zeros(wide.numel(), dtype=half), 3)
        back = unaligned(zeros(wide.numel()), 5)
        with kernels.forced_isa(isa):
            kernels.cast(wide, narrow)
            kernels.cast(narrow, back)
        count += require_same_bits(narrow, wide.to(half), f"fp32 to {half} on {isa}")
        count += require_same_bits(back, wide.to(half).float(), f"{half} to fp32 on {isa}")
        for tensor in (narrow, back):
            require_untouched_around(tensor, f"a cast on {isa}")
    return PassedCheck("casts to and from 16 bits", count)
