"""How prepared models start: from the meta device, from weights, from both."""

from __future__ import annotations

import gc
import json
import logging
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.bits import assert_same_model
from support.models import MODELS, WIDTH, Gpt, batch, loss_of, make
from support.training import step
from torch import Tensor, nn
from torch.nn import functional

import offload
from offload import ConfigError, FormatError, StoreError
from offload.core.errors import CapacityError
from offload.params import units
from offload.params.initialise import plan_tasks
from offload.params.placeholder import is_offloaded
from offload.params.prepared import Prepared, prepared_of
from offload.params.residency import Residency
from offload.planning import planner
from offload.storage.weights import INDEX, WeightBlock

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]
KI = 1 << 10


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)


def on_meta(name: str) -> nn.Module:
    with torch.device("meta"):
        return MODELS[name]()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, fused=True)


def saved(model: nn.Module, path: Path, **changes: Tensor | None) -> Path:
    """Save each parameter under its first name, and the buffers. changes: other values, or None to
    leave them out.
    """
    tensors: dict[str, Tensor] = {n: p.detach() for n, p in model.named_parameters()}
    tensors |= dict(model.named_buffers())
    for name, value in changes.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value
    save_file(tensors, path)
    return path


def counts(model: nn.Module) -> dict[str, int]:
    made = prepared_of(model)
    assert made is not None
    return dict(made.metrics.snapshot().counts)


def is_as_it_was(model: nn.Module, ids: list[int]) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    plain = all(type(p) is nn.Parameter for p in model.parameters())
    same = [id(tensor) for tensor in tensors] == ids
    return same and plain and all(t.is_meta for t in tensors) and prepared_of(model) is None


# --- the same as an ordinary model ----------------------------------------------------------------


@pytest.mark.parametrize("times", [1, 3], ids=["tight", "all"])
@pytest.mark.parametrize("name", ["gpt", "pictures", "thrice", "encoder"])
def test_meta_models_have_the_values_of_ordinary_ones(
    name: str, times: int, tmp_path: Path
) -> None:
    plain = make(name, seed=4)
    ours = on_meta(name)
    for module in ours.modules():
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention)):
            module.register_forward_pre_hook(lambda *_: None)
    theirs, mine = adamw(plain), adamw(ours)
    objects = [*ours.parameters()]
    torch.manual_seed(4)
    offload.prepare(ours, mine, host_memory=times * 160 * KI, nvme=tmp_path)
    if name == "encoder":  # torch makes one layer and copies it
        with torch.no_grad():
            for p, q in zip(plain.parameters(), objects, strict=True):
                module = next(m for m in ours.modules() if q in set(m.parameters(recurse=False)))
                with offload.resident(module):
                    p.copy_(q)
    assert all(p is q for p, q in zip(objects, ours.parameters(), strict=True))
    for seed in range(4):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
    offload.close(ours)
    assert_same_model(ours, plain)
    assert step(plain, theirs, 4) == step(ours, mine, 4)


@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("name", ["gpt", "pictures", "branches"])
def test_weights_win_and_train_the_same(name: str, meta: bool, tmp_path: Path) -> None:
    plain = make(name, seed=7)
    with torch.no_grad():
        for buffer in plain.buffers():
            buffer += 3
    path = saved(plain, tmp_path / "x.safetensors")
    ours = on_meta(name) if meta else make(name, seed=1)
    theirs, mine = adamw(plain), adamw(ours)
    offload.prepare(ours, mine, weights=path, host_memory=150 * KI, nvme=tmp_path)
    path.unlink()  # trained weights are somewhere else now
    for seed in range(4):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
    offload.close(ours)
    assert_same_model(ours, plain)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_other_floats_are_cast(
    given: torch.dtype,
    wanted: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("offload.params.start._CAST_BYTES", 1000)  # in several parts
    source = make("pictures", seed=5, dtype=given)
    path = saved(source, tmp_path / "x.safetensors")
    ours = on_meta("pictures").to(wanted)
    with caplog.at_level(logging.INFO, "offload"):
        offload.prepare(ours, weights=path, host_memory=60 * KI, nvme=tmp_path)
    casts = [r.getMessage() for r in caplog.records if "are cast from" in r.getMessage()]
    assert len(casts) == (given != wanted)
    offload.close(ours)
    assert_same_model(ours, source.to(wanted))


def test_progress_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours = on_meta("gpt")
    with caplog.at_level(logging.INFO, "offload"):
        offload.prepare(ours, adamw(ours), host_memory=150 * KI, nvme=tmp_path)
    lines = [r.getMessage() for r in caplog.records if r.getMessage().startswith("start:")]
    assert 3 <= len(lines) <= 10 and "43 KiB of 43 KiB" in lines[-1]  # with gaps
    offload.close(ours)


def test_tied_parameters_once_or_twice(tmp_path: Path) -> None:
    plain = make("gpt", seed=2)
    tied = plain.embedding.weight.detach()  # type: ignore[union-attr]
    ways: list[dict[str, Any]] = [
        {},
        {"head.weight": tied.clone()},
        {"embedding.weight": None, "head.weight": tied.clone()},
    ]
    for number, way in enumerate(ways):
        path = saved(plain, tmp_path / f"{number}.safetensors", **way)
        ours = on_meta("gpt")
        offload.prepare(ours, weights=path, host_memory=60 * KI, nvme=tmp_path)
        offload.close(ours)
        assert_same_model(ours, plain)
    path = saved(plain, tmp_path / "other.safetensors", **{"head.weight": tied + 1})
    with pytest.raises(FormatError, match=r"embedding\.weight and head\.weight are one parameter"):
        offload.prepare(on_meta("gpt"), weights=path)


def test_the_pool_stays_within_the_budget_during_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peaks = []
    real = Residency.take_in

    def watched(self: Any, block: Any, fill: Any = None) -> None:
        real(self, block, fill)
        peaks.append(self.cache._pool.stats().peak_bytes)

    monkeypatch.setattr(Residency, "take_in", watched)
    plain = make("gpt")
    for way in ({}, {"weights": saved(plain, tmp_path / "x.safetensors")}):
        peaks.clear()
        ours = on_meta("gpt")
        offload.prepare(ours, adamw(ours), host_memory=100 * KI, nvme=tmp_path, **way)
        made = prepared_of(ours)
        assert made is not None and not made.shares.holds_all_params
        assert len(peaks) >= 6
        assert max(peaks) <= made.shares.params + made.shares.gradients <= 100 * KI
        assert made.shares.total <= 100 * KI
        offload.close(ours)
        del made


# --- what does not fit together -------------------------------------------------------------------


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "missing": (
        {"norm.weight": None, "layers.1.up.bias": None},
        r"it does not have layers\.1\.up\.bias, norm\.weight \(what is not",
    ),
    "unexpected": ({"norm.other": torch.ones(3)}, r"the model has no norm\.other"),
    "shape": ({"norm.weight": torch.ones(3)}, r"norm\.weight of shape \(16,\), got \(3,\)"),
    "type": (
        {"norm.weight": torch.ones(WIDTH, dtype=torch.int32)},
        r"norm\.weight of torch\.float32, got torch\.int32",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_listed_and_changes_nothing(what: str, tmp_path: Path) -> None:
    changes, text = REFUSED[what]
    path = saved(make("gpt"), tmp_path / "x.safetensors", **changes)
    ours = on_meta("gpt")
    optimizer = adamw(ours)
    ids = [id(p) for p in ours.parameters()]
    with pytest.raises(ConfigError, match=text):
        offload.prepare(ours, optimizer, weights=path, host_memory=150 * KI, nvme=tmp_path)
    assert is_as_it_was(ours, ids) and type(optimizer) is torch.optim.AdamW
    filled = make("gpt")
    addresses = [p.data_ptr() for p in filled.parameters()]
    with pytest.raises(ConfigError, match=text):
        offload.prepare(filled, weights=path, host_memory=150 * KI, nvme=tmp_path)
    assert [p.data_ptr() for p in filled.parameters()] == addresses


def test_a_damaged_or_missing_file_changes_nothing(tmp_path: Path) -> None:
    path = saved(make("gpt"), tmp_path / "x.safetensors")
    os.truncate(path, path.stat().st_size - 1)
    ours = on_meta("gpt")
    ids = [id(p) for p in ours.parameters()]
    for weights, kind in ((path, FormatError), (tmp_path / "none", ConfigError)):
        with pytest.raises(kind):
            offload.prepare(ours, adamw(ours), weights=weights, nvme=tmp_path)
        assert is_as_it_was(ours, ids)


class Lost(nn.Module):
    """A module with tensors that nothing fills."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.arange(3.0), persistent=False)


class Lazy(Lost):
    """A module whose `reset_parameters` does not fill all of its tensors."""

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def test_what_nothing_fills_is_refused_by_name(tmp_path: Path) -> None:
    for kind, names in ((Lost, "scale, table"), (Lazy, "table")):
        with torch.device("meta"):
            model = kind()
        ids = [id(t) for t in (*model.parameters(), *model.buffers())]
        with pytest.raises(ConfigError, match=f"nothing gives values to {names}:"):
            offload.prepare(model, nvme=tmp_path)
        assert is_as_it_was(model, ids)
    with torch.device("meta"):
        model = Lost()
    full = saved(Lost(), tmp_path / "full.safetensors")
    offload.prepare(model, weights=full)
    offload.close(model)
    assert torch.equal(model.table, torch.arange(3.0))
    with torch.device("meta"):
        model = Lost()
    without = saved(Lost(), tmp_path / "without.safetensors", table=None)
    with pytest.raises(ConfigError, match="nothing gives values to table:"):
        offload.prepare(model, weights=without)


def test_a_failure_on_the_way_leaves_a_meta_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(make("gpt", seed=3), tmp_path / "x.safetensors")
    ours = on_meta("gpt")
    optimizer = adamw(ours)
    ids = [id(p) for p in ours.parameters()]
    real, taken = Residency.take_in, []

    def fail_fourth(self: Any, block: Any, fill: Any = None) -> None:
        taken.append(block)
        if len(taken) == 4:
            raise OSError("the fourth")
        real(self, block, fill)

    for way in ({}, {"weights": path}):
        taken.clear()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="the fourth"):
            patch.setattr(Residency, "take_in", fail_fourth)
            offload.prepare(ours, optimizer, host_memory=100 * KI, nvme=tmp_path, **way)
        assert is_as_it_was(ours, ids)
        with monkeypatch.context() as patch, pytest.raises(OSError, match="late"):
            patch.setattr("offload.params.prepared.attach", _raise_late)
            offload.prepare(ours, optimizer, host_memory=100 * KI, nvme=tmp_path, **way)
        assert is_as_it_was(ours, ids)
    with pytest.raises(CapacityError, match="the least that works"):
        offload.prepare(ours, optimizer, weights=path, host_memory=9 * KI, nvme=tmp_path)
    assert is_as_it_was(ours, ids)
    offload.prepare(ours, optimizer, weights=path, host_memory=100 * KI, nvme=tmp_path)
    offload.close(ours)
    assert_same_model(ours, make("gpt", seed=3))


def test_a_failure_on_the_way_loses_no_value_of_a_model_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each parameter has its old values or those of the file. One that was to stay in the file has
    the old ones: they are released last.
    """
    path = saved(make("gpt", seed=3), tmp_path / "x.safetensors")
    ours, old, new = make("gpt"), make("gpt"), make("gpt", seed=3)
    ours.layers[:2].requires_grad_(False)  # type: ignore[index,union-attr]
    way = {"weights": path, "host_memory": 100 * KI, "nvme": tmp_path}
    real, reads = WeightBlock.read, []

    def fail_from_fourth_on(self: Any, *arguments: Any) -> Any:
        reads.append(self.name)
        if len(reads) >= 4:
            raise StoreError("no more")
        return real(self, *arguments)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="no more"):
        patch.setattr(WeightBlock, "read", fail_from_fourth_on)
        offload.prepare(ours, adamw(ours), **way)
    assert not any(is_offloaded(p) for p in ours.parameters()) and prepared_of(ours) is None
    from_file = 0
    for ours_one, old_one, new_one in zip(
        ours.parameters(), old.parameters(), new.parameters(), strict=True
    ):
        is_new = torch.equal(ours_one, new_one) and not torch.equal(old_one, new_one)
        assert is_new or torch.equal(ours_one, old_one)
        assert not is_new or ours_one.requires_grad
        from_file += is_new
    assert from_file, "some were there when it failed"
    loss_of(ours, batch(0)).backward()
    ours.zero_grad()
    offload.prepare(ours, adamw(ours), **way)
    offload.close(ours)
    assert_same_model(ours, new)


def test_weights_that_change_while_the_model_is_prepared_are_noticed_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last file has changed: not even the values of the first one are taken."""
    ours, old = make("gpt"), make("gpt")
    values = {name: p.detach() for name, p in make("gpt", seed=3).named_parameters()}
    values |= dict(make("gpt", seed=3).named_buffers())
    names, folder = list(values), tmp_path / "weights"
    folder.mkdir()
    shards = {"a.safetensors": names[:3], "b.safetensors": names[3:]}
    for file, held in shards.items():
        save_file({name: values[name] for name in held}, folder / file)
    places = {name: file for file, held in shards.items() for name in held}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    real = Prepared._open_memory

    def touched(self: Any) -> None:
        real(self)
        os.utime(folder / "b.safetensors", (1, 1))

    monkeypatch.setattr(Prepared, "_open_memory", touched)
    with pytest.raises(StoreError, match="has changed while it was in use"):
        offload.prepare(ours, adamw(ours), weights=folder)
    assert_same_model(ours, old)


def _raise_late(*_: object) -> None:
    raise OSError("late")


def test_hooks_of_meta_parameters_are_not_lost_silently() -> None:
    ours = on_meta("gpt")
    next(ours.parameters()).register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(
        ConfigError, match=r"embedding\.weight: is on the meta device and has hooks"
    ):
        offload.prepare(ours)


def test_attributes_of_meta_parameters_stay() -> None:
    ours = on_meta("gpt")
    next(ours.parameters()).mark = 3  # type: ignore[attr-defined]
    offload.prepare(ours)
    assert next(ours.parameters()).mark == 3  # type: ignore[attr-defined]
    offload.close(ours)


# --- how modules fill themselves ------------------------------------------------------------------


class Styled(nn.Module):
    """A model with `_init_weights` for all modules below, as many have it; one layer is tied."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.list = nn.ModuleList([nn.LayerNorm(4)])

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 2.0 if module is self.first else 3.0)
            nn.init.constant_(module.bias, 2.0 if module is self.first else 3.0)


def test_init_weights_of_the_model_and_tied_parameters() -> None:
    with torch.device("meta"):
        model = Styled()
    offload.prepare(model)
    offload.close(model)
    assert model.second.weight is model.first.weight
    assert (model.first.weight == 2).all() and (model.first.bias == 2).all()
    assert (model.second.bias == 3).all() and (model.list[0].weight == 1).all()


def test_parts_that_have_values_keep_them() -> None:
    model = Styled()
    with torch.no_grad():
        model.first.weight.fill_(7)
    model.first.bias = nn.Parameter(torch.empty(4, device="meta"))
    model.second = nn.Linear(4, 4, device="meta")  # type: ignore[assignment]
    offload.prepare(model)
    offload.close(model)
    assert (model.first.weight == 7).all() and (model.first.bias == 2).all()
    assert (model.second.weight == 3).all()


def test_tasks_go_from_the_inside_out() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.MultiheadAttention(4, 2), nn.Dropout(), nn.BatchNorm1d(3))
    empty = {t: n for n, t in [*model.named_parameters(), *model.named_buffers()]}
    assert [task.name for task in plan_tasks(model, empty)] == ["0.out_proj", "0", "2"]
    assert plan_tasks(model, {}) == []


# --- frozen weights -------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A linear layer that is frozen, and what is trained beside it."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        draw = torch.Generator().manual_seed(seed)
        self.lora_a = nn.Parameter(torch.randn(2, base.in_features, generator=draw))
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = functional.linear(functional.linear(x, self.lora_a), self.lora_b)
        return self.base_layer(x) + inner


def adapted(model: nn.Module) -> nn.Module:
    model.requires_grad_(False)
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        layer.inputs = Adapter(layer.inputs, number)
    return model


def test_lora_writes_nothing_but_adapters(tmp_path: Path) -> None:
    path = saved(make("gpt", seed=6), tmp_path / "x.safetensors")
    plain, ours = adapted(make("gpt", seed=6)), adapted(on_meta("gpt"))
    theirs, mine = adamw(plain), adamw(ours)
    offload.prepare(ours, mine, weights=path, host_memory=72 * KI, nvme=tmp_path)
    made = prepared_of(ours)
    assert made is not None and made.store is not None and not made.shares.holds_all_params
    trained = [p for p in ours.parameters() if p.requires_grad]
    adapters = sum(p.numel() for p in trained)
    room = made.store.stats().capacity_bytes
    for seed in range(4):
        before = made.store.stats().written_bytes
        assert step(plain, theirs, seed) == step(ours, mine, seed)
        # Each adapter's block, and its moments, which are whole pages here.
        state_bytes = made.session.plan.state_bytes  # type: ignore[union-attr]
        assert made.store.stats().written_bytes - before <= 2 * 4 * adapters + state_bytes
        frozen = {f"parameters {u.number}: {u.name}" for u in made.units if "frozen" in u.name}
        assert len(frozen) == 4 and not frozen & set(made.store.names())
    assert counts(ours)["original_read_bytes"] > 2 * 30 * KI
    offload.close(ours)
    assert_same_model(ours, plain)
    del made
    # The same model in memory reserves room for all of it.
    other = adapted(make("gpt", seed=6))
    offload.prepare(other, adamw(other), host_memory=72 * KI, nvme=tmp_path)
    whole = prepared_of(other)
    assert whole is not None and whole.store is not None
    assert whole.store.stats().capacity_bytes - room >= 30 * KI
    offload.close(other)


def test_without_an_optimizer_nothing_is_written_or_reserved(tmp_path: Path) -> None:
    """It works without any directory for swap files, too."""
    path = saved(make("gpt", seed=6), tmp_path / "x.safetensors")
    plain, ours = make("gpt", seed=6), on_meta("gpt")
    assert offload.prepare(ours, weights=path, host_memory=24 * KI) is ours
    made = prepared_of(ours)
    assert made is not None and made.store is None and not made.shares.holds_all_params
    assert all(is_offloaded(p) for p in ours.parameters())
    with torch.no_grad():
        for seed in range(3):
            assert torch.equal(ours(batch(seed)), plain(batch(seed)))
    pool = made.pool
    assert pool is not None and pool.stats().peak_bytes <= 24 * KI
    offload.close(ours)
    assert_same_model(ours, plain)


def test_a_file_that_is_cut_while_the_model_runs(tmp_path: Path) -> None:
    path = saved(make("gpt", seed=6), tmp_path / "x.safetensors")
    whole = path.read_bytes()
    then = path.stat()
    plain, ours = make("gpt", seed=6), on_meta("gpt")
    offload.prepare(ours, weights=path, host_memory=24 * KI, nvme=tmp_path)
    with torch.no_grad():
        expected = plain(batch(0))
        assert torch.equal(ours(batch(0)), expected)
        os.truncate(path, 100)
        for _ in range(2):
            with pytest.raises(StoreError, match="has changed while it was in use"):
                ours(batch(0))
        path.write_bytes(whole)  # the same bytes again
        os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
        assert torch.equal(ours(batch(0)), expected)
    offload.close(ours)
    assert_same_model(ours, plain)


def test_frozen_weights_that_are_changed_all_the_same(tmp_path: Path) -> None:
    path = saved(make("gpt", seed=6), tmp_path / "x.safetensors")
    before = path.read_bytes()
    plain, ours = make("gpt", seed=6), on_meta("gpt")
    offload.prepare(ours, weights=path, host_memory=24 * KI, nvme=tmp_path)
    with torch.no_grad():
        for number in range(4):
            with offload.resident(ours.layers[number]):  # type: ignore[index]
                ours.layers[number].up.weight.mul_(2)  # type: ignore[index,union-attr]
            plain.layers[number].up.weight.mul_(2)  # type: ignore[index,union-attr]
        for seed in range(2):
            assert torch.equal(ours(batch(seed)), plain(batch(seed)))
    ours.load_state_dict(make("gpt", seed=8).state_dict())
    assert torch.equal(ours(batch(0)), make("gpt", seed=8)(batch(0)))
    offload.close(ours)
    assert_same_model(ours, make("gpt", seed=8))
    assert path.read_bytes() == before


def test_names_that_peft_has_changed(tmp_path: Path) -> None:
    path = saved(Gpt(2), tmp_path / "x.safetensors")
    with torch.device("meta"):
        model = Gpt(2)
    outer = nn.Module()
    outer.base_model = nn.Module()
    outer.base_model.model = adapted(model)
    made: Callable[..., Any] = offload.prepare
    made(outer, weights=path)
    offload.close(outer)
    plain = Gpt(2)
    plain.load_state_dict(
        {n.replace("base_model.model.", "").replace("base_layer.", ""): v
         for n, v in outer.state_dict().items() if "lora" not in n}
    )  # fmt: skip


def test_a_tensor_that_others_refer_to_cannot_be_filled() -> None:
    ours = on_meta("gpt")
    ids = [id(p) for p in ours.parameters()]
    kept = weakref.ref(list(ours.parameters())[3])
    with pytest.raises(ConfigError, match=r"layers\.0\.\S+: is on the meta device and cannot be"):
        offload.prepare(ours)
    assert kept() is not None and is_as_it_was(ours, ids)


def test_files_and_engine_go_with_a_model_that_nobody_closes(tmp_path: Path) -> None:
    path = saved(make("gpt", seed=6), tmp_path / "x.safetensors")
    before = len(os.listdir("/proc/self/fd"))
    ours = on_meta("gpt")
    offload.prepare(ours, weights=path, host_memory=24 * KI)
    with torch.no_grad():
        ours(batch(0))
    assert len(os.listdir("/proc/self/fd")) > before
    del ours
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_edited_weight_of_a_file_stays_where_there_is_no_disk(tmp_path: Path) -> None:
    """Its block cannot be evicted, so others are; and `close` gives the model back."""
    torch.manual_seed(0)
    made = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).requires_grad_(False)
    path = tmp_path / "model.safetensors"
    offload.prepare(model, host_memory=48 << 10, weights=path, units=(nn.Linear,))
    x = torch.ones(2, 64)
    assert torch.equal(model(x), made(x))
    with offload.resident(model[1]):
        model[1].weight.data.mul_(2.0)
    made[1].weight.data.mul_(2.0)
    for _ in range(2):
        assert torch.equal(model(x), made(x))
    offload.close(model)
    for ours, theirs in zip(model.parameters(), made.parameters(), strict=True):
        assert torch.equal(ours, theirs)
