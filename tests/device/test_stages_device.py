"""`wrap` among ranks with parameters on a device: stages 1 and 2, beside plain torch on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fake_accelerator import DeviceModule
from support.device import stages_cases as cases
from support.device import stages_loops as loops
from support.device.faults import OF_STAGE_1, OF_STAGE_2, OF_TWO_STREAMS
from support.device.mutants import mutant_of
from support.loops import tally
from support.mutation import Fault
from support.ranks.launch import run
from torch import nn

from offload import kernels
from offload.optim.agreement import checksums


@pytest.mark.parametrize("stage", [1, 2])
def test_the_bits_of_plain_torch(stage: int, tmp_path: Path) -> None:
    for found in run(2, cases.the_same_bits, stage, str(tmp_path)):
        assert not found["wrong"]


def test_gradients_that_two_streams_make() -> None:
    assert run(2, cases.several_streams) == [[], []]


@pytest.mark.parametrize("stage", [1, 2])
def test_each_rank_moves_its_part(stage: int) -> None:
    """Parameters and gradients come to the host and parameters go back, a rank's own; everything
    passes the network once, in stage 2 the gradients, too.
    """
    for found in run(2, cases.moved, stage):
        assert 0.98 <= found["up"] <= 1.02 and 1.96 <= found["down"] <= 2.04
        in_the_step = 2 if stage == 1 else 1  # else gradients have come before
        assert found["all up"] < 1.05 and found["all down"] < in_the_step + 0.05
        assert 1.0 <= found["gather"] <= 1.05
        assert ("reduce" in found) is (stage == 2) and 1.0 <= found.get("reduce", 1.0) <= 1.05
        assert "on the device" in found["text"]
        assert (found["host_bytes"] == 0) is (stage == 1)


@pytest.mark.parametrize("stage", [1, 2])
def test_what_else_a_loop_does(stage: int, tmp_path: Path) -> None:
    run(2, loops.otherwise, stage, str(tmp_path))


def test_three_ranks() -> None:
    run(3, loops.three)


@pytest.mark.parametrize("stage", [1, 2])
def test_an_error_in_the_middle_reaches_all_ranks(stage: int) -> None:
    assert run(2, loops.broken, stage, deadline_s=60) == ["ended", "ended"]


def test_checksums_notice_every_change(fake: DeviceModule) -> None:
    """Changes of values, of their places and of their signs are seen; the sum is the same on every
    device, in any order of addition.
    """
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.randn((1 << 20) + 3, generator=generator).to(dtype)
        changed = [one.neg(), one.roll(1), one.flip(0)]
        for at in (0, 1 << 19, (1 << 20) + 2):
            changed.append(one.clone())
            changed[-1][at] = one[at] + one[at].abs() / 64
        same, *others = checksums([each.to("fake") for each in [one, *changed]])
        several = checksums([one.to("fake:1"), one, one.to("fake:0")])
        assert several == [same, kernels.checksum(one), same] and same not in others
    assert checksums([one[:0].to("fake"), one[:0]])[1] == kernels.checksum(one[:0])


def test_refusals() -> None:
    run(2, loops.refusals)


@pytest.mark.parametrize(
    ("stage", "make", "faults"),
    [
        (1, cases.Mixed, OF_STAGE_1),
        (2, cases.Mixed, OF_STAGE_2),
        (2, cases.Forked, OF_TWO_STREAMS),
    ],
    ids=["stage 1", "stage 2", "two streams"],
)
def test_every_wait_is_needed(stage: int, make: type[nn.Module], faults: list[Fault]) -> None:
    tally("planted faults", len(faults))
    planted = [mutant_of(fault) for fault in faults]
    for found in run(2, cases.with_faults, stage, make, planted):
        assert [fault.what for fault, seen in zip(faults, found, strict=True) if not seen] == []
