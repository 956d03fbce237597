"""`offload.prepare` as users call it: other code can still use the model as a plain one."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_model
from support.loops import chosen
from support.models import batch, loss_of, make
from support.training import step
from torch import nn

import offload
from offload import CapacityError, ConfigError, StateError, kernels
from offload.params import host_cache
from offload.params import units as units_module
from offload.params.placeholder import is_offloaded
from offload.params.prepared import prepared_of
from offload.planning.unit import enclosing

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]
KI = 1 << 10


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units_module, "LARGE_BYTES", 2048)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)


def with_optimizer(model: nn.Module) -> tuple[nn.Module, torch.optim.AdamW]:
    return model, adamw(model)


def tight(folder: Path) -> dict[str, Any]:
    """Return a budget in which not all parameters have room."""
    return {"host_memory": 120 * KI, "nvme": folder}


@pytest.fixture
def gpt(tmp_path: Path) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a prepared model after a step, with most of it evicted."""
    model = make("gpt")
    model, optimizer = offload.prepare(model, adamw(model), **tight(tmp_path))
    step(model, optimizer, 0)
    assert any(map(is_offloaded, model.parameters()))
    yield model, optimizer
    offload.close(model)


def plain_after(*seeds: int) -> tuple[nn.Module, Any]:
    model = make("gpt")
    optimizer = adamw(model)
    for seed in seeds:
        step(model, optimizer, seed)
    return model, optimizer


# --- calls ----------------------------------------------------------------------------------------


@pytest.mark.quick
def test_the_same_objects_come_back_and_train_the_same(tmp_path: Path) -> None:
    plain, theirs = plain_after()
    ours = make("gpt")
    mine = adamw(ours)
    scheduler = torch.optim.lr_scheduler.StepLR(mine, 2, 0.5)
    other = torch.optim.lr_scheduler.StepLR(theirs, 2, 0.5)
    assert offload.prepare(ours, mine, **tight(tmp_path)) == (ours, mine)
    for seed in range(5):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
        scheduler.step()
        other.step()
    mine.close()
    assert prepared_of(ours) is None and type(mine) is torch.optim.AdamW
    assert_same_model(ours, plain)
    for seed in range(5, 7):
        assert step(plain, theirs, seed) == step(ours, mine, seed)


def test_state_that_is_there_goes_on(tmp_path: Path) -> None:
    plain, theirs = plain_after(0, 1)
    ours, mine = plain_after(0, 1)
    offload.prepare(ours, mine, **tight(tmp_path))
    for seed in (2, 3):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
    mine.close()
    assert_same_model(ours, plain)


def test_refusals_change_nothing(tmp_path: Path) -> None:
    model = make("gpt")
    optimizer = adamw(model)
    addresses = [p.data_ptr() for p in model.parameters()]
    calls: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (ConfigError, "expected a torch.nn.Module, got int", (3,), {}),
        (ConfigError, "expected a torch.optim.Optimizer", (model, model), {}),
        (ConfigError, "no such field", (model,), {"host_memry": 3}),
        (ConfigError, "not a directory", (model,), {"nvme": tmp_path / "no"}),
        (ConfigError, "units: expected", (model,), {"units": [3]}),
        (
            CapacityError,
            "the least that works",
            (model, optimizer),
            {"host_memory": 9 * KI, "nvme": tmp_path},
        ),
    ]
    for kind, text, arguments, options in calls:
        with pytest.raises(kind, match=text):
            offload.prepare(*arguments, **options)
    with pytest.raises(CapacityError, match=r"raise host_memory, or give nvme="):
        offload.prepare(model, optimizer, host_memory=190 * KI)
    assert [p.data_ptr() for p in model.parameters()] == addresses
    assert type(optimizer) is torch.optim.AdamW and prepared_of(model) is None
    offload.prepare(model, optimizer)
    with pytest.raises(ConfigError, match="is prepared already"):
        offload.prepare(model, nvme=tmp_path)
    with pytest.raises(ConfigError, match="is prepared already"):
        offload.prepare(nn.Sequential(model), nvme=tmp_path)
    offload.close(model)
    offload.close(model)


def test_a_failure_on_the_way_leaves_the_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.params.residency import Residency

    taken = []
    real = Residency.take_in

    def fail_third(self: Any, block: Any) -> None:
        taken.append(block)
        if len(taken) == 3:
            raise OSError("the third")
        real(self, block)

    model, plain = make("gpt"), make("gpt")
    with monkeypatch.context() as patch:
        patch.setattr(Residency, "take_in", fail_third)
        with pytest.raises(OSError, match="the third"):
            offload.prepare(model, adamw(model), **tight(tmp_path))
    assert_same_model(model, plain)
    loss_of(model, batch(0)).backward()


def test_nothing_is_looked_over_where_everything_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all, no step reads all parameters only to look for external edits, nor asks
    which units come next.
    """
    looks: list[int] = []
    real, ahead = kernels.checksum, host_cache.look_ahead

    def counted(memory: torch.Tensor) -> int:
        looks.append(memory.nbytes)
        return real(memory)

    def counted_ahead(*arguments: Any) -> Any:
        looks.append(0)
        return ahead(*arguments)

    monkeypatch.setattr(kernels, "checksum", counted)
    monkeypatch.setattr(host_cache, "look_ahead", counted_ahead)
    for options, is_looked_over in (({}, False), (tight(tmp_path), True)):
        looks.clear()
        model, optimizer = offload.prepare(*with_optimizer(make("gpt")), **options)
        for seed in range(3):
            step(model, optimizer, seed)
        assert (0 in looks, any(looks)) == (is_looked_over, is_looked_over)
        offload.close(model)


# --- parameters -----------------------------------------------------------------------------------


def test_resident_parameters_are_ordinary_ones(gpt: tuple[nn.Module, Any]) -> None:
    model, _optimizer = gpt
    plain, _theirs = plain_after(0)
    for name in ("embedding", "layers.0", "layers.3", "layers.2.up", "norm", "head"):
        module, other = model.get_submodule(name), plain.get_submodule(name)
        with offload.resident(module):
            for p, q in zip(module.parameters(), other.parameters(), strict=True):
                assert torch.equal(p, q) and p.norm() == q.norm()
    away = next(p for p in model.parameters() if is_offloaded(p))
    for use in (away.norm, lambda: away + 1, lambda: away.data, away.detach, away.tolist):
        with pytest.raises(StateError, match=r"offload\.resident"):
            use()
    assert away.shape and away.dtype == torch.float32 and away.device.type == "cpu"


EDITS = {
    "in place": lambda p: p.mul_(1.5),
    "data": lambda p: p.data.mul_(1.5),
    "rebound": lambda p: setattr(p, "data", p.data * 1.5),
    "numpy": lambda p: p.detach().numpy().__imul__(1.5),
}


@pytest.mark.parametrize("how", EDITS)
@pytest.mark.parametrize("inside", [True, False])
def test_edits_are_kept(gpt: tuple[nn.Module, Any], how: str, inside: bool) -> None:
    """Edits inside `resident` are kept, and edits of parameters that happen to be in memory."""
    model, optimizer = gpt
    plain, theirs = plain_after(0)
    for seed in chosen(test=(1, 2), torture=(1, 2, 3)):
        number = seed % 4
        layer, other = model.layers[number], plain.layers[number]  # type: ignore[index]
        with torch.no_grad():
            if inside:
                with offload.resident(layer):
                    for p, q in zip(layer.parameters(), other.parameters(), strict=True):
                        EDITS[how](p)
                        EDITS[how](q)
            else:
                assert torch.equal(model(batch(8)), plain(batch(8)))
                edited = 0
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    if not is_offloaded(p):
                        EDITS[how](p)
                        EDITS[how](q)
                        edited += 1
                assert edited
            assert torch.equal(model(batch(9)), plain(batch(9)))
        assert step(model, optimizer, seed) == step(plain, theirs, seed)
    assert_same_model(model, plain)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda p: p.data.bfloat16(), r"torch.bfloat16 \(\d+, \d+\)"),
        (lambda p: p.data.view(-1), r"torch.float32 \(\d+,\)"),  # at the same address
        (lambda p: p.data.view(torch.complex64), r"torch.complex64"),
    ],
)
def test_what_does_not_fit_the_place_is_refused(
    gpt: tuple[nn.Module, Any], change: Any, got: str
) -> None:
    model, optimizer = gpt
    plain, theirs = plain_after(0)
    weight = model.layers[1].up.weight  # type: ignore[index,union-attr]
    with offload.resident(model.layers[1]):  # type: ignore[index]
        kept = weight.data.clone()  # type: ignore[union-attr]
    words = rf"layers.1.up.weight: expected torch.float32 .* {got}"
    with pytest.raises(StateError, match=words), offload.resident(model.layers[1]):  # type: ignore[index]
        weight.data = change(weight)  # type: ignore[union-attr]
    weight.data = kept  # type: ignore[union-attr]
    assert step(model, optimizer, 1) == step(plain, theirs, 1)
    assert_same_model(model, plain)


def test_too_much_at_once_is_refused(gpt: tuple[nn.Module, Any]) -> None:
    model, optimizer = gpt
    with pytest.raises(CapacityError), offload.resident(model):
        pass
    plain, theirs = plain_after(0)
    assert step(model, optimizer, 1) == step(plain, theirs, 1)


# --- what other code does with a model ------------------------------------------------------------


def test_state_dict_is_that_of_the_plain_model(gpt: tuple[nn.Module, Any]) -> None:
    model, optimizer = gpt
    plain, _theirs = plain_after(0)
    saved = model.state_dict()
    assert list(saved) == list(plain.state_dict())
    assert saved["head.weight"] is saved["embedding.weight"]
    assert_same_model(model, plain)
    before = {name: value.clone() for name, value in saved.items()}
    step(model, optimizer, 1)
    assert all(torch.equal(saved[name], before[name]) for name in before), "copies"
    part = model.layers[2].state_dict(prefix="x.")  # type: ignore[index,operator,union-attr]
    assert set(part) == {f"x.{name}" for name in plain.layers[2].state_dict()}  # type: ignore[index,operator,union-attr]


def test_load_state_dict(gpt: tuple[nn.Module, Any]) -> None:
    model, optimizer = gpt
    plain, theirs = plain_after(5, 6)
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    assert_same_model(model, plain)
    optimizer.load_state_dict(theirs.state_dict())
    assert step(model, optimizer, 7) == step(plain, theirs, 7)
    with pytest.raises(RuntimeError, match=r"Missing key|size mismatch"):
        model.load_state_dict({"embedding.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match="assign=True"):
        model.load_state_dict(plain.state_dict(), assign=True)
    assert_same_model(model, plain)
    assert step(model, optimizer, 8) == step(plain, theirs, 8)


def test_loading_between_forward_and_backward_is_refused(gpt: tuple[nn.Module, Any]) -> None:
    model, _ = gpt
    loss = loss_of(model, batch(1))
    model.load_state_dict(make("gpt", seed=3).state_dict())
    with pytest.raises(StateError, match="have changed since the forward pass"):
        loss.backward()
    assert_same_model(model, make("gpt", seed=3))
    model.zero_grad()  # backward had set some


def test_to_where_it_is_does_nothing(gpt: tuple[nn.Module, Any]) -> None:
    model, optimizer = gpt
    plain, theirs = plain_after(0)
    assert model.to("cpu") is model and model.float() is model and model.cpu() is model
    model.layers[1].to("cpu", torch.float32)  # type: ignore[index,union-attr]
    for change in (model.half, model.bfloat16, model.share_memory, lambda: model.to("meta")):
        with pytest.raises(ConfigError, match=r"offload\.close"):
            change()
    with pytest.raises(ConfigError, match=r"offload\.close"):
        model.layers[1].half()  # type: ignore[index,operator,union-attr]
    assert step(model, optimizer, 1) == step(plain, theirs, 1)


def test_any_text_may_be_a_name(tmp_path: Path) -> None:
    model: Any = nn.Sequential()
    model.add_module("a lone surrogate \udc80", nn.Linear(4, 4))
    model, optimizer = offload.prepare(model, torch.optim.AdamW(model.parameters()))
    with optimizer:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        offload.report(model).save_trace(tmp_path / "run.json")


def test_buffers_move_as_torch_moves_them(tmp_path: Path) -> None:
    model = offload.prepare(make("pictures"), nvme=tmp_path)
    model.apply(lambda module: module)
    assert model.to("cpu") is model
    with pytest.raises(ConfigError):
        model.double()
    offload.close(model)


def test_copies_are_refused(gpt: tuple[nn.Module, Any]) -> None:
    model, _ = gpt
    for thing in (model, model.layers[0], model.head):  # type: ignore[index]
        with pytest.raises(StateError, match="cannot be"):
            copy.deepcopy(thing)
        with pytest.raises(StateError, match="cannot be"):
            pickle.dumps(thing)


def test_two_models_share_one_budget(tmp_path: Path) -> None:
    """A policy that learns, and a reference that does not."""
    policy, reference = make("gpt"), make("gpt").requires_grad_(False)
    optimizer = adamw(policy)
    offload.prepare(policy, optimizer, **tight(tmp_path))
    offload.prepare(reference, host_memory=152 * KI, nvme=tmp_path)
    plain, theirs = plain_after()
    fixed = make("gpt")
    for seed in range(4):
        losses = []
        for learner, teacher, stepper in ((plain, fixed, theirs), (policy, reference, optimizer)):
            with torch.no_grad():
                wanted = teacher(batch(seed))
            loss = (learner(batch(seed)) - wanted).square().mean() + loss_of(learner, batch(seed))
            loss.backward()
            stepper.step()
            stepper.zero_grad()
            losses.append(float(loss.detach()))
        assert losses[0] == losses[1]
    offload.close(reference)
    offload.close(policy)
    assert_same_model(policy, plain)


def test_with_room_for_all_autograd_is_left_alone(tmp_path: Path) -> None:
    """No saved tensor is packed; torch's version counters notice that parameters have changed."""
    (plain, theirs), (model, optimizer) = plain_after(), plain_after()
    offload.prepare(model, optimizer, host_memory="64MiB", nvme=tmp_path)
    for seed in range(3):
        assert step(plain, theirs, seed) == step(model, optimizer, seed)
    loss = loss_of(model, batch(3))
    kept = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert "Reference" not in repr(getattr(kept, "_raw_saved_self", ""))
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model.zero_grad()
    del loss, kept
    offload.close(model)


def test_the_plan_says_what_will_be_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("gpt")
    optimizer = adamw(model)
    whole = offload.plan(model, optimizer)
    assert "all of it fits in host memory" in str(whole) and whole.away_bytes == 0
    told = offload.plan(model, optimizer, **tight(tmp_path))
    assert told.away_bytes > 0 and "comes from disk" in str(told)
    assert told.shares.total <= 120 * KI and told.disk_room_bytes > told.state.disk_bytes > 0
    offload.prepare(model, optimizer, **tight(tmp_path))
    made = prepared_of(model)
    assert made is not None and made.prepare_plan.plan == told, "prepare does what plan has said"
    with pytest.raises(ConfigError, match="is prepared already"):
        offload.plan(model)
    offload.close(model)
    least = offload.plan(model, optimizer, host_memory=90 * KI, nvme=tmp_path)
    assert least.shares.spilled and "on disk for want of it" in str(least)
    assert least.disk_room_bytes > least.shares.gradients_on_disk + least.state.disk_bytes
    assert least.step_written_bytes > least.shares.gradients_on_disk > 0
    with pytest.raises(CapacityError, match="the least that works"):
        offload.plan(model, optimizer, host_memory=9 * KI, nvme=tmp_path)
    monkeypatch.setattr("offload.planning.planner.CHUNK_NUMEL", 4 << 20)
    with torch.device("meta"):
        big = nn.Sequential(*(nn.Sequential(nn.Linear(4096, 4096)) for _ in range(40)))
    told = offload.plan(big, torch.optim.AdamW(big.parameters()), host_memory="1GiB", nvme=tmp_path)
    assert told.param_bytes > 2**31 and told.step_written_bytes > 2 * 2**31
    with pytest.raises(ConfigError, match="expected an optimizer or a Config, got int"):
        offload.plan(model, 3)
    with pytest.raises(ConfigError, match="got two"):
        offload.plan(optimizer, optimizer)


def test_state_without_masters_goes_on(tmp_path: Path) -> None:
    """The state of a plain optimizer for 16-bit parameters has no master: the parameter becomes it,
    even if it is evicted already.
    """
    plain, ours = (make("gpt", dtype=torch.bfloat16) for _ in range(2))
    theirs, mine = adamw(plain), adamw(ours)
    for model, optimizer in ((plain, theirs), (ours, mine)):
        step(model, optimizer, 0)
    saved = theirs.state_dict()
    offload.wrap(theirs)
    held = offload.report(theirs).plan.arena_bytes
    offload.prepare(ours, mine, host_memory=held + 110 * KI, nvme=tmp_path)
    assert any(map(is_offloaded, ours.parameters()))
    for seed in (1, 2):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
    theirs.load_state_dict(saved)
    mine.load_state_dict(saved)
    for seed in (3, 4):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
    mine.close()
    theirs.close()
    assert_same_model(ours, plain)


# --- what goes wrong ------------------------------------------------------------------------------


class Interrupted(nn.Module):
    """A layer that raises `KeyboardInterrupt` after its inner one while `now` is set."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.now = inner, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if self.now:
            raise KeyboardInterrupt
        return x


def test_an_interrupt_in_forward_leaves_the_model_usable(tmp_path: Path) -> None:
    """torch calls no hook when `KeyboardInterrupt` ends a forward pass."""
    models = [make("gpt") for _ in range(2)]
    for model in models:
        model.layers[2] = Interrupted(model.layers[2])  # type: ignore[index,operator]
    (plain, ours), (theirs, mine) = models, map(adamw, models)
    offload.prepare(ours, mine, host_memory=122 * KI, nvme=tmp_path)
    for seed in range(4):
        assert step(plain, theirs, seed) == step(ours, mine, seed)
        ours.layers[2].now = True  # type: ignore[index,union-attr]
        with pytest.raises(KeyboardInterrupt):
            ours(batch(seed))
        ours.layers[2].now = False  # type: ignore[index,union-attr]
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        with torch.no_grad():
            for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
                if not is_offloaded(q):
                    p.data.mul_(1.01)
                    q.data.mul_(1.01)
        assert_same_model(ours, plain)
    offload.close(ours)
    assert_same_model(ours, plain)


def test_threads_do_not_disturb_each_other(gpt: tuple[nn.Module, Any]) -> None:
    model, optimizer = gpt
    plain, theirs = plain_after(0)
    expected = [plain(batch(seed)).detach() for seed in range(6)]

    def evaluate(seed: int) -> bool:
        for _ in range(50):
            try:
                with torch.no_grad():
                    return torch.equal(model(batch(seed)), expected[seed])
            except CapacityError:  # other threads run: no room for two layers at once
                continue
        return True

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(evaluate, range(6)))
    made = prepared_of(model)
    assert made is not None and made.engine is not None
    kept = enclosing(made.units)
    assert all(b.pins == (b.number in kept) for b in made.engine.residency.blocks)
    assert step(model, optimizer, 1) == step(plain, theirs, 1)
    assert_same_model(model, plain)


def test_a_model_that_nobody_closes_gives_its_budget_back(tmp_path: Path, own_budget: Any) -> None:
    for activations in ("keep", "offload"):
        model = make("gpt")
        offload.prepare(model, adamw(model), **tight(tmp_path), activations=activations)
        assert own_budget.used_bytes > 0
        del model
        gc.collect()
        assert own_budget.used_bytes == 0


def test_the_least_that_works_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.planning.planner.CHUNK_NUMEL", 4 << 20)
    plain, theirs = plain_after()
    model = make("gpt")
    optimizer = adamw(model)
    with pytest.raises(CapacityError) as refused:
        offload.prepare(model, optimizer, host_memory=9 * KI, nvme=tmp_path)
    least = int(str(refused.value).split("about ")[1].split()[0])
    offload.prepare(model, optimizer, host_memory=least, nvme=tmp_path)
    for seed in range(2):
        assert step(plain, theirs, seed) == step(model, optimizer, seed)
    offload.close(model)


def test_parameters_that_were_not_prepared_are_refused(tmp_path: Path) -> None:
    model = make("gpt")
    model.layers[1].requires_grad_(False)  # type: ignore[index,union-attr]
    optimizer = adamw(model)
    offload.prepare(model, optimizer, **tight(tmp_path))
    step(model, optimizer, 0)
    with pytest.raises(ConfigError, match="is not of the model that was prepared"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.layers[1].requires_grad_(True)  # type: ignore[index,union-attr]
    loss_of(model, batch(1)).backward()
    with pytest.raises(
        CapacityError, match="were frozen, or in no optimizer, when the model was prepared"
    ):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.zero_grad()
    offload.close(model)


def test_views_that_somebody_holds_are_named(tmp_path: Path) -> None:
    model = make("gpt")
    offload.prepare(model, adamw(model), host_memory=106 * KI, nvme=tmp_path)
    held = []
    handles = [
        layer.register_forward_hook(lambda layer, *_: held.append(layer.up.weight.data))
        for layer in model.layers  # type: ignore[union-attr]
    ]
    with pytest.raises(CapacityError, match=r"holds views of .* layers\.\d"):
        model(batch(0))
    held.clear()
    for handle in handles:
        handle.remove()
    plain, _ = plain_after()
    assert torch.equal(model(batch(0)), plain(batch(0)))
    offload.close(model)


@pytest.mark.filterwarnings("ignore")  # warnings of the compiler itself
def test_a_compiled_model(tmp_path: Path) -> None:
    plain, theirs = plain_after()
    model, optimizer = plain_after()
    offload.prepare(model, optimizer, **tight(tmp_path))
    compiled = torch.compile(model, backend="eager")
    for seed in range(3):
        assert step(plain, theirs, seed) == step(compiled, optimizer, seed)
    torch._dynamo.reset()
    offload.close(model)
    assert_same_model(model, plain)


class Turned(nn.Module):
    """A layer that uses its weight as a complex one, conjugated, as state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, 2) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = torch.view_as_complex(self.weight).conj()
        return (x.to(weight.dtype) @ weight).abs() + x @ weight.imag


class Decaying(nn.Module):
    """A layer that changes its weight in place whenever it runs, before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return (x @ self.weight).tanh()


@pytest.mark.parametrize("kind", [Turned, Decaying])
def test_layers_that_treat_their_weights_in_unusual_ways(kind: Any, tmp_path: Path) -> None:
    results = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(*(kind() for _ in range(6)))
        optimizer = adamw(model)
        if is_prepared:
            budget = (96 if kind is Turned else 52) * KI
            offload.prepare(model, optimizer, host_memory=budget, nvme=tmp_path, units=(kind,))
        losses = []
        for seed in range(3):
            torch.manual_seed(seed)
            loss = model(torch.randn(4, 32)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        if is_prepared:
            assert any(map(is_offloaded, model.parameters())), "not all of it has room"
            offload.close(model)
        results.append([*losses, *(p.detach().clone() for p in model.parameters())])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def swap(first: nn.Linear, second: nn.Linear) -> None:
    first.weight.data, second.weight.data = second.weight.data, first.weight.data


def turn(first: nn.Linear, second: nn.Linear) -> None:
    first.weight.data = first.weight.data.t()


def repeat(first: nn.Linear, second: nn.Linear) -> None:
    first.weight.data = first.weight.data[:1].expand(32, 32)


@pytest.mark.parametrize("change", [swap, turn, repeat])
@pytest.mark.parametrize("budget", [24 * KI, 1 << 20])
@pytest.mark.parametrize("units", [None, (nn.Linear,)])
def test_values_from_other_places_in_the_same_memory(
    change: Any, budget: int, units: Any, tmp_path: Path
) -> None:
    results = []
    for is_prepared in (False, True):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
        if is_prepared:
            offload.prepare(layers, host_memory=budget, nvme=tmp_path, units=units)
            with offload.resident(layers[1]), offload.resident(layers[2]):
                change(layers[1], layers[2])
            layers(torch.ones(1, 32))
            offload.close(layers)
        else:
            change(layers[1], layers[2])
        results.append([p.detach().clone() for p in layers.parameters()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_that_cannot_begin_holds_nothing(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    offload.prepare(layers, host_memory=16 * KI, nvme=tmp_path, units=(nn.Linear,))
    layers(torch.ones(1, 32))
    with pytest.raises(StateError, match="convert the values"), offload.resident(layers[1]):
        layers[1].weight.data = torch.ones(3, 3)
    for _ in range(2):
        with pytest.raises(StateError, match="convert the values"):
            layers[0](torch.ones(1, 32))
    made = prepared_of(layers)
    assert made is not None and made.engine is not None
    assert [block.pins for block in made.engine.residency.blocks] == [0] * 4
    layers[1].weight.data = torch.ones(32, 32)
    del made
    layers(torch.ones(1, 32))
    offload.close(layers)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + torch.add(self.layers[0].weight, self.layers[3].weight).sum()


@pytest.mark.parametrize(("budget", "works"), [(16 * KI, True), (8 * KI, False)])
def test_one_operation_with_the_weights_of_two_units(
    budget: int, works: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = Sum()
    expected = model(torch.ones(1, 32)).detach()
    offload.prepare(model, host_memory=budget, nvme=tmp_path, units=(nn.Linear,))
    with torch.no_grad():
        if works:
            assert torch.equal(model(torch.ones(1, 32)), expected)
        else:
            with pytest.raises(CapacityError):
                model(torch.ones(1, 32))
    offload.close(model)
    assert torch.equal(model(torch.ones(1, 32)), expected)
