"""Trainings of a model that is sharded over ranks and runs on their devices, for
test_stage3_device.py: each function runs in every process.
"""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fake_accelerator import DeviceModule, collectives, load
from torch import Tensor, nn

import offload
from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.params import prepared
from offload.params.gathered import DeviceGathered, DeviceGatheredBlockMemory, Gathered
from support.device.mutants import Mutant, patched
from support.device.transfer_cases import register
from support.models import WIDTH, WORDS, Gpt, Lora, Thrice
from support.ranks.stage3 import (
    Mixture,
    Model,
    Odd,
    Wide,
    adamw,
    clip,
    clip_in_double,
    loss_of,
    made_of,
    means,
    seeded,
    tokens,
)


class Fork(nn.Module):
    """A layer of which half runs on a stream of its own, forward and backward."""

    side: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.here, self.there = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        main = torch.accelerator.current_stream()
        Fork.side = Fork.side or torch.Stream(x.device)
        Fork.side.wait_event(main.record_event())
        x.record_stream(Fork.side)
        with Fork.side:
            there = self.there(x)
        there.record_stream(main)
        main.wait_event(Fork.side.record_event())
        return self.here(x) * there


class Forked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        self.layers = nn.Sequential(*(Fork() for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.embedding(tokens)))


STEPS = 4
Scene = Callable[[int, Path], None]
MODELS: dict[str, Model] = {
    "gpt": Gpt,
    "mixture": Mixture,  # some parameters have a gradient on one rank, some on none
    "odd": Odd,
    "thrice": Thrice,
    "adapters": Lora,
    "wide": Wide,
    "forked": Forked,
}
RECOMPUTED: dict[str, Model] = {
    "inside": lambda: Gpt(inside=False),
    "inside, reentrant": lambda: Gpt(inside=True),
    "around": lambda: Gpt(around=False),
    "around, reentrant": lambda: Gpt(around=True),
}


def device(schedule: tuple[str, int]) -> DeviceModule:
    module = load(*schedule)
    collectives.register()
    prepared.Pool = partial(Pool, register=register)  # type: ignore[assignment,misc]
    return module


def evaluate(model: nn.Module, rank: int) -> Tensor:
    with torch.no_grad():
        return model(tokens(rank, 99)[:, :-1].to("fake")).cpu()


def train(
    model: Any,
    optimizer: Any,
    rank: int,
    steps: int = STEPS,
    micro: int = 1,
    reduces_once: bool = True,
) -> list[Any]:
    """Train, and return what is seen: losses, and evaluations in between.

    micro: batches a step.
    reduces_once: gradients are reduced after the last batch only, and not after each.
    """
    seen: list[Any] = []
    for step in range(steps):
        for part in range(micro):
            waits = reduces_once and part + 1 < micro
            with model.no_sync() if waits else nullcontext():
                loss = loss_of(model, tokens(rank, step * micro + part).to("fake"))
                loss.backward()
            if isinstance(model, Plain) and not waits:
                model.average()
            seen.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            seen.append(evaluate(model, rank))
    return seen


class Plain:
    """The reference: a whole model on the device, the mean of gradients over the ranks, and torch's
    optimizer in host memory.
    """

    def __init__(self, make: Model) -> None:
        self.model, self.twin = seeded(make).to("fake"), seeded(make)
        self._optimizer = adamw(self.twin)

    def __call__(self, batch: Tensor) -> Any:
        return self.model(batch)

    def no_sync(self) -> Any:
        return nullcontext()

    def average(self) -> None:
        """Add the mean over the ranks of the gradients since the last call."""
        params = list(self.model.parameters())
        for param, twin, mean in zip(params, self.twin.parameters(), means(params), strict=True):
            if mean is not None:
                twin.grad = mean if twin.grad is None else twin.grad + mean
            param.grad = None

    def step(self) -> None:
        self._optimizer.step()
        with torch.no_grad():
            for param, twin in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                param.copy_(twin)

    def zero_grad(self) -> None:
        self.twin.zero_grad()


@cache
def expected(name: str, rank: int, **way: Any) -> tuple[list[Any], dict[str, Tensor]]:
    plain = Plain(MODELS[name])
    seen = train(plain, plain, rank, **way)
    return seen, {key: value.cpu() for key, value in plain.model.state_dict().items()}


def check_seen(what: str, ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs), what
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(a, b), f"{what}: {number} of what is seen differs"


def check_state(what: str, found: dict[str, Tensor], end: dict[str, Tensor]) -> None:
    assert found.keys() == end.keys()
    for key, value in end.items():
        assert found[key].is_cpu, f"{what}: {key}"
        assert torch.equal(found[key], value), f"{what}: {key} differs"


def ready(make: Model, folder: Path, **options: Any) -> tuple[Any, Any]:
    model = seeded(make)
    return offload.prepare(model, adamw(model), device="fake", nvme=folder, **options)


def trains_right(
    rank: int,
    folder: Path,
    name: str = "gpt",
    make: Model | None = None,
    way: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, int]:
    """Check that a training has the bits of plain training, and return the engine's counts.

    make: another way to build the same model.
    way: options of `train`.
    """
    seen, end = expected(name, rank, **(way or {}))
    what = f"{name} {way} {options}"
    before = settled_bytes()
    model, optimizer = ready(make or MODELS[name], folder, **options)
    made = made_of(model)
    check_seen(what, train(model, optimizer, rank, **(way or {})), seen)
    check_state(what, model.state_dict(), end)
    if not way or "micro" not in way:  # `no_sync` takes more
        assert made.transfer.memory.peak_bytes <= made.prepare_plan.sharding.fixed_bytes, what
    found = made.metrics.snapshot()
    assert not found.fallbacks, found.fallbacks
    for count in ("gathered_views_escaped", "whole_gradients_escaped"):
        assert not found.counts.get(count), f"{what}: {count}"
    optimizer.close()
    check_state(f"{what}, closed", model.state_dict(), end)
    assert not list(folder.iterdir()), what
    del model, optimizer, made
    assert settled_bytes() == before, f"{what}: device memory is given back"
    return dict(found.counts)


def settled_bytes() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    return int(torch.accelerator.memory_allocated())


def all_schedules(rank: int, folder: str, schedules: list[tuple[str, int]]) -> None:
    mine = Path(folder) / str(rank)
    mine.mkdir()
    device(("eager", 0))
    expected("gpt", rank, steps=3)
    for schedule in schedules:
        device(schedule)
        trains_right(rank, mine, way={"steps": 3})


def under(rank: int, folder: str, schedules: list[tuple[str, int]], scenes: list[Scene]) -> None:
    mine = Path(folder) / str(rank)
    mine.mkdir()
    device(("eager", 0))
    for schedule in schedules:
        for scene in scenes:
            device(schedule)
            scene(rank, mine)


def name_of(scene: Scene) -> str:
    return scene.__name__


# --- scenes, each under some schedules ------------------------------------------------------------


def least_host_bytes(make: Model, folder: Path, **options: Any) -> int:
    model = seeded(make)
    try:
        offload.plan(model, adamw(model), device="fake", host_memory=4096, nvme=folder, **options)
    except CapacityError as refused:
        return int(str(refused).split("about ")[1].split()[0])
    raise AssertionError("4096 bytes are enough")


def on_disk(rank: int, folder: Path) -> None:
    nbytes = least_host_bytes(Wide, folder)
    model = seeded(Wide)
    plan = offload.plan(model, adamw(model), device="fake", host_memory=nbytes, nvme=folder)
    assert plan.away_bytes and plan.state.disk_bytes and plan.shares.spilled, plan
    assert plan.shares.whole == 0 and "on the device" in str(plan)
    for way in ({"steps": 3}, {"steps": 2, "micro": 2}):
        counts = trains_right(rank, folder, "wide", way=way, host_memory=nbytes)
        assert counts["disk_read_bytes"] > 0


def accumulated(rank: int, folder: Path) -> None:
    for name in ("gpt", "mixture"):
        trains_right(rank, folder, name, way={"micro": 3, "steps": 3})


def other_models(rank: int, folder: Path) -> None:
    for name in ("mixture", "odd", "thrice", "adapters"):
        trains_right(rank, folder, name)


def recomputed(rank: int, folder: Path) -> None:
    for make in RECOMPUTED.values():
        trains_right(rank, folder, make=make)
    for activations in ("recompute", "offload"):
        trains_right(rank, folder, activations=activations)


def counted(rank: int, folder: Path) -> None:
    """Check the bytes that are sent, uploaded and downloaded against theory; and device memory."""
    model, optimizer = ready(Wide, folder)
    made, params = made_of(model), sum(p.numel() * 4 for p in model.parameters())
    train(model, optimizer, rank, steps=2)  # the order of uses is known then
    made.ranks.sent_bytes.clear()
    before, steps = made.metrics.snapshot().counts, 4
    for step in range(steps):
        loss_of(model, tokens(rank, step).to("fake")).backward()
        optimizer.step()
        optimizer.zero_grad()
    found = made.metrics.snapshot().counts
    count, sharding = made.ranks.count, made.prepare_plan.sharding
    theory = 3 * steps * params * (count - 1) / count
    assert 0.7 * theory < sum(made.ranks.sent_bytes.values()) <= 1.05 * theory
    up, down = (found[f"{way}_bytes"] - before[f"{way}_bytes"] for way in WAYS)
    # Shards are uploaded for forward and backward unless they are still there; gradients are
    # downloaded once.
    assert 0.7 * 2 * steps * params / count < up <= 1.05 * 2 * steps * params / count
    assert steps * params / count <= down <= 1.05 * steps * params / count
    use = offload.report(optimizer).model.shared
    assert 0 < use.whole_peak_bytes <= use.whole_bytes == sharding.whole_bytes < 0.7 * params
    assert sharding.gradient_bytes < 0.6 * params
    assert made.shares.whole == 0
    optimizer.close()


WAYS = ("host_to_device", "device_to_host")


def bounded(rank: int, folder: Path) -> None:
    """Train a model that is too large for its device; refuse budgets that are too small."""
    settled_bytes()  # memory that earlier scenes left would count
    nbytes = device_bytes_for(Wide, folder)
    trains_right(rank, folder, "wide", device_memory=nbytes)
    few = nbytes - 1 if rank == 0 else nbytes  # an error on one rank is an error on all
    refused(
        CapacityError if rank == 0 else StateError,
        "device_memory: .*gathered from 2 ranks.*the least that works",
        lambda: ready(Wide, folder, device_memory=few),
    )
    model, optimizer = ready(Wide, folder, device_memory=nbytes + 4096)
    refused(CapacityError, "resident at once need .*device_memory", lambda: lend(model))
    optimizer.close()


def lend(model: nn.Module) -> None:
    with offload.resident(model):
        pass


def device_bytes_for(make: Model, folder: Path) -> int:
    """Return the least device memory that works, without activations."""
    model = seeded(make)
    try:
        offload.plan(model, adamw(model), device="fake", device_memory=4096)
    except CapacityError as refused:
        return int(str(refused).split("about ")[1].split()[0])
    raise AssertionError("4096 bytes are enough")


def refused(kind: type[Exception], words: str, act: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        act()


def edited(rank: int, folder: Path) -> None:
    """Read and change values and gradients from outside of runs."""
    plain = seeded(Gpt).to("fake")
    model, optimizer = ready(Gpt, folder)
    refused(StateError, "resident", lambda: model.head.weight.sum())
    with offload.resident(model), torch.no_grad():
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param.cpu(), other.cpu()) and param.device.type == "fake"
        model.norm.weight.mul_(1.5)
        model.layers[0].up.weight.data = model.layers[0].up.weight.data * 2
    with torch.no_grad():
        plain.norm.weight.mul_(1.5)
        plain.layers[0].up.weight.mul_(2)
    assert torch.equal(evaluate(model, rank), evaluate(plain, rank))
    with pytest.raises(StateError, match="same changes"), offload.resident(model.norm):
        model.norm.weight.data.fill_(float(rank))
    assert torch.equal(evaluate(model, rank), evaluate(plain, rank))
    other = {key: value.cpu() + 1 for key, value in plain.state_dict().items()}
    model.load_state_dict(other)
    check_state("loaded", model.state_dict(), other)
    loss_of(model, tokens(rank, 0).to("fake")).backward()
    with offload.resident(model.norm):
        grad = model.norm.weight.grad
        norm = float(grad.norm())
        assert norm > 0 and grad.device.type == "fake"
        grad.mul_(torch.tensor(2.0, device="fake"))
    assert float(model.norm.weight.grad.norm()) == pytest.approx(2 * norm)
    model.to("fake")
    refused(ConfigError, "stay", lambda: model.to("cpu"))
    optimizer.close()


def clipped(rank: int, folder: Path) -> None:
    plain, (model, optimizer) = Plain(Gpt), ready(Gpt, folder)
    for step in range(3):
        for one, cut in ((plain, clip_in_double), (model, clip)):
            loss_of(one, tokens(rank, step).to("fake")).backward()
            plain.average() if one is plain else None
            cut(plain.twin.parameters() if one is plain else model.parameters())
        plain.step()
        plain.zero_grad()
        optimizer.step()
        assert all(p.grad is None or p.grad.is_cpu for p in model.parameters())
        optimizer.zero_grad()
    check_state("clipped", model.state_dict(), plain.twin.state_dict())
    refused(StateError, "no_sync", lambda: step_inside(model, optimizer, rank))
    optimizer.close()


def step_inside(model: Any, optimizer: Any, rank: int) -> None:
    with model.no_sync():
        loss_of(model, tokens(rank, 0).to("fake")).backward()
    optimizer.step()


def saved(rank: int, folder: Path) -> None:
    """Save on all ranks, and load on the device and on the CPU.

    On the device the training goes on with the same bits.
    """
    model, optimizer = ready(Mixture, folder)
    train(model, optimizer, rank, steps=2)
    path = folder.parent / "checkpoint"
    offload.save(path, model, optimizer, extra={"step": 2})
    end = train(model, optimizer, rank, steps=2)
    state, moments = model.state_dict(), optimizer.state_dict()["state"]
    optimizer.close()
    for options in ({"device": "fake", "nvme": folder}, {"device": "cpu"}):
        torch.manual_seed(rank)
        model = Mixture()
        torch.manual_seed(3)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
        model, optimizer = offload.prepare(model, adamw(model), **options)
        assert offload.load(path, model, optimizer)["step"] == 2
        if options["device"] == "fake":
            check_seen("loaded", train(model, optimizer, rank, steps=2), end)
            check_state("loaded", model.state_dict(), state)
            for number, each in optimizer.state_dict()["state"].items():
                for name, value in each.items():
                    assert torch.equal(value, moments[number][name]), (number, name)
        optimizer.close()
    dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    dist.barrier()


def came_home(rank: int, folder: Path) -> None:
    """Check that `close` puts parameters, gradients and buffers back where they were."""
    for home in ("fake", "cpu"):
        model = seeded(Gpt).to(home)
        model.register_buffer("scale", torch.ones(3, device=home))
        values = {key: value.cpu() for key, value in model.state_dict().items()}
        offload.prepare(model, adamw(model), device="fake")
        loss_of(model, tokens(rank, 0).to("fake")).backward()
        norms = [float(p.grad.norm()) for p in model.parameters()]
        offload.close(model)
        assert {p.device.type for p in (*model.parameters(), *model.buffers())} == {home}
        assert {p.grad.device.type for p in model.parameters()} == {home}
        found = [float(p.grad.cpu().norm()) for p in model.parameters()]
        assert all(math.isclose(a, b, rel_tol=1e-5) for a, b in zip(norms, found, strict=True))
        check_state(home, {key: v.cpu() for key, v in model.state_dict().items()}, values)


class Filled(Gpt):
    """A model whose norm is initialized by rebinding the weight to another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.reset_parameters = self._fill_norm  # type: ignore[method-assign]

    def _fill_norm(self) -> None:
        self.norm.weight.data = torch.rand(WIDTH)
        nn.init.zeros_(self.norm.bias)


def beginnings(rank: int, folder: Path) -> None:
    model = seeded(Gpt).to("fake")
    if rank == 1:
        with torch.no_grad():
            model.layers[2].down.bias[3] += 1
    refused(ConfigError, "down.bias", lambda: offload.prepare(model, device="fake"))
    refused(
        ConfigError,
        "config: .*device",
        lambda: offload.prepare(Gpt(), device=("cpu", "fake")[rank]),
    )
    torch.manual_seed(7 + rank)  # every rank draws what rank 0 draws, on the CPU
    with torch.device("meta"):
        model = Filled()
    torch.fake.manual_seed(rank)  # type: ignore[attr-defined]
    model, optimizer = offload.prepare(model, adamw(model), device="fake", nvme=folder)
    torch.manual_seed(7)
    with torch.device("meta"):
        plain = Filled()
    offload.prepare(plain, device="cpu", process_group=False)
    check_state("filled", model.state_dict(), plain.state_dict())
    train(model, optimizer, rank, steps=1)
    optimizer.close()
    offload.close(plain)
    model = offload.prepare(seeded(Gpt), device="fake")  # to evaluate alone
    assert torch.equal(evaluate(model, rank), evaluate(seeded(Gpt).to("fake"), rank))
    offload.close(model)


SCENES: list[Scene] = [
    other_models,
    edited,
    came_home,
    counted,
    recomputed,
    clipped,
    saved,
    beginnings,
    bounded,
]


@contextmanager
def late_uploads() -> Iterator[None]:
    """Upload shards as late as possible, when their ticket is waited for, while the block runs.

    The collectives of the fake device would otherwise have waited for them.
    """
    gather, arrive = DeviceGatheredBlockMemory.gather, DeviceGathered.arrive
    slices: dict[Gathered, Tensor] = {}

    def note(self: DeviceGatheredBlockMemory, nbytes: int, own: Tensor, *args: Any) -> Gathered:
        found = gather(self, nbytes, own, *args)
        slices[found] = own
        return found

    def arrive_without(self: DeviceGathered) -> Ticket[None] | None:
        upload, own = arrive(self), slices.pop(self, None)
        return upload if upload is None or own is None else _late(upload, own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceGatheredBlockMemory, "gather", note)
        patch.setattr(DeviceGathered, "arrive", arrive_without)
        yield


def _late(upload: Ticket[None], own: Tensor) -> Ticket[None]:
    late: Ticket[None] = Ticket("a late copy")
    was = own.clone()

    def land(_: float | None) -> None:
        upload.wait()
        late.finish(None)
        assert torch.equal(own, was), "a slice has changed before it was read"

    late.land = land
    return late


def forked(rank: int, folder: str, mutant: Mutant | None, schedules: list[tuple[str, int]]) -> bool:
    """Return whether gradients that two streams make are right under all of these schedules."""
    mine = Path(folder) / str(rank)
    mine.mkdir()
    device(("eager", 0))
    expected("forked", rank, steps=4)
    for schedule in schedules:
        device(schedule)
        Fork.side = None
        with nullcontext() if mutant is None else patched(mutant):
            try:
                trains_right(rank, mine, "forked", way={"steps": 4})
            except AssertionError:
                return False
    return True


def with_fault(
    rank: int, folder: str, mutant: Mutant | None, schedules: list[tuple[str, int]]
) -> None:
    """Train with state on disk, which runs all of the code: with a fault it should fail."""
    mine = Path(folder) / str(rank)
    mine.mkdir()
    device(("eager", 0))
    way = {"steps": 2, "micro": 2, "reduces_once": False}
    expected("gpt", rank, **way)
    nbytes = least_host_bytes(Gpt, mine)
    for schedule in schedules:
        device(schedule)
        with late_uploads(), nullcontext() if mutant is None else patched(mutant):
            trains_right(rank, mine, way=way, host_memory=nbytes)
