"""What ranks do with a model that is shared out over them and runs on their devices, for
test_stage3_device.py: each function runs in every process.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fake_accelerator import DeviceModule, collectives, load
from preparelib import Gpt
from stage3lib import Mixture, Model, adamw, loss_of, made_of, seeded, tokens
from torch import Tensor, nn
from transfer_cases import register

import offload
from offload import prepared
from offload.pool import Pool

STEPS = 4
MODELS: dict[str, Model] = {"gpt": Gpt, "mixture": Mixture}


def device(schedule: tuple[str, int]) -> DeviceModule:
    module = load(*schedule)
    collectives.register()
    prepared.Pool = partial(Pool, register=register)  # type: ignore[assignment,misc]
    return module


def evaluate(model: nn.Module, rank: int) -> Tensor:
    with torch.no_grad():
        return model(tokens(rank, 99)[:, :-1].to("fake")).cpu()


def train(model: Any, optimizer: Any, rank: int, steps: int = STEPS, micro: int = 1) -> list[Any]:
    """What is seen: losses, and evaluations in between. micro: batches a step, reduced once."""
    seen: list[Any] = []
    for step in range(steps):
        for part in range(micro):
            with model.no_sync() if part + 1 < micro else nullcontext():
                loss = loss_of(model, tokens(rank, step * micro + part).to("fake"))
                loss.backward()
            seen.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            seen.append(evaluate(model, rank))
    return seen


class Plain:
    """The same by plain means: a whole model on the device, the mean of gradients over the ranks,
    and torch's optimizer in host memory.
    """

    def __init__(self, make: Model) -> None:
        self.model, self._twin = seeded(make).to("fake"), seeded(make)
        self._optimizer = adamw(self._twin)

    def __call__(self, batch: Tensor) -> Any:
        return self.model(batch)

    def no_sync(self) -> Any:
        return nullcontext()

    def step(self) -> None:
        for param, twin in zip(self.model.parameters(), self._twin.parameters(), strict=True):
            twin.grad = _mean(param)
        self._optimizer.step()
        self._put()

    def _put(self) -> None:
        with torch.no_grad():
            for param, twin in zip(self.model.parameters(), self._twin.parameters(), strict=True):
                param.copy_(twin)

    def zero_grad(self) -> None:
        self.model.zero_grad()


def _mean(param: Tensor) -> Tensor | None:
    """Over the ranks, in their order; zero where one has none, None where all have none."""
    count = dist.get_world_size()
    mine = torch.zeros(param.shape) if param.grad is None else param.grad.cpu()
    each = [torch.empty_like(mine) for _ in range(count)]
    there = [torch.empty(1) for _ in range(count)]
    dist.all_gather(each, mine.contiguous())
    dist.all_gather(there, torch.tensor([float(param.grad is not None)]))
    if not sum(map(float, there)):
        return None
    total = each[0] / count
    for one in each[1:]:
        total = total + one / count
    return total


def expected(name: str, rank: int, **way: Any) -> tuple[list[Any], dict[str, Tensor]]:
    load("eager", 0)
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


def ready(name: str, folder: Path, **options: Any) -> tuple[Any, Any]:
    model = seeded(MODELS[name])
    return offload.prepare(model, adamw(model), device="fake", nvme=folder, **options)


def trains_right(
    rank: int, folder: Path, schedule: tuple[str, int], name: str = "gpt", **options: Any
) -> dict[str, int]:
    """The bits of plain training; what was counted."""
    way = {key: options.pop(key) for key in ("steps", "micro") if key in options}
    seen, end = expected(name, rank, **way)
    what = f"{name} {schedule} {options}"
    device(schedule)
    gc.collect()
    torch.accelerator.empty_cache()
    before = torch.accelerator.memory_allocated()
    model, optimizer = ready(name, folder, **options)
    made = made_of(model)
    check_seen(what, train(model, optimizer, rank, **way), seen)
    check_state(what, model.state_dict(), end)
    found = made.metrics.snapshot()
    assert not found.fallbacks, found.fallbacks
    optimizer.close()
    check_state(f"{what}, closed", model.state_dict(), end)
    assert not list(folder.iterdir())
    del model, optimizer, made
    gc.collect()
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() == before, "device memory is given back"
    return dict(found.counts)


def all_schedules(rank: int, folder: str, schedules: list[tuple[str, int]]) -> None:
    mine = Path(folder) / str(rank)
    mine.mkdir()
    for schedule in schedules:
        trains_right(rank, mine, schedule)
