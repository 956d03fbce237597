"""The plan: what fits stays, the rest moves, and what cannot work is refused with the numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from offload import CapacityError
from offload.planning.layout import ParamSpec
from offload.planning.planner import BUFFERS, Budgets, TrainingFacts, plan_state
from offload.planning.state_plan import UNKNOWN, Plan, Speeds

MI = 1 << 20
FIELDS = ("exp_avg", "exp_avg_sq")


def params(*numels: int, fields: tuple[str, ...] = FIELDS) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", n, fields) for i, n in enumerate(numels)]


def make_plan(
    specs: Sequence[ParamSpec],
    host_bytes: int | None,
    has_disk: bool,
    needs_grad_buffers: bool = False,
    speeds: Speeds = UNKNOWN,
) -> Plan:
    facts = TrainingFacts(tuple(specs), needs_grad_buffers, speeds=speeds)
    return plan_state(facts, Budgets(host_bytes, directories=int(has_disk)))


def test_everything_stays_where_it_fits() -> None:
    plan = make_plan(params(10 * MI, 100), 100 * MI, has_disk=True)
    assert plan.disk_bytes == plan.buffers == plan.buffer_bytes == 0
    assert plan.arena_bytes == plan.resident_bytes == plan.state_bytes
    assert plan.fits_without_us and "fits without offload" in str(plan)
    assert make_plan(params(10 * MI), None, has_disk=False).disk_bytes == 0


@pytest.mark.parametrize("budget_mi", [1, 5, 64, 200, 333, 799])
def test_budgets_are_kept(budget_mi: int) -> None:
    plan = make_plan(params(100 * MI, 3, 5), budget_mi * MI, has_disk=True)
    assert plan.arena_bytes <= budget_mi * MI
    assert plan.disk_bytes + plan.resident_bytes == plan.state_bytes >= 800 * MI
    assert plan.disk_bytes > 0 and 2 <= plan.buffers <= BUFFERS
    assert plan.step_read_bytes == plan.step_written_bytes
    in_buffers = plan.disk_bytes - plan.step_read_bytes
    assert 0 < in_buffers <= plan.buffers * plan.buffer_bytes
    assert plan.disk_capacity_bytes >= plan.disk_bytes + plan.buffers * plan.buffer_bytes
    # No room is wasted: not one more chunk would fit.
    assert plan.arena_bytes + plan.buffer_bytes > budget_mi * MI or plan.buffers == BUFFERS


def test_state_that_must_move_and_no_more() -> None:
    """16 bytes a step for an fp32 parameter (m and v, there and back), 24 for a 16-bit one."""
    for fields, bytes_each in ((FIELDS, 16), (("master", *FIELDS), 24)):
        plan = make_plan(params(64 * MI, fields=fields), 2 * MI, has_disk=True)
        moved = plan.step_read_bytes + plan.step_written_bytes
        assert moved == bytes_each * 64 * MI - 2 * plan.arena_bytes, "what has a place stays there"
        assert plan.arena_bytes <= 2 * MI


def test_what_cannot_work_is_refused_with_the_arithmetic() -> None:
    with pytest.raises(CapacityError, match=r"needs 80 MiB \(83886080 bytes\), 8 MiB are allowed"):
        make_plan(params(10 * MI), 8 * MI, has_disk=False)
    with pytest.raises(CapacityError, match="the least that works is 262144 bytes"):
        make_plan(params(10 * MI), 1000, has_disk=True)
    assert make_plan(params(10 * MI), 262144, has_disk=True).buffers == 2
    with pytest.raises(CapacityError, match="the least that works is 81920 bytes"):
        make_plan(params(10_000), 1000, has_disk=True)
    assert make_plan(params(10_000), 81920, has_disk=True).fits_without_us


def plan_with(speeds: Speeds) -> Plan:
    return make_plan(params(100 * MI), 64 * MI, has_disk=True, speeds=speeds)


def test_wear_and_time() -> None:
    plan = plan_with(Speeds(disk_bytes_per_s=4e9, update_bytes_per_s=40e9))
    written = plan.step_written_bytes
    assert plan.endurance_share(1000, 600) == written * 1000 / 600e12
    assert plan.predicted_step_s == 2 * written / 4e9
    assert f"{plan.predicted_step_s:.3g} s at best: disk" in str(plan)
    assert plan_with(Speeds(update_bytes_per_s=40e9)).predicted_step_s is None
    assert "not predicted" in str(plan_with(Speeds()))
    fast_disk = plan_with(Speeds(disk_bytes_per_s=1e15, update_bytes_per_s=40e9))
    assert fast_disk.predicted_step_s == (2 * plan.state_bytes + 12 * 100 * MI) / 40e9


def test_the_table_reads() -> None:
    text = str(make_plan(params(100 * MI), 160 * MI, has_disk=True))
    for words in (
        "104,857,600 in 1 tensors",
        "on disk",
        "10,000 steps write",
        "of 160 MiB allowed: state 32 MiB, buffers 128 MiB",
    ):
        assert words in text


def test_staging_buffers_shrink_where_there_is_no_disk() -> None:
    """State on a device that fits but for the staging buffers: smaller chunks need smaller ones."""
    there = [ParamSpec("p", 16 * MI, FIELDS, device_bytes=4)]
    large = make_plan(there, None, has_disk=False)
    state, grad_buffers = large.state_bytes, large.grad_buffers_bytes
    assert large.staging_buffers * large.staging_buffer_bytes == 3 * 16 * MI
    for spare_mi in (47, 20, 3):
        plan = make_plan(there, state + spare_mi * MI, has_disk=False)
        assert plan.resident_bytes == state and plan.arena_bytes <= state + spare_mi * MI
        assert plan.staging_buffers == large.staging_buffers and not plan.has_grad_buffers
    plan = make_plan(there, state + grad_buffers + 20 * MI, has_disk=False, needs_grad_buffers=True)
    assert plan.has_grad_buffers and plan.arena_bytes <= state + grad_buffers + 20 * MI
    with pytest.raises(
        CapacityError, match=r"needs 128 MiB .* copies of device parameters 384 KiB"
    ):
        make_plan(there, state + 1000, has_disk=False)


@pytest.mark.parametrize("has_disk", [False, True])
def test_parameters_without_state_need_staging_buffers_only(has_disk: bool) -> None:
    there = [ParamSpec("p", 16 * MI, (), device_bytes=4), ParamSpec("q", 9, ())]
    plan = make_plan(there, None, has_disk)
    assert plan.state_bytes == plan.disk_bytes == 0 and len(plan.chunks) == 4
    small = make_plan(there, 12 * MI, has_disk)
    assert small.disk_bytes == small.buffers == 0 and small.arena_bytes <= 12 * MI
    with pytest.raises(CapacityError, match="host_memory"):
        make_plan(there, 5000, has_disk)
