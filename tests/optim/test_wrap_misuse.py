"""The misuse of a wrapped optimizer: by two threads, by a signal handler, in a forked child; closed
twice, or forgotten. Each is refused or harmless, never silently wrong.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_state, assert_same_tensors
from support.wrapping import adamw, give_gradients, parameters, train
from torch.optim import AdamW

import offload
from offload import StateError
from offload.core.budget import Budget
from offload.optim.updater import Updater

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]


# --- one thread, one act at a time ----------------------------------------------------------------

CALLS: dict[str, Callable[[Any], Any]] = {
    "step": lambda optimizer: optimizer.step(),
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "load_state_dict": lambda optimizer: optimizer.load_state_dict(
        {"state": {}, "param_groups": AdamW(parameters()).state_dict()["param_groups"]}
    ),
    "add_param_group": lambda optimizer: optimizer.add_param_group(
        {"params": [torch.ones(3, requires_grad=True)]}
    ),
    "close": lambda optimizer: optimizer.close(),
}


def in_the_middle(
    monkeypatch: pytest.MonkeyPatch, where: str, then: Callable[[], Any]
) -> dict[str, Any]:
    """Have `then` called once, in the middle of the next step or export."""
    real, told = getattr(Updater, where), {}

    def slow(self: Updater, *args: Any) -> Any:
        monkeypatch.setattr(Updater, where, real)
        told["got"] = then()
        return real(self, *args)

    monkeypatch.setattr(Updater, where, slow)
    return told


def error_of(call: Callable[[], Any]) -> BaseException | None:
    try:
        call()
    except StateError as error:
        return error.with_traceback(None)
    return None


def in_a_thread(call: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(error_of(call)))
    thread.start()
    thread.join(30)
    return found[0]


@pytest.mark.parametrize("second", CALLS)
@pytest.mark.parametrize(("first", "where"), [("step", "_pass_over"), ("state_dict", "copy_out")])
def test_a_second_thread_is_refused(
    first: str, where: str, second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result of the first thread's call is what it would have been without the second."""
    here, there = parameters(), parameters()
    plain, wrapped = AdamW(here, lr=1e-2, fused=True), adamw(there, tmp_path)
    for params, optimizer in ((here, plain), (there, wrapped)):
        train(params, optimizer, 0)
        give_gradients(params, 1)
    told = in_the_middle(monkeypatch, where, lambda: in_a_thread(lambda: CALLS[second](wrapped)))
    CALLS[first](wrapped)
    assert isinstance(told["got"], StateError)
    assert f"{second} while another thread is in {first}" in str(told["got"])
    if first == "step":
        plain.step()
    assert_same_tensors(here, there)
    assert_same_state(plain, wrapped)
    wrapped.close()


@pytest.mark.parametrize("second", CALLS)
def test_a_signal_handler_in_the_middle_of_a_step_is_refused(
    second: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A handler runs in the thread that steps. If it saved then, half of the state would be old."""
    params = parameters()
    optimizer = adamw(params)
    give_gradients(params, 0)
    told = in_the_middle(
        monkeypatch, "_pass_over", lambda: error_of(lambda: CALLS[second](optimizer))
    )
    optimizer.step()
    assert isinstance(told["got"], StateError) and "in the middle of step" in str(told["got"])
    train(params, optimizer, 1)
    optimizer.close()


def test_a_hook_may_look_at_the_state_before_it_is_loaded() -> None:
    params = parameters()
    optimizer = adamw(params)
    train(params, optimizer, 0)
    seen: list[Any] = []
    optimizer.register_load_state_dict_pre_hook(lambda own, _: seen.append(own.state_dict()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert float(seen[0]["state"][0]["step"]) == 1
    optimizer.close()


def test_two_threads_may_take_turns() -> None:
    params = parameters()
    optimizer = adamw(params)
    give_gradients(params, 0)
    for _ in range(3):
        assert in_a_thread(optimizer.step) is None
    assert float(optimizer.state_dict()["state"][0]["step"]) == 3
    optimizer.close()


@pytest.mark.parametrize("act", CALLS)
def test_a_forked_child_is_refused(act: str, tmp_path: Path) -> None:
    """The child's call raises, and the parent goes on."""
    params = parameters()
    optimizer = adamw(params, tmp_path)
    train(params, optimizer, 0)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            error = error_of(lambda: CALLS[act](optimizer))
            code = 0 if error is not None and "parent process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    train(params, optimizer, 1)
    assert float(optimizer.state_dict()["state"][0]["step"]) == 2
    optimizer.close()


# --- closing --------------------------------------------------------------------------------------


def test_closing_twice_is_harmless() -> None:
    params = parameters()
    optimizer = adamw(params)
    try:
        with optimizer:
            train(params, optimizer, 0)
            optimizer.close()
        optimizer.close()
    finally:
        optimizer.close()
    assert type(optimizer) is AdamW
    train(params, optimizer, 1)
    again = copy.deepcopy(optimizer)
    assert_same_state(again, pickle.loads(pickle.dumps(optimizer)))
    offload.wrap(optimizer)
    train(params, optimizer, 2)
    optimizer.close()  # the real one again
    assert type(optimizer) is AdamW and float(optimizer.state[params[0]]["step"]) == 3
    optimizer.close()


class Closable(AdamW):
    """An optimizer with a `close` of its own, which it has again after it was wrapped."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_close_of_the_optimizers_own_is_left_alone() -> None:
    optimizer = Closable(parameters())
    offload.wrap(optimizer, elementwise=True).close()
    optimizer.close()
    assert type(optimizer) is Closable and optimizer.closed == 1


# --- forgotten ------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_forgotten_optimizer_gives_its_memory_back_at_once(
    on_disk: bool, tmp_path: Path, own_budget: Budget
) -> None:
    params = parameters()
    optimizer = adamw(params, tmp_path if on_disk else None)
    train(params, optimizer, 0)
    gc.collect()
    gc.disable()
    try:
        assert own_budget.used_bytes
        del optimizer
        assert own_budget.used_bytes == 0
    finally:
        gc.enable()


def test_garbage_is_collected_before_a_plan_is_made(own_budget: Budget) -> None:
    """A trainer in a reference cycle keeps its optimizer until garbage is collected."""

    class Trainer:
        def __init__(self) -> None:
            self.me = self
            self.optimizer = adamw(parameters())

    gc.disable()
    try:
        Trainer()
        assert own_budget.used_bytes
        optimizer = offload.wrap(AdamW(parameters()), host_memory="40KiB")
        assert offload.report(optimizer).plan.host_memory_bytes == 40 << 10
        optimizer.close()
    finally:
        gc.enable()
