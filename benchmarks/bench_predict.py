"""Predicted times of iterations beside measured ones: `make bench ONLY=predict`, or pytest
benchmarks/bench_predict.py.

A GPT trains with budgets from everything in memory to nearly everything on disk, with several
depths, types and numbers of tokens, by turns; each of these runs is simulated with the speed that
its own drive had. What else the simulator is told is measured with everything in memory, alone and
beside a busy drive. OFFLOAD_BENCH_ROUNDS changes the number of turns, OFFLOAD_BENCH_DIR the
directory, OFFLOAD_BENCH_LAYERS and OFFLOAD_BENCH_WIDTH the model (for a try, with the first
configurations only; nothing is judged or written down then).
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from contest import rounds
from gpt import GPT
from predict_results import BYTES_NEAR, NEEDED, Known, Prediction, Predictions

import offload
from offload.core.timeline import DISK_READS, DISK_WRITES, Event, StepFact
from offload.planning.planner import Budgets
from offload.planning.profile import Profile, Tuning, this_machine
from offload.storage.disk import DiskStore
from offload.telemetry import run_file
from offload.telemetry.run_file import Run
from offload.tools.forecast.simulator import simulate
from offload.tools.forecast.workload import Workload

MI = 1 << 20
LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH = 10, 768, 12, 4096, 512
WARM_UP, STEPS = 3, 6  # even: steps may come in twos, of which the second finds what the first left
TRAINED_BYTES = 16  # an element: parameter, gradient and state, with fp32 as with bf16 parameters
BUSY_BYTES, BUSY_REQUESTS = 8 * MI, 8
LEAST_SHARE = 0.05  # of a drive's busy time, for a kind of it to have a speed of its own
COPY_BYTES = 256 * MI


@dataclass(frozen=True)
class Setup:
    """A configuration. share: of the host memory that everything takes; None: no limit. depth:
    None: the derived one.
    """

    share: float | None
    tokens: int = 512
    depth: int | None = 2
    dtype: str = "float32"

    def __str__(self) -> str:
        depth = "derived depth" if self.depth is None else f"depth {self.depth}"
        return f"{self.dtype}, {self.tokens} tokens, {self.share or 1:.0%} in memory, {depth}"

    @property
    def in_memory(self) -> Setup:
        return replace(self, share=None, depth=2)


SETUPS = (
    Setup(0.75),
    Setup(0.55),
    Setup(0.40),
    Setup(0.40, depth=0),
    Setup(0.40, depth=5),
    Setup(0.40, depth=None),
    Setup(0.40, tokens=2048),
    Setup(0.35, tokens=128),
    Setup(0.45, dtype="bfloat16"),
    Setup(0.30, dtype="bfloat16", tokens=1024),
)


def layers() -> int:
    return int(os.environ.get("OFFLOAD_BENCH_LAYERS") or LAYERS)


def width() -> int:
    return int(os.environ.get("OFFLOAD_BENCH_WIDTH") or WIDTH)


def is_a_try() -> bool:
    return (layers(), width()) != (LAYERS, WIDTH)


# --- real runs ------------------------------------------------------------------------------------


def train(setup: Setup, directory: Path) -> Run:
    """Train some steps; return the run from its file."""
    torch.manual_seed(20261117)
    model: Any = GPT(layers(), width(), HEADS, LENGTH, VOCABULARY)
    model = model.to(getattr(torch, setup.dtype))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    place: dict[str, Any] = {"prefetch_depth": "auto" if setup.depth is None else setup.depth}
    with TemporaryDirectory(dir=directory, prefix="predict-") as folder:
        if setup.share is not None:
            numel = sum(param.numel() for param in model.parameters())
            memory = int(setup.share * TRAINED_BYTES * numel)
            place |= {"host_memory": memory, "nvme": folder}
        model, optimizer = offload.prepare(model, optimizer, device="cpu", **place)
        with optimizer:
            length = min(setup.tokens, LENGTH)
            words = torch.randint(VOCABULARY, (setup.tokens // length, length + 1))
            for _ in range(WARM_UP + STEPS):
                model.loss(words).backward()
                optimizer.step()
                optimizer.zero_grad()
            offload.report(optimizer).save_trace(Path(folder) / "run.json")
        return run_file.load(Path(folder) / "run.json")


def steady(run: Run) -> Sequence[StepFact]:
    return run.about.steps[WARM_UP:]


def iteration_s(run: Run) -> float:
    ends_s = [step.end_s for step in run.about.steps[WARM_UP - 1 :]]
    return statistics.median((b - a) / 2 for a, b in zip(ends_s, ends_s[2:], strict=False))


def moved_bytes(run: Run) -> float:
    kinds = "disk_read_bytes", "disk_written_bytes"
    return statistics.mean(sum(step.counts.get(k, 0) for k in kinds) for step in steady(run))


def update_bytes_per_s(run: Run) -> float:
    rates = [s.counts["updated_bytes"] / s.seconds["step(): update"] for s in steady(run)]
    return statistics.median(rates)


# --- speeds ---------------------------------------------------------------------------------------


def disk_rates(events: Sequence[Event]) -> dict[str, float]:
    """Return the rates of a run's own drive: reads alone, writes alone, both. A request's bytes are
    spread evenly over its time. A kind that was in progress for less than LEAST_SHARE of the busy
    time gets the mean rate of all.
    """
    disk = [e for e in events if e.row in (DISK_READS, DISK_WRITES) and e.end_s > e.begin_s]
    moments = sorted({moment for e in disk for moment in (e.begin_s, e.end_s)})
    seconds, nbytes = dict.fromkeys(("read", "write", "mixed"), 0.0), dict[str, float]()
    at, under_way = 0, set[Event]()
    begins = sorted(disk, key=lambda event: event.begin_s)
    for begin_s, end_s in pairwise(moments):
        while at < len(begins) and begins[at].begin_s <= begin_s:
            under_way.add(begins[at])
            at += 1
        under_way = {event for event in under_way if event.end_s > begin_s}
        if not under_way:
            continue
        rows = {event.row for event in under_way}
        kind = "mixed" if len(rows) == 2 else "read" if DISK_READS in rows else "write"
        seconds[kind] += end_s - begin_s
        share = sum(e.nbytes / (e.end_s - e.begin_s) for e in under_way) * (end_s - begin_s)
        nbytes[kind] = nbytes.get(kind, 0.0) + share
    busy = sum(seconds.values())
    whole = sum(nbytes.values()) / busy
    return {
        kind: nbytes[kind] / s if s > LEAST_SHARE * busy else whole for kind, s in seconds.items()
    }


def copy_bytes_per_s() -> float:
    source, target = torch.ones(2, COPY_BYTES, dtype=torch.uint8).unbind()
    rates = []
    for _ in range(5):
        begin_s = time.perf_counter()
        target.copy_(source)
        rates.append(2 * COPY_BYTES / (time.perf_counter() - begin_s))
    return statistics.median(rates)


@contextmanager
def busy_drive(directory: Path) -> Iterator[None]:
    """Read and write all the time in another thread while the block runs."""
    stop = threading.Event()
    store = DiskStore([directory], 3 * BUSY_REQUESTS * BUSY_BYTES)
    memory = torch.ones(2 * BUSY_REQUESTS, BUSY_BYTES, dtype=torch.uint8)
    errors: list[BaseException] = []
    for ticket in [store.write(str(n), memory[n]) for n in range(BUSY_REQUESTS)]:
        ticket.wait()

    def work() -> None:
        try:
            while not stop.is_set():
                tickets = [store.write(str(n), memory[n]) for n in range(BUSY_REQUESTS // 2)]
                tickets += [
                    store.read(str(n), memory[n + BUSY_REQUESTS])
                    for n in range(BUSY_REQUESTS // 2, BUSY_REQUESTS)
                ]
                for ticket in tickets:
                    ticket.wait()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="busy drive")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        store.close()
    if errors:
        raise errors[0]


@dataclass(frozen=True)
class Base:
    """The figures with everything in memory: the workload, and speeds alone and beside a busy
    drive.
    """

    work: Workload
    update_bytes_per_s: float
    compute_beside_disk: float
    update_beside_disk: float


def measure_base(setup: Setup, directory: Path) -> Base:
    works, updates = [], []
    for beside in (nullcontext(), busy_drive(directory)):
        with beside:
            run = train(setup, directory)
        works.append(Workload.of_run(run))
        updates.append(update_bytes_per_s(run))
    return Base(
        works[0],
        updates[0],
        min(1.0, works[0].compute_s / works[1].compute_s),
        min(1.0, updates[1] / updates[0]),
    )


# --- predictions ----------------------------------------------------------------------------------


def predict(setup: Setup, base: Base, memory_bytes_per_s: float, run: Run, row: Prediction) -> None:
    """Add one round of a configuration to its row: predicted from `base`, and measured."""
    rates, (cpu, cores) = disk_rates(run.events), this_machine()
    machine = Profile(
        name="this one",
        is_measured=True,
        sources=(),
        date="",
        cpu=cpu,
        cores=cores,
        memory_bytes_per_s=memory_bytes_per_s,
        update_bytes_per_s=base.update_bytes_per_s,
        disk_read_bytes_per_s=rates["read"],
        disk_write_bytes_per_s=rates["write"],
        disk_mixed_bytes_per_s=rates["mixed"],
        compute_beside_disk=base.compute_beside_disk,
        update_beside_disk=base.update_beside_disk,
    )
    about = run.about
    # Units and parameters are the same; only what computes when was measured in memory.
    work = replace(base.work, units=about.units, params=about.params)
    budgets = Budgets(about.host_bytes, None, about.directories, about.activations)
    found = simulate(work, budgets, machine, Tuning(prefetch_depth=setup.depth), WARM_UP + STEPS)
    row.predicted_s.append(found.step_s)
    row.measured_s.append(iteration_s(run))
    row.predicted_bytes.append(found.read_bytes + found.written_bytes)
    row.measured_bytes.append(moved_bytes(run))
    row.disk_bytes_per_s.append(rates["mixed"])
    row.limit = found.limit
    print(f"{row.name}: {row.measured_s[-1]:.3f} s, predicted {found.step_s:.3f} s", flush=True)


def test_predictions(benchmark: Any, predict_results: list[Predictions], directory: Path) -> None:
    setups = SETUPS[:3] if is_a_try() else SETUPS
    rows = [Prediction(str(setup)) for setup in setups]
    bases: list[Base] = []

    def go_round() -> None:
        memory = copy_bytes_per_s()
        known = {alone: measure_base(alone, directory) for alone in {s.in_memory for s in setups}}
        bases.extend(known.values())
        for setup, row in zip(setups, rows, strict=True):
            run = train(setup, directory)
            predict(setup, known[setup.in_memory], memory, run, row)

    benchmark.pedantic(go_round, rounds=rounds(3))
    for row in rows:
        assert row.bytes_ratio is None or abs(row.bytes_ratio - 1) <= BYTES_NEAR, row
        benchmark.extra_info[row.name] = row.ratio
    middle = statistics.median
    known = Known(
        f"a GPT of {layers()} layers of width {width()}, {STEPS} iterations after {WARM_UP}",
        middle(base.update_bytes_per_s for base in bases),
        copy_bytes_per_s(),
        middle(base.compute_beside_disk for base in bases),
        middle(base.update_beside_disk for base in bases),
    )
    if is_a_try():
        print(known, *rows, sep="\n")
    else:
        predict_results.append(Predictions(known, rows))
        assert sum(row.is_near for row in rows) >= NEEDED, [(r.name, r.ratio) for r in rows]
