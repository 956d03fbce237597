"""AdamW against its ceiling and its peers: `make bench`, or pytest benchmarks/bench_kernels.py.

The ceiling is a kernel without arithmetic that reads four fp32 buffers and writes three of them, on
the same memory and threads: nothing that does the work of AdamW can be faster for long.
OFFLOAD_BENCH_ROUNDS changes the number of rounds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from contest import Contestant, hold, huge_tensor
from results import Row
from torch import Tensor

from offload import _native, kernels
from offload.kernels import rules

MI = 1 << 20
LR, BETAS, EPS, DECAY, STEP = 1e-3, (0.9, 0.999), 1e-8, 0.1, 3
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def rounds_for(numel: int) -> int:
    return int(os.environ.get("OFFLOAD_BENCH_ROUNDS") or min(101, max(31, 512 * MI // numel)))


@contextlib.contextmanager
def on_threads(count: int) -> Iterator[None]:
    """Let torch, DeepSpeed (which runs on torch's threads) and our kernels use so many threads."""
    before = torch.get_num_threads(), kernels.num_threads()
    torch.set_num_threads(count)
    kernels.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        kernels.set_num_threads(before[1])


PART = 16 * MI  # elements that one contestant works on before the next one does


@dataclass
class Slices:
    """The buffers of one part, what they hold before the step, and what they must hold after it."""

    p: Tensor
    g: Tensor
    m: Tensor
    v: Tensor
    before: list[Tensor]
    after: list[Tensor]
    scratch: Tensor

    @property
    def written(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.p, self.m, self.v

    @property
    def addresses(self) -> list[int]:
        return [t.data_ptr() for t in (self.p, self.g, self.m, self.v)]

    def reset(self) -> None:
        for target, source in zip(self.written, self.before, strict=True):
            target.copy_(source)

    def check_bits(self) -> None:
        for got, expected in zip(self.written, self.after, strict=True):
            assert torch.equal(got.view(torch.int32), expected.view(torch.int32))

    def check_close(self) -> None:
        for got, expected in zip(self.written, self.after, strict=True):
            torch.sub(got, expected, out=self.scratch)
            assert float(torch.linalg.vector_norm(self.scratch, math.inf)) < 1e-5

    def check_touch(self) -> None:
        g = self.g.view(torch.int32)
        for got, source in zip(self.written, self.before, strict=True):
            assert torch.equal(got.view(torch.int32), source.view(torch.int32) ^ g)

    def torch_step(self, **kind: bool) -> Callable[[], object]:
        param = torch.nn.Parameter(self.p)
        param.grad = self.g
        optimizer = torch.optim.AdamW(
            [param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, **kind
        )
        count = torch.tensor(0.0)
        optimizer.state[param] = {"step": count, "exp_avg": self.m, "exp_avg_sq": self.v}

        def run() -> None:
            count.fill_(STEP - 1)
            optimizer.step()

        return run

    def deepspeed_step(self) -> Callable[[], object]:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        param = torch.nn.Parameter(self.p)
        param.grad = self.g
        optimizer = DeepSpeedCPUAdam(
            [param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, adamw_mode=True
        )
        state: dict[str, Any] = {"step": 0, "exp_avg": self.m, "exp_avg_sq": self.v}
        optimizer.state[param] = state

        def run() -> None:
            state["step"] = STEP - 1
            optimizer.step()

        return run


class Bench:
    """The buffers of one AdamW step, in parts."""

    def __init__(self, numel: int, part: int = PART) -> None:
        self.numel = numel
        self.p, self.g, self.m, self.v = (huge_tensor(numel) for _ in range(4))
        self.g.normal_()
        self.rule = rules.Adam.at(
            STEP, lr=LR, beta1=BETAS[0], beta2=BETAS[1], eps=EPS, weight_decay=DECAY, decoupled=True
        )
        scratch = torch.empty(min(part, numel))
        before = [torch.randn(numel), torch.randn(numel) * 0.1, torch.rand(numel) * 0.1 + 0.01]
        after = [torch.empty(numel) for _ in before]
        self.parts = [
            Slices(
                *(t[begin : begin + part] for t in (self.p, self.g, self.m, self.v)),
                before=[t[begin : begin + part] for t in before],
                after=[t[begin : begin + part] for t in after],
                scratch=scratch,
            )
            for begin in range(0, numel, part)
        ]
        for one in self.parts:
            one.reset()
            one.torch_step(fused=True)()
            for target, source in zip(one.after, one.written, strict=True):
                target.copy_(source)

    def reset(self, part: int) -> None:
        self.parts[part].reset()

    def ceiling(self, threads: int) -> Contestant:
        return Contestant(
            "ceiling",
            [partial(_native.touch, *one.addresses, one.p.numel(), threads) for one in self.parts],
            lambda part: self.parts[part].check_touch(),
        )

    def contestants(self, threads: int) -> list[Contestant]:
        update = partial(kernels.update, self.rule, threads=threads)

        def exact(part: int) -> None:
            self.parts[part].check_bits()

        def close(part: int) -> None:
            self.parts[part].check_close()

        parts = self.parts
        found = [
            self.ceiling(threads),
            Contestant("offload", [partial(update, o.p, o.g, o.m, o.v) for o in parts], exact),
            Contestant("torch fused", [one.torch_step(fused=True) for one in parts], exact),
            Contestant("torch foreach", [one.torch_step(foreach=True) for one in parts], close),
        ]
        if HAS_DEEPSPEED:
            steps = [one.deepspeed_step() for one in parts]
            found.append(Contestant("DeepSpeedCPUAdam", steps, close))
        return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numel_mi", [1, 4, 16, 64])
def test_adamw_fp32(benchmark: Any, table: list[Row], numel_mi: int, threads: int) -> None:
    bench = Bench(numel_mi * MI)
    with on_threads(threads):
        contestants = bench.contestants(threads)
        benchmark.pedantic(
            lambda: hold(contestants, rounds_for(bench.numel), bench.reset), rounds=1
        )
    for contestant in contestants:
        table.append(
            Row.of(
                "AdamW fp32", numel_mi, threads, contestant, contestants, nbytes=28 * bench.numel
            )
        )
    benchmark.extra_info.update({c.name: c.median_s for c in contestants})


class MixedBench(Bench):
    """A step with bf16 gradients, an fp32 master and a bf16 parameter out, clipped by global norm,
    with an overflow check. In one part: the norm is that of all elements.
    """

    MAX_NORM = 1.0

    def __init__(self, numel: int) -> None:
        self.g16, self.p16 = (huge_tensor(numel, torch.bfloat16) for _ in range(2))
        self.g16.normal_()
        super().__init__(numel, part=numel)
        self.reset(0)
        self.by_torch()
        for target, source in zip(self.parts[0].after, self.parts[0].written, strict=True):
            target.copy_(source)

    def by_torch(self) -> None:
        param = torch.nn.Parameter(self.p)
        param.grad = self.g16.float()
        norm = torch.nn.utils.clip_grad_norm_([param], self.MAX_NORM)
        if not math.isfinite(float(norm)):
            return
        optimizer = torch.optim.AdamW(
            [param], lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
        )
        count = torch.tensor(STEP - 1.0)
        optimizer.state[param] = {"step": count, "exp_avg": self.m, "exp_avg_sq": self.v}
        optimizer.step()
        self.p16.copy_(self.p)

    def by_us(self, threads: int) -> None:
        stats = kernels.grad_stats(self.g16, threads=threads)
        if not stats.finite:
            return
        scale = min(1.0, self.MAX_NORM / (stats.norm + 1e-6))
        kernels.update(
            self.rule, self.p, self.g16, self.m, self.v, out=self.p16, scale=scale, threads=threads
        )

    def reset(self, part: int) -> None:
        super().reset(part)
        self.p16.zero_()

    def check_mixed(self, part: int) -> None:
        self.parts[part].check_close()
        assert torch.equal(self.p16, self.p.bfloat16())

    def contestants(self, threads: int) -> list[Contestant]:
        return [
            self.ceiling(threads),
            Contestant("offload", [lambda: self.by_us(threads)], self.check_mixed),
            Contestant("torch calls", [self.by_torch], self.check_mixed),
        ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("numel_mi", [4, 64])
def test_mixed_chain(benchmark: Any, table: list[Row], numel_mi: int, threads: int) -> None:
    bench = MixedBench(numel_mi * MI)
    with on_threads(threads):
        contestants = bench.contestants(threads)
        benchmark.pedantic(
            lambda: hold(contestants, rounds_for(bench.numel), bench.reset), rounds=1
        )
    for contestant in contestants:
        table.append(
            Row.of(
                "mixed chain", numel_mi, threads, contestant, contestants, nbytes=30 * bench.numel
            )
        )
    benchmark.extra_info.update({c.name: c.median_s for c in contestants})


def sum_of_squares_by_torch(g: Tensor) -> None:
    norm = torch.linalg.vector_norm(g.float())
    assert bool(torch.isfinite(norm))


@pytest.mark.parametrize("threads", [1, 2])
def test_grad_stats(benchmark: Any, table: list[Row], threads: int) -> None:
    """Norm and overflow check of bf16 gradients in one pass."""
    grad = huge_tensor(64 * MI, torch.bfloat16)
    grad.normal_()
    expected = float(torch.linalg.vector_norm(grad.double()))
    norms: list[float] = []

    def check(part: int) -> None:
        assert math.isclose(norms[-1], expected, rel_tol=1e-9)

    with on_threads(threads):
        contestants = [
            Contestant(
                "offload",
                [lambda: norms.append(kernels.grad_stats(grad, threads=threads).norm)],
                check,
            ),
            Contestant("torch calls", [lambda: sum_of_squares_by_torch(grad)], lambda part: None),
        ]
        benchmark.pedantic(lambda: hold(contestants, 25, lambda part: None), rounds=1)
    for contestant in contestants:
        table.append(
            Row.of("norm bf16", 64, threads, contestant, contestants, nbytes=2 * grad.numel())
        )
