"""Freed memory stays with the process, so that every step need not fault it in again; but not
without bound.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import StateError
from offload.core import heap
from offload.core.budget import Budget
from offload.core.heap import SLACK_BYTES, Heap
from offload.core.metrics import Metrics

MI = 1 << 20

# 40 MiB: on the heap, for none of it is larger than glibc's own threshold.
SCRIPT = """
import resource, sys
import torch
import offload
from offload.core.heap import keep_freed_memory

optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(8))])
if "wrap" in sys.argv:
    offload.wrap(optimizer)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    held = [torch.ones(1 << 20) for _ in range(10)]
    del held

for _ in range(4):
    work()
before = faults()
for _ in range(5):
    work()
print(faults() - before, keep_freed_memory())
"""


def run(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, bool]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=clean | variables
    )
    faults, kept = done.stdout.split()
    return int(faults), kept == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_wrapping_keeps_what_is_freed(tmp_path: Path) -> None:
    faults, kept = run(tmp_path, "wrap")
    plain, _ = run(tmp_path)
    assert kept and faults < 1000 and faults <= plain  # of 5 x 10 Ki pages


# --- how much is kept -----------------------------------------------------------------------------


class Process:
    """A made-up process: bytes in use, and bytes that are free and still resident."""

    def __init__(self) -> None:
        self.used = 500 * MI
        self.free = self.peak = self.trims = 0
        self.heap = Heap(self.private, self.trim)
        self.heap._users = 1
        self.heap.trim_after_start()
        self.trims = 0

    def private(self) -> int:
        return self.used + self.free

    def trim(self) -> bool:
        self.free = 0
        self.trims += 1
        return True

    def pass_through(self, nbytes: int, reused: bool) -> None:
        """Take `nbytes` and free them; resident free bytes serve for them if `reused`."""
        found = min(self.free, nbytes) if reused else 0
        self.free += nbytes - found
        self.peak = max(self.peak, self.private())


def test_what_is_freed_and_never_used_again_is_bounded() -> None:
    process = Process()
    for _ in range(1000):
        process.pass_through(16 * MI, reused=False)
        process.heap.arrived(16 * MI)
    assert process.peak <= (500 + 16) * MI + SLACK_BYTES + 16 * MI
    assert process.trims <= 1000 * 16 * MI // SLACK_BYTES + 1, "no more often than needed"


def test_small_gradients_are_looked_at_together() -> None:
    process = Process()
    for _ in range(64 * 1000):
        process.pass_through(MI // 4, reused=False)
        process.heap.arrived(MI // 4)
    assert process.peak <= 500 * MI + SLACK_BYTES + 16 * MI + MI
    assert process.trims <= 16_000 * MI // SLACK_BYTES + 1


@pytest.mark.parametrize("passing_mib", [40, 200, 1000])
def test_what_each_unit_needs_in_passing_is_kept(passing_mib: int) -> None:
    """As recomputed activations; with a look at its gradients in between."""
    process = Process()
    for _ in range(1000):
        process.pass_through(passing_mib * MI, reused=True)
        process.heap.look()
        process.pass_through(8 * MI, reused=True)
        process.heap.look()
    assert process.trims <= 2 and process.peak <= (500 + passing_mib + 8) * MI


def test_what_grows_and_is_in_use_costs_little() -> None:
    process = Process()
    for _ in range(500):  # forward, then backward, some steps
        for _ in range(20):
            process.used += 50 * MI
            process.heap.look()
        for _ in range(20):
            process.used -= 50 * MI
            process.free += 50 * MI
            process.heap.look()
        process.free = 0  # forward uses it again
    assert process.trims <= 20


def test_where_pages_cannot_go_nothing_is_tried_over_and_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = Process()
    monkeypatch.setattr(process.heap, "_trim", lambda: False)
    process.pass_through(4000 * MI, reused=False)
    process.heap.look()
    assert process.free == 4000 * MI


def test_nobody_to_serve_means_nothing_is_done() -> None:
    process = Process()
    process.heap._users = 0
    process.pass_through(4000 * MI, reused=False)
    process.heap.look()
    assert not process.trims


# --- the C library --------------------------------------------------------------------------------


class Library(SimpleNamespace):
    """A stand-in for glibc, with the two calls that the engine makes."""

    def __init__(self) -> None:
        self.told: dict[int, int] = {}
        self.trims = 0

    def mallopt(self, name: int, value: int) -> int:
        self.told[name] = value
        return 1

    def malloc_trim(self, _: int) -> int:
        self.trims += 1
        return 1


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    made, mine = Library(), heap.Heap()
    monkeypatch.setattr(heap, "_glibc", lambda: made)
    for name in (
        "api",
        "params.engine",
        "params.hooks",
        "params.prepared",
        "optim.coordinator",
        "optim.session",
    ):
        monkeypatch.setattr(f"offload.{name}.HEAP", mine)  # the real one may still have users
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    return made


def wrapped(**options: Any) -> Any:
    return offload.wrap(torch.optim.AdamW(nn.Linear(4, 4).parameters()), **options)


def prepared(**options: Any) -> Any:
    model = nn.Linear(4, 4)
    return offload.prepare(model, torch.optim.AdamW(model.parameters()), **options)[1]


TRIM, MMAP = -1, -3


@pytest.mark.parametrize("make", [wrapped, prepared])
def test_the_last_to_close_has_glibc_give_back_again(
    make: Any, library: Library, own_budget: Budget
) -> None:
    one, other = make(host_memory=2 * MI), wrapped(host_memory=4 * MI)
    assert library.told == {MMAP: 32 * MI, TRIM: -1}
    one.close()
    gc.collect()
    assert library.told[TRIM] == -1, "the other still works"
    trims = library.trims
    other.close()
    gc.collect()
    assert library.told == {MMAP: 32 * MI, TRIM: 64 * MI} and library.trims == trims + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")],
)
def test_whoever_has_set_glibc_is_left_alone(
    name: str, value: str, library: Library, own_budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with wrapped(host_memory=2 * MI) as optimizer:
        assert not offload.report(optimizer).fallbacks, "pages can be given back all the same"
    gc.collect()
    assert not library.told


@pytest.mark.parametrize("make", [wrapped, prepared])
def test_another_c_library_is_told_of(
    make: Any, own_budget: Budget, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    with make(host_memory=2 * MI) as optimizer:
        assert "no malloc_trim" in offload.report(optimizer).fallbacks["freed memory"]
    with pytest.raises(StateError, match="freed memory: this C library has no malloc_trim"):
        make(host_memory=2 * MI, strict=True)


def test_a_library_without_the_calls_is_no_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert heap._glibc.__wrapped__() is None


def test_a_user_that_is_forgotten_is_served_no_longer(library: Library) -> None:
    made, user = Heap(lambda: 1, lambda: True), Metrics()
    made.serve(user, user)
    assert made._users == 1
    del user
    gc.collect()
    assert made._users == 0 and made.base_bytes is None and made.peak_bytes() is None
