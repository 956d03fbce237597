"""Threads of the kernels: shared by all callers, GIL released, alive after fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from support.kernels import assert_same_bits

from offload import _native, kernels
from offload.kernels import rules

pytestmark = pytest.mark.kernels

RULE = rules.Adam.at(3, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


def fresh(numel: int) -> list[torch.Tensor]:
    """Make parameter, gradient and states, the same ones for the same `numel`."""
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


@pytest.mark.parametrize("threads", [1, 2, 3, None])
def test_every_call_may_ask_for_fewer_threads(threads: int | None) -> None:
    kernels.set_num_threads(4)
    wide, narrow = torch.ones(2_000_000), torch.ones(2_000_000, dtype=torch.bfloat16)
    for call in (
        lambda: run(2_000_000, threads=threads),
        lambda: kernels.grad_stats(wide, threads=threads),
        lambda: kernels.cast(wide, narrow, threads=threads),
        lambda: kernels.cast(narrow, wide, threads=threads),
    ):
        _native.most_lanes()
        call()
        assert _native.most_lanes() == (threads or 4)


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


def native_calls(wide: list[torch.Tensor], half: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Return every kernel of the native core by its name, on four fp32 tensors and one of bf16,
    which the caller must keep.

    Not through `kernels`: the checks there release the GIL for reasons of their own.
    """
    addresses, n = [tensor.data_ptr() for tensor in wide], half.numel()

    def update(rule: rules.Rule) -> Callable[[], None]:
        call = _native.Update(*addresses, 0, 0, 3, 1.0, n, n, 0)
        return partial(getattr(_native, rule.kernel), call, *vars(rule).values())

    sgd = {"lr": 1e-3, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0}
    return {
        "adam": update(RULE),
        "sgd": update(rules.Sgd.at(**sgd, nesterov=False, first=False)),
        "adagrad": update(rules.Adagrad.at(2, lr=1e-3, lr_decay=0.0, eps=1e-8, weight_decay=0.0)),
        "lion": update(rules.LionRule.at(lr=1e-3, beta1=0.9, beta2=0.99, weight_decay=0.0)),
        "block_sums": partial(_native.block_sums, addresses[0], 0, n, addresses[1], 0),
        "cast": partial(_native.cast, addresses[0], 0, half.data_ptr(), 1, n, 0),
    }


@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad", "lion", "block_sums", "cast"])
def test_other_python_threads_run_during_a_call(name: str) -> None:
    """The switch interval is made so long that the main thread only gets on if the call releases
    the GIL.
    """
    wide = [torch.ones(4 << 20) for _ in range(4)]
    half = torch.ones(4 << 20, dtype=torch.bfloat16)
    call = native_calls(wide, half)[name]
    order: list[str] = []

    def work() -> None:
        order.append("call begins")
        for _ in range(30):
            call()
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


THREADS_OF_A_CALL = """
import os, torch
from offload import kernels
from offload.kernels import rules
rule = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, decoupled=True)
torch.set_num_threads(1)
tensors = [torch.ones(2_000_000) for _ in range(4)]
kernels.set_num_threads(4)
kernels.update(rule, *tensors, threads=1)
def count():
    return len(os.listdir("/proc/self/task"))
alone = count()
for threads in (1, 2, 3, None):
    kernels.update(rule, *tensors, threads=threads)
    kernels.grad_stats(tensors[1], threads=threads)
    print(count() - alone)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads in /proc")
def test_a_call_starts_as_many_threads_as_it_counts() -> None:
    """What the process has, not what the team says: the caller and a thread for each other lane."""
    done = subprocess.run(
        [sys.executable, "-c", THREADS_OF_A_CALL], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["0", "1", "2", "3"], done.stderr


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_a_team_of_its_own() -> None:
    kernels.set_num_threads(2)
    expected = run(1_000_000)  # the parent's team has threads now, the child will have none of them
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
    """A child forked in the middle of a parent's call must not inherit a lock that no thread
    releases.
    """
    code = """
import os, threading, torch
from offload import kernels
from offload.kernels import rules
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


FORKED_EARLY = """
import os, torch
torch.set_num_threads(2)  # before the import, which takes this number
from offload import kernels
from offload.kernels import rules
rule = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, decoupled=True)
tensors = [torch.ones(400_000) for _ in range(4)]
(tensors[0] + tensors[1]).sum()  # torch's OpenMP threads exist now
child = os.fork()
if child == 0:
    kernels.update(rule, *tensors)  # the first call of a kernel in this family of processes
    kernels.grad_stats(tensors[1])
    os._exit(0 if (tensors[0].numpy() < 1).all() else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
kernels.update(rule, *tensors)  # and the parent goes on with torch's threads
print("fine")
"""

IMPORTED_IN_THE_WORKER = """
import multiprocessing, sys
import numpy as np, torch
def work(queue):
    from offload import kernels
    from offload.kernels import rules
    rule = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, decoupled=True)
    # Not made by torch: its own threads are gone here, and it would wait for them.
    tensors = [torch.from_numpy(np.ones(400_000, np.float32)) for _ in range(4)]
    kernels.set_num_threads(2)
    kernels.update(rule, *tensors)
    queue.put(float(tensors[0].numpy().max()))
torch.set_num_threads(2)
(torch.ones(1_000_000) + 1).sum()  # torch's OpenMP threads exist now
assert "offload" not in sys.modules
context = multiprocessing.get_context("fork")
queue = context.Queue()
worker = context.Process(target=work, args=(queue,))
worker.start()
assert 0.8 < queue.get(timeout=60) < 1
worker.join()
print("fine")
"""


@pytest.mark.parametrize("code", [FORKED_EARLY, IMPORTED_IN_THE_WORKER], ids=["early", "worker"])
def test_a_child_does_not_wait_for_threads_that_died_at_the_fork(code: str) -> None:
    """torch had threads before the fork, and no kernel has run yet."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the child that hangs would outlive its parent
        process.communicate()
        pytest.fail("the child hangs")
    assert out.strip() == "fine", err
