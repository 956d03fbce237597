"""A prepared model and its optimizer: the bits of plain training, with any share of memory."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import pytest
import torch
from support import children
from support.loops import chosen
from support.models import MODELS, batch, make
from support.training import train_in_parts
from torch import nn

import offload
from offload.core.budget import Budget
from offload.core.config import Config
from offload.core.errors import CapacityError, ConfigError
from offload.optim.gradient_handle import GradientHandle
from offload.optim.tiers import is_chunk_key
from offload.params import units
from offload.params.prepare_plan import PreparePlan
from offload.params.prepared import Prepared
from offload.params.units import find_units
from offload.planning import planner
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.shares import Shares, share_out
from offload.planning.unit import Unit, UnitSizes

KI = 1024
STEPS = chosen(test=4, torture=10)
Make = Callable[[nn.Module], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, own_budget: Budget) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(planner, "LEAST_CHUNK_NUMEL", 64)


def shared_out(
    found: Sequence[Unit],
    gradients: Sequence[int],
    state_bytes: int,
    host_bytes: int | None,
    activations: str = "keep",
    least_state_bytes: int = 0,
) -> Shares:
    """Divide the budget among units, gradients and as much state as is said."""
    facts = TrainingFacts(is_prepared=True, units=UnitSizes.of(found), gradients=tuple(gradients))
    known = {"state_bytes": state_bytes, "least_state_bytes": least_state_bytes}
    vars(facts).update(known, least_spill_bytes=0)  # instead of those of parameters
    return share_out(facts, Budgets(host_bytes, activations=activations))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def opened(model: nn.Module, optimizer: Any, folder: Path | str, nbytes: int | None) -> Prepared:
    prepare_plan = PreparePlan(model, optimizer, Config.of(None, nvme=folder), nbytes)
    return Prepared(prepare_plan, model, optimizer)


def least_bytes(name: str, dtype: torch.dtype, make_one: Make | None) -> int:
    model = make(name, dtype=dtype)
    if make_one is None:
        model.requires_grad_(False)
    with pytest.raises(CapacityError, match="the least that works") as refused:
        opened(model, make_one(model) if make_one else None, gettempdir(), 4096)
    return int(str(refused.value).split("about ")[1].split()[0])


def compare(
    name: str,
    dtype: torch.dtype,
    folder: Path,
    host_bytes: int,
    make_one: Make,
    own_budget: Budget,
) -> Any:
    """Assert that a prepared model has the bits of plain training, which has exact masters for
    16-bit parameters; return the prepared model's counts.
    """
    plain, ours = make(name, dtype=dtype), make(name, dtype=dtype)
    theirs, mine = offload.wrap(make_one(plain)), make_one(ours)
    before = own_budget.used_bytes
    prepared = opened(ours, mine, folder, host_bytes)
    assert train_in_parts(plain, theirs, STEPS) == train_in_parts(ours, mine, STEPS)
    counts = dict(prepared.metrics.snapshot().counts)
    assert own_budget.used_bytes - before <= host_bytes
    assert "gradients_outside_of_their_place" not in counts
    prepared.close()
    theirs.close()
    for (what, p), q in zip(plain.named_parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q), what
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert set(theirs.state[p]) == set(mine.state[q])
        for field, value in theirs.state[p].items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(mine.state[q][field]))
    return counts


@pytest.mark.quick
@pytest.mark.parametrize("name", chosen(test=[*MODELS], torture=[*MODELS], quick=["gpt"]))
def test_bits_with_little_memory(name: str, tmp_path: Path, own_budget: Budget) -> None:
    least = least_bytes(name, torch.float32, adamw)
    counts = compare(name, torch.float32, tmp_path, least, adamw, own_budget)
    assert counts.get("disk_read_bytes", 0) > 0 or name == "pictures"  # its least holds all


ANY_MEMORY = list(itertools.product([torch.float32, torch.bfloat16], [1.0, 1.2, 1.5, 20.0]))
# The least is in the test above for float32; of the rest each share once.
SOME_MEMORY = [ANY_MEMORY[number] for number in (1, 3, 4, 6)]


@pytest.mark.parametrize(("dtype", "times"), chosen(test=SOME_MEMORY, torture=ANY_MEMORY))
def test_bits_with_any_memory(
    dtype: torch.dtype, times: float, tmp_path: Path, own_budget: Budget
) -> None:
    budget = int(times * least_bytes("gpt", dtype, adamw))
    counts = compare("gpt", dtype, tmp_path, budget, adamw, own_budget)
    assert ("disk_read_bytes" in counts) is (times < 20)


@pytest.mark.parametrize(
    "make_one",
    [
        lambda model: torch.optim.SGD(model.parameters(), 0.1),
        lambda model: torch.optim.SGD(model.parameters(), 0.1, momentum=0.9),
        lambda model: offload.Lion(model.parameters(), 1e-3),
        lambda model: torch.optim.RMSprop(model.parameters(), 1e-3),
        lambda model: torch.optim.AdamW(
            [{"params": [p]} for p in reversed(list(model.parameters()))], lr=1e-2
        ),
    ],
    ids=["sgd", "momentum", "lion", "rmsprop", "groups"],
)
def test_bits_with_other_optimizers(make_one: Make, tmp_path: Path, own_budget: Budget) -> None:
    least = least_bytes("gpt", torch.bfloat16, make_one)
    compare("gpt", torch.bfloat16, tmp_path, least, make_one, own_budget)


def test_frozen_parameters_are_never_written(tmp_path: Path) -> None:
    model = make("gpt")
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    prepared = opened(model, optimizer, tmp_path, 140 * KI)
    train_in_parts(model, optimizer, 2)
    before = prepared.store.stats()
    train_in_parts(model, optimizer, 3)
    after = prepared.store.stats()
    adapters = sum(p.numel() for p in trained)
    assert after.written_bytes - before.written_bytes <= 3 * adapters * 16
    prepared.close()


def test_a_new_plan_leaves_no_state_behind(tmp_path: Path) -> None:
    model = make("gpt")
    optimizer = adamw(model)
    least = least_bytes("gpt", torch.float32, adamw)
    prepared = opened(model, optimizer, tmp_path, least)
    train_in_parts(model, optimizer, 1)
    before = prepared.store.stats()
    prepared.session.reopen()
    after = prepared.store.stats()
    waiting = prepared.session.plan.buffers  # chunks in them are not on disk, before or after
    assert abs(after.chunks - before.chunks) <= waiting
    chunks = [name for name in prepared.store.names() if is_chunk_key(name)]
    assert len(chunks) <= len(prepared.session.plan.chunks)
    prepared.session.close()
    assert all(name.startswith(("parameters", "gradient ")) for name in prepared.store.names())
    prepared.engine.close()
    prepared.store.close()


def test_without_an_optimizer(tmp_path: Path) -> None:
    plain, ours = make("encoder"), make("encoder")
    for model in (plain, ours):
        model.requires_grad_(False)
    least = least_bytes("encoder", torch.float32, None)
    prepared = opened(ours, None, tmp_path, least)
    for step in range(3):
        assert torch.equal(plain(batch(step)), ours(batch(step)))
    assert prepared.store.stats().read_bytes > 0
    prepared.close()
    assert all(
        torch.equal(p, q) for p, q in zip(plain.parameters(), ours.parameters(), strict=True)
    )


def test_what_cannot_work_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    found = find_units(make("gpt"))
    with pytest.raises(
        CapacityError, match=r"the least that works is about (\d+) bytes"
    ) as refused:
        shared_out(found, [40 * KI], 80 * KI, 50 * KI, least_state_bytes=72 * KI)
    least = int(str(refused.value).split("about ")[1].split()[0])
    shares = shared_out(found, [40 * KI], 80 * KI, least)
    assert shares.total <= least
    everything = shared_out(found, [40 * KI], 80 * KI, None)
    assert everything.holds_all_params
    assert shared_out(found, [40 * KI], 80 * KI, everything.total) == everything
    model = make("gpt")
    stranger = torch.optim.SGD([*model.parameters(), nn.Parameter(torch.ones(3))], 0.1)
    with pytest.raises(ConfigError, match="the optimizer has it, but the model does not"):
        opened(model, stranger, tmp_path, None)


# --- gradients that do not fit --------------------------------------------------------------------


class Wide(nn.Module):
    """A model of eight layers of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024)) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_gradients_on_disk_leave_memory(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Wide()
    ours = Wide()
    ours.load_state_dict(plain.state_dict())
    theirs = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9, fused=True)
    mine = torch.optim.SGD(ours.parameters(), 0.1, momentum=0.9, fused=True)
    prepared = opened(ours, mine, tmp_path, 16 << 20)
    shares = prepared.shares
    assert shares.gradients_on_disk >= 24 << 20
    assert "on disk for want of it" in str(prepared.plan)
    assert prepared.metrics._gauges["disk"]() == prepared.store.stats().used_bytes
    room = prepared.plan.spill_room_bytes
    assert shares.gradients_on_disk < room < 1.15 * shares.gradients_on_disk + 2 * shares.staging
    x = torch.ones(4, 1024)
    for step in range(3):
        for micro in range(2):
            for model in (plain, ours):
                (model(x * (step + micro)).square().mean()).backward()
        spilled = [p.grad for p in ours.parameters() if isinstance(p.grad, GradientHandle)]
        assert sum(grad.nbytes for grad in spilled) >= 24 << 20
        assert all(grad.here is None for grad in spilled), "no bytes of it are in memory"
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        theirs.step()
        mine.step()
        for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)
        assert all(grad.here is None for grad in spilled)
        del spilled  # a handle that is kept keeps its room
        theirs.zero_grad()
        mine.zero_grad()
    prepared.close()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q)


def test_as_few_gradients_as_must_go_to_disk() -> None:
    found = find_units(make("gpt"))
    sizes = [4 * KI, 64 * KI, 16 * KI, 0]
    state = 400 * KI
    least = least_that_works(lambda: shared_out(found, sizes, state, 9 * KI))
    assert shared_out(found, sizes, state, least).spilled == (0, 1, 2)
    some = shared_out(found, sizes, state, least + 28 * KI)
    assert some.spilled == (1,) and some.gradients == 20 * KI
    assert some.gradients_on_disk == 64 * KI and some.total <= least + 28 * KI
    assert shared_out(found, sizes, state, least + 110 * KI).spilled == ()


@pytest.mark.parametrize("state", [0, 40 * KI, 4000 * KI])
@pytest.mark.parametrize("offloads", [False, True])
def test_the_least_that_is_told_works(state: int, offloads: bool) -> None:
    found, activations = find_units(make("gpt")), "offload" if offloads else "keep"
    least = least_that_works(lambda: shared_out(found, [], state, 9 * KI, activations))
    shares = shared_out(found, [], state, least, activations)
    assert shares.total <= least and bool(shares.activations) is offloads
    with pytest.raises(CapacityError):
        shared_out(found, [], state, least - 4096, activations)


def least_that_works(refused: Callable[[], object]) -> int:
    with pytest.raises(CapacityError, match="the least that works") as error:
        refused()
    return int(str(error.value).split("about ")[1].split()[0])


def test_a_program_that_just_ends_says_nothing(tmp_path: Path) -> None:
    """It ends with a loss in a global, with writes in flight, and with nothing closed."""
    code = """
import torch
from torch import nn
import offload

model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer = offload.prepare(model, optimizer, host_memory="5MiB", nvme=".")
for _ in range(3):
    loss = model(torch.randn(8, 256)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    done = children.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not any(tmp_path.iterdir())
