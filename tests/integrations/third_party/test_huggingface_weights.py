"""Hugging Face models that are made on the meta device and read from what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_model
from support.integration import batch, llama

import offload
from offload.params import units
from offload.params.prepared import prepared_of

pytestmark = pytest.mark.timeout(120)
KI = 1 << 10


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 64 * KI)


def on_meta(config: Any) -> Any:
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def plain(request: pytest.FixtureRequest) -> Any:
    from transformers import LlamaForCausalLM

    config = llama(4).config
    config.tie_word_embeddings = request.param
    torch.manual_seed(5)
    return LlamaForCausalLM(config)


def answers(model: Any) -> torch.Tensor:
    words = batch(1)["input_ids"]
    found: torch.Tensor = model.eval().generate(
        words, max_new_tokens=6, do_sample=False, use_cache=True, pad_token_id=0
    )
    return found


def test_generate_from_shards(plain: Any, tmp_path: Path) -> None:
    plain.save_pretrained(tmp_path, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ours = on_meta(plain.config)
    offload.prepare(ours, weights=tmp_path, host_memory=400 * KI)
    made = prepared_of(ours)
    assert made is not None and made.store is None and not made.shares.holds_all_params
    assert torch.equal(answers(ours), answers(plain))
    with torch.no_grad():
        assert torch.equal(ours(**batch(2)).logits, plain(**batch(2)).logits)
    offload.close(ours)
    assert_same_model(ours, plain)


def test_training_from_one_file(plain: Any, tmp_path: Path) -> None:
    plain.save_pretrained(tmp_path)
    ours = on_meta(plain.config)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (plain, ours)]
    offload.prepare(ours, optimizers[1], weights=tmp_path, host_memory="2MiB", nvme=tmp_path)
    for number in range(3):
        losses = []
        for model, optimizer in zip((plain, ours), optimizers, strict=True):
            torch.manual_seed(number)
            loss = model(**batch(number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
    offload.close(ours)
    assert_same_model(ours, plain)


def test_a_model_that_fills_itself() -> None:
    config = llama(2).config
    ours = on_meta(config)
    torch.manual_seed(1)
    offload.prepare(ours)
    offload.close(ours)
    weight = ours.model.layers[1].mlp.up_proj.weight.detach()
    assert abs(float(weight.std()) - config.initializer_range) < 2e-3
    assert (ours.model.norm.weight == 1).all()
    assert torch.equal(ours.model.rotary_emb.inv_freq, llama(2).model.rotary_emb.inv_freq)
    assert torch.isfinite(ours(**batch(0)).loss)


def test_adapters_of_peft_on_frozen_weights(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    plain = llama(3)
    plain.save_pretrained(tmp_path, max_shard_size="150KB")

    def adapted(model: Any) -> Any:
        torch.manual_seed(2)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        return get_peft_model(model, lora)

    theirs, ours = adapted(plain), adapted(on_meta(plain.config))
    assert all(p.is_meta for p in ours.parameters())
    trained = [[p for p in m.parameters() if p.requires_grad] for m in (theirs, ours)]
    optimizers = [torch.optim.AdamW(params, lr=1e-2, fused=True) for params in trained]
    torch.manual_seed(2)
    offload.prepare(ours, optimizers[1], weights=tmp_path, host_memory=300 * KI, nvme=tmp_path)
    made = prepared_of(ours)
    assert made is not None and made.store is not None and not made.shares.holds_all_params
    assert "original_read_bytes" not in made.metrics.snapshot().counts  # not before they are used
    nbytes = sum(p.nbytes for p in trained[1])
    for number in range(3):
        before = made.store.stats().written_bytes
        losses = []
        for model, optimizer in zip((theirs, ours), optimizers, strict=True):
            torch.manual_seed(number)
            loss = model(**batch(number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
        assert made.store.stats().written_bytes - before <= 3 * nbytes + 16 * KI
    offload.close(ours)
    assert_same_model(ours, theirs)


def test_adapters_of_peft_without_weights() -> None:
    from peft import LoraConfig, get_peft_model

    for how in (True, "pissa"):
        base = on_meta(llama(2).config)
        lora = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=True)
        ours = get_peft_model(base, lora)
        lora.init_lora_weights = how
        if how == "pissa":  # looks at the values of the layer inside
            with pytest.raises(offload.ConfigError, match=r"lora_A\.default\.weight.*lora_B"):
                offload.prepare(ours)
            continue
        offload.prepare(ours)
        offload.close(ours)
        layer = base.model.layers[1].self_attn.q_proj
        assert (layer.lora_B["default"].weight == 0).all()
        assert layer.lora_A["default"].weight.detach().std() > 0.05  # as peft draws them
        assert abs(float(layer.base_layer.weight.detach().std()) - 0.02) < 2e-3  # as the model does


@pytest.mark.parametrize("size", ["5GB", "150KB"])
def test_save_pretrained_of_a_prepared_model(plain: Any, size: str, tmp_path: Path) -> None:
    """The same files as the plain one's, byte for byte, within the budget. With several shards only
    the tensors are the same: shards are cut by the tensors' memory, which differs here.
    """
    from safetensors.torch import load_file
    from transformers import LlamaForCausalLM

    plain.save_pretrained(tmp_path / "plain", max_shard_size=size)
    ours = LlamaForCausalLM.from_pretrained(tmp_path / "plain")
    offload.prepare(ours, host_memory=400 * KI, nvme=tmp_path)
    made = prepared_of(ours)
    assert made is not None and not made.shares.holds_all_params
    ours.save_pretrained(tmp_path / "ours", max_shard_size=size)
    offload.close(ours)
    folders = tmp_path / "plain", tmp_path / "ours"
    texts = [{path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders]
    if size == "5GB":
        assert texts[0] == texts[1] and "model.safetensors" in texts[0]
        return
    assert min(len(list(folder.glob("*.safetensors"))) for folder in folders) > 2
    tensors: list[dict[str, bytes]] = [{}, {}]
    for found, folder in zip(tensors, folders, strict=True):
        for path in folder.glob("*.safetensors"):
            found |= {name: t.numpy().tobytes() for name, t in load_file(path).items()}
    assert tensors[0] == tensors[1]
