"""The disk store against fio and what people use today: `make bench`, or pytest
benchmarks/bench_store.py.

Every contestant moves the same bytes once a round, in turn, in the same directory
(OFFLOAD_BENCH_DIR, else one below build/). OFFLOAD_BENCH_ROUNDS changes the number of rounds,
OFFLOAD_BENCH_SUSTAINED_GB the length of the sustained run.
"""

from __future__ import annotations

import importlib.util
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from contest import rounds
from disk_contest import MI, DeepSpeed, DiskContestant, Fio, Ours, Plain, Run, hold, timed
from store_results import StoreRow

TOTAL_BYTES = 512 * MI
SITTINGS = 3
KINDS = ("write", "read", "mixed")
HAS_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None
HAS_SAFETENSORS = importlib.util.find_spec("safetensors") is not None


@pytest.mark.parametrize("chunk_mi", [1, 4, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_store_and_fio(
    benchmark: Any, store_table: list[StoreRow], directory: Path, kind: str, chunk_mi: int
) -> None:
    """Ours with and without checksums, on both native engines, beside fio.

    Where files and memory happen to lie makes a tenth of difference: every contestant gets new ones
    at each sitting.
    """
    sittings: list[list[DiskContestant]] = []

    def sit() -> None:
        for _ in range(SITTINGS):
            sittings.append(sit_once(directory, kind, chunk_mi * MI))

    benchmark.pedantic(sit, rounds=1)
    whole = [
        DiskContestant(same[0].name, same[0].run, [run for one in same for run in one.runs])
        for same in zip(*sittings, strict=True)
    ]
    store_table += [StoreRow.of(kind, chunk_mi, one, whole[0]) for one in whole]


def sit_once(directory: Path, kind: str, chunk: int) -> list[DiskContestant]:
    stores = {name: Ours(directory, chunk, TOTAL_BYTES, name) for name in ("io_uring", "threads")}
    fio = Fio(directory, TOTAL_BYTES)
    contestants = [
        DiskContestant("offload", getattr(stores["io_uring"], kind)),
        DiskContestant("fio", partial(fio.run, kind, chunk)),
        DiskContestant("offload without checksums", partial(stores["io_uring"].unchecked, kind)),
        DiskContestant("offload on threads", getattr(stores["threads"], kind)),
    ]
    if kind != "read":
        known = partial(stores["io_uring"].known, kind)
        contestants.append(DiskContestant("offload, sums known", known))
    if fio.has_huge_pages:
        huge = partial(fio.run, kind, chunk, "mmaphuge")
        contestants.append(DiskContestant("fio, huge pages", huge))
    try:
        hold(contestants, -(-rounds(15) // SITTINGS))
    finally:
        for thing in (*stores.values(), fio):
            thing.close()
    return contestants


@pytest.mark.parametrize("chunk_mi", [1, 4, 16])
def test_sums_of_an_update(
    benchmark: Any, store_table: list[StoreRow], directory: Path, chunk_mi: int
) -> None:
    """What checksums cost in a step: they are taken in the pass that makes the bytes."""
    ours = Ours(directory, chunk_mi * MI, TOTAL_BYTES, "io_uring")
    contestants = [
        DiskContestant("offload", ours.write_updated),
        DiskContestant("offload, summed up later", partial(ours.write_updated, takes_sums=False)),
        DiskContestant(
            "offload without checksums", partial(ours.unchecked, "write_updated", takes_sums=False)
        ),
    ]
    try:
        benchmark.pedantic(lambda: hold(contestants, rounds(15)), rounds=1)
    finally:
        ours.close()
    store_table += [
        StoreRow.of("write, updated", chunk_mi, one, contestants[0]) for one in contestants
    ]


@pytest.mark.parametrize("chunk_mi", [1, 4, 16])
@pytest.mark.parametrize("kind", ["write_known", "mixed_known", "write_made", "read_used"])
def test_checksums(
    benchmark: Any, store_table: list[StoreRow], directory: Path, kind: str, chunk_mi: int
) -> None:
    """What checksums cost a caller that knows them when it writes, makes the bytes that are
    written, or uses those that are read; in the runs beside fio no caller touches the bytes.
    """
    ours = Ours(directory, chunk_mi * MI, TOTAL_BYTES, "io_uring")
    contestants = [
        DiskContestant("offload", getattr(ours, kind)),
        DiskContestant("offload without checksums", partial(ours.unchecked, kind)),
    ]
    try:
        benchmark.pedantic(lambda: hold(contestants, rounds(15)), rounds=1)
    finally:
        ours.close()
    what = kind.replace("_", ", ")
    store_table += [StoreRow.of(what, chunk_mi, one, contestants[0]) for one in contestants]


@pytest.mark.parametrize("kind", ["write", "read"])
def test_store_and_others(
    benchmark: Any, store_table: list[StoreRow], directory: Path, kind: str
) -> None:
    """Beside DeepSpeed's aio_handle, aiofiles by hand, torch.save and safetensors, 4 MiB each."""
    chunk = 4 * MI
    ours = Ours(directory, chunk, TOTAL_BYTES, "io_uring")
    python = Ours(directory, chunk, TOTAL_BYTES, "aiofiles")
    plain = {
        name: Plain(directory, chunk, TOTAL_BYTES, name)
        for name in ("aiofiles", "torch", *(["safetensors"] if HAS_SAFETENSORS else []))
    }
    contestants = [
        DiskContestant("offload", getattr(ours, kind)),
        DiskContestant("offload on aiofiles", getattr(python, kind)),
        *(
            DiskContestant(f"{name} by hand", getattr(one, f"{name}_{kind}"))
            for name, one in plain.items()
        ),
    ]
    things: list[Any] = [ours, python, *plain.values()]
    if HAS_DEEPSPEED:
        deepspeed = DeepSpeed(directory, TOTAL_BYTES)
        deepspeed.write()
        contestants.append(DiskContestant("DeepSpeed aio_handle", getattr(deepspeed, kind)))
        things.append(deepspeed)
    for name, one in plain.items():
        getattr(one, f"{name}_write")()
    try:
        benchmark.pedantic(lambda: hold(contestants, rounds(7)), rounds=1)
    finally:
        for thing in things:
            thing.close()
    store_table += [StoreRow.of(f"{kind}, others", 4, one, contestants[0]) for one in contestants]


def test_sustained(benchmark: Any, store_table: list[StoreRow], directory: Path) -> None:
    """Mixed reads and writes for many times a drive's cache: the first tenth beside the last."""
    total = int(os.environ.get("OFFLOAD_BENCH_SUSTAINED_GB") or 60) * 10**9
    ours = Ours(directory, 16 * MI, 4 * TOTAL_BYTES, "io_uring")
    runs: list[Run] = []

    def work() -> None:
        while sum(run.nbytes for run in runs) < total:
            runs.append(ours.mixed())

    try:
        benchmark.pedantic(work, rounds=1)
    finally:
        ours.close()
    tenth = max(1, len(runs) // 10)
    parts = {"all": runs, "first tenth": runs[:tenth], "last tenth": runs[-tenth:]}
    whole = DiskContestant("offload, all", lambda: timed(lambda: None, 1), runs)
    for name, part in parts.items():
        one = DiskContestant(f"offload, {name}", whole.run, part)
        store_table.append(StoreRow.of(f"mixed, sustained {total / 1e9:.0f} GB", 16, one, None))
