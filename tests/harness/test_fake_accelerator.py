"""The fake accelerator, in processes of its own: a device is registered for good.

What is tested runs in ``tests/fake_accelerator``; here the answers are judged.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_accelerator.build import library
from fake_accelerator.offload_case import FAULTS
from fake_accelerator.run_checks import CHECKS
from fake_accelerator.train_case import SCHEDULES
from support import children

HERE = Path(__file__).resolve().parents[1]
NAMES = [f"{name}-{seed}" for name, seed in SCHEDULES]
CHECKED_UNDER = [("eager", 0), ("lazy", 0), ("seeded", 2)]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    library()  # the build has a time limit of its own
    return children.run(
        [sys.executable, *arguments],
        cwd=HERE,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


@functools.cache
def answer(module: str, *arguments: str) -> Any:
    """Run a module of the package, once for all tests, and return what it prints."""
    done = run("-W", "error", "-m", f"fake_accelerator.{module}", *arguments)
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stderr}"
    return json.loads(done.stdout)


@pytest.mark.parametrize(("schedule", "seed"), CHECKED_UNDER)
@pytest.mark.parametrize("name", CHECKS)
def test_check(name: str, schedule: str, seed: int) -> None:
    result = answer("run_checks", schedule, str(seed))[name]
    assert result == "ok", result


def test_training_equals_the_host_to_rounding() -> None:
    trained = answer("train_case")
    assert all(trained[name]["off"] < 2e-5 for name in NAMES), trained
    assert trained["without_shapes"] == []


def test_training_is_the_same_to_the_bit_under_every_schedule() -> None:
    trained = answer("train_case")
    assert len({trained[name]["digest"] for name in NAMES}) == 1
    assert trained["autocast-eager"]["digest"] == trained["autocast-lazy"]["digest"]
    assert 0 < trained["autocast-eager"]["off"] < 0.1


def test_a_correct_offload_loop_has_the_same_bits_under_every_schedule() -> None:
    result = answer("offload_case")
    assert result["off"] < 1e-5
    assert len({digest for one in result["rounds"] for digest in one["none"].values()}) == 1


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught_every_time(fault: str) -> None:
    rounds = answer("offload_case")["rounds"]
    right = rounds[0]["none"]["eager-0"]
    caught = [[name for name in NAMES if one[fault][name] != right] for one in rounds]
    assert caught[0], f"no schedule caught: {fault}"
    assert caught[0] == caught[1]


TOUCH = """
import ctypes, torch
from fake_accelerator import load
load()
tensor = torch.ones(4, device="fake")
torch.accelerator.synchronize()
print(tensor.cpu().sum().item(), flush=True)
{}
print("still alive", flush=True)
"""


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.c_float.from_address(tensor.data_ptr()).value",
        "ctypes.memset(tensor.data_ptr(), 0, 4)",
    ],
    ids=["read", "write"],
)
def test_the_host_cannot_touch_device_memory(touch: str) -> None:
    done = run("-c", TOUCH.format(touch))
    assert done.stdout == "4.0\n", done.stdout + done.stderr
    assert done.returncode == -signal.SIGSEGV


SETTINGS = """
import torch
from fake_accelerator import load
fake = load()
pinned = torch.zeros(4, pin_memory=True)
pinned.copy_(torch.ones(4, device="fake"), non_blocking=True)
print(pinned.sum().item(), torch.accelerator.get_memory_info()[1])
"""


@pytest.mark.parametrize(("schedule", "value"), [("eager", "4.0"), ("lazy", "0.0")])
def test_the_environment_sets_the_device_up(schedule: str, value: str) -> None:
    settings = {"FAKE_ACCELERATOR_SCHEDULE": schedule, "FAKE_ACCELERATOR_BUDGET": "4194304"}
    done = run("-c", SETTINGS, **settings)
    assert done.stdout == f"{value} 4194304\n", done.stdout + done.stderr
