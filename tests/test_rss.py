"""Resident memory, as the kernel counts it, keeps to `host_memory`: not the engine's own counters.

RSS above that after import is at most the budget, activations, the gradients in autograd's hands
and 300 MiB, for gradients of any size, on disk or not. Where the machine allows it the kernel
enforces that by a cgroup, and ends a process that takes more.
"""

from __future__ import annotations

import json
import random
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from support import children
from support.loops import tally
from support.memory_group import memory_group

MI = 1 << 20
ELSE_BYTES = 300 * MI  # beside what is counted below
WIDTH = 1024  # of what layers take and give

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="RSS is read from /proc")


@dataclass(frozen=True)
class Case:
    """A model, by the KiB of gradients of each layer, two of each, and what to do with it."""

    sizes_kib: list[list[int]]
    budget_bytes: int
    how: str = "prepare"
    steps: int = 1
    updates: bool = False
    tokens: int = 16

    @property
    def grad_bytes(self) -> list[int]:
        return [kib << 10 for sizes in self.sizes_kib for kib in sizes for _ in range(2)]

    @property
    def activation_bytes(self) -> int:
        """The bytes that autograd keeps, and what the widest product makes in passing."""
        each = [self.tokens * (nbytes // WIDTH + 12 * WIDTH) for nbytes in self.grad_bytes]
        return sum(each) + 3 * max(each)

    @property
    def held_bytes(self) -> int:
        """Gradients in autograd's hands, and with `wrap` all that is the user's."""
        if self.how == "wrap":
            return 2 * sum(self.grad_bytes)
        return max(self.grad_bytes)

    @property
    def allowed_bytes(self) -> int:
        return self.budget_bytes + self.activation_bytes + self.held_bytes + ELSE_BYTES


def run(case: Case, directory: Path) -> dict[str, Any]:
    """Run the case in a process of its own, which the kernel ends where it takes more than is
    allowed.
    """
    with memory_group(case.allowed_bytes) as group:
        wish = {**asdict(case), "directory": str(directory), "group": group and str(group)}
        command = children.program("support.rss_run", json.dumps(wish))
        done = children.run(command, capture_output=True, text=True, timeout=1200)
    tally("runs under a memory limit of the kernel" if group else "runs with RSS looked at")
    assert done.returncode == 0, f"{case}: ended with {done.returncode} {group=}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def check(case: Case, directory: Path) -> dict[str, Any]:
    found = run(case, directory)
    grown, allowed = found["grown_bytes"] / MI, case.allowed_bytes / MI
    assert grown <= allowed, f"{case}: RSS grew by {grown:.0f} MiB, {allowed:.0f} are allowed"
    return found


def test_gradients_that_go_to_disk_leave_no_memory_behind(tmp_path: Path) -> None:
    """768 MiB of gradients, each of a size that glibc keeps when it is freed."""
    case = Case([[16 << 10]] * 24, 256 * MI)
    found = check(case, tmp_path)
    assert found["spilled_bytes"] > 500 * MI and found["trims"]
    assert found["engine_bytes"] <= 256 * MI


def drawn(seed: int) -> Case:
    """Draw gradients of 4 KiB to 256 MiB, 1 GiB in all, and a budget for some or all of them."""
    draw = random.Random(seed)
    sizes: list[list[int]] = []
    while sum(map(sum, sizes)) < 1 << 19:
        kind = draw.choice(["any", "same"])
        kib = [4 * int(2 ** draw.uniform(0, 16)) for _ in range(draw.randint(1, 4))]
        layer, count = kib if kind == "any" else kib[:1] * len(kib), draw.randint(1, 8)
        room = (1 << 19) - sum(map(sum, sizes))  # with all layers of one size it may be 24 GiB
        sizes += [layer] * min(count, max(1, room // sum(layer)))
    most = max(map(sum, sizes)) << 10
    budget = int(draw.choice([3.5, 5, 20]) * most) + 64 * MI
    return Case(sizes, budget, draw.choice(["prepare", "prepare", "wrap"]), steps=3, updates=True)


@pytest.mark.torture
@pytest.mark.parametrize("seed", range(24))
def test_gradients_of_any_sizes_keep_to_the_budget(seed: int, tmp_path: Path) -> None:
    check(drawn(seed), tmp_path)
