"""What a model needs, from its shapes alone, against what it needs when it really runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.loops import chosen
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload.core.errors import ConfigError
from offload.tools.forecast.footprint import Footprint, make_on_meta, make_optimizer, measure
from offload.tools.forecast.meta_cost import Meter, metered
from offload.tools.forecast.sources import FunctionSource, find_source
from offload.tools.forecast.synthetic_llama import StandIn

BATCH, SEQUENCE = 2, 24


def plain() -> nn.Module:
    return StandIn(3, 64, 100, 4, 128, 64)


def grouped() -> nn.Module:
    return StandIn(3, 64, 100, 4, 128, 64, key_value_heads=2)


def tied() -> nn.Module:
    return StandIn(3, 64, 100, 4, 128, 64, is_tied=True)


def source_of(make: Callable[[], nn.Module]) -> FunctionSource:
    return FunctionSource(f"here:{make.__name__}", make)


def kept_for_real(model: nn.Module, source: FunctionSource, batch: Tensor) -> int:
    """Return the bytes behind all that autograd saves, without parameters and input."""
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), batch)}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        source.loss(model, batch)
    return sum(t.untyped_storage().nbytes() for c, t in kept.items() if c not in known)


@pytest.mark.parametrize("make", [plain, grouped, tied])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_counted_is_what_autograd_keeps(
    make: Callable[[], nn.Module], dtype: torch.dtype, seed: int
) -> None:
    source = source_of(make)
    real = make().to(dtype)
    batch = source.make_batch(BATCH, SEQUENCE, torch.Generator().manual_seed(seed), "cpu")
    model = make_on_meta(source, str(dtype).removeprefix("torch."))
    on_meta = source.make_batch(BATCH, SEQUENCE, device="meta")
    meter = Meter([*model.parameters(), on_meta])
    with metered(meter):
        loss = source.loss(model, on_meta)
        assert meter.live_bytes - loss.nbytes == kept_for_real(real, source, batch)


def products() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 50))


def test_products_are_counted_as_torch_counts_them() -> None:
    source = source_of(products)
    model, batch = products(), source.make_batch(BATCH, SEQUENCE, device="cpu")
    with FlopCounterMode(display=False) as counter:
        source.loss(model, batch).backward()
    assert measure(source, BATCH, SEQUENCE).flops == counter.get_total_flops()


def test_attention_is_counted_without_the_matrix_of_all_pairs() -> None:
    """Twice as long texts: twice the activations, and more than twice the work."""
    short, long = measure(source_of(plain), 1, 30), measure(source_of(plain), 1, 60)
    assert long.activation_bytes <= 2.01 * short.activation_bytes
    assert long.flops > 2.1 * short.flops


def test_shared_heads_cost_less_to_make_and_as_much_to_use() -> None:
    """The products for keys and values are half as large; attention itself is the same."""
    hidden, tokens = 64, BATCH * SEQUENCE
    saved = 3 * 2 * tokens * hidden * hidden  # two products, each half of hidden x hidden
    whole, half = (measure(source_of(make), BATCH, SEQUENCE).flops for make in (plain, grouped))
    assert whole - half == 3 * saved  # layers; forward once, backward twice is in `saved`


class Experts(nn.Module):
    """A mixture of experts: the rows are sorted by expert, and each expert has one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(56, 32, dtype=torch.bfloat16)
        self.matrices = nn.Parameter(torch.zeros(8, 32, 56, dtype=torch.bfloat16))

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.table(tokens.flatten())
        ends = torch.full((8,), rows.size(0), dtype=torch.int32, device=rows.device)
        made = torch.nn.functional.grouped_mm(rows, self.matrices, offs=ends)
        return made.view(*tokens.shape, 56)


def test_each_row_has_one_expert_backward_too() -> None:
    found = measure(source_of(Experts), BATCH, SEQUENCE)
    assert found.flops == 3 * 2 * BATCH * SEQUENCE * 32 * 56


class LearnedPlaces(nn.Module):
    """A model with T5's attention: the bias that it adds for positions is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 32)
        self.places = nn.Parameter(torch.zeros(1, 4, SEQUENCE, SEQUENCE))

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.table(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        attend = torch.nn.functional.scaled_dot_product_attention
        made = attend(heads, heads, heads, attn_mask=self.places)
        return made.transpose(1, 2).flatten(2) @ self.table.weight.T


def test_attention_with_learned_places() -> None:
    assert measure(source_of(LearnedPlaces), BATCH, SEQUENCE).flops > 0


class Attends(nn.Module):
    """A model with attention over text (batch, tokens, 32), in one of the shapes that occur."""

    WAYS = ("widths", "widths and mask", "lengths", "shared", "shared widths", "dropout", "batch")

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.table = nn.Embedding(50, 32)
        self.last = nn.Linear(4 * (6 if "widths" in way else 8), 50)
        self.value = nn.Linear(8, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.table(tokens).unflatten(-1, (4, 8)).transpose(1, 2)
        made = self._attend(heads, heads.tanh(), heads.sin())
        logits: Tensor = self.last(made.transpose(1, 2).flatten(2))
        return logits

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attend = torch.nn.functional.scaled_dot_product_attention
        if "widths" in self.way:  # as DeepSeek-V3: 192 for queries and keys, 128 for values
            value = self.value(value)
        if self.way == "lengths":  # as a decoder to its encoder
            key, value = key[:, :, :7].clone(), value[:, :, :7].clone()
        if "shared" in self.way:
            key, value = key[:, :2].clone(), value[:, :2].clone()
            return attend(query, key, value, is_causal=True, enable_gqa=True)
        if self.way == "batch":  # one memory for all texts
            return attend(query, key[:1].clone(), value[:1].clone())
        if "mask" in self.way:
            mask = torch.ones(query.size(2), query.size(2), dtype=torch.bool, device=query.device)
            return attend(query, key, value, attn_mask=mask)
        return attend(query, key, value, dropout_p=0.25 if self.way == "dropout" else 0.0)


@pytest.mark.parametrize("way", Attends.WAYS)
def test_attention_of_every_shape_is_counted_as_a_processor_computes_it(way: str) -> None:
    source = FunctionSource("here:Attends", lambda: Attends(way))
    assert measure(source, BATCH, SEQUENCE).flops > 0  # backward, too
    real = Attends(way)
    batch = source.make_batch(BATCH, SEQUENCE, device="cpu")
    model, on_meta = make_on_meta(source), source.make_batch(BATCH, SEQUENCE, device="meta")
    meter = Meter([*model.parameters(), on_meta])
    with metered(meter):
        loss = source.loss(model, on_meta)
        assert meter.live_bytes - loss.nbytes == kept_for_real(real, source, batch)


@pytest.mark.parametrize("way", ["widths", "lengths", "shared", "dropout"])
def test_on_a_device_no_shape_needs_the_matrix_of_all_pairs(way: str) -> None:
    source = FunctionSource("here:Attends", lambda: Attends(way))
    short, long = (measure(source, 1, n, on_device=True) for n in (512, 1024))
    assert long.activation_bytes + long.logits_bytes <= 2.01 * (
        short.activation_bytes + short.logits_bytes
    )


def test_shapes_that_do_not_fit_are_refused_as_torch_does() -> None:
    class Unfit(Attends):
        def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            shared = key[:, :2], value[:, :2]
            return torch.nn.functional.scaled_dot_product_attention(query, *shared)

    with pytest.raises(ConfigError, match=r"size of tensor a \(4\) must match .* offload_example"):
        measure(FunctionSource("here:Unfit", lambda: Unfit("none")), BATCH, SEQUENCE)


# --- the order of uses ----------------------------------------------------------------------------


def order_for_real(source: FunctionSource, directory: Path, activations: str) -> list[Any]:
    model: Any = source.make_model()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = offload.prepare(
        model, optimizer, host_memory="1MiB", nvme=directory, activations=activations
    )
    with optimizer:
        batch = source.make_batch(BATCH, SEQUENCE, device="cpu")
        source.loss(model, batch).backward()
        facts = offload.report(optimizer).trace
        assert facts is not None
        return [tuple(use) for use in facts.uses()]


@pytest.mark.parametrize("make", [plain, tied])
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_units_are_used_in_the_order_in_which_they_are_for_real(
    make: Callable[[], nn.Module], activations: str, tmp_path: Path
) -> None:
    found = measure(source_of(make), BATCH, SEQUENCE, activations=activations)
    order = [(use.phase, use.unit) for use in found.uses]
    assert order == order_for_real(source_of(make), tmp_path, activations)


def test_recomputed_layers_keep_less_and_compute_more() -> None:
    kept = measure(source_of(plain), BATCH, SEQUENCE)
    again = measure(source_of(plain), BATCH, SEQUENCE, activations="recompute")
    assert again.activation_bytes < kept.activation_bytes / 4
    forward = sum(use.flops for use in kept.uses if use.phase == 0)
    assert kept.flops < again.flops <= kept.flops + forward


# --- what is said of it ---------------------------------------------------------------------------


def test_sizes_and_types_are_those_of_the_model() -> None:
    found = measure(source_of(plain), BATCH, SEQUENCE, dtype="bfloat16")
    model = plain()
    assert found.numel == sum(param.numel() for param in model.parameters())
    assert (found.dtype, found.param_bytes) == ("bfloat16", 2 * found.numel)
    assert (found.tokens, found.buffer_bytes) == (BATCH * SEQUENCE, 0)
    assert sum(unit.nbytes for unit in found.units) >= found.param_bytes


def test_logits_grow_with_the_vocabulary_and_activations_do_not() -> None:
    def wide() -> nn.Module:
        return StandIn(3, 64, 5000, 4, 128, 64)

    few, many = (measure(source_of(make), BATCH, SEQUENCE) for make in (plain, wide))
    assert many.activation_bytes == few.activation_bytes
    tokens = BATCH * SEQUENCE
    assert many.logits_bytes >= tokens * 5000 * 4 > few.logits_bytes


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "lion"])
def test_every_optimizer_that_is_named_is_made(name: str) -> None:
    model = make_on_meta(source_of(plain))
    assert type(make_optimizer(name, model)).__name__.lower() == name


def test_a_model_with_nothing_to_train_is_refused() -> None:
    model = make_on_meta(source_of(plain)).requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter that is trained"):
        make_optimizer("adamw", model)


def test_the_model_is_left_as_it_was() -> None:
    found = measure(source_of(plain), BATCH, SEQUENCE, activations="recompute")
    for module in found.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert "forward" not in vars(module) and "_call_impl" not in vars(module)
    assert all(param.grad is None for param in found.model.parameters())


# --- models that look at their input --------------------------------------------------------------


class Checks(nn.Module):
    """A model that looks at values, as many do, to refuse wrong ones or to take a short way."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(20, 8), nn.Linear(8, 20)
        self.took_short_way = False

    def forward(self, tokens: Tensor) -> Tensor:
        if (tokens < 0).any():
            raise ValueError("negative tokens")
        self.took_short_way = bool((tokens >= 0).all())
        output: Tensor = self.layer(self.table(tokens))
        return output


class Looks(Checks):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, : int(tokens[0, 0].item())])


def test_checks_of_values_go_as_they_do_with_ordinary_ones() -> None:
    found = measure(source_of(Checks), BATCH, SEQUENCE)
    assert found.flops > 0
    assert found.model.took_short_way


def test_a_model_that_needs_values_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"here:Looks: cannot be run on shapes alone with 2 texts"
    ):
        measure(source_of(Looks), BATCH, SEQUENCE)


def test_a_text_that_is_too_long_for_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 64 tokens of a text, got 65"):
        measure(source_of(plain), 1, 65)


class Elsewhere(nn.Module):
    """A model that names a device where most models leave it open."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)
        self.weight = nn.Parameter(torch.zeros(8, 20, device="cpu"))
        self.register_buffer("scale", torch.ones(3, device="cpu"))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens) @ self.weight * self.scale[0]


def test_a_model_that_names_its_device_is_counted_too() -> None:
    found = measure(source_of(Elsewhere), BATCH, SEQUENCE)
    assert all(param.is_meta for param in found.model.parameters())
    assert found.buffer_bytes == 12


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_of_transformers_is_counted(kind: str, tmp_path: Path) -> None:
    """Its masks are computed from values, and tensors on the meta device have none."""
    pytest.importorskip("transformers")
    from test_model_source import CONFIGS, config_file

    config_file(tmp_path, CONFIGS[kind])
    found = measure(find_source(tmp_path), BATCH, SEQUENCE)
    forward = sum(use.flops for use in found.uses if use.phase == 0)
    assert 2.5 * forward < found.flops < 3.5 * forward


# --- nothing is allocated -------------------------------------------------------------------------

LARGE = """
import resource, torch
from offload.tools.forecast.footprint import measure
from offload.tools.forecast.sources import find_source
measure(find_source("1M"), 1, 64)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = measure(find_source("SIZE"), 1, 4096)
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(found.numel, found.activation_bytes, after - before)
"""


def test_a_large_model_takes_no_memory() -> None:
    size, least_activation_bytes = chosen(test=("7B", 8e9), torture=("70B", 50e9))
    code = LARGE.replace("SIZE", size)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240
    )
    numel, activation_bytes, grown_kib = map(int, done.stdout.split())
    assert 0.92 * int(size[:-1]) * 1e9 < numel < 1.08 * int(size[:-1]) * 1e9
    assert activation_bytes > least_activation_bytes
    assert grown_kib < 200 << 10, "KiB; its parameters alone would be 14 or 138 GB"


def test_a_footprint_does_not_change_from_one_time_to_the_next() -> None:
    def numbers(found: Footprint) -> tuple[object, ...]:
        return found.uses, found.activation_bytes, found.logits_bytes, found.layer_bytes

    one, other = (measure(source_of(plain), BATCH, SEQUENCE) for _ in range(2))
    assert numbers(one) == numbers(other)
