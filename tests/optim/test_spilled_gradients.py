"""Gradients that host memory has no room for: they go through the store, and a handle stands for
each. They must have the bits of plain torch.
"""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.leftovers import await_nothing_held
from torch import nn

import offload
from offload.core.budget import Budget
from offload.core.errors import CorruptionError, StateError, StoreError, StoreTimeout
from offload.core.metrics import Metrics
from offload.core.ticket import Ticket
from offload.optim.gradient_handle import GradientHandle
from offload.optim.gradient_source import GradientEdit
from offload.params import block_staging
from offload.params.block_staging import SpilledGradientReader
from offload.params.prepared import prepared_of
from offload.params.spill import SpillArea
from offload.params.spilled_gradient import SpilledGradientValues, StagedGradientRange
from offload.planning import planner
from offload.planning.layout import Chunk, Slice
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind

KI = 1024
BUDGET = 400 * KI
CHUNK = Chunk(0, "a chunk", ("exp_avg",), (Slice(0, 0, 256, 0),), 256)


class Net(nn.Module):
    """A model of six layers of 64 KiB and a scalar parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(128, 128)) for _ in range(6))
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks so small that a gradient is spilled in several ranges."""
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 1024)


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def backward(*models: nn.Module, step: int = 0) -> None:
    x = torch.randn(4, 128, generator=torch.Generator().manual_seed(step))
    for model in models:
        model(x).square().mean().backward()


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(grads(one), grads(other), strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[tuple[nn.Module, Any, nn.Module, Any]]:
    """Yield a plain model with its optimizer, and a prepared copy whose gradients are spilled."""
    torch.manual_seed(0)
    plain = Net()
    ours = copy.deepcopy(plain)
    model, optimizer = offload.prepare(ours, adamw(ours), host_memory=BUDGET, nvme=tmp_path)
    assert prepared_of(model).shares.spilled
    yield plain, adamw(plain), model, optimizer
    if prepared_of(model) is not None:
        optimizer.close()


def one_spilled(model: nn.Module) -> tuple[str, Any]:
    """Return the name of a matrix whose gradient is spilled, in several ranges, and the matrix."""
    return next(
        (name, param)
        for name, param in model.named_parameters()
        if isinstance(param.grad, GradientHandle) and param.dim() == 2
    )


def spilled_in(model: nn.Module) -> list[Any]:
    return [grad for grad in grads(model) if isinstance(grad, GradientHandle)]


# --- what is done to gradients --------------------------------------------------------------------


def clip_norm(model: nn.Module, _: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_twice(model: nn.Module, _: Any) -> Any:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def clip_foreach(model: nn.Module, _: Any) -> Any:
    return nn.utils.clip_grad_norm_(model.parameters(), 1e-3, foreach=True)


def clip_value(model: nn.Module, _: Any) -> Any:
    return nn.utils.clip_grad_value_(model.parameters(), 1e-5)


def unscale(model: nn.Module, optimizer: Any) -> Any:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))  # it has a scale from now on
    scaler.unscale_(optimizer)
    return torch.stack(list(scaler._found_inf_per_device(optimizer).values()))


def norms(model: nn.Module, _: Any) -> Any:
    each = [
        [g.norm(), g.data.norm(2), g.detach().norm(1), torch.linalg.vector_norm(g, 2.0)]
        for g in grads(model)
    ]
    each += [
        [g.norm(float("inf")), torch.norm(g), *torch._foreach_norm([g], 2)] for g in grads(model)
    ]
    return torch.stack([one for row in each for one in row])


def halve_views(model: nn.Module, _: Any) -> Any:
    for grad in grads(model):
        grad.view(-1).mul_(0.5)
        grad.flatten()[:3] += 1.0
        grad.data.mul_(3)


def halve_items(model: nn.Module, _: Any) -> Any:
    for grad in grads(model):
        if grad.dim():
            grad[0] = 7.0
            grad[-1] *= 2


def numpy_edit(model: nn.Module, _: Any) -> Any:
    for grad in grads(model):
        grad.numpy()[...] *= 2


def with_tensors(model: nn.Module, _: Any) -> Any:
    for grad in grads(model):
        grad.add_(torch.ones_like(grad), alpha=0.1).mul_(torch.full_like(grad, 0.3)).neg_()


def in_order(model: nn.Module, _: Any) -> Any:
    third = torch.tensor(1 / 3)
    for grad in grads(model):
        grad.mul_(third)
        grad /= 0.7
        grad *= 1.1
    third.zero_()  # the caller may change its tensor later


def foreach(model: nn.Module, _: Any) -> Any:
    torch._foreach_mul_(grads(model), 0.3)
    torch._foreach_add_(grads(model), 1e-3)
    torch._foreach_div_(grads(model), [2.0 + n for n in range(len(grads(model)))])


def zeroed(model: nn.Module, optimizer: Any) -> Any:
    optimizer.zero_grad(set_to_none=False)


def replaced(model: nn.Module, _: Any) -> Any:
    for number, param in enumerate(model.parameters()):
        param.grad = None if number % 3 == 0 else param.grad.clone() * 2


def looked_at(model: nn.Module, _: Any) -> Any:
    each = [
        [g.isfinite().all(), g.abs().max(), g.sum(), (g * 2 - g).mean(), g.view(-1)[0]]
        for g in grads(model)
    ]
    return torch.stack([one.float() for row in each for one in row])


def copied(model: nn.Module, _: Any) -> Any:
    def saved(grad: torch.Tensor) -> torch.Tensor:
        file = io.BytesIO()
        torch.save(grad, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    each = [
        [copy.deepcopy(g), g.clone(), g.to(torch.float64).float(), saved(g)] for g in grads(model)
    ]
    return torch.cat([one.reshape(-1) for row in each for one in row])


def in_inference(model: nn.Module, _: Any) -> Any:
    with torch.inference_mode():
        for grad in grads(model):
            grad.mul_(0.3).add_(1.0)


def foreach_named(model: nn.Module, _: Any) -> Any:
    each: Any = grads(model)
    torch._foreach_mul_(self=each, scalar=0.3)  # type: ignore[call-overload]
    torch._foreach_div_(each, scalars=[2.0 + n for n in range(len(each))])  # type: ignore[call-overload]
    torch._foreach_addcmul_(each, each, each, torch.arange(1.0, len(each) + 1))
    found = torch._foreach_norm(each, 2.0, dtype=torch.float64)
    return torch.stack(list(found))


def through_storage(model: nn.Module, _: Any) -> Any:
    for grad in grads(model):
        torch.empty(0).set_(grad.untyped_storage()).mul_(0.5)  # type: ignore[call-overload]
        grad.storage()[0] = 7.0


def through_dlpack(model: nn.Module, _: Any) -> Any:
    each = [torch.from_dlpack(grad) for grad in grads(model)]
    for one in each:
        one.mul_(0.5)
    del one
    each.pop()
    for other in each:
        other.add_(1e-3)


def refused(model: nn.Module, _: Any) -> Any:
    for grad in grads(model):
        for act in (
            lambda grad: grad.mul_(1j),
            lambda grad: grad.div_(2.0, rounding_mode="bad"),
            lambda grad: torch._foreach_mul_([grad], torch.ones(1)),
            lambda grad: torch._foreach_mul_([grad], [0.5, 0.5]),
        ):
            with pytest.raises(RuntimeError):
                act(grad)
        with pytest.raises(TypeError):
            grad.mul_()


ACTS = [
    clip_norm, clip_twice, clip_foreach, clip_value, unscale, norms, halve_views, halve_items,
    numpy_edit, with_tensors, in_order, foreach, zeroed, replaced, looked_at, copied, in_inference,
    foreach_named, through_storage, through_dlpack, refused,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("passes", [1, 2])
def test_every_operation_has_the_bits_of_plain_torch(both: Any, passes: int) -> None:
    plain, theirs, ours, mine = both
    for step, act in enumerate(ACTS):
        for micro in range(passes):
            backward(plain, ours, step=10 * step + micro)
        assert spilled_in(ours), act.__name__
        a, b = act(plain, theirs), act(ours, mine)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), act.__name__
        if step % 2:  # accumulate onto edited gradients
            backward(plain, ours, step=99)
        assert_same(plain, ours)
        theirs.step()
        mine.step()
        theirs.zero_grad()
        mine.zero_grad()
    mine.close()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(theirs.state[p]["exp_avg_sq"], mine.state[q]["exp_avg_sq"])


# --- gradients that other code holds --------------------------------------------------------------


def flat_buffer(model: nn.Module) -> torch.Tensor:
    """Make the gradients views of one tensor, and return it."""
    each = list(model.parameters())
    buffer = torch.zeros(sum(param.numel() for param in each))
    for param, part in zip(each, buffer.split([p.numel() for p in each]), strict=True):
        param.grad = part.view(param.shape)
    return buffer


def assert_steps_alike(plain: nn.Module, theirs: Any, ours: nn.Module, mine: Any) -> None:
    theirs.step()
    mine.step()
    state = ours.state_dict()
    for name, param in plain.named_parameters():
        assert torch.equal(param, state[name]), name


def test_views_of_a_buffer_stay_its_views(both: Any) -> None:
    plain, theirs, ours, mine = both
    buffers = flat_buffer(plain), flat_buffer(ours)
    for step in range(2):
        backward(plain, ours, step=step)
        assert torch.equal(*buffers)
        for buffer in buffers:
            buffer.mul_(0.5).clamp_(-1e-4, 1e-4)
        assert_steps_alike(plain, theirs, ours, mine)
        for buffer in buffers:
            buffer.zero_()
    assert "stays in memory" in offload.report(mine).fallbacks["gradients on disk"]
    mine.zero_grad()
    backward(ours)
    assert spilled_in(ours), "nobody shares the next ones"


def test_one_tensor_may_be_the_gradient_of_several(both: Any) -> None:
    plain, theirs, ours, mine = both
    for model in (plain, ours):
        shared = torch.zeros(128, 128)
        for param in model.parameters():
            if param.dim() == 2:
                param.grad = shared
        del shared
    backward(plain, ours)
    assert_same(plain, ours)
    assert_steps_alike(plain, theirs, ours, mine)


@pytest.mark.parametrize("keep", [lambda g: g, lambda g: g.untyped_storage(), lambda g: g.numpy()])
def test_what_an_earlier_hook_keeps_is_the_gradient(
    tmp_path: Path, keep: Callable[[torch.Tensor], Any]
) -> None:
    torch.manual_seed(0)
    plain = Net()
    ours: Any = copy.deepcopy(plain)
    kept: dict[nn.Module, list[Any]] = {plain: [], ours: []}
    for model in (plain, ours):
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(
                lambda param, model=model: kept[model].append(keep(param.grad))
            )
    theirs = adamw(plain)
    ours, mine = offload.prepare(ours, adamw(ours), host_memory=BUDGET, nvme=tmp_path)
    assert prepared_of(ours).shares.spilled
    backward(plain, ours)
    for each in kept.values():
        for one in each:
            memory = torch.as_tensor(one) if not isinstance(one, torch.UntypedStorage) else one
            if isinstance(memory, torch.UntypedStorage):
                memory = torch.empty(0).set_(memory)  # type: ignore[call-overload]
            memory.mul_(0.25).clamp_(-1e-5, 1e-5)
    assert_steps_alike(plain, theirs, ours, mine)
    mine.close()


def test_memory_that_torch_does_not_count_stays(both: Any) -> None:
    plain, theirs, ours, mine = both
    each = []
    for model in (plain, ours):
        array = torch.zeros(128, 128).numpy().copy()
        model.layers[0][0].weight.grad = torch.from_numpy(array)
        model.layers[1][0].weight.grad = torch.zeros(128, 128).share_memory_()
        each.append(array)
    backward(plain, ours)
    for array in each:
        array *= 0.25
    assert ours.layers[1][0].weight.grad.is_shared()
    assert_steps_alike(plain, theirs, ours, mine)


def test_norm_and_scale_cost_no_read(both: Any) -> None:
    plain, theirs, ours, mine = both

    def read_bytes() -> int:
        return offload.report(mine).counts.get("spilled_read_bytes", 0)

    for step in range(2):
        backward(plain, ours, step=step)
        before = read_bytes()
        nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        nn.utils.clip_grad_norm_(ours.parameters(), 1e-3)
        assert step == 0 or read_bytes() == before, "from the second step on norms are known"
        whole = sum(grad.nbytes for grad in spilled_in(ours))
        before = read_bytes()
        mine.step()
        assert read_bytes() - before == whole, "the update reads each once"
        theirs.step()
        mine.zero_grad()
        theirs.zero_grad()


def test_one_that_is_kept_stays_what_it_was(both: Any) -> None:
    plain, _, ours, mine = both
    backward(plain, ours)
    kept = list(zip(grads(plain), grads(ours), strict=True))
    views = [(a.view(-1)[1:], b.view(-1)[1:]) for a, b in kept]
    for model in (plain, ours):
        model.zero_grad()
    backward(plain, ours, step=1)
    assert_same(plain, ours)
    mine.close()
    for a, b in kept + views:
        assert torch.equal(a, b), "also when the model is an ordinary one again"
    assert all(type(grad) is torch.Tensor for grad in grads(ours))
    assert_same(plain, ours)


def test_a_fused_norm_is_that_of_gradients_in_memory(tmp_path: Path) -> None:
    found = []
    for host in (BUDGET, "64MiB"):
        torch.manual_seed(0)
        model = Net()
        optimizer: Any = adamw(model)
        model, optimizer = offload.prepare(
            model, optimizer, host_memory=host, nvme=tmp_path, max_grad_norm=1e-3
        )
        each = []
        for step in range(3):
            backward(model, step=step)
            if step == 2:
                backward(model, step=7)
            optimizer.step()
            each.append(optimizer.grad_norm)
            optimizer.zero_grad()
        optimizer.close()
        found.append((each, [param.clone() for param in model.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(map(torch.equal, found[0][1], found[1][1]))


def test_a_plan_made_anew_finds_the_gradients(both: Any) -> None:
    """A gradient is spilled in the ranges of the plan, which may change before the step."""
    plain, theirs, ours, mine = both
    for step in range(2):
        backward(plain, ours, step=step)
        planner.LEAST_CHUNK_NUMEL = 2048 >> step  # type: ignore[misc]
        prepared_of(ours).session.reopen()
        theirs.step()
        mine.step()
        theirs.zero_grad()
        mine.zero_grad()
    mine.close()
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


# --- what goes wrong ------------------------------------------------------------------------------


def swap_files(folder: Path) -> list[Path]:
    """List the open files of this process in a directory, which need not have a name."""
    each = [Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd")]
    return [one for one in each if _target(one).startswith(str(folder))]


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def damage(folder: Path, wanted: bytes, change: Callable[[bytes], bytes]) -> int:
    """Change these bytes in each open file of the directory that has them; return how many have."""
    found = 0
    for file in swap_files(folder):
        data = file.read_bytes()
        at = data.find(wanted)
        if at >= 0:
            with open(file, "r+b") as opened:
                opened.seek(at)
                opened.write(change(data[at : at + len(wanted)]))
                opened.flush()
                os.fsync(opened.fileno())
            found += 1
    return found


def flip(data: bytes) -> bytes:
    return bytes([data[0] ^ 4]) + data[1:]


@pytest.mark.parametrize("change", [flip, lambda data: bytes(len(data))], ids=["bit", "page"])
def test_damage_between_backward_and_step_is_noticed(
    both: Any, change: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    _, _, ours, mine = both
    backward(ours)
    name, param = one_spilled(ours)
    values = param.grad.clone().numpy().tobytes()  # read back: it is written
    assert damage(tmp_path, values[:4096], change) == 1
    with pytest.raises(CorruptionError, match=f"gradient .* of {name}"):
        mine.step()
    with pytest.raises(StateError):
        mine.state_dict()  # chunks are from different steps: none is returned


def test_damage_is_noticed_by_whoever_looks(both: Any, tmp_path: Path) -> None:
    plain, theirs, ours, mine = both
    backward(plain, ours)
    name, param = one_spilled(ours)
    grad = param.grad
    values = grad.clone().numpy().tobytes()
    assert damage(tmp_path, values[:4096], flip) == 1
    with pytest.raises(CorruptionError, match="what was read"):
        grad.sum()
    param.grad = plain.get_parameter(name).grad.clone()
    theirs.step()
    mine.step()
    mine.close()
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


@contextmanager
def failing_writes(model: nn.Module, code: int = errno.EIO) -> Iterator[None]:
    """Let all operations of the store fail from the first write of a gradient on, while the block
    runs.
    """
    store = prepared_of(model).store
    real = store.write

    def broken(name: str, *args: Any) -> Any:
        if name.startswith("gradient"):
            store.engine.inject(Fault(FaultKind.ERROR, forever=True, code=code))
        return real(name, *args)

    store.write = broken
    try:
        yield
    finally:
        store.engine.inject(Fault(FaultKind.NONE))
        del store.write


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_write_is_told_before_anything_changes(both: Any, code: int) -> None:
    """Backward raises the error if it waits for another write, otherwise `step` does."""
    plain, theirs, ours, mine = both
    backward(plain, ours)
    theirs.step()
    mine.step()
    theirs.zero_grad()
    mine.zero_grad()
    before = copy.deepcopy(mine.state_dict())
    with failing_writes(ours, code), pytest.raises(StoreError, match=errno.errorcode[code]):
        backward(ours)
        mine.step()
    mine.zero_grad()
    after = mine.state_dict()
    for key, state in before["state"].items():
        assert all(torch.equal(state[name], after["state"][key][name]) for name in state)
    backward(plain, ours)
    theirs.step()
    mine.step()
    mine.close()
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


def test_zeros_in_place_of_what_is_lost_are_a_gradient(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, theirs, ours, mine = both
    backward(ours)
    prepared_of(ours).engine.gradients.area.settle()

    def interrupted(self: StagedGradientRange) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StagedGradientRange, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backward(ours)
    with pytest.raises(StateError, match="zero_grad"):
        mine.step()
    mine.zero_grad(set_to_none=False)
    backward(plain, ours)
    assert_steps_alike(plain, theirs, ours, mine)


def test_an_edit_that_cannot_be_written_back_is_not_lost(both: Any) -> None:
    plain, theirs, ours, mine = both
    backward(plain, ours)
    name, param = one_spilled(ours)
    with failing_writes(ours), pytest.raises(StoreError, match="EIO"):
        param.grad.add_(torch.ones_like(param.grad))
    plain.get_parameter(name).grad.add_(torch.ones(128, 128))
    theirs.step()
    mine.step()
    mine.close()
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))


def test_no_map_of_a_file_has_gradients(both: Any, tmp_path: Path) -> None:
    _, _, ours, _ = both
    backward(ours)
    assert spilled_in(ours)
    maps = Path("/proc/self/maps").read_text().splitlines()
    assert not [line for line in maps if str(tmp_path) in line]


# --- staging memory -------------------------------------------------------------------------------


@contextmanager
def staging(folder: Path, nbytes: int = 8 * KI, **options: Any) -> Iterator[SpillArea]:
    """Open a spill area whose slots are one page each, while the block runs."""
    memory = torch.empty(nbytes, dtype=torch.uint8)
    store = DiskStore(folder, 4 << 20, **options)
    try:
        yield SpillArea(store, memory, 2 << 20, Metrics())
    finally:
        store.engine.inject(Fault(FaultKind.NONE))
        store.close()


def gradient(area: SpillArea, values: torch.Tensor) -> SpilledGradientValues:
    made = SpilledGradientValues.make(area, object(), "w", values)
    assert made is not None
    made.take(values)
    return made


def taken_of(area: SpillArea, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Return a set that collects the addresses of the slots taken from now on."""
    found: set[int] = set()
    real = area.take

    def take() -> Any:
        slot = real()
        found.add(slot.memory.data_ptr())
        return slot

    monkeypatch.setattr(area, "take", take)
    return found


@pytest.mark.parametrize("slot_bytes", [None, 8 * KI], ids=["as it was", "divided anew"])
def test_memory_that_a_lost_read_may_write_to_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slot_bytes: int | None
) -> None:
    with staging(tmp_path, 16 * KI if slot_bytes else 8 * KI, timeout_s=0.3) as area:
        assert isinstance(area.store, DiskStore)
        engine = area.store.engine
        older = gradient(area, torch.randn(2048))
        area.settle()
        engine.inject(Fault(FaultKind.LOST_COMPLETION, nth=1))
        with pytest.raises(StoreTimeout, match="no answer"):
            older.add(torch.ones(2048))
        engine.inject(Fault(FaultKind.NONE))
        abandoned = {one.memory.address for one in engine._abandoned.values()}
        assert abandoned
        if slot_bytes is not None:
            area.divide(slot_bytes)
        used, values = taken_of(area, monkeypatch), torch.randn(32 * KI)
        assert torch.equal(gradient(area, values).load(), values)
        size = area.slot_bytes
        assert not any(at <= one < at + size for at in used for one in abandoned)


def test_a_drive_that_answers_again_gives_staging_memory_back(tmp_path: Path) -> None:
    with staging(tmp_path, timeout_s=0.2) as area:
        assert isinstance(area.store, DiskStore)
        engine = area.store.engine
        engine.inject(Fault(FaultKind.DELAY, nth=1, forever=True, code=600))
        with pytest.raises(StoreTimeout):
            lost = gradient(area, torch.randn(2048))
            area.settle()
            del lost  # a write of a freed gradient fails without an error
        engine.inject(Fault(FaultKind.NONE))
        deadline_s = time.monotonic() + 30
        while engine.abandoned_bytes and time.monotonic() < deadline_s:
            time.sleep(0.05)
        values = torch.randn(8192)
        assert torch.equal(gradient(area, values).load(), values)


def test_what_was_never_started_loses_no_staging_memory(tmp_path: Path) -> None:
    with staging(tmp_path) as area:
        area.lose_after(area.slots[0], StoreTimeout("not started", errno=errno.ETIME))
        assert not area.slots[0].is_lost


def test_a_slot_that_the_update_takes_is_no_other_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with staging(tmp_path, 16 * KI) as area:
        values = gradient(area, torch.randn(256))
        area.settle()
        reader, real, found = SpilledGradientReader(area, {}), area.take, []
        reader.begin({0: values.part(0, 256)}, [CHUNK])
        other = threading.Thread(target=lambda: found.append(real()))

        def take() -> Any:
            slot = real()
            other.start()  # it comes while the slot is free no more, and not staged yet
            other.join(0.2)
            return slot

        monkeypatch.setattr(area, "take", take)
        (staged,) = reader.take(CHUNK).values()
        other.join()
        assert found[0] is not reader._slots[CHUNK.number]
        staged.wait()
        reader.end()


def test_a_block_that_another_thread_takes_in_has_come() -> None:
    class Block:
        """A block whose read is taken in as soon as it was looked at."""

        def __init__(self) -> None:
            self._reads: list[Ticket[None] | None] = [Ticket("a read"), None]

        @property
        def reading(self) -> Ticket[None] | None:
            return self._reads.pop(0) if len(self._reads) > 1 else self._reads[0]

    arrival: Any = block_staging._Arrival
    assert not arrival(Block(), None).done, "it was in flight when it was looked at"


def test_an_interrupted_addition_gives_its_slots_back(
    both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, ours, mine = both
    backward(ours)
    area = prepared_of(ours).engine.gradients.area
    area.settle()

    def interrupted(self: StagedGradientRange) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StagedGradientRange, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            backward(ours)
    for slot in area.slots:
        assert not (slot.is_lost or slot.is_staged or slot.is_written)
        assert all(ticket.done for ticket in slot.tickets)
    for param in ours.parameters():
        if isinstance(param.grad, GradientHandle) and param.grad.source.error is not None:
            param.grad = None
    assert area.has_free()
    mine.step()


def test_an_interrupted_backward_keeps_no_memory_of_what_is_closed(
    own_budget: Budget, tmp_path: Path
) -> None:
    """torch keeps the rest of its graph in a queue until the next backward."""
    model = Net()
    optimizer = adamw(model)
    offload.prepare(model, optimizer, host_memory=BUDGET, nvme=tmp_path)
    backward(model)

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    handle = model.layers[3][0].bias.register_post_accumulate_grad_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        backward(model)
    handle.remove()
    engine = weakref.ref(prepared_of(model).engine)
    optimizer.close()
    gc.collect()
    assert engine() is None
    assert own_budget.used_bytes == 0, own_budget.holders()


@pytest.mark.parametrize("closes", [False, True])
def test_gradients_keep_no_model_alive(closes: bool, own_budget: Budget, tmp_path: Path) -> None:
    """A parameter holds its gradient where Python's garbage collection cannot see it: a gradient
    that led back to parameters would keep all of them, in a notebook for ever.
    """
    model = Net()
    optimizer = adamw(model)
    offload.prepare(model, optimizer, host_memory=BUDGET, nvme=tmp_path)
    backward(model)
    assert spilled_in(model)
    held = model.layers[0][0].weight.grad if closes else None
    params = [weakref.ref(param) for param in model.parameters()]
    if closes:
        optimizer.close()
    del model, optimizer
    gc.collect()
    assert not any(param() is not None for param in params)
    await_nothing_held(own_budget)
    del held


def test_slots_in_use_are_not_handed_out_again(tmp_path: Path) -> None:
    """A range that an edit has zeroed needs no read, so its slot has no transfer in flight."""
    with staging(tmp_path) as area:
        zeros = gradient(area, torch.randn(16 * KI))
        zeros.edit(GradientEdit.of("zero_", (), {}))
        values = torch.randn(16 * KI)
        zeros.add(values)
        assert torch.equal(zeros.load(), values)


def test_smaller_slots_take_older_gradients(tmp_path: Path) -> None:
    with staging(tmp_path, 64 * KI) as area:
        area.divide(16 * KI)
        values = torch.randn(8 * KI)
        added, replaced = gradient(area, values), gradient(area, values)
        area.divide(4 * KI)
        added.add(values)
        replaced.take(values * 3)
        assert torch.equal(added.load(), values + values)
        assert torch.equal(replaced.load(), values * 3)
