"""Activations that are recomputed or on disk: the bits of the plain model, in less memory."""

from __future__ import annotations

import gc
import random
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.bits import assert_same_gradients
from support.loops import chosen
from support.models import MODELS, WIDTH, Gpt, Layer, batch, loss_of, make
from support.stores import chunks_of
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import offload
from offload import ConfigError, StateError
from offload.core.errors import StoreError
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.params import activations, draws, prepare_plan, recompute
from offload.params import units as units_module
from offload.params.activation_store import DiskActivations
from offload.params.activations import Activations, PackedTensor, SavedStorage, Stage
from offload.params.prepared import Prepared, prepared_of
from offload.storage import growing
from offload.storage.growing import GrowingStore

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]
KI = 1 << 10
TIGHT = 120 * KI  # not all parameters have room, so that what autograd keeps is seen
MODES = ["recompute", "offload"]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "LARGE_BYTES", 2048)
    monkeypatch.setattr(activations, "LEAST_BYTES", 256)
    monkeypatch.setattr(growing, "FIRST_BYTES", 64 * KI)
    torch.set_num_threads(1)  # for so little work


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@contextmanager
def prepared(model: nn.Module, mode: str, folder: Path, **fields: Any) -> Iterator[Prepared]:
    fields = {"host_memory": 200 * KI, "nvme": folder, **fields}
    _, optimizer = offload.prepare(model, adamw(model), activations=mode, **fields)
    made = prepared_of(model)
    assert made is not None
    try:
        yield made
    finally:
        optimizer.zero_grad()
        offload.close(model)


def counts(made: Prepared) -> dict[str, int]:
    return dict(made.metrics.snapshot().counts)


def kept_bytes() -> int:
    """Return the bytes that autograd keeps in memory of the model's run, each storage once."""
    gc.collect()
    found = [each.tensor for each in gc.get_objects() if type(each) is activations.KeptTensor]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}
    return sum(storages.values())


def nothing_is_outside(made: Prepared) -> bool:
    found = made.engine.activations  # type: ignore[union-attr]
    assert found is not None
    gc.collect()
    found._take_in_ended()
    assert found._held_bytes == found._going_bytes == 0 and not found._away
    store = found._activation_store._store  # type: ignore[attr-defined]
    return is_empty(store)


def is_empty(store: GrowingStore) -> bool:
    """Return whether the store is empty. A chunk that was freed while it was written gives its room
    back when the write has ended: wait for that.
    """
    end_s = time.monotonic() + 20.0
    while store.used_bytes and time.monotonic() < end_s:
        time.sleep(0.01)
    return store.used_bytes == 0 and chunks_of(store) == 0


def compare(ours: nn.Module, plain: nn.Module, steps: int = 4) -> None:
    """Train both models for some steps, with evaluation in between, and assert that losses, random
    numbers, gradients and evaluated outputs are the same.
    """
    theirs = adamw(plain)
    mine = prepared_of(ours).session.optimizer  # type: ignore[union-attr]
    for step in range(steps):
        losses = []
        for model, optimizer in ((plain, theirs), (ours, mine)):
            optimizer.zero_grad()
            torch.manual_seed(step)
            for micro in range(1 + step % 2):
                loss = loss_of(model, batch(10 * step + micro))
                loss.backward()
            losses.append((loss.detach(), torch.rand(3)))  # and the random numbers after it
        assert torch.equal(losses[0][0], losses[1][0])
        assert torch.equal(losses[0][1], losses[1][1])
        assert_same_gradients(ours, plain)
        theirs.step()
        mine.step()
        with torch.no_grad():
            assert torch.equal(plain.eval()(batch(step)), ours.eval()(batch(step)))
        plain.train()
        ours.train()


def test_the_report_tells_where_they_are(tmp_path: Path) -> None:
    ours = make("gpt")
    with prepared(ours, "offload", tmp_path) as made:
        outside = made.engine.activations._activation_store  # type: ignore[union-attr]
        outside.limit_bytes = 2048
        loss = loss_of(ours, batch(0))
        while_kept = offload.report(ours)
        use = while_kept.model.activations  # type: ignore[union-attr]
        assert use is not None and 0 < use.host_bytes < use.sent_bytes
        assert use.disk_bytes == outside.disk_bytes > 0 == use.hits == use.misses
        assert while_kept.model.disk_bytes >= use.disk_bytes  # type: ignore[union-attr]
        loss.backward()
        del loss
        assert nothing_is_outside(made)
        told = offload.report(ours)
        use = told.model.activations  # type: ignore[union-attr]
        assert use is not None and use.host_bytes == use.disk_bytes == 0
        assert use.hits + use.misses > 0 and use.waited_s > 0
        flat = told.to_dict()
        assert flat["model/activations/sent_bytes"] == use.sent_bytes > 0
        assert flat["model/activations/waited_seconds"] == use.waited_s
        assert f"activations  {use}" in re.sub(" {2,}", "  ", str(told))
        assert ", activations " in made.shares.taken


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_the_plain_model(name: str, mode: str, tmp_path: Path) -> None:
    plain, ours = make(name), make(name)
    with prepared(ours, mode, tmp_path) as made:
        if mode == "offload":  # nearly all go to the drive
            made.engine.activations._activation_store.limit_bytes = 2048  # type: ignore[union-attr]
        compare(ours, plain, steps=chosen(test=2, torture=4))
        if mode == "offload":
            assert nothing_is_outside(made)
            assert counts(made)["activations_offloaded_bytes"] > 0
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q)
    assert not any("forward" in vars(module) for module in ours.modules())


# --- recomputation --------------------------------------------------------------------------------


def runs_of(model: nn.Module, function: Callable[[], Any]) -> int:
    """Count how often the layers of a GPT compute their second half while the function runs."""
    handles, calls = [], []
    for layer in model.layers:  # type: ignore[union-attr]
        handles.append(layer.up.register_forward_pre_hook(lambda *_: calls.append(1)))
    function()
    for handle in handles:
        handle.remove()
    return len(calls)


def test_less_is_kept_and_each_layer_runs_twice(tmp_path: Path) -> None:
    kept, runs = {}, {}
    for mode in ("keep", "recompute"):
        model = make("gpt")
        with prepared(model, mode, tmp_path, host_memory=TIGHT):
            loss = loss_of(model, batch(0))
            kept[mode] = kept_bytes()
            del loss
            runs[mode] = runs_of(model, lambda: loss_of(model, batch(0)).backward())  # noqa: B023
            with torch.no_grad():
                assert runs_of(model, lambda: model(batch(0))) == 4  # noqa: B023
            model.zero_grad()
    assert kept["recompute"] < kept["keep"] / 3
    assert runs == {"keep": 4, "recompute": 8}


@pytest.mark.parametrize("cut", ["joined", "several units each"])
def test_layers_that_are_not_one_unit_each_run_twice_to_the_same_bits(
    cut: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = make("gpt"), make("gpt")
    units = units_module.find_units(ours)
    layer_bytes = max(unit.nbytes for unit in units if unit.modules[0] in set(ours.layers))
    param_bytes = sum(param.nbytes for param in ours.layers[0].parameters())
    if cut == "joined":
        find = partial(units_module.find_units, unit_bytes=2 * layer_bytes)
        monkeypatch.setattr(prepare_plan, "find_units", lambda *args: find(*args[:3]))
    else:
        monkeypatch.setattr(units_module, "MOST_BYTES", param_bytes - 1)
    with prepared(ours, "recompute", tmp_path) as made:
        in_unit = [len(set(unit.modules) & set(ours.layers)) for unit in made.units]
        assert max(in_unit) == (2 if cut == "joined" else 0)
        assert runs_of(ours, lambda: loss_of(ours, batch(0)).backward()) == 8
        loss_of(theirs, batch(0)).backward()
        assert_same_gradients(ours, theirs)


def test_recomputing_where_there_are_no_layers_is_told(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with prepared(model, "recompute", tmp_path) as made:
        assert "recomputation of activations" in made.metrics.snapshot().fallbacks


@pytest.mark.parametrize("name", ["around", "around_reentrant", "inside", "inside_reentrant"])
def test_what_recomputes_itself_is_not_recomputed_twice(name: str, tmp_path: Path) -> None:
    model = make(name)
    with prepared(model, "recompute", tmp_path) as made:
        once = 8 if name.startswith("around") else 4  # `up` is not in what is checkpointed inside
        loss_of(model, batch(0)).backward()
        assert runs_of(model, lambda: loss_of(model, batch(0)).backward()) == once
        inside = 4 if name.startswith("inside") else 0
        assert counts(made).get("layers_that_recompute_themselves", 0) == inside
        model.zero_grad()


def test_a_checkpoint_around_the_whole_model_is_enough(tmp_path: Path) -> None:
    plain, ours = make("dropout"), make("dropout")
    with prepared(ours, "recompute", tmp_path):
        for model in (plain, ours):
            torch.manual_seed(1)
            out = checkpoint(model, batch(0), use_reentrant=False)
            out.square().mean().backward()
        assert_same_gradients(ours, plain)
        again = lambda: checkpoint(ours, batch(0), use_reentrant=False).sum().backward()  # noqa: E731
        assert runs_of(ours, again) == 8
        ours.zero_grad()


@dataclass
class Pair:
    first: Tensor
    second: Tensor | None


class Odd(nn.Module):
    """A model of layers with many kinds of keywords and outputs, and buffers that change these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_OddLayer(kind) for kind in ("tuple", "dict", "pair", "none"))

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.one_hot(tokens % WIDTH, WIDTH).float()
        for layer in self.layers:
            found = layer(x, mask=x > 0.5, debug=None, scale=(x.mean(), 2.0))
            match found:
                case (first, None, second):
                    x = first * second
                case {"out": first, "also": second}:
                    x = first + second
                case Pair(first, None):
                    x = first
                case (first, second):
                    assert second is None
                    x = first
        return x


class _OddLayer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kind = kind
        self.register_buffer("factor", torch.ones(()))
        self.register_buffer("table", torch.linspace(0, 1, WIDTH))

    def forward(self, x: Tensor, *, mask: Tensor, debug: None, scale: tuple[Tensor, float]) -> Any:
        assert debug is None
        self.factor.mul_(1.5)
        y = self.inner(x * scale[0]) * scale[1] * float(self.factor) + self.table
        y = functional.dropout(y.masked_fill(mask, 0.5), 0.2, self.training)
        made = {
            "tuple": (y, None, y.tanh()),
            "dict": {"out": y, "also": y * y},
            "pair": Pair(y, None),
            "none": [y, None],
        }
        return made[self.kind]


def test_any_arguments_and_outputs_and_buffers_that_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    plain = Odd()
    torch.manual_seed(0)
    ours = Odd()
    with prepared(ours, "recompute", tmp_path):
        for model in (plain, ours):
            torch.manual_seed(3)
            losses = [loss_of(model, batch(seed)) for seed in range(3)]  # before any backward
            for loss in losses:
                loss.backward(retain_graph=True)
                loss.backward()
        assert_same_gradients(ours, plain)
        monkeypatch.setattr(recompute, "COPIED_BYTES", 8)
        loss = loss_of(ours, batch(0))
        ours.layers[1].table.add_(1.0)  # type: ignore[operator]
        with pytest.raises(RuntimeError, match=r"inplace operation: buffer table of layers\.1"):
            loss.backward()
        ours.zero_grad()


def normal_by_numpy(draw: Any, x: Tensor) -> Tensor:
    return torch.from_numpy(draw.standard_normal(tuple(x.shape))).to(x)


GLOBAL = torch.Generator()
GLOBAL_NUMPY = np.random.default_rng(0)


class Noisy(nn.Module):
    """A layer that draws random numbers from the source that `way` names. begin: its first runs,
    which draw none.
    """

    def __init__(self, way: str, begin: int = 0) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.way, self.runs_left = way, begin
        self.own = torch.Generator().manual_seed(1)
        self.own_python, self.own_numpy = random.Random(1), np.random.default_rng(1)
        self.own_state = np.random.RandomState(1)
        hidden = torch.Generator().manual_seed(2)
        self.held = [torch.Generator().manual_seed(3)]
        self.closure = lambda x: torch.randn(x.shape, generator=hidden)

    def noise(self, x: Tensor) -> Tensor:
        match self.way:
            case "attribute":
                return torch.rand(x.shape, generator=self.own)
            case "in place":
                return torch.empty_like(x).uniform_(generator=self.own)
            case "list":
                return torch.bernoulli(x.abs().clamp(0, 1), generator=self.held[0])
            case "closure":
                return self.closure(x)  # type: ignore[no-any-return]
            case "global":
                return torch.randn(x.shape, generator=GLOBAL)
            case "python":
                return x.new_tensor(random.random() + self.own_python.random())
            case "numpy":
                return normal_by_numpy(np.random, x) + normal_by_numpy(self.own_state, x)
            case "numpy generator":
                return normal_by_numpy(self.own_numpy, x)
            case "hidden":
                return normal_by_numpy(GLOBAL_NUMPY, x)
        raise AssertionError(self.way)

    def forward(self, x: Tensor) -> Tensor:
        if self.runs_left:
            self.runs_left -= 1
            return x * self.inner(x)
        return self.inner(x * self.noise(x)).square() + x  # the last operation saves nothing


class NoisyModel(nn.Module):
    def __init__(self, way: str, begin: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Noisy(way, begin) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = functional.one_hot(tokens % WIDTH, WIDTH).float()
        for layer in self.layers:
            x = layer(x)
        return x


WAYS = ["attribute", "in place", "list", "closure", "global", "python", "numpy", "numpy generator"]


def noisy(way: str, begin: int = 0) -> NoisyModel:
    torch.manual_seed(0)
    return NoisyModel(way, begin)


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_draws_the_same_random_numbers_again_wherever_it_has_them_from(
    way: str, tmp_path: Path
) -> None:
    plain, ours = noisy(way), noisy(way)
    with prepared(ours, "recompute", tmp_path):
        for model in (plain, ours):
            GLOBAL.manual_seed(4)
            np.random.seed(5)
            random.seed(6)
            losses = [loss_of(model, batch(seed)) for seed in range(2)]  # before any backward
            for loss in reversed(losses):
                loss.backward(retain_graph=True)
                loss.backward()
            loss_of(model, batch(2)).backward()  # and later draws go on
        assert_same_gradients(ours, plain)


class AfterDropout(nn.Module):
    """A layer that hands torch's default generator over after its dropout has drawn from it.
    is_own: the layer has it as an attribute.
    """

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.inner, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.own = torch.default_generator if is_own else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.inner(x))
        return torch.rand(x.shape, generator=torch.default_generator) * x.square() + x


@pytest.mark.parametrize("is_own", [False, True])
def test_the_default_generator_may_be_handed_over(is_own: bool, tmp_path: Path) -> None:
    """Its state when it is first seen in use is not that at the layer's beginning."""
    plain, ours = noisy("attribute"), noisy("attribute")
    for model in (plain, ours):
        torch.manual_seed(0)
        model.layers = nn.ModuleList(AfterDropout(is_own) for _ in range(3))
    with prepared(ours, "recompute", tmp_path):
        for model in (plain, ours):
            torch.manual_seed(7)
            losses = [loss_of(model, batch(seed)) for seed in range(2)]
            for loss in reversed(losses):
                loss.backward(retain_graph=True)
                loss.backward()
            loss_of(model, batch(2)).backward()
        assert_same_gradients(ours, plain)


def test_default_generators_are_known() -> None:
    assert draws.is_default(torch.default_generator) and draws.is_default(
        torch.random.default_generator
    )
    assert not draws.is_default(torch.Generator()) and not draws.is_default(random.Random())


def test_a_layer_that_gives_other_values_when_it_is_run_again_is_named(tmp_path: Path) -> None:
    ours = noisy("hidden")
    with prepared(ours, "recompute", tmp_path):
        loss = loss_of(ours, batch(0))
        with pytest.raises(StateError, match=r"layers\.2: run again in backward it gave other"):
            loss.backward()


def test_one_that_begins_to_later_is_noticed_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recompute, "CHECKED_EVERY", 8)
    ours = noisy("hidden", begin=2 * 4)  # each run counts twice
    with prepared(ours, "recompute", tmp_path):
        for seed in range(7):
            loss_of(ours, batch(seed)).backward()
        loss = loss_of(ours, batch(7))
        with pytest.raises(StateError, match=r"layers\.2: run again in backward it gave other"):
            loss.backward()


def test_parameters_that_have_changed_are_noticed(tmp_path: Path) -> None:
    model = make("gpt")
    with prepared(model, "recompute", tmp_path, host_memory=TIGHT) as made:
        optimizer = made.session.optimizer  # type: ignore[union-attr]
        first, second = loss_of(model, batch(0)), loss_of(model, batch(1))
        first.backward()
        optimizer.step()
        with pytest.raises(StateError, match="have changed since the forward pass"):
            second.backward()
        optimizer.zero_grad()


class Cache:
    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def get_seq_length(self) -> int:
        return len(self.seen)

    def update(self, x: Tensor) -> None:
        self.seen.append(x)


class WithCache(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CacheLayer() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x, cache = functional.one_hot(tokens % WIDTH, WIDTH).float(), Cache()
        for layer in self.layers:
            x = layer(x, past=cache)
        assert cache.get_seq_length() == 2
        return x


class _CacheLayer(Layer):
    def forward(self, x: Tensor, past: Cache) -> Tensor:  # type: ignore[override]
        past.update(x)
        return super().forward(x)


def test_a_cache_is_filled_once(tmp_path: Path) -> None:
    model = WithCache()
    with prepared(model, "recompute", tmp_path) as made:
        loss_of(model, batch(0)).backward()
        why = made.metrics.snapshot().fallbacks["recomputation of activations"]
        assert "use_cache = False" in why
        model.zero_grad()


def test_hugging_face_checkpointing_stays_as_it_is(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        use_cache=False,
        attn_implementation="eager",
    )

    def run(mode: str, its_own: bool) -> tuple[int, list[Tensor | None]]:
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config).train()
        if its_own:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        calls: list[int] = []
        for layer in model.model.layers:
            layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        with prepared(model, mode, tmp_path, host_memory=None):
            loss = model(input_ids=batch(0), labels=batch(0)).loss
            loss.backward()
            grads = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
            model.zero_grad()
        return len(calls), grads

    calls, expected = run("keep", False)
    assert calls == 3
    for mode, its_own in (("recompute", False), ("recompute", True)):
        calls, grads = run(mode, its_own)
        assert calls == 6
        assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True) if e is not None)


def test_a_forward_of_somebody_elses_is_put_back(tmp_path: Path) -> None:
    model = Gpt(2)
    own = model.layers[0].forward
    called: list[int] = []

    def mine(x: Tensor) -> Tensor:
        called.append(1)
        return own(x)

    model.layers[0].forward = mine  # type: ignore[method-assign, assignment]
    with prepared(model, "recompute", tmp_path):
        loss_of(model, batch(0)).backward()
        assert len(called) == 2
        model.zero_grad()
    assert vars(model.layers[0])["forward"] is mine


# --- offload --------------------------------------------------------------------------------------


@contextmanager
def kept_within(nbytes: int, folder: Path) -> Iterator[tuple[Activations, GrowingStore]]:
    """Keep all that autograd saves in `Activations` with so much memory, while the block runs."""
    metrics = Metrics()
    store = GrowingStore([folder], metrics)
    made = Activations(DiskActivations(store, nbytes), torch.device("cpu"), metrics)

    def pack(tensor: Tensor) -> Any:
        return made.save(tensor) or activations.KeptTensor(tensor.detach(), tensor._version)

    def unpack(kept: Any) -> Tensor:
        found: Tensor = kept.tensor if type(kept) is activations.KeptTensor else kept.checked()
        return found

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield made, store
    made.close()


def chain(x: Tensor, length: int = 20) -> Tensor:
    for _ in range(length):
        x = torch.tanh(x) * 1.1
    return x


def test_memory_stays_within_the_limit(tmp_path: Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)  # 16 KiB
    chain(x).sum().backward()
    expected, x.grad = x.grad, None
    with kept_within(80 * KI, tmp_path) as (made, store):
        loss = chain(x).sum()
        alive = {n for n, ref in made._here.items() if ref() is not None}
        assert made.peak_bytes <= 80 * KI and len(alive) <= 5
        assert chunks_of(store) >= 14
        loss.backward()
        assert made.peak_bytes <= 80 * KI
        counted = made._metrics.snapshot().counts
        assert counted["activation_hits"] >= 10 and "activation_misses" not in counted
        del loss
        made._take_in_ended()
        assert is_empty(store) and made._held_bytes == 0
    assert torch.equal(x.grad, expected)


def test_the_budget_has_a_share_for_them(tmp_path: Path) -> None:
    kept = {}
    for mode in ("keep", "offload"):
        model = make("gpt")
        with prepared(model, mode, tmp_path, host_memory=TIGHT) as made:
            loss = loss_of(model, batch(0))
            gc.collect()
            kept[mode] = kept_bytes()
            if mode == "offload":
                held = made.engine.activations  # type: ignore[union-attr]
                assert held.peak_bytes <= made.shares.activations < kept["keep"] / 2
                assert "activations" in made.shares.parts
                kept[mode] += held._held_bytes
            del loss
    assert kept["offload"] < kept["keep"] / 2
    with pytest.raises(ConfigError, match=r"needs nvme=\.\.\. for a model on the CPU"):
        offload.prepare(make("gpt"), activations="offload")


def test_what_is_saved_twice_is_stored_once_and_views_come_back(tmp_path: Path) -> None:
    def run(x: Tensor) -> Tensor:
        q, k, v = (x * 1.0).view(16, 16, 48).transpose(0, 1).chunk(3, dim=-1)
        wide = (q[:, :, ::2] * k[:, :, 1::2]).expand(4, 16, 16, 8)
        return (q * k).sum() + (k * v).sum() + (wide * wide).sum()

    x = torch.randn(16, 16, 48, requires_grad=True)
    run(x).backward()
    expected, x.grad = x.grad, None
    with kept_within(1, tmp_path) as (_made, store):
        loss = run(x)
        chain(torch.ones(8, 8, requires_grad=True))  # its saves evict all of them
        saved = [each for each in gc.get_objects() if type(each) is PackedTensor]
        pieces = {each._piece for each in saved if each._piece.nbytes == x.nbytes}
        assert len(pieces) == 1 and store.used_bytes < 2.5 * x.nbytes
        del saved, pieces
        loss.backward(retain_graph=True)
        loss.backward()
        assert torch.equal(x.grad, 2 * expected)


def test_what_others_hold_stays_where_it_is(tmp_path: Path) -> None:
    leaf, table = torch.randn(32, 32, requires_grad=True), torch.randn(32, 32)
    with kept_within(1, tmp_path) as (_made, store):
        loss = (leaf * table * leaf).sum()
        held = chain(leaf, 3)
        assert chunks_of(store) < 6
        alive = [each for each in gc.get_objects() if type(each) is SavedStorage]
        at = {each.memory.data_ptr() for each in alive if each.memory is not None}
        assert {leaf.data_ptr(), table.data_ptr()} <= at
        (loss + held.sum()).backward()
        del alive


@pytest.mark.parametrize("is_late", [False, True])
def test_changes_in_place_are_noticed(is_late: bool, tmp_path: Path) -> None:
    with kept_within(1 if is_late else 1 << 20, tmp_path) as (_made, _store):
        x = torch.randn(32, 32, requires_grad=True)
        y = torch.sigmoid(x)
        loss = y.sum()
        y.detach().mul_(2.0)
        del y
        other = chain(x, 4)  # evicts it after the change, if is_late
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*version 1"):
            loss.backward()
        del other, loss


def test_a_loss_that_is_dropped_or_fails_leaves_nothing(tmp_path: Path) -> None:
    model = make("dropout")

    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    with prepared(model, "offload", tmp_path) as made:
        loss = loss_of(model, batch(0))
        store = made.engine.activations._activation_store._store  # type: ignore[union-attr, attr-defined]
        assert chunks_of(store) > 0
        del loss
        assert nothing_is_outside(made)
        handle = model.get_submodule("layers.3").register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="in the middle"):
            loss_of(model, batch(0))
        handle.remove()
        assert nothing_is_outside(made)
        loss = loss_of(model, batch(0))
        hook = model.get_submodule("layers.1").up.weight.register_hook(fail)  # type: ignore
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        hook.remove()
        del loss
        torch.ones(1, requires_grad=True).sum().backward()  # torch keeps what failed until then
        assert nothing_is_outside(made)
        model.zero_grad()
        torch.manual_seed(0)
        loss = loss_of(model, batch(1))
        loss.backward(retain_graph=True)
        first = [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]
        for p in model.parameters():
            p.grad = None
        loss.backward()
        for p, g in zip(model.parameters(), first, strict=True):
            assert torch.equal(p.grad, g)  # type: ignore[arg-type]
        del loss
        assert nothing_is_outside(made)


def test_backward_after_close_is_refused(tmp_path: Path) -> None:
    with kept_within(1, tmp_path) as (made, _store):
        loss = chain(torch.randn(32, 32, requires_grad=True)).sum()
        made.close()
        with pytest.raises(StateError, match="closed since the forward pass"):
            loss.backward()


def test_a_write_that_fails_is_told_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(32, 32, requires_grad=True)
    chain(x, 6).sum().backward()
    expected, x.grad = x.grad, None
    with kept_within(12 * KI, tmp_path) as (_made, store):
        y = chain(x, 5)
        with monkeypatch.context() as patch:
            broken: Ticket[None] = Ticket("a write")
            broken.fail(StoreError("no more", errno=5, operation="write", file="x"))
            patch.setattr(store, "write", lambda *_: broken)
            with pytest.raises(StoreError, match="no more"):
                chain(y, 3)
        chain(y, 1).sum().backward()
    assert torch.equal(x.grad, expected)


def test_several_graphs_in_any_order(tmp_path: Path) -> None:
    inputs = [torch.randn(32, 32, requires_grad=True) for _ in range(4)]
    expected = [torch.autograd.grad(chain(x, 9).sum(), x)[0] for x in inputs]
    with kept_within(24 * KI, tmp_path) as (made, store):
        losses = [chain(x, 9).sum() for x in inputs]
        for number in (2, 0, 3, 1):
            (grad,) = torch.autograd.grad(losses[number], inputs[number])
            assert torch.equal(grad, expected[number])
        assert made.peak_bytes <= 24 * KI
        del losses, grad
        made._take_in_ended()
        assert is_empty(store)


def test_pieces_move_by_the_table() -> None:
    class Nobody:
        def bring(self, piece: SavedStorage) -> Tensor:
            raise AssertionError

        def ended(self, piece: SavedStorage) -> None: ...

    piece = SavedStorage(Nobody(), 0, torch.zeros(4, dtype=torch.uint8))
    piece.move_to(Stage.GOING)
    with pytest.raises(AssertionError, match=r"GOING -> .*COMING"):
        piece.move_to(Stage.COMING)


def test_the_store_grows(tmp_path: Path) -> None:
    store = GrowingStore([tmp_path], Metrics())
    data = [torch.full((40 * KI,), n, dtype=torch.uint8) for n in range(9)]
    for n, source in enumerate(data):
        store.write(f"{n}", source).wait()
    assert len(store._stores) > 2 and chunks_of(store) == 9
    for n, source in enumerate(data):
        target = torch.empty_like(source)
        store.read(f"{n}", target).wait()
        assert torch.equal(source, target)
        store.free(f"{n}")
        store.free(f"{n}")
    assert is_empty(store)
    with pytest.raises(StateError, match="nothing is stored"):
        store.read("3", data[0])
    store.close()


def test_a_layer_by_itself_is_run_again_after_its_values_were_loaded(tmp_path: Path) -> None:
    """Values that are resident since they were loaded count as those of the forward pass, too."""
    plain, ours = make("gpt"), make("gpt")
    with prepared(ours, "recompute", tmp_path, host_memory=TIGHT):
        for model in (plain, ours):
            model.load_state_dict(make("gpt", seed=1).state_dict())
            last: Any = model.layers[-1]  # type: ignore[index,union-attr]
            last(torch.ones(1, 2, WIDTH, requires_grad=True)).square().sum().backward()
        assert_same_gradients(ours, plain)
