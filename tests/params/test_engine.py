"""A model within a budget: the same losses and gradients to the bit, for any model and any order of
runs.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from support.bits import assert_same_gradients
from support.loops import chosen
from support.models import MODELS, batch, loss_of, make
from torch import nn

from offload.core.budget import Budget
from offload.core.errors import StateError
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.optim.gradient_handle import GradientHandle
from offload.params import units
from offload.params.block import Reference
from offload.params.engine import Engine
from offload.params.gradients import SpilledGradientParams
from offload.params.placeholder import is_offloaded
from offload.params.units import find_units
from offload.planning.unit import enclosing
from offload.storage.disk import DiskStore


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)


@contextmanager
def prepared(
    model: nn.Module,
    share: float,
    folder: Path | None = None,
    depth: int = 2,
    spill: SpilledGradientParams | None = None,
) -> Iterator[Engine]:
    """Run the model with host memory for a share of its parameters while the block runs; 0: the
    least that works.
    """
    found = find_units(model)
    sizes = [unit.nbytes for unit in found]
    pages = [-(-max(size, 1) // 4096) * 4096 for size in sizes]
    kept = enclosing(found)
    least = sum(pages[n] for n in kept) + max(
        sum(pages[n] for n in unit.needs if n not in kept) for unit in found
    )
    budget = max(least, int(share * sum(pages)) // 4096 * 4096)
    budget += spill.staging_bytes if spill is not None else 0
    pool = Pool(budget, budget=Budget())
    room = 4 * sum(pages) + (spill.room_bytes if spill is not None else 0)
    swap = tempfile.TemporaryDirectory()
    store = DiskStore([folder or swap.name], room)
    engine = Engine(model, found, pool, store, Metrics(), depth, spill=spill)
    try:
        yield engine
        assert pool.stats().peak_bytes <= budget
        assert not engine.metrics.snapshot().fallbacks
    finally:
        engine.close()
        store.close()
        pool.close()
        swap.cleanup()


def nothing_is_used(engine: Engine) -> bool:
    kept = enclosing(engine.units)
    return all(b.pins == (b.number in kept) for b in engine.residency.blocks)


SHARES = [0.0, 0.4, 0.8, 1.5]
# Every model with the least memory and with one other share; torture has all.
BUDGETS = chosen(
    test=[(name, share) for i, name in enumerate(MODELS) for share in (0.0, SHARES[1 + i % 3])],
    torture=list(itertools.product(MODELS, SHARES)),
    quick=[("gpt", 0.4), ("branches", 0.0)],
)


@pytest.mark.quick
@pytest.mark.parametrize(("name", "share"), BUDGETS)
def test_losses_and_gradients_are_those_of_the_plain_model(name: str, share: float) -> None:
    plain, ours = make(name), make(name)
    with prepared(ours, share) as engine:
        for step in range(chosen(test=3, torture=4)):
            losses = []
            for model in (plain, ours):
                torch.manual_seed(step)  # dropout
                for micro in range(1 + step % 2):
                    loss = loss_of(model, batch(10 * step + micro))
                    loss.backward()
                losses.append(loss.detach())
            assert torch.equal(*losses)
            assert_same_gradients(ours, plain)
            plain.zero_grad()
            ours.zero_grad()
            for model in (plain, ours):
                model.eval()
            with torch.no_grad():
                assert torch.equal(plain(batch(step)), ours(batch(step)))
            for model in (plain, ours):
                model.train()
        assert nothing_is_used(engine)
        for p, q in zip(plain.buffers(), ours.buffers(), strict=True):
            assert torch.equal(p, q)
    assert not any(is_offloaded(p) for p in ours.parameters())
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p, q)


def test_from_disk(tmp_path: Path) -> None:
    plain, ours = make("gpt"), make("gpt")
    with prepared(ours, 0.5, tmp_path) as engine:
        for step in range(3):
            for model in (plain, ours):
                loss_of(model, batch(step)).backward()
        assert_same_gradients(ours, plain)
        counts = engine.metrics.snapshot().counts
        assert counts["parameter_hits"] > counts["parameter_misses"] > 0


def test_a_known_order_never_waits_for_a_block_that_nobody_has_asked_for() -> None:
    model = make("gpt")
    with prepared(model, 0.7) as engine:
        for step in range(6):
            before = engine.metrics.snapshot().counts.get("parameter_misses", 0)
            loss_of(model, batch(step)).backward()
            missed = engine.metrics.snapshot().counts.get("parameter_misses", 0) - before
        assert missed == 0


def test_what_is_away_is_refused_outside_a_run() -> None:
    model = make("gpt")
    with prepared(model, 0.3):
        loss_of(model, batch(0)).backward()
        away = [p for p in model.parameters() if is_offloaded(p)]
        assert away
        with pytest.raises(StateError, match=r"offload\.resident"):
            away[0].norm()


def test_an_exception_leaves_everything_consistent() -> None:
    plain, ours = make("gpt"), make("gpt")

    def fail(*_: object) -> None:
        raise ValueError("in the middle")

    with prepared(ours, 0.4) as engine:
        for module in ("layers.2", "layers.1.up", "norm"):
            handle = ours.get_submodule(module).register_forward_pre_hook(fail)
            with pytest.raises(ValueError, match="in the middle"):
                loss_of(ours, batch(0))
            handle.remove()
            assert nothing_is_used(engine)
        loss = loss_of(ours, batch(0))
        handle = ours.get_submodule("layers.1").register_full_backward_hook(fail)
        handle.remove()
        hook = ours.layers[1].up.weight.register_hook(fail)  # in the middle of backward
        with pytest.raises(ValueError, match="in the middle"):
            loss.backward()
        hook.remove()
        ours.zero_grad()
        for model in (plain, ours):
            loss_of(model, batch(1)).backward()
        assert_same_gradients(ours, plain)


def test_a_graph_that_is_forgotten_keeps_nothing() -> None:
    model = make("gpt")
    with prepared(model, 0.0) as engine:
        for step in range(5):
            loss_of(model, batch(step))  # never a backward
        gc.collect()
        held = sum(b.nbytes for b in engine.residency.blocks if b.memory is not None)
        assert held < sum(b.nbytes for b in engine.residency.blocks)


def test_a_view_that_escapes_is_not_pulled_away() -> None:
    model = make("gpt")
    with prepared(model, 0.5) as engine, torch.no_grad():
        kept = []
        hook = model.layers[0].register_forward_hook(
            lambda module, *_: kept.append(module.up.weight.t().detach())
        )
        model(batch(0))
        hook.remove()
        before = kept[0].clone()
        for step in range(4):
            model(batch(step))
        assert torch.equal(kept[0], before)
        assert engine.residency.blocks[engine.units[1].number] is not None


def test_a_gradient_belongs_to_whoever_holds_it(tmp_path: Path) -> None:
    plain, ours = make("gpt"), make("gpt")
    pages = sum(-(-param.nbytes // 4096) * 4096 for param in ours.parameters())
    spill = SpilledGradientParams(
        frozenset(ours.parameters()), 4096, pages + 4096
    )  # room for all, and one more
    with prepared(ours, 0.5, tmp_path, spill=spill) as engine:
        held = []
        for step in range(3):
            for model in (plain, ours):
                model.zero_grad()
                loss_of(model, batch(step)).backward()
            assert_same_gradients(ours, plain)
            held.append((ours.norm.weight.grad, plain.norm.weight.grad))
            held.append((ours.norm.bias.grad, plain.norm.bias.grad))
        for a, b in held:
            assert torch.equal(a, b)
        counts = engine.metrics.snapshot().counts
        assert counts["gradients_outside_of_their_place"] >= 3, "the last ones have no room left"
        nbytes = sum(param.nbytes for param in ours.parameters())
        assert 2 * nbytes < counts["spilled_bytes"] < 3 * nbytes, (
            "what goes to the drive is counted"
        )
        ours.zero_grad()
        del held, a, b
        loss_of(ours, batch(0)).backward()
        assert isinstance(ours.norm.weight.grad, GradientHandle), "its room is free again"
    assert type(ours.norm.weight.grad) is torch.Tensor, "an ordinary one, once the model is"


def test_nothing_is_changed_while_it_is_being_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update of a block waits until a write of the block to the store has ended."""
    model = make("gpt")
    with prepared(model, 1.5) as engine:
        block, ticket = engine.residency.blocks[1], Ticket[None]("a slow write")
        monkeypatch.setattr(DiskStore, "write", lambda *_: ticket)
        engine.residency.cache.store.save(block)
        assert engine.residency.cache.try_begin(block)
        threading.Timer(0.2, ticket.finish, [None]).start()
        engine.residency.cache.await_arrival(block)
        assert ticket.done and block.is_stored
        engine.residency.end(block, has_changed=False)
        block.is_stored = False  # in fact nothing was written


def test_a_loss_that_is_dropped_leaves_nothing_behind() -> None:
    """An autograd node that saves its own output must not keep itself alive."""
    gc.collect()
    gc.freeze()  # collections skip what exists already
    for name in MODELS:
        model = make(name)
        with prepared(model, 0.4):
            loss = loss_of(model, batch(0))
            assert references() > 0, name
            del loss
            assert references() == 0, name


def references() -> int:
    gc.collect()
    return sum(type(found) is Reference for found in gc.get_objects())


def test_what_is_changed_before_backward_is_noticed() -> None:
    model = make("gpt")

    class Spoiled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = torch.sigmoid(self.model(tokens))
            self.last = x
            return x * 2.0

    whole = Spoiled()
    with prepared(whole, 0.4):
        loss = whole(batch(0)).sum()
        whole.last.detach().mul_(3.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del loss, whole.last
