"""Measures a training iteration of a small model, prepared with less memory than it needs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from offload.api import prepare, report
from offload.params.prepared import prepared_of
from offload.planning.layout import ELEMENT_BYTES
from offload.tools.bench.figure import Figure, FigureUnit, Repeats, repeat
from offload.tools.bench.sizes import Bench
from offload.tools.forecast.synthetic_llama import StandIn

_SEED = 1
_STEP_SECONDS = 8  # training may take so many times as long as a figure
_NEEDS_BYTES = ELEMENT_BYTES * 4  # per element: the parameter, its gradient, two moments


@dataclass(frozen=True)
class StepFigures:
    """The figures of a training iteration.

    stall_share: the share of these iterations in which their thread waited; None: the report has no
    whole iteration. host_bytes: the budget of host memory.
    """

    seconds: Figure
    tokens_per_s: Figure
    stall_share: float | None
    host_bytes: int
    read_bytes: int  # in all, from `prepare` until `close` has returned
    written_bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {k: v.median if isinstance(v, Figure) else v for k, v in vars(self).items()}


def measure_training(bench: Bench, directories: Sequence[str], device: torch.device) -> StepFigures:
    """Measure training with AdamW in float32. The budget of host memory is half of what the model
    needs, and the rest is in the directories; without directories all of it is in host memory.
    """
    name, size = "training step", bench.sizes.model
    bench.progress.begin(name)
    host_bytes = size.numel * _NEEDS_BYTES * (1 if directories else 3) // 2
    fields: dict[str, Any] = {"nvme": list(directories)} if directories else {}
    fields |= {"device": device, "host_memory": host_bytes}
    with torch.random.fork_rng(devices=[]):  # the generators of the user's process do not advance
        torch.manual_seed(_SEED)
        with torch.device("meta"):
            model = StandIn.of(size, size.length)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = prepare(model, optimizer, **fields)
        made = prepared_of(model)
        assert made is not None, "it has just been prepared"
        try:
            each_s = _train(bench, model, optimizer, device)
            told = report(optimizer)
        finally:
            optimizer.close()
    tokens, counts = size.tokens, made.metrics.snapshot().counts  # close() writes, too
    rates = [tokens / s for s in each_s]
    return StepFigures(
        seconds=bench.done(name, FigureUnit.SECONDS, each_s),
        tokens_per_s=bench.done("training tokens", FigureUnit.TOKENS_PER_S, rates),
        stall_share=told.live_numbers(bench.sizes.warm_up_steps).get("stall_share"),
        host_bytes=host_bytes,
        read_bytes=counts.get("disk_read_bytes", 0),
        written_bytes=counts.get("disk_written_bytes", 0),
    )


def _train(bench: Bench, model: Any, optimizer: Any, device: torch.device) -> list[float]:
    """Train; return the seconds of each iteration after the warm-up."""
    sizes, size = bench.sizes, bench.sizes.model
    generator = torch.Generator("cpu").manual_seed(_SEED)
    shape = size.batch, size.length

    def iterate() -> float:
        tokens = torch.randint(size.vocabulary, shape, generator=generator, device="cpu")
        begin_s = time.perf_counter()
        loss = model.loss(tokens.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device, which may be behind the CPU
        return time.perf_counter() - begin_s

    for _ in range(sizes.warm_up_steps):
        iterate()
    runs = Repeats(_STEP_SECONDS * sizes.seconds, min(2, sizes.steps), sizes.steps)
    return repeat(iterate, runs, bench.progress.at, warm_up=False)
