"""One plan a call: `wrap`, `prepare` and `plan` make records once and plan once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.core.errors import CapacityError
from offload.planning.layout import ParamSpec
from offload.planning.planner import Budgets, TrainingFacts
from offload.planning.training import plan_training
from offload.planning.unit import UnitSizes

KI = 1024
WHERE = {
    "plan_training": (
        "offload.params.prepare_plan",
        "offload.optim.opening",
        "offload.optim.session",
        "offload.tools.forecast.simulator",
    ),
    "make_records": (
        "offload.params.prepare_plan",
        "offload.optim.opening",
        "offload.optim.session",
    ),
}


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the calls of the plan function and of the one that makes records."""
    found: Counter[str] = Counter()

    def count(name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            found[name] += 1
            return act(*args, **kwargs)

        return counted

    for name, modules in WHERE.items():
        for module in modules:
            whole = f"{module}.{name}"
            act = vars(import_module(module))[name]
            monkeypatch.setattr(whole, count(name, act))
    return found


def trained(tmp_path: Path) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()  # it has state that is taken over
    optimizer.zero_grad()
    return model, optimizer, {"nvme": tmp_path, "host_memory": "1MiB"}


def test_prepare_plans_once(tmp_path: Path, counts: Counter[str]) -> None:
    model, optimizer, fields = trained(tmp_path)
    offload.plan(model, optimizer, **fields)
    assert counts == {"plan_training": 1, "make_records": 1}
    counts.clear()
    offload.prepare(model, optimizer, **fields)
    assert counts == {"plan_training": 1, "make_records": 1}
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    assert counts == {"plan_training": 1, "make_records": 1}, "a step plans nothing"
    optimizer.close()  # type: ignore[attr-defined]


def test_wrap_plans_once(tmp_path: Path, counts: Counter[str]) -> None:
    _, optimizer, fields = trained(tmp_path)
    offload.plan(optimizer, **fields)
    assert counts == {"plan_training": 1, "make_records": 1}
    counts.clear()
    offload.wrap(optimizer, **fields)
    assert counts == {"plan_training": 1, "make_records": 1}
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(70))]})
    assert counts == {"plan_training": 2, "make_records": 2}, "for other parameters, once more"
    optimizer.close()  # type: ignore[attr-defined]


def test_a_simulation_plans_once(counts: Counter[str]) -> None:
    offload.plan("1M", host_memory="64MiB", sequence=8)
    assert counts["plan_training"] == 1


# --- the function ---------------------------------------------------------------------------------

SIZES = UnitSizes((40 * KI, 40 * KI, 8 * KI), ((0, 2), (1, 2), (2,)), frozenset({2}))
PARAMS = tuple(ParamSpec(f"p{n}", 10 * KI, ("m",), unit=n) for n in range(2))
MODEL = TrainingFacts(PARAMS, is_prepared=True, units=SIZES, gradients=(40 * KI, 40 * KI))


def test_an_optimizer_alone_has_the_whole_budget() -> None:
    plan = plan_training(TrainingFacts(PARAMS), Budgets(100 * KI))
    assert plan.state.resident_bytes == plan.host_bytes == 80 * KI
    assert plan.shares.total == plan.disk_room_bytes - plan.state.disk_capacity_bytes == 0


def test_shares_and_state_fit_together() -> None:
    everything = plan_training(MODEL, Budgets())
    assert everything.host_bytes == everything.shares.total == (88 + 80 + 80) * KI
    assert everything.shares.state == everything.state.arena_bytes
    assert everything.params_on_host_bytes == everything.param_bytes == 88 * KI
    less = plan_training(MODEL, Budgets(200 * KI))
    assert less.host_bytes <= 200 * KI and less.state.arena_bytes <= less.shares.state
    assert less.budgets.host_bytes == less.shares.state, "a later plan has the same share"
    with pytest.raises(CapacityError, match="need 253952 bytes in all"):
        plan_training(MODEL, Budgets(200 * KI, directories=0))


def test_blocks_in_weight_files_take_no_room_on_the_drives() -> None:
    sizes = UnitSizes(SIZES.nbytes, SIZES.needs, SIZES.kept, in_files=frozenset({0}))
    facts = TrainingFacts(PARAMS, is_prepared=True, units=sizes, gradients=MODEL.gradients)
    whole, less = (plan_training(one, Budgets()) for one in (MODEL, facts))
    assert less.file_bytes == 40 * KI and whole.file_bytes == 0
    assert whole.disk_room_bytes - less.disk_room_bytes == 2 * 40 * KI


def test_a_device_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(CapacityError, match=r"the least that works is about (\d+) bytes") as error:
        plan_training(MODEL, Budgets(device_bytes=40 * KI))
    least = int(str(error.value).split("about ")[1].split()[0])
    assert plan_training(MODEL, Budgets(device_bytes=least)).device_left_bytes == 0
    with pytest.raises(CapacityError):
        plan_training(MODEL, Budgets(device_bytes=least - 1))
