"""Pinned host memory: who asks for it, what CUDA may answer, and what is left behind. CUDA itself
is a stub: its runtime's calls, its last error, and its current device.
"""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.core import pool as pool_module
from offload.core.budget import Budget
from offload.core.errors import StateError
from offload.core.metrics import Metrics
from offload.core.pool import Pool
from offload.tools.selftest import budgets
from offload.tools.selftest.check import Setting

MIB = 1 << 20
SECOND = torch.device("cuda", 1)
REFUSALS = {1: "invalid argument", 2: "out of memory", 304: "OS call failed", 801: "not supported"}
ALREADY = 712


@dataclass
class Runtime:
    """A stand-in for what `torch.cuda.cudart()` gives. answers: of the next calls of
    `cudaHostRegister`.
    """

    answers: list[int] = field(default_factory=list)
    unregister_answer: int = 0
    current: int = 0  # device
    last_error: int = 0
    is_lost: bool = False  # every call fails from now on
    calls: list[tuple[str, int]] = field(default_factory=list)  # and the device at that moment
    held: dict[int, int] = field(default_factory=dict)  # bytes, by address

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1, "for all devices of the process"
        self.calls.append(("register", self.current))
        code = self.answers.pop(0) if self.answers else 0
        if code == 0:
            self.held[address] = nbytes
        return self._answer(code)

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", self.current))
        if self.unregister_answer == 0:
            self.held.pop(address, None)
        return self._answer(self.unregister_answer)

    def cudaGetErrorString(self, code: int) -> str:
        return REFUSALS.get(code, "unknown error")

    def _answer(self, code: int) -> int:
        self.last_error = code or self.last_error
        return code

    def launch(self, *_: object, **__: object) -> None:
        """Launch a kernel of the user's code, which gets an error that was left behind."""
        self.calls.append(("launch", self.current))
        code, self.last_error = self.last_error, self.last_error if self.is_lost else 0
        if code:
            raise RuntimeError(f"CUDA error {code}")

    @contextmanager
    def device_index(self, index: int) -> Iterator[None]:
        before, self.current = self.current, index
        yield
        self.current = before


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    stub = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stub)
    monkeypatch.setattr(torch.accelerator, "device_index", stub.device_index)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(pool_module.torch, "full", stub.launch)
    return stub


def open_pool(metrics: Metrics | None = None) -> Pool:
    return Pool(4 * MIB, budget=Budget(), device=SECOND, metrics=metrics)


def test_the_arena_is_pinned_with_its_own_device_current(runtime: Runtime) -> None:
    pool = open_pool()
    assert runtime.held == {pool.address: 4 * MIB}
    pool.close()
    gc.collect()
    assert not runtime.held
    assert runtime.calls == [("register", 1), ("unregister", 1)] and runtime.current == 0


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_is_told_and_leaves_no_error_behind(runtime: Runtime, code: int) -> None:
    runtime.answers = [code]
    metrics = Metrics()
    pool = open_pool(metrics)
    told = metrics.snapshot().fallbacks["pinned host memory"]
    assert f"cuda:1 refused 4 MiB: {REFUSALS[code]} ({code})" in told and "host_memory=" in told
    assert runtime.last_error == 0
    runtime.launch()  # the user's code, which has done nothing wrong
    with pool.lease(MIB) as lease:
        assert lease.tensor().fill_(7).sum() == 7 * MIB
    pool.close()
    gc.collect()
    assert ("unregister", 1) not in runtime.calls


def test_strict_allows_no_refusal_and_nothing_is_held_then(runtime: Runtime) -> None:
    runtime.answers = [2]
    budget = Budget()
    with pytest.raises(StateError, match=r"pinned host memory: cuda:1 refused .*strict=True"):
        Pool(4 * MIB, budget=budget, device=SECOND, metrics=Metrics(strict=True))
    gc.collect()
    assert budget.used_bytes == 0 and runtime.last_error == 0


def test_a_registration_that_somebody_forgot_is_taken_back(runtime: Runtime) -> None:
    runtime.answers = [ALREADY, 0]
    metrics = Metrics()
    pool = open_pool(metrics)
    assert runtime.held == {pool.address: 4 * MIB} and not metrics.snapshot().fallbacks
    pool.close()


def test_memory_that_cuda_takes_for_anothers_is_refused(runtime: Runtime) -> None:
    """Copies would read what was there before."""
    runtime.answers = [ALREADY, ALREADY]
    with pytest.raises(StateError, match="restart the process"):
        open_pool()
    assert runtime.last_error == 0


def test_a_lost_device_is_no_refusal(runtime: Runtime) -> None:
    runtime.answers, runtime.is_lost = [700], True
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        open_pool()


def test_an_arena_that_cannot_be_unpinned_stays_mapped(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(pool_module, "_KEPT", kept)
    raised: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    runtime.unregister_answer = 1
    pool = open_pool()
    pool.close()
    with caplog.at_level(logging.WARNING, "offload"):
        del pool
        gc.collect()
    assert "could not be unpinned, and stays mapped: invalid argument (1)" in caplog.text
    assert not raised and runtime.last_error == 0
    (arena,) = kept
    assert arena[0] == 0, "it is mapped"


def test_pages_are_there_before_the_device_asks_and_it_is_logged(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads: set[str] = set()
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        threads.add(thread.name)
        start(thread)

    def resident_pages(address: int, nbytes: int, _: torch.device) -> None:
        pages.append(_resident_bytes(address, nbytes))

    pages: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", note)
    monkeypatch.setattr(pool_module.os, "sched_getaffinity", lambda _: {0, 1, 2})
    with caplog.at_level(logging.INFO, "offload"):
        Pool(16 * MIB, resident_pages, Budget(), SECOND).close()
        assert pages == [16 * MIB] and len(threads) == 3
        assert "pinning 16 MiB for cuda:1" in caplog.text
        open_pool().close()
        assert "pinned 4 MiB in " in caplog.text


def _resident_bytes(address: int, nbytes: int) -> int:
    """Return how many bytes of the map at `address` are resident by the kernel's own count, at most
    `nbytes`.
    """
    found = 0
    with open("/proc/self/smaps") as maps:
        is_inside = False
        for line in maps:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                is_inside = begin <= address < end
            elif is_inside and first == "Rss:":
                found = int(line.split()[1]) << 10
    return min(found, nbytes)


# --- who is pinned --------------------------------------------------------------------------------


def test_the_cpu_pins_nothing_on_a_machine_with_a_gpu(runtime: Runtime, tmp_path: Path) -> None:
    """Neither a pool by itself, nor an optimizer or a model on the CPU, nor the selftest: a context
    on a GPU costs hundreds of megabytes, and cannot be made in a forked child.
    """
    with Pool(MIB, budget=Budget()), Pool(MIB, budget=Budget(), device=torch.device("cpu")):
        pass
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrapped = offload.wrap(torch.optim.AdamW(plain.parameters()))
    wrapped.close()
    optimizer = torch.optim.AdamW(plain.parameters())
    model, _ = offload.prepare(plain, optimizer, device="cpu")
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    offload.close(model)
    budgets.memory(Setting("cpu", tmp_path, is_quick=True, seed=0))
    assert runtime.calls == []


def test_the_end_of_the_process_unpins_without_a_word() -> None:
    """Interpreters tear modules down in an order of their own."""
    done = subprocess.run(
        [sys.executable, "-c", _ENDS], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "registered\n", "")


_ENDS = """
import torch
from offload.core.budget import Budget
from offload.core.pool import Pool

def register(address, nbytes, device):
    print("registered", flush=True)
    def unregister():
        print("unregistered", flush=True)
        raise RuntimeError("CUDA is gone")
    return unregister

pool = Pool(4 << 20, register, Budget(), torch.device("meta"))
tensor = pool.lease(4096).tensor()
"""
