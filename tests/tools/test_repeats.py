"""A few of the layers that are alike tell what all cost, exactly; where they do not, all run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.tools.forecast.footprint import Footprint, make_on_meta, measure
from offload.tools.forecast.repeats import LEAST_PERIODS, find_repeats, shortened
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.sources import FunctionSource, find_source
from offload.tools.forecast.synthetic_llama import LlamaLayer, StandIn

LAYERS = 12


def decoder() -> nn.Module:
    return StandIn(LAYERS, 64, 100, 4, 128, 64)


class Layered(nn.Module):
    """Some layers one after the other, between an embedding and a head."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def layer(inner: int, heads: int = 4) -> nn.Module:
    return LlamaLayer(64, heads, heads, inner)


def alternating() -> nn.Module:
    return Layered([layer((128, 128, 512)[n % 3]) for n in range(36)])


def after_others() -> nn.Module:
    return Layered([layer(96), layer(96), *(layer(256) for _ in range(12)), layer(96)])


class Counted(nn.Module):
    """A layer that knows its number, and whose dropout grows with it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number
        self.inner = layer(128)
        self.rate = 0.01 * (number + 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.dropout(self.inner(x), self.rate, train=True)


def counted() -> nn.Module:
    return Layered([Counted(n) for n in range(LAYERS)])


class Twice(Layered):
    """Runs its layers forward and then, in the same order, once more."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for inner in [*self.layers, *self.layers]:
            x = inner(x)
        return self.head(x)  # type: ignore[no-any-return]


def twice() -> nn.Module:
    return Twice([layer(128) for _ in range(LAYERS)])


ALIKE = (decoder, alternating, after_others, counted)


class Ladder(Layered):
    """Connects its first layers with its last ones, by number: fewer layers cannot run."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for n in range(LAYERS):
            x = self.layers[n](x)
        return self.head(x)  # type: ignore[no-any-return]


class Hourglass(Layered):
    """Cuts the text shorter after each layer: no two cost alike."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for inner in self.layers:
            x = inner(x)[:, : max(1, x.size(1) - 3)]
        return self.head(x).mean()  # type: ignore[no-any-return]


class Frozen(Layered):
    """Its lower layers compute no gradients, by their number."""

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.table(tokens)
            for inner in list(self.layers)[:7]:
                x = inner(x)
        for inner in list(self.layers)[7:]:
            x = inner(x)
        return self.head(x)  # type: ignore[no-any-return]


class Backwards(Layered):
    """Runs its last layer first."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for inner in reversed(self.layers):  # type: ignore[call-overload]
            x = inner(x)
        return self.head(x)  # type: ignore[no-any-return]


class Sometimes(Layered):
    """Does more after every fourth layer."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for n, inner in enumerate(self.layers):
            x = inner(x)
            x = torch.tanh(x) if n % 4 == 3 else x
        return self.head(x)  # type: ignore[no-any-return]


class Mixed(Layered):
    """Uses the outputs of all its layers at the end."""

    def forward(self, tokens: Tensor) -> Tensor:
        found = [self.table(tokens)]
        for inner in self.layers:
            found.append(inner(found[-1]))
        return self.head(torch.stack(found).mean(0))  # type: ignore[no-any-return]


class Checkpointed(Layered):
    """Runs all its layers again in backward, in one checkpoint."""

    def forward(self, tokens: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for inner in self.layers:
                x = inner(x)
            return x

        x = torch.utils.checkpoint.checkpoint(run, self.table(tokens), use_reentrant=False)
        return self.head(x)  # type: ignore[no-any-return]


class Sparse(nn.Module):
    """A layer for a part of the text."""

    def __init__(self, keep: float) -> None:
        super().__init__()
        self.keep, self.inner = keep, layer(128)

    def forward(self, x: Tensor) -> Tensor:
        count = int(self.keep * x.size(1))
        return torch.cat([self.inner(x[:, :count]), x[:, count:]], dim=1)


def depths() -> nn.Module:
    """Layers of which those in the middle have a setting of their own."""
    return Layered([Sparse(0.25 if 10 <= n < 20 else 1.0) for n in range(30)])


def hooked() -> nn.Module:
    """Layers of which one in the middle has a hook that does more."""
    model = Layered([layer(128) for _ in range(30)])
    model.layers[14].register_forward_hook(lambda _m, _x, y: y.tanh().tanh())
    return model


def of(kind: type[Layered]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        return kind([layer(128) for _ in range(LAYERS)])

    made.__name__ = kind.__name__
    return made


class Sharing(Layered):
    """Layers of which two share a matrix."""

    def __init__(self) -> None:
        super().__init__([layer(128) for _ in range(LAYERS)])
        self.layers[7].up.weight = self.layers[2].up.weight  # type: ignore[union-attr]


def ladder() -> nn.Module:
    return Ladder([layer(128) for _ in range(LAYERS)])


def hourglass() -> nn.Module:
    return Hourglass([layer(128) for _ in range(LAYERS)])


def source(make: Callable[[], nn.Module]) -> FunctionSource:
    return FunctionSource(f"here:{make.__name__}", make)


def both(make: Callable[[], nn.Module], *how: Any, **more: Any) -> tuple[Footprint, Footprint]:
    """Measure with a few of the layers, and with all."""
    some = measure(source(make), 2, 48, *how, **more)
    return some, measure(source(make), 2, 48, *how, counts_all=True, **more)


def assert_same(some: Footprint, full: Footprint) -> None:
    assert some.uses == full.uses
    assert [(u.name, u.nbytes, u.needs) for u in some.units] == [
        (u.name, u.nbytes, u.needs) for u in full.units
    ]
    for name in ("activation_bytes", "logits_bytes", "layer_bytes", "flops", "buffer_bytes"):
        assert getattr(some, name) == getattr(full, name), name


@pytest.mark.parametrize("make", ALIKE)
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("on_device", [False, True])
def test_a_few_layers_tell_what_all_cost(
    make: Callable[[], nn.Module], activations: str, on_device: bool
) -> None:
    some, full = both(make, None, activations, on_device=on_device)
    assert some.count.repeats, "otherwise nothing is tested"
    assert len(some.count.uses) < len(full.count.uses) and not full.count.repeats
    assert_same(some, full)


@pytest.mark.parametrize("unit_bytes", [400_000, 1 << 20])
def test_units_of_several_layers_are_found_all_the_same(unit_bytes: int) -> None:
    some, full = both(decoder, None, "keep", unit_bytes)
    assert some.count.repeats and len(some.units) < LAYERS
    assert_same(some, full)


def test_layers_that_are_several_units_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.params import units

    monkeypatch.setattr(units, "MOST_BYTES", 100_000)
    monkeypatch.setattr(units, "LARGE_BYTES", 20_000)
    some, full = both(decoder, None, "recompute")
    assert some.count.repeats and len(some.units) > 3 * LAYERS
    assert_same(some, full)


def test_adapters_beside_a_frozen_model(tmp_path: Path) -> None:
    """The first layer computes no gradient of its input, so it is not like the others."""
    some, full = both(decoder, None, "keep", lora=4)
    assert some.count.repeats
    assert_same(some, full)
    trained = [param for param in some.model.parameters() if param.requires_grad]
    assert len(trained) == 2 * 7 * LAYERS and sum(p.numel() for p in trained) < 70_000


ODD = (ladder, hourglass, twice, *map(of, (Frozen, Backwards, Sometimes, Mixed, Checkpointed)))


@pytest.mark.parametrize("make", ODD, ids=lambda make: make.__name__)
def test_layers_that_only_look_alike_all_run(make: Callable[[], nn.Module]) -> None:
    some, full = both(make)
    assert some.count.is_irregular and not some.count.repeats
    assert_same(some, full)


@pytest.mark.parametrize("make", [depths, hooked])
def test_layers_with_settings_of_their_own_are_others(make: Callable[[], nn.Module]) -> None:
    assert_same(*both(make))


def test_layers_that_share_parameters_are_not_alike() -> None:
    some, full = both(Sharing)
    assert not some.count.repeats and not some.count.is_irregular
    assert_same(some, full)


def test_irregular_layers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.tools.forecast.forecaster import forecast

    found = forecast(
        ForecastRequest.of("test_repeats:ladder", host_memory="8MiB", sequence=32, batch=2)
    )
    assert any("every layer was counted" in note for note in found.notes)
    assert not any("every layer" in note for note in _notes_of("test_repeats:decoder"))


def _notes_of(model: str) -> tuple[str, ...]:
    from offload.tools.forecast.forecaster import forecast

    return forecast(ForecastRequest.of(model, host_memory="8MiB", sequence=32, batch=2)).notes


def test_a_shortened_model_is_whole_again_also_after_an_error() -> None:
    model = make_on_meta(source(alternating))
    before = [id(layer) for layer in model.layers]  # type: ignore[union-attr]
    parts = [m for m in model.modules() if m in set(model.layers)]  # type: ignore[arg-type]
    (repeat,) = find_repeats(model, parts)
    assert (repeat.begin, repeat.length, repeat.periods) == (0, 3, 12)
    with pytest.raises(RuntimeError), shortened({repeat: LEAST_PERIODS}):
        kept = [id(layer) for layer in model.layers]  # type: ignore[union-attr]
        assert kept == before[:9] + before[-3:]
        raise RuntimeError
    assert [id(layer) for layer in model.layers] == before  # type: ignore[union-attr]
    assert list(model.layers._modules) == [str(n) for n in range(36)]  # type: ignore[union-attr]


def test_a_model_of_any_length_is_measured_from_one_count() -> None:
    """What is put together for fewer layers is what such a model costs."""
    long = measure(source(decoder), 2, 48, None, "recompute")
    (repeat,) = long.count.repeats

    def short() -> nn.Module:
        return StandIn(7, 64, 100, 4, 128, 64)

    with long.shortened_to({repeat: 7}) as some:
        full = measure(source(short), 2, 48, None, "recompute", counts_all=True)
        assert_same_but_names(some, full)
        assert some.workload("adamw", _machine()).units[3].nbytes == full.units[3].nbytes
    assert len(long.units) == LAYERS + len(full.units) - 7


def assert_same_but_names(some: Footprint, full: Footprint) -> None:
    assert some.uses == full.uses
    assert [u.nbytes for u in some.units] == [u.nbytes for u in full.units]
    assert some.activation_bytes == full.activation_bytes
    assert some.logits_bytes == full.logits_bytes


def _machine() -> Any:
    from offload.tools.forecast.machines import NOMINAL

    return NOMINAL


@pytest.mark.parametrize("name", ["t5-11b", "deepseek-v3", "flux-12b"])
def test_published_models(name: str) -> None:
    """Two runs of layers; dense layers before mixtures of experts; two kinds of blocks."""
    pytest.importorskip("diffusers" if name == "flux-12b" else "transformers")
    given = find_source(name), 1, 256, None, "recompute", None, True
    some, full = measure(*given), measure(*given, counts_all=True)
    assert some.count.repeats
    assert_same(some, full)
