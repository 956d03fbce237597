"""Units that are used together: checkpointed in one segment, or one by the code of another. They
are resident one at a time all the same, so that the least host memory is enough.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import offload
from offload.core.budget import Budget
from offload.core.errors import CapacityError
from offload.params import units
from offload.params.model_methods import ReplacedModelMethods
from offload.params.trace import Phase
from offload.planning import planner

WIDTH = 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 512)


class Layer(nn.Module):
    """A layer of two linear ones. other: a layer whose weights it uses, too."""

    def __init__(self, other: Layer | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other = [other]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        (other,) = self.other
        if other is not None:
            x = x + x @ other.first.weight.t() + functional.linear(x, other.second.weight)
        return x + functional.dropout(self.second(x), 0.2, self.training)


class Chain(nn.Module):
    def __init__(self, segments: int = 0, is_reentrant: bool = False, borrows: bool = False):
        super().__init__()
        layers: list[Layer] = []
        for number in range(6):
            layers.append(Layer(layers[number // 2] if borrows and number else None))
        self.layers = nn.Sequential(*layers)
        self.segments, self.is_reentrant = segments, is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if not self.segments or not torch.is_grad_enabled():
            return self.layers(x)
        found = checkpoint_sequential(
            self.layers, self.segments, x, use_reentrant=self.is_reentrant
        )
        assert isinstance(found, Tensor)
        return found


class Normed(Chain):
    """A chain whose segments end with a layer norm: backward asks for its bias before its input."""

    def __init__(self) -> None:
        super().__init__(3)
        for layer in self.layers:
            norm = nn.LayerNorm(WIDTH)
            nn.init.normal_(norm.weight)
            layer.register_module("norm", norm)
            layer.register_forward_hook(lambda layer, _, out: layer.norm(out))


class Weights(Chain):
    """A chain of products whose backward asks for the weight before the input."""

    def __init__(self) -> None:
        super().__init__(3)
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(0)).squeeze(0)


class Nested(Chain):
    """A chain with checkpoints within a checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        for begin in (0, 3):
            x = checkpoint(self._run, x, begin, use_reentrant=False)  # type: ignore[assignment]
        return x

    def _run(self, x: Tensor, begin: int) -> Tensor:
        x = checkpoint(self.layers[begin : begin + 2], x, use_reentrant=False)  # type: ignore[assignment]
        out: Tensor = self.layers[begin + 2](x)
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two a segment": lambda: Chain(3),
    "two a segment, reentrant": lambda: Chain(3, is_reentrant=True),
    "three a segment": lambda: Chain(2),
    "nested": Nested,
    "a norm at the end": Normed,
    "weights before inputs": Weights,
    "borrowed": lambda: Chain(borrows=True),
    "borrowed in segments": lambda: Chain(3, borrows=True),
}


def built(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: Any) -> list[Tensor]:
    seen = []
    for number in range(3):
        torch.manual_seed(number)
        for _ in range(1 + number % 2):
            loss = model(torch.randn(4, WIDTH, requires_grad=True)).square().mean()
            loss.backward()
            seen.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(torch.randn(4, WIDTH)))
        model.train()
    return seen


def least_bytes(folder: Path, name: str, **options: Any) -> int:
    with pytest.raises(CapacityError) as refused:
        offload.plan(*built(name), host_memory=8192, nvme=folder, **options)
    found = re.search(r"least that works is (?:about )?(\d+)", str(refused.value))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
@pytest.mark.parametrize("name", MODELS)
def test_the_least_is_enough(name: str, activations: str, tmp_path: Path) -> None:
    plain, theirs = built(name)
    expected = train(plain, theirs)
    least = least_bytes(tmp_path, name, activations=activations)
    for budget in (least, 2 * least):
        model, optimizer = built(name)
        offload.prepare(
            model, optimizer, host_memory=budget, nvme=tmp_path, activations=activations
        )
        seen = train(model, optimizer)
        offload.close(model)
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p, q)


def prepared_with_the_least(folder: Path) -> tuple[Any, Any]:
    model, optimizer = built("borrowed")
    least = least_bytes(folder, "borrowed")
    return offload.prepare(model, optimizer, host_memory=least, nvme=folder)


def test_views_that_an_error_has_left_behind_do_not_stay(tmp_path: Path) -> None:
    """Frames of an error that was caught hold them until garbage is collected."""
    model, _ = prepared_with_the_least(tmp_path)
    residency = model._offload_prepared.engine.residency
    first, second = residency.blocks[0], residency.blocks[-1]
    gc.disable()
    try:
        residency.use(first.unit, Phase.FORWARD)
        circle: list[Any] = [first.memory[:1]]
        circle.append(circle)
        residency.done(first.unit)
        del circle
        residency.use(second.unit, Phase.FORWARD)
        residency.done(second.unit)
    finally:
        gc.enable()
    assert first.memory is None
    offload.close(model)


def test_memory_of_a_block_that_never_came_does_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames of an error that was caught hold it until garbage is collected."""
    model, optimizer = prepared_with_the_least(tmp_path)
    residency = model._offload_prepared.engine.residency

    def interrupted(block: Any, memory: Tensor, priority: Any) -> None:
        circle: list[Any] = [memory]
        circle.append(circle)
        raise KeyboardInterrupt

    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(residency.cache.store, "read", interrupted)
            with pytest.raises(KeyboardInterrupt):
                model(torch.randn(4, WIDTH))
        train(model, optimizer)
    finally:
        gc.enable()
    offload.close(model)


def test_a_state_dict_that_is_interrupted_leaves_the_memory_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook keeps the last error, and with it what was gathered until then."""
    model, optimizer = prepared_with_the_least(tmp_path)
    train(model, optimizer)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ReplacedModelMethods, "_copy", interrupted)
        with pytest.raises(KeyboardInterrupt) as kept:
            model.state_dict()
    train(model, optimizer)
    assert kept.traceback
    offload.close(model)


class Mixed(Chain):
    """A chain with one operation on parameters of two units."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers[0], self.layers[1]
        x = functional.linear(x, first.first.weight, second.first.bias)  # type: ignore[union-attr, arg-type]
        out: Tensor = self.layers(x)
        return out


def test_what_one_operation_needs_at_once_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, "mixed", Mixed)
    least = least_bytes(tmp_path, "mixed")
    model, optimizer = built("mixed")
    offload.prepare(model, optimizer, host_memory=least, nvme=tmp_path)
    with pytest.raises(CapacityError, match=r"at the same moment: layers.\d .*units=") as refused:
        train(model, optimizer)
    assert "autograd function" not in str(refused.value)
    offload.close(model)
    model, optimizer = built("mixed")  # with larger units, as the message advises
    offload.prepare(model, optimizer, host_memory=10 * least, nvme=tmp_path, units=[nn.Sequential])
    plain, theirs = built("mixed")
    expected, seen = train(plain, theirs), train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    offload.close(model)


def test_what_runs_in_another_thread_is_left_alone(tmp_path: Path) -> None:
    """A kernel of the other thread may be reading the block."""
    least = least_bytes(tmp_path, "borrowed")
    model, optimizer = built("borrowed")
    offload.prepare(model, optimizer, host_memory=least, nvme=tmp_path)
    residency = model._offload_prepared.engine.residency
    first, second = residency.blocks[0], residency.blocks[-1]
    with ThreadPoolExecutor(1) as other:
        other.submit(residency.use, first.unit, Phase.FORWARD).result(60)
        memory = first.memory.data_ptr()
        with pytest.raises(CapacityError, match="host pool"):
            residency.use(second.unit, Phase.FORWARD)
        assert first.memory is not None and first.memory.data_ptr() == memory
        other.submit(residency.done, first.unit).result(60)
    residency.use(second.unit, Phase.FORWARD)
    residency.use(first.unit, Phase.FORWARD)  # this thread may take the memory of its own
    assert second.memory is None
    residency.done(first.unit)
    residency.done(second.unit)
    offload.close(model)
