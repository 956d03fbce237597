"""Optimizers of device parameters that are sharded over ranks (stages 1 and 2), for
test_stages_device.py: functions that take a rank run in every process. Beside each there is plain
torch on the CPU, with gradients averaged by hand.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from fake_accelerator import collectives, load
from fake_accelerator.train_case import SCHEDULES
from torch import Tensor, nn

import offload
from offload.core.errors import StateError
from offload.core.pool import Pool
from offload.distributed.ranks import Ranks, ranks_of
from offload.optim import buckets, coordinator
from offload.planning import planner
from support.device.mutants import Mutant, patched
from support.device.transfer_cases import register
from support.ranks.stages import reduce

# A seed makes each stream early or late. Streams in the order in which they are made: that of the
# collectives, upload, download, between devices. Over these seeds each is early and late, beside
# each other one.
ALL = [*SCHEDULES, *(("seeded", seed) for seed in (8, 11, 15, 16, 21, 26, 31))]
SOME = [("eager", 0), ("lazy", 0), ("seeded", 11), ("seeded", 21)]
BUCKET_BYTES = 4 << 10  # so that there are several, and a parameter that is larger


class Mixed(nn.Module):
    """A model with parameters of both types and of all sizes: unused, frozen, without elements, in
    another order of memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 37)
        self.large = nn.Linear(37, 71, bias=False).bfloat16()
        self.last = nn.Linear(71, 3).bfloat16()
        self.one = nn.Parameter(torch.tensor(0.3))
        self.none = nn.Parameter(torch.empty(0, 5))
        self.frozen = nn.Parameter(torch.ones(37), requires_grad=False)
        self.turned = nn.Parameter(torch.randn(11, 13).t())
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x) * self.frozen * self.one + self.none.sum()
        hidden = self.last(self.large(hidden.bfloat16()).tanh()).float()
        return hidden.square().mean() + (x @ self.turned).square().mean()


class Forked(nn.Module):
    """A model of which half runs on a stream of its own, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = (
            nn.Sequential(*(nn.Linear(13, 13) for _ in range(3))) for _ in range(2)
        )
        self.side: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cpu:
            return (self.here(x) * self.there(x)).square().mean()
        main = torch.accelerator.current_stream()
        self.side = self.side or torch.Stream(x.device)
        self.side.wait_event(main.record_event())
        x.record_stream(self.side)
        with self.side:
            there = self.there(x)
        there.record_stream(main)
        main.wait_event(self.side.record_event())
        return (self.here(x) * there).square().mean()


class Wide(nn.Module):
    """A model large enough that rounding up does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 160), nn.Linear(160, 120), nn.Linear(120, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def groups_of(params: list[Tensor]) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


class Reference:
    """A reference in plain torch on the CPU; of 16-bit parameters it updates fp32 masters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.params = list(model.parameters())
        self.masters = [
            p if p.dtype == torch.float32 else nn.Parameter(p.detach().float()) for p in self.params
        ]
        self.optimizer = torch.optim.AdamW(groups_of(self.masters), lr=1e-2, fused=True)

    @torch.no_grad()
    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            if param is not master:
                master.grad = None if param.grad is None else param.grad.float()
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)


def reduce_all(model: nn.Module, ranks: Ranks) -> None:
    """Average the gradients as DDP does; `reduce` takes parameters of one type."""
    for dtype in (torch.float32, torch.bfloat16):
        some = nn.ParameterList(p for p in model.parameters() if p.dtype == dtype)
        reduce(some, ranks)


class Pair:
    """A model on the device whose optimizer is sharded, and the same model in plain torch on the
    CPU.
    """

    def __init__(
        self, ranks: Ranks, stage: int, make: Callable[[], nn.Module] = Mixed, **settings: Any
    ) -> None:
        self.ranks, self.stage, self.turn = ranks, stage, 0
        torch.manual_seed(5)
        self.plain = Reference(make())
        torch.manual_seed(5)
        self.model = make().to("fake")
        optimizer = torch.optim.AdamW(groups_of(list(self.model.parameters())), lr=1e-2)
        self.ours: Any = offload.wrap(optimizer, release_grads=stage == 2, **settings)

    def input(self, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(500 * self.ranks.rank + 10 * self.turn + micro)
        return torch.randn(3 + self.ranks.rank, 13, generator=generator)

    def backward(self, passes: int, micros: int) -> None:
        """Make gradients on both sides, in `passes` passes of `micros` micro-batches each.

        Each pass is averaged over the ranks by itself.
        """
        self.turn += 1
        self.plain.model.zero_grad()
        sums: dict[Tensor, Tensor] = {}
        for each in range(passes):
            for micro in range(each * micros, (each + 1) * micros):
                self.plain.model(self.input(micro)).backward()
                if self.stage == 2:
                    is_last = (micro + 1) % micros == 0
                    with nullcontext() if is_last else self.ours.no_sync():
                        self.model(self.input(micro).to("fake")).backward()
            reduce_all(self.plain.model, self.ranks)
            for p in self.plain.params:
                if p.grad is not None:
                    sums[p] = p.grad if p not in sums else sums[p] + p.grad
                    p.grad = None
        for p, q in zip(self.model.parameters(), self.plain.params, strict=True):
            q.grad = sums.get(q)
            if self.stage == 1:  # late work of the device
                p.grad = None if q.grad is None else (q.grad.to("fake") + 0) * 1
        self.grads = [q.grad for q in self.plain.params]

    def step_again(self) -> None:
        """Repeat the last step on the device, whose parameters are those before it again."""
        if self.stage == 2:
            self.model(self.input(0).to("fake")).backward()
        else:
            for p, grad in zip(self.model.parameters(), self.grads, strict=True):
                p.grad = None if grad is None else grad.to("fake")
        self.ours.step()

    def step(self, passes: int = 1, micros: int = 1) -> bool:
        """Take a step; return whether the device had the right parameters just before and after."""
        self.backward(passes, micros)
        late, before = self.tripled(self.model), self.tripled(self.plain.model)
        self.ours.step()
        self.plain.step()
        early, after = self.tripled(self.model), self.tripled(self.plain.model)
        self.ours.zero_grad()
        self.plain.model.zero_grad()
        found = [one.cpu() for one in [*late, *early]]
        return all(torch.equal(a, b) for a, b in zip(found, [*before, *after], strict=True))

    def tripled(self, model: nn.Module) -> list[Tensor]:
        return [p.detach() * 3 for p in model.parameters()]

    def has_same_state(self) -> bool:
        ours, theirs = self.ours.state_dict()["state"], self.plain.optimizer.state_dict()["state"]
        return ours.keys() == theirs.keys() and all(
            torch.equal(ours[number][name], value)
            for number, state in theirs.items()
            for name, value in state.items()
        )


def start() -> Ranks:
    load("eager", 0)
    collectives.register()
    buckets.BUCKET_BYTES, planner.CHUNK_NUMEL = BUCKET_BYTES, 1024
    coordinator.Pool = partial(Pool, register=register)  # type: ignore[misc, assignment]
    ranks = ranks_of(None, deadline_s=30)
    assert ranks is not None
    return ranks


def least_host_bytes(stage: int) -> int:
    """Return a budget with which some of the state must be on the drive."""
    made = torch.optim.AdamW(groups_of(list(Mixed().to("fake").parameters())), lr=1e-2)
    plan = offload.plan(made, release_grads=stage == 2)
    chunk = max(chunk.nbytes for chunk in plan.chunks)
    return plan.staging_buffers * plan.staging_buffer_bytes + plan.shared_bytes + 2 * chunk


def trains(pair: Pair) -> bool:
    """Take several steps, in stage 2 of several passes and micro-batches."""
    turns = ((1, 1), (1, 3), (2, 2)) if pair.stage == 2 else ((1, 1), (1, 1), (1, 1))
    return all([pair.step(*turn) for turn in turns])


def the_same_bits(rank: int, stage: int, directory: str) -> dict[str, Any]:
    """Train under every schedule, under some also with state on disk; return those that went wrong.

    All device memory must be freed after each.
    """
    ranks, wrong = start(), []
    for schedule in ALL:
        load(*schedule)
        least = least_host_bytes(stage)
        gc.collect()
        held = torch.accelerator.memory_allocated()
        on_disk = {"host_memory": least, "nvme": directory}
        for settings in ({}, on_disk) if schedule in SOME else ({},):
            pair = Pair(ranks, stage, **settings)
            if not trains(pair) or not pair.has_same_state():
                wrong.append((*schedule, bool(settings)))
            told = offload.report(pair.ours)
            assert bool(told.plan.disk_bytes) is bool(settings) and not told.fallbacks
            pair.ours.close()
            del pair
            gc.collect()
            torch.accelerator.synchronize()
            assert torch.accelerator.memory_allocated() == held, schedule
    return {"wrong": wrong}


def several_streams(rank: int) -> list[tuple[str, int]]:
    """Return the schedules under which a backward pass on two streams goes wrong."""
    ranks = start()
    seeds = [("seeded", seed) for seed in (0, 1, 7, 8, 15, 26)]
    return [one for one in (("lazy", 0), *seeds) if goes_wrong(ranks, 2, Forked, one)]


def moved(rank: int, stage: int) -> dict[str, Any]:
    """Return the bytes of a step as multiples of those in theory.

    They are counted on the network, and between host and device as the transfer counts them.
    """
    ranks = start()
    buckets.BUCKET_BYTES = 32 << 10
    pair = Pair(ranks, stage, Wide)
    nbytes = sum(p.nbytes for p in pair.model.parameters())
    for _ in range(2):  # in which all gradients are compared
        assert pair.step()
    before, sent_before = offload.report(pair.ours).total.moved, sent(pair)
    pair.backward(1, 1)
    reducer = pair.ours._offload_session.coordinator.resources.sharded.reducer
    if reducer is not None:
        reducer.drain()  # else the last gradients are still on the network, now and then
    torch.accelerator.synchronize()
    torch.fake.reset_counters()  # type: ignore[attr-defined]
    pair.ours.step()
    torch.accelerator.synchronize()
    counted = torch.fake.counters()  # type: ignore[attr-defined]
    after, sent_after = offload.report(pair.ours).total.moved, sent(pair)
    share = nbytes / ranks.count
    found = {
        "up": (after["host_to_device_bytes"] - before["host_to_device_bytes"]) / share,
        "down": (after["device_to_host_bytes"] - before["device_to_host_bytes"]) / share,
        # All copies of the step: the collectives of the fake device pass through host memory.
        "all up": counted["h2d_bytes"] / share - ranks.count,
        "all down": counted["d2h_bytes"] / share - 1,
    }
    theory = share * (ranks.count - 1)
    found |= {kind: (sent_after[kind] - sent_before.get(kind, 0)) / theory for kind in sent_after}
    plan = offload.report(pair.ours).plan
    found["text"] = str(plan)
    found["host_bytes"] = plan.shared_bytes
    pair.ours.close()
    return found


def sent(pair: Pair) -> dict[str, int]:
    return dict(pair.ours._offload_session.coordinator.ranks.sent_bytes)


# --- faults ---------------------------------------------------------------------------------------


def with_faults(
    rank: int, stage: int, make: Callable[[], nn.Module], faults: list[Mutant]
) -> list[bool]:
    """Return for each fault whether the training goes wrong under some schedule."""
    ranks, found = start(), []
    for fault in faults:
        with patched(fault):
            found.append(any(goes_wrong(ranks, stage, make, schedule) for schedule in ALL))
    return found


def goes_wrong(
    ranks: Ranks, stage: int, make: Callable[[], nn.Module], schedule: tuple[str, int]
) -> bool:
    load(*schedule)
    pair = Pair(ranks, stage, make)
    try:
        is_right = trains(pair)
    except StateError as error:  # found on all ranks, before the next step
        assert "differ in the values of" in str(error)
        is_right = False
    right = ranks.exchange(is_right, "what came out")
    pair.ours.close()
    del pair
    gc.collect()
    torch.accelerator.synchronize()
    return not all(right)
