"""Models with fewer layers, and chunks that are joined, against the full simulation."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from offload.planning.layout import lay_out
from offload.planning.planner import Budgets
from offload.planning.training import plan_training
from offload.planning.tuning import UNTUNED
from offload.tools.forecast import case, extrapolation
from offload.tools.forecast.case import ForecastCase
from offload.tools.forecast.extrapolation import Fineness, plan_of_sample, sample_sizes, weighted
from offload.tools.forecast.footprint import measure
from offload.tools.forecast.machines import find_machine
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.simulator import facts_of
from offload.tools.forecast.sources import find_source

MI, GI = 1 << 20, 1 << 30
NEAR = 0.03  # as documented


def test_the_samples_of_a_linear_figure_give_it_for_all_layers() -> None:
    periods = {"encoder": 40, "decoder": 60, "rest": 5}
    sizes = sample_sizes(periods, Fineness(8, 16, 100))
    assert [size for size, _ in sizes] == [
        {"encoder": 8, "decoder": 8, "rest": 5},
        {"encoder": 16, "decoder": 8, "rest": 5},
        {"encoder": 8, "decoder": 16, "rest": 5},
    ]

    def figure(size: dict[str, int]) -> dict[str, float]:
        return {"seconds": 3.0 + 2 * size["encoder"] + 7 * size["decoder"], "waits": 1.0}

    found = weighted([(weight, figure(size)) for size, weight in sizes])
    assert found == pytest.approx({"seconds": 3.0 + 2 * 40 + 7 * 60, "waits": 1.0})


def test_a_model_with_few_layers_is_its_own_sample() -> None:
    assert sample_sizes({"layers": 24}, Fineness(8, 16, 100)) == [({"layers": 24}, 1.0)]


def make_case(model: str, full: bool, uses: int, **given: Any) -> ForecastCase:
    """Make a case that is simulated fully, or from samples if it has more than so many uses."""
    request = ForecastRequest.of(model, full=full, **given)
    machine = find_machine(request.on).profile
    assert machine is not None
    on_device = machine.device is not None
    how = request.batch, request.sequence, request.dtype, request.activations
    footprint = measure(find_source(model, request.shape), *how, on_device=on_device)
    device = int(0.9 * machine.device_memory_bytes) if machine.device_memory_bytes else None
    budgets = Budgets(request.host_bytes, request.device_bytes or device, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(case, "_MANY_USES", uses)
        patch.setattr(case, "_LARGE_NUMEL", 0)
        return ForecastCase.of(request, footprint, budgets, machine, machine, UNTUNED)


ON = {"on": "rtx4090-1ssd", "activations": "recompute", "sequence": 1024}
# 40 layers: 8 and 16 of them tell what 40 take.
CASES = (
    ("all in memory", {**ON, "host_memory": "40GiB"}),
    ("state on the drive", {**ON, "host_memory": "12GiB"}),
    ("parameters, too", {**ON, "host_memory": "3GiB"}),
    ("and a small device", {**ON, "host_memory": "3GiB", "device_memory": "3GiB"}),
    ("activations, too", {**ON, "host_memory": "3GiB", "activations": "offload"}),
    ("on the CPU", {"on": "workstation-cpu", "host_memory": "3GiB", "sequence": 256}),
    ("wrapped", {**ON, "host_memory": "6GiB", "use": "wrap"}),
)


@pytest.mark.parametrize("given", [given for _, given in CASES], ids=[name for name, _ in CASES])
@pytest.mark.parametrize("uses", [0, 10**6], ids=["fewer layers", "joined chunks"])
def test_samples_take_and_move_what_the_whole_model_does(
    given: dict[str, Any], uses: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fine = Fineness(8, 16, 500)
    monkeypatch.setattr(Fineness, "of", classmethod(lambda cls, numel: fine))
    shape = {"layers": 40, "hidden": 1536, "vocabulary": 8000}
    whole = make_case("1.5B", True, uses, **given, **shape)
    few = make_case("1.5B", False, uses, **given, **shape)
    has_fewer_layers = uses == 0 and given.get("use") != "wrap"
    assert not whole.samples and len(few.samples) == (2 if has_fewer_layers else 1)
    expected, got = whole.run(whole.plan()), few.run(few.plan())
    step_s = expected.step_s
    assert got.step_s == pytest.approx(step_s, rel=NEAR)
    assert got.compute_s == pytest.approx(expected.compute_s, rel=1e-6)
    assert got.update_s == pytest.approx(expected.update_s, rel=1e-3)
    for name in ("read_bytes", "written_bytes", "to_device_bytes", "to_host_bytes"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=NEAR), name
    for name in ("host_bytes_taken", "disk_bytes", "params_on_host_bytes"):
        assert getattr(got, name) == pytest.approx(getattr(expected, name), rel=1e-3), name
    assert sum(got.stalls.values()) == pytest.approx(
        sum(expected.stalls.values()), abs=NEAR * step_s
    )


def test_a_plan_that_is_cut_down_holds_the_same_part_of_everything() -> None:
    large = make_case("1.5B", True, 0, **ON, host_memory="3GiB", layers=40, hidden=1536)
    small = make_case("550M", True, 0, **ON, host_memory="3GiB", layers=13, hidden=1536)
    plan = large.plan()
    few = plan_of_sample(plan, small.facts, 1, small.work.logits_bytes)
    share = few.param_bytes / plan.param_bytes
    both = [few, plan]
    resident = [p.state.resident_bytes / p.state.state_bytes for p in both]
    assert resident[0] == pytest.approx(resident[1], abs=0.01)
    spilled = [p.shares.gradients_on_disk / sum(p.facts.gradients) for p in both]
    assert 0 < spilled[0] == pytest.approx(spilled[1], abs=0.06)
    assert 0.3 < share < 0.4 and few.state.buffers == plan.state.buffers


@pytest.mark.parametrize("host", ["40GiB", "6GiB", "1GiB"])
def test_joined_chunks_are_planned_as_the_chunks_they_stand_for(host: str) -> None:
    work = make_case("1.5B", True, 0, **ON, host_memory=host).work
    facts = facts_of(work, offloads_activations=False)
    budgets = Budgets(ForecastRequest.of("1B", host_memory=host).host_bytes, None, 1)
    real = plan_training(facts, budgets)
    joined = plan_training(facts, dataclasses.replace(budgets, joined_numel=20 * MI))
    assert len(joined.state.chunks) < len(real.state.chunks) / 3
    assert joined.shares == real.shares
    assert joined.state.buffer_bytes == real.state.buffer_bytes
    assert joined.state.buffers == real.state.buffers
    for name in ("state_bytes", "resident_bytes", "disk_bytes", "arena_bytes", "step_read_bytes"):
        near = pytest.approx(getattr(real.state, name), rel=0.02, abs=20 * MI * 12)
        assert getattr(joined.state, name) == near, name


def test_a_forecast_of_any_size_makes_few_chunks() -> None:
    found = make_case("1T", False, 400, on="a100-80g-2ssd", host_memory="400GiB", sequence=128)
    plan = found.plan()
    assert len(plan.state.chunks) < 10_000
    sample = found.samples[-1]
    few = plan_of_sample(plan, facts_of(sample.work, False), 1, sample.work.logits_bytes)
    assert extrapolation.Fineness.of(found.numel).pieces >= 1000
    assert lay_out(few.facts.params, sample.joined_numel)
