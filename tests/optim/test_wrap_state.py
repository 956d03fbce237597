"""The state of a wrapped optimizer when something goes wrong, and when it goes back to torch."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_state, assert_same_tensors
from support.interrupts import interrupt_at
from support.wrapping import adamw, give_gradients, parameters, tensors, train
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

import offload
from offload import CapacityError, StateError, StoreError
from offload.optim import coordinator as ground_module
from offload.optim import export as export_module
from offload.optim.optimizer import OffloadOptimizer
from offload.optim.updater import Updater
from offload.storage.engine import Fault, FaultKind
from offload.storage.handout import Handout

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]


# --- a reopening that fails -----------------------------------------------------------------------


def no_room(*_: Any, **__: Any) -> Any:
    raise CapacityError("disk store: no room")


def both(directory: Path) -> tuple[list[nn.Parameter], Optimizer, list[nn.Parameter], Any]:
    """Return the parameters and the optimizer of a plain and of a wrapped AdamW after two steps."""
    here, there = parameters(), parameters()
    plain, wrapped = AdamW(here, lr=1e-2, fused=True), adamw(there, directory)
    for params, optimizer in ((here, plain), (there, wrapped)):
        train(params, optimizer, 0, 1)
    return here, plain, there, wrapped


def test_no_room_for_more_groups_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full between closing the old files and reserving the new ones."""
    here, plain, there, wrapped = both(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ground_module, "DiskStore", no_room)
        with pytest.raises(CapacityError, match="no room; the state is kept aside"):
            wrapped.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
        assert len(wrapped.param_groups) == 1
        assert_same_state(plain, wrapped)  # can be saved
        give_gradients(there, 2)
        with pytest.raises(CapacityError, match="kept aside"):
            wrapped.step()
        assert offload.report(wrapped).counts["steps"] == 2
    train(here, plain, 2, 3)
    train(there, wrapped, 2, 3)  # goes on by itself once there is room
    assert_same_tensors(here, there)
    assert_same_state(plain, wrapped)
    wrapped.close()


@pytest.mark.parametrize("then", ["close", "load"])
def test_state_that_is_kept_aside_can_leave(
    then: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, plain, there, wrapped = both(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(ground_module, "DiskStore", no_room)
        with pytest.raises(CapacityError, match="kept aside"):
            wrapped.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
        if then == "close":
            wrapped.close()
            assert type(wrapped) is AdamW
    if then == "load":
        train(here, plain, 2)
        wrapped.load_state_dict(plain.state_dict())
        train(there[:0], wrapped)
        with torch.no_grad():
            for a, b in zip(there, here, strict=True):
                a.copy_(b)
    assert_same_state(plain, wrapped)
    train(here, plain, 4)
    train(there, wrapped, 4)
    assert_same_tensors(here, there)
    wrapped.close()


def test_a_fault_while_state_moves_over_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, plain, there, wrapped = both(tmp_path)
    real = ground_module.DiskStore

    def faulty(*args: Any, **options: Any) -> Any:
        store = real(*args, **options)
        store.engine.inject(Fault(FaultKind.ERROR, 1, True, 5))
        return store

    with monkeypatch.context() as patch:
        patch.setattr(ground_module, "DiskStore", faulty)
        with pytest.raises(StoreError, match="kept aside"):
            wrapped.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
    train(here, plain, 2)
    train(there, wrapped, 2)
    assert_same_tensors(here, there)
    assert_same_state(plain, wrapped)
    wrapped.close()


# --- steps and loads that break off ---------------------------------------------------------------


def broken(directory: Path) -> tuple[list[nn.Parameter], Any, dict[str, Any], list[Tensor]]:
    """Return parameters and optimizer after a third step that failed halfway, and the `state_dict`
    and weights after the second.
    """
    params = parameters()
    optimizer = adamw(params, directory)
    train(params, optimizer, 0, 1)
    saved, weights = optimizer.state_dict(), [param.detach().clone() for param in params]
    optimizer._offload_session.coordinator.store.engine.inject(Fault(FaultKind.ERROR, 3, True, 5))
    with pytest.raises(StoreError):
        train(params, optimizer, 2)
    return params, optimizer, saved, weights


def test_a_checkpoint_mends_a_broken_optimizer(tmp_path: Path) -> None:
    here = parameters()
    plain = AdamW(here, lr=1e-2, fused=True)
    train(here, plain, 0, 1, 2, 3)
    params, optimizer, saved, weights = broken(tmp_path)
    with pytest.raises(StateError, match=r"an earlier step .* \(the last one: state_dict\(\) aft"):
        optimizer.state_dict()
    with pytest.raises(StateError, match="was not written since; load the model's"):
        optimizer.load_state_dict(saved)
    with pytest.raises(StateError, match="different steps"):
        optimizer.step()
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    optimizer.load_state_dict(saved)
    train(params, optimizer, 2, 3)
    assert_same_tensors(here, params)
    assert_same_state(plain, optimizer)
    optimizer.close()


def test_a_broken_load_is_told_as_such_and_can_be_repeated(tmp_path: Path) -> None:
    here, plain, there, wrapped = both(tmp_path)
    wrapped._offload_session.coordinator.store.engine.inject(Fault(FaultKind.ERROR, 1, True, 5))
    with pytest.raises(StoreError):
        wrapped.load_state_dict(plain.state_dict())
    with pytest.raises(StateError, match=r"an earlier load_state_dict .* load it again"):
        wrapped.step()
    wrapped.load_state_dict(plain.state_dict())
    train(here, plain, 2)
    train(there, wrapped, 2)
    assert_same_tensors(here, there)
    wrapped.close()


def test_a_load_after_a_step_that_broke_off_may_break_off_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that fails mends nothing: there is no state to go on with until one succeeds."""
    params, optimizer, saved, weights = broken(tmp_path)
    with torch.no_grad():
        for param, weight in zip(params, weights, strict=True):
            param.copy_(weight)
    with monkeypatch.context() as patch:
        patch.setattr(ground_module, "DiskStore", no_room)
        for _ in range(2):
            with pytest.raises(CapacityError, match="no room"):
                optimizer.load_state_dict(saved)
        for refused in (optimizer.step, optimizer.state_dict):
            with pytest.raises(StateError, match="an earlier load_state_dict"):
                refused()
    with pytest.raises(StateError, match="an earlier load_state_dict"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
    assert len(optimizer.param_groups) == 1
    optimizer.load_state_dict(saved)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2
    optimizer.close()


def test_an_interrupted_state_dict_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes while chunks are read, and while torch puts the dictionary together."""
    here, plain, there, wrapped = both(tmp_path)

    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Handout, "room", interrupt)
        with pytest.raises(KeyboardInterrupt):
            wrapped.state_dict()
    calls = []

    def interrupt_second(piece: Any, part: Any) -> Any:
        calls.append(part)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return fields(piece, part)

    from offload.optim.tiers import HostChunk

    fields = HostChunk.fields
    with monkeypatch.context() as patch:
        patch.setattr(HostChunk, "fields", interrupt_second)
        with pytest.raises(KeyboardInterrupt):
            wrapped.state_dict()
    handle = wrapped.register_state_dict_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        wrapped.state_dict()
    handle.remove()
    assert len(wrapped.state) == 0
    assert_same_state(plain, wrapped)
    train(here, plain, 2)
    train(there, wrapped, 2)
    assert_same_tensors(here, there)
    wrapped.close()


# --- back to torch --------------------------------------------------------------------------------

KINDS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (AdamW, {"fused": True}),
    (Adam, {"foreach": True}),
    (SGD, {"momentum": 0.9}),
    (Adagrad, {}),
    (torch.optim.RMSprop, {"foreach": False}),  # NAdam: loading rounds its product in torch
]


@pytest.mark.parametrize(("kind", "settings"), KINDS, ids=lambda v: getattr(v, "__name__", ""))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_closed_optimizer_of_half_parameters_steps(
    kind: type[Optimizer],
    settings: dict[str, Any],
    dtype: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It steps as a plain one with the same state, rounded, does; and it can be wrapped again."""
    params = parameters(dtype)
    optimizer = offload.wrap(kind(params, lr=1e-2, **settings))
    train(params, optimizer, 0, 1)
    exact = optimizer.state_dict()
    others = [nn.Parameter(param.detach().clone()) for param in params]
    judge = kind(others, lr=1e-2, **settings)
    judge.load_state_dict(
        {
            **exact,
            "state": {
                number: {name: value for name, value in state.items() if name != "master"}
                for number, state in exact["state"].items()
            },
        }
    )
    with caplog.at_level(logging.WARNING, "offload"):
        optimizer.close()
    assert "4 parameters are torch" in caplog.text and "master" in caplog.text
    assert all(s["master"].dtype == torch.float32 for s in exact["state"].values())
    for param, state in optimizer.state.items():
        assert "master" not in state
        assert all(v.dtype == param.dtype for v in state.values() if v.shape == param.shape)
    train(params, optimizer, 2, 3)
    train(others, judge, 2, 3)
    assert_same_tensors(params, others)
    offload.wrap(optimizer)
    train(params, optimizer, 4)
    optimizer.close()


def test_closing_fp32_loses_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    params = parameters()
    optimizer = adamw(params)
    train(params, optimizer, 0)
    params[0].data = params[0].data.t().contiguous().t()  # another order of memory since
    with caplog.at_level(logging.INFO, "offload"):
        optimizer.close()
    assert not caplog.text
    assert optimizer.state[params[0]]["exp_avg"].stride() == params[0].stride()


def test_momentum_that_is_turned_on_later_works_as_the_error_advises() -> None:
    """16-bit SGD without momentum has a master and nothing else."""
    params, others = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = offload.wrap(SGD(params, lr=0.1))
    train(params, optimizer, 0)
    saved = optimizer.state_dict()
    optimizer.param_groups[0]["momentum"] = 0.9
    give_gradients(params, 1)
    with pytest.raises(offload.ConfigError, match=r"close\(\), then wrap or prepare again"):
        optimizer.step()
    optimizer.close()
    offload.wrap(optimizer)
    train(params, optimizer, 1, 2)
    plain = SGD(others, lr=0.1)
    plain.load_state_dict(saved)  # the other advice: load into the plain one, and wrap again
    plain.param_groups[0]["momentum"] = 0.9
    with torch.no_grad():
        for p, start in zip(others, tensors(0, torch.bfloat16), strict=True):
            p.copy_(start)
    offload.wrap(plain)
    train(others, plain, 0, 1, 2)
    assert set(plain.state_dict()["state"][0]) == {"master", "momentum_buffer"}
    optimizer.close()
    plain.close()


# --- bytes that move ------------------------------------------------------------------------------


def test_loading_reads_nothing(tmp_path: Path) -> None:
    """All of the state is replaced; a parameter that the `state_dict` leaves out starts anew."""
    here, plain, there, wrapped = both(tmp_path)
    saved = plain.state_dict()
    del saved["state"][2]  # other parameters are in the same chunk
    before = offload.report(wrapped)
    wrapped.load_state_dict(saved)
    after = offload.report(wrapped)
    assert after.disk_read_bytes == before.disk_read_bytes
    moved = after.disk_written_bytes - before.disk_written_bytes
    assert 0 < moved <= after.plan.disk_bytes
    plain.load_state_dict(saved)
    train(here, plain, 2)
    train(there, wrapped, 2)
    assert_same_tensors(here, there)
    assert_same_state(plain, wrapped)
    wrapped.close()


@pytest.mark.parametrize("where", ["ample", "directory", "nowhere"])
def test_a_copy_while_the_plan_is_made_anew_is_accounted_for(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state fits in the budget once. Its copy has room in an ample budget or goes to the
    directory; without either, the report tells of a fall-back.
    """
    made = []
    store = export_module.DiskStore
    monkeypatch.setattr(
        export_module, "DiskStore", lambda *a, **k: made.append(a) or store(*a, **k)
    )
    params = parameters()
    options = {"host_memory": "120KiB" if where == "ample" else "50KiB"}
    if where == "directory":
        options["nvme"] = tmp_path  # type: ignore[assignment]
    optimizer = offload.wrap(AdamW(params, lr=1e-2, fused=True), **options)
    assert not offload.report(optimizer).plan.disk_bytes
    train(params, optimizer, 0)
    more = nn.Parameter(torch.ones(9))
    optimizer.add_param_group({"params": [more]})
    assert bool(made) == (where == "directory")
    told = offload.report(optimizer).fallbacks
    assert ("memory while the plan is made anew" in told) == (where == "nowhere")
    others = parameters()
    plain = AdamW(others, lr=1e-2, fused=True)
    train(others, plain, 0, 1)
    train(params, optimizer, 1)
    assert_same_tensors(params, others)
    optimizer.close()


def test_a_plan_that_does_not_fit_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    params = parameters()
    optimizer = offload.wrap(AdamW(params), host_memory="40KiB")
    train(params, optimizer, 0)
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "copy_out", no_room)
        with pytest.raises(CapacityError, match="are allowed"):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(90, 90))]})
    train(params, optimizer, 1)
    optimizer.close()


def test_an_interrupted_load_is_refused_or_has_changed_nothing() -> None:
    """Ctrl-C comes before any instruction that replaces groups, counts and state."""
    params = parameters()
    optimizer = adamw(params)
    train(params, optimizer, 0, 1)
    old = optimizer.state_dict()
    new = copy.deepcopy(old)
    new["param_groups"][0]["lr"] = 0.5
    for state in new["state"].values():
        state["step"] += 5
    # Each of the first 59, which are before and after the load itself, then every third.
    for instruction in itertools.chain(range(1, 60), itertools.count(60, 3)):
        optimizer.load_state_dict(old)
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupt_at(instruction, Updater, OffloadOptimizer) as reached,
        ):
            optimizer.load_state_dict(new)
        if not reached:
            break
        try:
            found = optimizer.state_dict()
        except offload.StateError:
            continue
        steps = {float(state["step"]) for state in found["state"].values()}
        assert (len(found["state"]), steps, found["param_groups"][0]["lr"]) in [
            (len(params), {2.0}, 1e-2),
            (len(params), {7.0}, 0.5),
        ], instruction
    optimizer.close()


def test_a_distributed_checkpoint_takes_no_step() -> None:
    """torch takes one, with gradients of zero, where an optimizer seems to have no state."""
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    models = [nn.Linear(5, 3) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [AdamW(model.parameters(), fused=True) for model in models]
    ours, theirs = offload.wrap(optimizers[0]), optimizers[1]
    for model, optimizer in zip(models, optimizers, strict=True):
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = ours.state_dict()
    found = get_optimizer_state_dict(models[0], ours)
    assert_same_state(ours, theirs)
    set_optimizer_state_dict(models[0], ours, optim_state_dict=found)
    assert_same_state(ours, theirs)
    assert ours.state and len(ours.state) == 0
    ours.load_state_dict({**expected, "state": {}})
    assert not ours.state
    ours.close()
    assert type(ours.state) is type(theirs.state)
