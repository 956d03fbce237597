"""The advice of a plan that does not work: each change works, alone, and takes as long as told."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import offload
from offload.core.errors import CapacityError
from offload.planning.planner import Budgets
from offload.planning.profile import DriveProfile, Profile
from offload.tools import cli
from offload.tools.forecast.advice import call_of
from offload.tools.forecast.forecast import Change, MisfitError
from offload.tools.forecast.forecaster import forecast
from offload.tools.forecast.machines import NOMINAL
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.synthetic_llama import StandIn

MODEL = "test_plan_advice:make"


def make() -> nn.Module:
    return StandIn(6, 128, 1000, 4, 256, 64)


def machine(memory: int = 64 << 20, device: int | None = 16 << 20, **changes: Any) -> Profile:
    return dataclasses.replace(
        NOMINAL,
        name="here",
        disks=(DriveProfile("a", 3e9, 3e9, 3e9),),
        memory_bytes=memory,
        device=None if device is None else "fake GPU",
        device_memory_bytes=device,
        **changes,
    )


@pytest.fixture
def on(tmp_path: Path) -> str:
    machine().save(tmp_path / "machine.json")
    return str(tmp_path / "machine.json")


def misfit(**given: Any) -> tuple[Change, ...]:
    with pytest.raises(CapacityError) as caught:
        forecast(ForecastRequest.of(MODEL, **given))
    assert isinstance(caught.value, MisfitError)
    for change in caught.value.misfit.changes:
        assert change.what in str(caught.value), "also from Python"
    return caught.value.misfit.changes


CASES: dict[str, dict[str, Any]] = {
    "many texts on a device": {"batch": 64, "sequence": 64, "host_memory": "40MiB"},
    "little device memory": {"batch": 2, "sequence": 32, "device_memory": "2MiB"},
    "little host memory": {"batch": 1, "sequence": 16, "host_memory": "1MiB"},
    "no drive": {"batch": 1, "sequence": 16, "host_memory": "12MiB", "nvme_count": 0},
    "wrapped": {"batch": 2, "sequence": 32, "device_memory": "8MiB", "use": "wrap"},
}


@pytest.mark.parametrize("given", CASES.values(), ids=CASES)
def test_each_change_works_alone_and_takes_as_long_as_told(on: str, given: dict[str, Any]) -> None:
    changes = misfit(on=on, **given)
    assert changes, "there is a way"
    parser = cli.make_parser()
    asked = [MODEL, "--on", on]
    for name, value in given.items():
        asked += [f"--{name.replace('_', '-')}", str(value)]
    for change in changes:
        arguments = parser.parse_args(["plan", *asked, *shlex.split(change.option)])
        from offload.tools.cli import plan

        found = forecast(ForecastRequest.of(MODEL, **plan._given(arguments)))
        assert found.works and found.timing is not None
        assert change.step_s == pytest.approx(found.timing.step_s)
        assert change.tokens_per_s == pytest.approx(found.timing.tokens_per_s)


def test_the_fastest_change_comes_first(on: str) -> None:
    changes = misfit(on=on, **CASES["many texts on a device"])
    rates = [change.tokens_per_s for change in changes]
    assert rates == sorted(rates, reverse=True)  # type: ignore[type-var]
    assert any(re.match(r"batch \d+ instead of 64", change.what) for change in changes)


def test_what_the_machine_does_not_have_is_not_advised(on: str) -> None:
    """The device has 16 MiB."""
    given = CASES["many texts on a device"]
    assert not any("device_memory" in change.what for change in misfit(on=on, **given))
    found = forecast(ForecastRequest.of(MODEL, on=on, **given, device_memory="1GiB"))
    assert not found.works and "the device has 16 MiB" in found.problems[0]
    assert "device_memory=14 MiB, as this machine has it" not in str(found), "too little, too"
    small = forecast(ForecastRequest.of(MODEL, on=on, batch=2, sequence=32, device_memory="1GiB"))
    assert ["device_memory" in change.what for change in small.changes].count(True) == 1


def test_where_one_change_is_not_enough_two_are_told(tmp_path: Path) -> None:
    machine(device=3200 << 10).save(tmp_path / "small.json")
    given: dict[str, Any] = {"batch": 16, "sequence": 64, "host_memory": "40MiB"}
    (change,) = misfit(on=str(tmp_path / "small.json"), **given)
    assert re.fullmatch(r'batch \d+ instead of 16, and activations="recompute"', change.what)


def test_more_host_memory_than_the_machine_has_is_a_problem(tmp_path: Path) -> None:
    machine(memory=16 << 20, device=None).save(tmp_path / "small.json")
    on = str(tmp_path / "small.json")
    found = forecast(ForecastRequest.of(MODEL, on=on, host_memory="1GiB", sequence=16))
    assert not found.works and "the machine has 16 MiB" in found.problems[0]
    assert any("as this machine has it" in change.what for change in found.changes)


def test_directories_must_have_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    found = forecast(ForecastRequest.of(MODEL, host_memory="8MiB", nvme=tmp_path, sequence=16))
    assert not found.works and "nvme: 1 MiB are free there" in found.problems[0]
    assert forecast(ForecastRequest.of(MODEL, host_memory="8MiB", nvme_count=1, sequence=16)).works


def test_wrap_is_advised_where_state_alone_has_room(on: str) -> None:
    """Without a drive, `prepare` needs host memory for parameters and gradients, too."""
    texts = [change.what for change in misfit(on=on, **CASES["no drive"])]
    assert "offload.wrap instead of offload.prepare" in texts and "one drive" in texts


def test_activations_beyond_the_machine_are_advised_about(tmp_path: Path) -> None:
    machine(memory=32 << 20, device=None).save(tmp_path / "small.json")
    asked = ForecastRequest.of(
        MODEL, on=str(tmp_path / "small.json"), host_memory="8MiB", batch=32, sequence=64
    )
    found = forecast(asked)
    assert not found.works and found.changes
    lines = str(found).splitlines()
    assert lines[1].startswith("PROBLEM") and lines[2].startswith("what would fit")


def test_where_nothing_helps_that_is_said() -> None:
    from offload.tools.forecast.forecast import Misfit

    assert "no single change" in str(Misfit("m", "here", "none", "too large", ()))


def test_the_call_is_code_that_python_reads() -> None:
    asked = ForecastRequest.of(MODEL, device_memory="20GiB", activations="recompute")
    text = call_of(asked, Budgets(64 << 30, 20 << 30, 2), on_device=True)
    assert text == (
        'model, optimizer = offload.prepare(model, optimizer, device="cuda", '
        'device_memory="20GiB", host_memory="64GiB", nvme=["DRIVE1", "DRIVE2"], '
        'activations="recompute")'
    )
    compile(text, "call", "exec")
    odd = call_of(ForecastRequest.of(MODEL, host_memory="16.7GiB"), Budgets(17931488460), False)
    assert "host_memory=17931488460," in odd, "no more and no less"
    wrapped = call_of(ForecastRequest.of(MODEL, use="wrap"), Budgets(1 << 30, None, 1), True)
    assert wrapped == 'optimizer = offload.wrap(optimizer, host_memory="1GiB", nvme="DRIVE1")'


def test_wrap_moves_what_the_engine_moves(tmp_path: Path) -> None:
    """What is told of `wrap` on the CPU, against a plan of the real optimizer."""
    import torch

    machine(memory=1 << 30, device=None).save(tmp_path / "large.json")
    asked: dict[str, Any] = {"on": str(tmp_path / "large.json"), "host_memory": "4MiB"}
    told = forecast(ForecastRequest.of(MODEL, use="wrap", batch=2, sequence=32, **asked))
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    planned: Any = offload.plan(optimizer, host_memory="4MiB", nvme=tmp_path)
    assert told.tiers["optimizer state"] == {
        "host": planned.resident_bytes,
        "disk": planned.disk_bytes,
    }
    assert told.taken_bytes == planned.arena_bytes
    assert told.read_bytes == pytest.approx(planned.step_read_bytes, rel=0.05)
    assert told.tiers["parameters"] == {"process": sum(p.nbytes for p in model.parameters())}
    assert told.timing is not None and told.timing.compute_s > 0
