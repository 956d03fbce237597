"""Models that are named (a size, a config.json, a function): what they consist of, and their
inputs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.core.errors import ConfigError, FormatError
from offload.tools.forecast.footprint import measure
from offload.tools.forecast.model_shape import PUBLISHED, Shape, derive_shape, parse_count
from offload.tools.forecast.sources import FunctionSource, find_source
from offload.tools.forecast.synthetic_llama import StandIn


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, count", [("7B", 7e9), ("350M", 350e6), ("1.3b", 1.3e9), ("5 k", 5e3), ("1T", 1e12)]
)
def test_a_size_is_read(text: str, count: float) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["7", "B", "7BB", "-7B", "seven", "7B:make", ""])
def test_what_is_no_size_is_not_taken_for_one(text: str) -> None:
    assert parse_count(text) is None


@pytest.mark.parametrize("text", ["1M", "10M", "125M", "350M", "1B", "3B", "20B", "175B", "1T"])
def test_a_derived_shape_has_about_as_many_parameters(text: str) -> None:
    count = parse_count(text)
    assert count is not None
    assert abs(derive_shape(count).numel / count - 1) <= 0.05


@pytest.mark.parametrize("shape", PUBLISHED, ids=str)
def test_a_published_model_is_found_by_its_size(shape: Shape) -> None:
    assert derive_shape(shape.numel) == shape


def test_what_is_given_of_a_shape_stays() -> None:
    found = derive_shape(7e9, Shape(layers=40, vocabulary=50_000))
    assert (found.layers, found.vocabulary) == (40, 50_000)
    assert abs(found.numel / 7e9 - 1) <= 0.05


def test_a_shape_of_another_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"13B.*the nearest has 6\.74B"):
        derive_shape(13e9, Shape(32, 4096, 32_000, 32, 11_008))


@pytest.mark.parametrize("values", [{"layers": 0}, {"hidden": -1}, {"heads": 3, "hidden": 64}])
def test_an_impossible_shape_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(values))):
        Shape(**values)


# --- the stand-in ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [PUBLISHED[0], PUBLISHED[1], PUBLISHED[-1]], ids=str)
def test_the_stand_in_has_the_parameters_of_its_shape(shape: Shape) -> None:
    source = find_source(f"{shape.numel / 1e9}B")
    with torch.device("meta"):
        assert numel(source.make_model()) == shape.numel


def small(key_value_heads: int | None = None, is_tied: bool = False) -> StandIn:
    return StandIn(2, 32, 50, 4, 64, 40, key_value_heads, is_tied)


@pytest.mark.parametrize("model", [small(), small(2), small(is_tied=True)])
def test_a_token_sees_those_before_it_and_no_other(model: StandIn, seed: int) -> None:
    tokens = torch.randint(50, (2, 12), generator=generator(seed))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 50
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert not torch.equal(before[:, 7:], after[:, 7:])


def test_a_token_sees_where_the_others_are(seed: int) -> None:
    tokens = torch.randint(50, (1, 12), generator=generator(seed))
    swapped = tokens.clone()
    swapped[:, [2, 5]] = tokens[:, [5, 2]]
    assert not torch.equal(tokens, swapped)
    assert not torch.allclose(small()(tokens)[:, -1], small()(swapped)[:, -1], atol=1e-6)


def test_a_tied_head_has_no_values_of_its_own() -> None:
    tied = small(is_tied=True)
    assert tied.head.weight is tied.embedding.weight
    assert numel(tied) == numel(small()) - 32 * 50


def test_too_long_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 40 tokens of a text, got 41"):
        small()(torch.zeros(1, 41, dtype=torch.int64))


def test_a_stand_in_that_was_made_without_values_trains(tmp_path: Path, seed: int) -> None:
    with torch.device("meta"):
        model: Any = small()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = offload.prepare(model, optimizer, host_memory="4MiB", nvme=tmp_path)
    tokens = torch.randint(50, (4, 20), generator=generator(seed))
    losses = []
    with optimizer:
        for _ in range(8):
            loss = model.loss(tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


# --- sizes ----------------------------------------------------------------------------------------


def test_a_batch_is_the_same_for_the_same_state_and_fits_the_loss(seed: int) -> None:
    source = find_source("1M")
    batch = source.make_batch(3, 16, generator(seed))
    assert batch.shape == (3, 17) and int(batch.max()) < 512
    assert torch.equal(batch, source.make_batch(3, 16, generator(seed)))
    assert not torch.equal(batch, source.make_batch(3, 16, generator(seed + 1)))
    model = source.make_model()
    loss = source.loss(model, batch)
    assert torch.equal(loss, model.loss(batch)) and loss.isfinite()


def test_without_values_nothing_is_computed() -> None:
    source = find_source("7B")
    with torch.device("meta"):
        model, batch = source.make_model(), source.make_batch(2, 64)
    assert batch.is_meta and all(param.is_meta for param in model.parameters())
    assert source.loss(model, batch).is_meta
    assert source.make_batch(2, 8, device="meta").is_meta


def test_a_shape_is_for_a_size_only(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="are for a size"):
        find_source("os:getcwd", Shape(layers=2))


@pytest.mark.parametrize("text", ["nothing", "7Q", "", ":make", "module:", "a/b"])
def test_what_names_no_model_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected module:function, a config\.json"):
        find_source(text)


# --- functions ------------------------------------------------------------------------------------

MODULE = """
import torch
from torch import nn

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(30, 8), nn.Linear(8, 30)
    def forward(self, tokens):
        return self.head(self.table(tokens))

class Pictures(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)
    def forward(self, picture, scale=1.0):
        return {"features": self.layer(picture) * scale}
    def offload_example(self, batch, sequence):
        return {"picture": torch.zeros(batch, 3, sequence, sequence), "scale": 2.0}

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, a, b):
        return self.layer(a + b).sum()
    def offload_example(self, batch, sequence):
        return torch.ones(batch, 4), torch.ones(batch, 4)

class inside:
    make = Tokens

number = 3
def fails():
    raise ValueError("no such thing")
def nothing():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write a module to the current directory, which is not on the path by itself."""
    name = f"models_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return name


@pytest.mark.parametrize("name", ["Tokens", "Pictures", "Pair", "inside.make"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_function_makes_a_model_that_is_fed_as_it_asks(
    module: str, name: str, device: str
) -> None:
    source = find_source(f"{module}:{name}")
    batch = source.make_batch(2, 8, device=device)
    with torch.device(device):
        model = source.make_model()
    loss = source.loss(model, batch)
    assert loss.dim() == 0 and loss.device.type == device
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())


def test_tokens_are_below_the_size_of_the_first_table(module: str, seed: int) -> None:
    source = find_source(f"{module}:Tokens")
    batch = source.make_batch(64, 64, generator(seed), device="cpu")
    assert batch.shape == (64, 65) and int(batch.max()) == 29


@pytest.mark.parametrize(
    "name, reason",
    [
        ("missing", "AttributeError"),
        ("number", "is a int; expected a function"),
    ],
)
def test_a_function_that_is_not_there_is_refused(module: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_source(f"{module}:{name}")


def test_a_module_that_is_not_there_is_refused(module: str) -> None:
    with pytest.raises(ConfigError, match="ModuleNotFoundError"):
        find_source("no_such_module_anywhere:make")


@pytest.mark.parametrize(
    "name, reason",
    [("fails", "ValueError: no such thing"), ("nothing", r"expected a torch.nn.Module, got int")],
)
def test_a_function_that_gives_no_model_is_refused(module: str, name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        find_source(f"{module}:{name}").make_model()


class Words(nn.Module):
    def forward(self, tokens: Tensor) -> str:
        return "words"


def test_an_output_without_a_loss_is_refused() -> None:
    source = FunctionSource("here:Words", Words)
    with pytest.raises(ConfigError, match="forward returned str"):
        source.loss(Words(), source.make_batch(1, 4, device="cpu"))


# --- Hugging Face ---------------------------------------------------------------------------------

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": 100,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "deepseekv3": {  # values have another width than queries; rows have experts
        "model_type": "deepseek_v3",
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
}


def config_file(directory: Path, values: dict[str, Any]) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(values))
    return path


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_makes_its_model(tmp_path: Path, kind: str, seed: int) -> None:
    pytest.importorskip("transformers")
    path = config_file(tmp_path, CONFIGS[kind])
    for text in (path, tmp_path):
        source = find_source(text)
        model = source.make_model()
        batch = source.make_batch(2, 16, generator(seed), "cpu")
        assert batch["input_ids"].shape == (2, 16) and int(batch["input_ids"].max()) < 100
        loss = source.loss(model, batch)
        loss.backward()
        assert loss.isfinite() and type(model).__name__.lower().startswith(kind)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_is_counted_on_shapes_alone(
    tmp_path: Path, kind: str, dtype: str, on_device: bool
) -> None:
    pytest.importorskip("transformers")
    source = find_source(config_file(tmp_path, CONFIGS[kind]))
    found = measure(source, 2, 16, dtype, on_device=on_device)
    assert found.flops > 0 and found.activation_bytes > 0


@pytest.mark.parametrize(
    "values, error, reason",
    [
        ({"a": 1}, ConfigError, 'has no "model_type"'),
        ({"model_type": "llama", "auto_map": {"AutoModel": "x.y"}}, ConfigError, "code of its own"),
        ({"model_type": "no_such_model"}, ConfigError, "no configuration that transformers"),
        ({"model_type": "wav2vec2"}, ConfigError, "which is neither a language model nor"),
    ],
)
def test_a_config_whose_input_is_not_known_is_refused(
    tmp_path: Path, values: dict[str, Any], error: type[Exception], reason: str
) -> None:
    if "transformers" in reason or "language" in reason:
        pytest.importorskip("transformers")
    with pytest.raises(error, match=reason):
        find_source(config_file(tmp_path, values))


def test_a_config_that_is_no_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{model")
    with pytest.raises(FormatError, match=r"config\.json"):
        find_source(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "other.json"])
def test_a_config_that_is_not_there_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        find_source(tmp_path / name)


def test_without_transformers_a_config_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match="needs the transformers library"):
        find_source(config_file(tmp_path, CONFIGS["llama"]))


@pytest.mark.parametrize("size", ["0B", "0.0M"])
def test_a_size_of_nothing_is_refused(size: str) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        find_source(size)


def test_a_text_longer_than_the_models_positions_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps(
            {
                "model_type": "gpt2",
                "n_positions": 16,
                "n_embd": 32,
                "n_layer": 1,
                "n_head": 2,
                "vocab_size": 64,
                "architectures": ["GPT2LMHeadModel"],
            }
        )
    )
    source = find_source(str(path))
    model = source.make_model()
    source.loss(model, source.make_batch(1, 8))
    with pytest.raises(ConfigError, match="16 positions"):
        source.loss(model, source.make_batch(1, 32))


def test_a_configuration_that_transformers_refuses_is_a_config_error(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "hidden_size": -5, "num_hidden_layers": 0}')
    with pytest.raises(ConfigError, match="config"):
        source = find_source(str(path))
        with torch.device("meta"):
            source.make_model()
