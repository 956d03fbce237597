"""A run's usual iteration, from its events."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.core.errors import FormatError
from offload.core.timeline import COMPUTE, DISK_READS, STEP, WAITING, Event, StepFact
from offload.telemetry import run_file
from offload.telemetry.run_file import About, Run, UnitFact
from offload.tools.forecast.workload import BACKWARD, EVALUATION, FORWARD, Workload, WorkloadUse

UNITS = tuple(UnitFact(f"layer {n}", 100 * (n + 1), (n,), False, False) for n in range(2))


def about(steps: int = 0, **changes: Any) -> About:
    done = [StepFact(n, 10.0 * n, 10.0 * n + 1.0, {}, {}) for n in range(steps)]
    known: dict[str, Any] = {
        "title": "a model",
        "made_by": "",
        "date": "",
        "cpu": "",
        "cores": 1,
        "device": "cpu",
        "kind": "prepare",
        "prefetch_depth": "2",
        "activations": "keep",
        "tuned": None,
        "host_bytes": None,
        "device_bytes": None,
        "directories": 1,
        "plan": "",
        "shares": {},
        "chunk_numel": None,
        "units": UNITS,
        "params": (),
        "order": ((0, 0), (0, 1), (1, 1), (1, 0)),
        "steps": tuple(done),
        "fallbacks": {},
        "numbers": {},
    }
    return About(**(known | changes))


def iteration(at_s: float, slower: float = 1.0) -> list[Event]:
    """Make the events of an iteration of ten seconds, times `slower`, with a step in the first."""

    def use(name: str, begin_s: float, end_s: float) -> Event:
        return Event(COMPUTE, name, at_s + begin_s * slower, at_s + end_s * slower)

    return [
        Event(STEP, "step 1", at_s, at_s + slower),
        use("forward 0: layer 0", 2.0, 3.0),
        use("forward 1: layer 1", 3.0, 3.1),  # then it waits for half a second
        Event(WAITING, "parameter read: x", at_s + 3.1 * slower, at_s + 3.6 * slower),
        use("forward 1: layer 1", 3.6, 4.0),
        # The loss, until 4.5.
        use("backward 1: layer 1", 4.5, 6.5),
        use("backward 0: layer 0", 6.5, 8.0),
    ]


def run_of(*slower: float, **changes: Any) -> Run:
    events, at_s = [], 0.0
    for factor in slower:
        events += iteration(at_s, factor)
        at_s += 10.0 * factor
    events.append(Event(STEP, "step", at_s, at_s + 1.0))
    return Run(about(**changes), tuple(events), (), ())


def test_an_iteration_is_read_from_its_events() -> None:
    work = Workload.of_run(run_of(1.0))
    assert [(use.phase, use.unit) for use in work.uses] == [
        (FORWARD, 0),
        (FORWARD, 1),
        (BACKWARD, 1),
        (BACKWARD, 0),
    ]
    # Waiting is left out; what is between forward and backward belongs to the last use of forward.
    assert [use.compute_s for use in work.uses] == pytest.approx([1.0, 1.0, 2.0, 1.5])
    assert work.between_s == pytest.approx(1.0 + 2.0)
    assert work.compute_s == pytest.approx(5.5)
    assert work.device == "cpu" and work.dtype == "float32" and work.param_bytes == 300


def test_medians_are_of_iterations_after_the_first_two() -> None:
    work = Workload.of_run(run_of(5.0, 4.0, 1.0, 1.0, 3.0))
    assert [use.compute_s for use in work.uses] == pytest.approx([1.0, 1.0, 2.0, 1.5])


def test_iterations_with_other_uses_do_not_count() -> None:
    run = run_of(1.0, 1.0, 1.0, 1.0, 1.0)
    odd = Event(COMPUTE, "evaluation 1: layer 1", 38.5, 39.0)
    events = sorted((*run.events, odd), key=lambda event: event.end_s)
    work = Workload.of_run(dataclasses.replace(run, events=tuple(events)))
    assert all(use.phase != EVALUATION for use in work.uses) and len(work.uses) == 4


def test_a_unit_that_is_used_twice_in_a_row_has_two_uses() -> None:
    events = [
        Event(STEP, "step", 0.0, 1.0),
        Event(COMPUTE, "forward 0: x", 1.0, 2.0),
        Event(COMPUTE, "forward 0: x", 2.0, 4.0),
        Event(COMPUTE, "backward 0: x", 4.0, 5.0),
        Event(STEP, "step", 6.0, 7.0),
    ]
    work = Workload.of_run(Run(about(), tuple(events), (), ()))
    assert work.uses == (WorkloadUse(0, 0, 1.0), WorkloadUse(0, 0, 2.0), WorkloadUse(1, 0, 1.0))


def test_what_a_busy_drive_costs_is_taken_out() -> None:
    run = run_of(1.0)
    busy = Event(DISK_READS, "parameters 1: x", 4.5, 6.5, 10)
    run = dataclasses.replace(run, events=(*run.events, busy))
    assert Workload.of_run(run).uses[2].compute_s == pytest.approx(2.0)
    uses = Workload.of_run(run, compute_beside_disk=0.6).uses
    assert [use.compute_s for use in uses] == pytest.approx([1.0, 1.0, 1.2, 1.5])


def test_a_devices_time_is_divided_by_sizes() -> None:
    wait = Event(WAITING, "device copy", 8.0, 8.5)  # at the end of backward
    run = run_of(1.0, device="cuda:0")
    work = Workload.of_run(dataclasses.replace(run, events=(*run.events, wait)))
    assert work.device == "cuda"
    weights = [1, 2, 4, 2]
    each = [use.compute_s / weight for use, weight in zip(work.uses, weights, strict=True)]
    assert each == pytest.approx([each[0]] * 4)
    assert work.compute_s + work.between_s == pytest.approx(9.0 - 0.5)  # less what a read took


def test_a_model_that_is_not_prepared_is_what_is_between_steps() -> None:
    work = Workload.of_run(Run(about(steps=4, units=(), order=()), (), (), ()))
    assert work.uses == () and work.between_s == pytest.approx(9.0)


def test_offloaded_activations_are_counted() -> None:
    steps = tuple(
        StepFact(n, 10.0 * n, 10.0 * n + 1, {}, {"activations_offloaded_bytes": 7 if n else 1})
        for n in range(5)
    )
    run = run_of(1.0)
    run = dataclasses.replace(run, about=dataclasses.replace(run.about, steps=steps))
    assert Workload.of_run(run).activation_bytes == 7


@pytest.mark.parametrize("steps", [0, 1])
def test_too_few_steps_are_refused(steps: int) -> None:
    with pytest.raises(FormatError, match=r"two steps.*train some steps longer"):
        Workload.of_run(Run(about(steps=steps, units=(), order=()), (), (), ()))
    with pytest.raises(FormatError, match="a model: expected the events of two steps"):
        Workload.of_run(Run(about(steps=steps), (), (), ()))


def test_uses_that_cannot_be_read_are_refused() -> None:
    run = run_of(1.0)
    events = tuple(e._replace(name="sideways") if e.row == COMPUTE else e for e in run.events)
    with pytest.raises(FormatError, match="expected a use like"):
        Workload.of_run(dataclasses.replace(run, events=events))


def test_a_scaled_workload_computes_longer_and_is_the_same_else() -> None:
    work = Workload.of_run(run_of(1.0))
    twice = work.scaled(2.0)
    assert twice.compute_s == pytest.approx(2 * work.compute_s)
    assert twice.between_s == pytest.approx(2 * work.between_s)
    assert (twice.units, twice.params, twice.dtype) == (work.units, work.params, work.dtype)


def test_a_real_run_has_all_its_uses_and_their_time(seed: int, tmp_path: Path) -> None:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = offload.prepare(model, optimizer, host_memory="400KiB", nvme=tmp_path)
    with optimizer:
        for _ in range(5):
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        offload.report(optimizer).save_trace(tmp_path / "run.json")
    run = run_file.load(tmp_path / "run.json")
    work = Workload.of_run(run)
    order = [(use.phase, use.unit) for use in work.uses]
    assert order == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 3), (1, 2), (1, 1), (1, 0)]
    assert order == [tuple(use) for use in run.about.order[-8:]]
    assert all(use.compute_s > 0 for use in work.uses)
