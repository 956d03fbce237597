"""Threads of the kernels: shared by all callers, GIL released, alive after fork."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from testlib import assert_same_bits

from offload import _native, kernels, rules

pytestmark = pytest.mark.kernels

RULE = rules.Adam.at(3, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


def fresh(numel: int) -> list[torch.Tensor]:
    """Parameter, gradient and states, the same ones for the same `numel`."""
    generator = torch.Generator().manual_seed(numel)
    param, grad = (torch.randn(numel, generator=generator) for _ in range(2))
    return [param, grad, torch.zeros(numel), torch.zeros(numel)]


def run(numel: int, threads: int | None = None) -> torch.Tensor:
    tensors = fresh(numel)
    kernels.update(RULE, *tensors, threads=threads)
    return tensors[0]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_many_callers_share_the_lanes(limit: int) -> None:
    """Eight Python threads at once: never more lanes than the limit, and every result right."""
    kernels.set_num_threads(limit)
    sizes = [300_000 + 1000 * i for i in range(8)] * 4
    expected = {numel: run(numel) for numel in set(sizes)}
    _native.most_lanes()
    gate = threading.Barrier(8)

    def job(index: int) -> list[torch.Tensor]:
        gate.wait()
        return [run(numel) for numel in sizes[index::8]]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(job, range(8)))
    assert 1 <= _native.most_lanes() <= limit
    for index, tensors in enumerate(results):
        for numel, tensor in zip(sizes[index::8], tensors, strict=True):
            assert_same_bits(tensor, expected[numel], f"caller {index}, {numel} elements")


def test_a_call_may_ask_for_fewer_threads() -> None:
    kernels.set_num_threads(4)
    _native.most_lanes()
    run(2_000_000, threads=1)
    assert _native.most_lanes() == 1


@pytest.mark.parametrize("settings", [{}, {"OMP_NUM_THREADS": "1"}])
def test_at_first_there_are_as_many_threads_as_torch_has(settings: dict[str, str]) -> None:
    code = (
        "import torch; from offload import kernels; "
        "print(kernels.num_threads(), torch.get_num_threads())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **settings},
    )
    ours, torchs = map(int, done.stdout.split())
    assert ours == torchs
    assert not settings or ours == int(settings["OMP_NUM_THREADS"])


def test_other_python_threads_run_during_a_call() -> None:
    """The switch interval is made so long that the main thread only gets on if the call lets go of
    the GIL.
    """
    numel = 8 << 20
    buffers = [torch.ones(numel) for _ in range(4)]
    order: list[str] = []

    def work() -> None:
        order.append("call begins")
        for _ in range(20):
            kernels.update(RULE, *buffers)
        order.append("call ends")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        worker = threading.Thread(target=work)
        worker.start()
        order.append("main thread")
        worker.join()
    finally:
        sys.setswitchinterval(before)
    assert order == ["call begins", "main thread", "call ends"]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_crew_of_its_own() -> None:
    kernels.set_num_threads(2)
    expected = run(1_000_000)  # the parent's crew has threads now, the child will have none of them
    # Tensors are made before the fork: torch's own threads do not survive it.
    tensors = fresh(1_000_000)
    child = os.fork()
    if child == 0:
        kernels.update(RULE, *tensors)
        os._exit(0 if np.array_equal(tensors[0].numpy(), expected.numpy()) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(run(1_000_000), expected)


def test_forked_while_others_compute() -> None:
    """A child forked in the middle of a parent's call must not inherit a lock that nobody opens."""
    code = """
import os, threading, torch
from offload import kernels, rules
rule = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, decoupled=True)
kernels.set_num_threads(2)
stop = threading.Event()
# Made before the fork: torch's own threads do not survive it.
mine = [torch.ones(100_000) for _ in range(4)]
def churn():
    tensors = [torch.ones(200_000) for _ in range(4)]
    while not stop.is_set():
        kernels.update(rule, *tensors)
threads = [threading.Thread(target=churn) for _ in range(3)]
for t in threads: t.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        kernels.update(rule, *mine)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
for t in threads: t.join()
print("fine")
"""
    out = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert out.stdout.strip() == "fine", out.stderr
