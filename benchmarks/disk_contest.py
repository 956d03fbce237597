"""Contestants of the store benchmark: each moves the same number of bytes, once a round.

fio is the measure: it does nothing but move bytes, with as many requests in flight as we have. The
others are what people use today. A contestant that would only fill the page cache must also sync,
and reads with an empty cache. Every run that returns bytes has them checked.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from offload import kernels
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.kernels import SUM_BYTES, rules
from offload.storage.disk import DiskStore
from offload.storage.engine import DEPTH, Transfer
from offload.storage.native_engine import NativeEngine

MI = 1 << 20
RULE = rules.Adam.at(3, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
_NR_HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
PASSES = 2  # over all bytes in one run, so that it is long beside its own beginning


@dataclass
class Run:
    """One timed run."""

    seconds: float
    cpu_s: float
    nbytes: int

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.seconds / 1e9


@dataclass
class DiskContestant:
    name: str
    run: Callable[[], Run]
    runs: list[Run] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        return statistics.median(run.gb_per_s for run in self.runs)

    @property
    def cores(self) -> float:
        """The number of cores kept busy."""
        return statistics.median(run.cpu_s / run.seconds for run in self.runs)

    @property
    def cpu_s_per_gb(self) -> float:
        return statistics.median(run.cpu_s / run.nbytes * 1e9 for run in self.runs)

    def ratios(self, other: DiskContestant) -> list[float]:
        """Return the speed against another contestant's, round by round."""
        return [a.gb_per_s / b.gb_per_s for a, b in zip(self.runs, other.runs, strict=True)]


def hold(contestants: list[DiskContestant], rounds: int) -> None:
    """Run each contestant once a round, in an order that turns; the first round only warms up."""
    for number in range(-1, rounds):
        turn = number % len(contestants)
        for contestant in contestants[turn:] + contestants[:turn]:
            run = contestant.run()
            if number >= 0:
                contestant.runs.append(run)


def timed(work: Callable[[], object], nbytes: int) -> Run:
    before, begin = _cpu_s(), time.perf_counter()
    work()
    return Run(time.perf_counter() - begin, _cpu_s() - before, nbytes)


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def window(chunk_bytes: int) -> int:
    """Return the requests in flight at once, fio's as well as ours: as many bytes as the engine has
    in flight, and as many again, so that it never runs dry while Python is busy.
    """
    return max(4, 2 * DEPTH * MI // chunk_bytes)


class NoSums(NativeEngine):
    """A native engine that moves bytes without checksums, to see what checksums cost."""

    @classmethod
    @contextmanager
    def in_place_of(cls, engine: object) -> Iterator[None]:
        """Let the same engine, with its files and memory, skip checksums while the block runs: two
        engines differ by more than checksums cost.
        """
        before = engine.__class__
        engine.__class__ = cls  # type: ignore[assignment]
        try:
            yield
        finally:
            engine.__class__ = before  # type: ignore[assignment]

    def _start(self, number: int, transfer: Transfer, priority: int) -> None:  # type: ignore[override]
        memory = transfer.memory
        self._native.submit(
            number,
            transfer.is_write,
            transfer.file.fd,
            memory.address,
            memory.nbytes,
            transfer.offset,
            transfer.file.align,
            0,
            int(priority),
        )


class Ours:
    """A `DiskStore` full of chunks of one size, and leases to move them to and from."""

    def __init__(self, directory: Path, chunk_bytes: int, total_bytes: int, engine: str) -> None:
        self.chunk_bytes, self.total_bytes = chunk_bytes, total_bytes
        self.count = total_bytes // chunk_bytes
        self.window = window(chunk_bytes)
        self.pool = Pool(self.window * chunk_bytes)
        self.leases = [self.pool.lease(chunk_bytes) for _ in range(self.window)]
        self.tensors = [lease.tensor(torch.int64) for lease in self.leases]
        for number, tensor in enumerate(self.tensors):
            tensor.random_(generator=torch.Generator().manual_seed(number))
        self.sources = [tensor.clone() for tensor in self.tensors]
        capacity = total_bytes + 2 * self.window * chunk_bytes
        self.store = DiskStore(
            directory,
            capacity,
            engine=engine,
            memory=[self.pool.buffer()],
        )
        for _ in range(3):  # every block of the file has been written once: no unwritten extents
            self.write()

    def _restore(self) -> None:
        # By numpy, in this thread alone: torch's threads spin for milliseconds after a copy, and
        # would count as ours.
        for tensor, source in zip(self.tensors, self.sources, strict=True):
            np.copyto(tensor.numpy(), source.numpy())

    def _move(
        self,
        start: Callable[[int, torch.Tensor], Ticket[None]],
        use: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Move all chunks through the window, PASSES times; `use` gets each tensor that is back."""
        tickets: list[Ticket[None] | None] = [None] * self.window
        for turn in range(PASSES * self.count + self.window):
            slot = turn % self.window
            if (ticket := tickets[slot]) is not None:
                ticket.wait(60)
                if use is not None:
                    use(self.tensors[slot])
            if turn < PASSES * self.count:
                tickets[slot] = start(turn % self.count, self.tensors[slot])

    def write(self) -> Run:
        self._restore()
        return timed(
            lambda: self._move(lambda n, tensor: self.store.write(f"chunk {n}", tensor)),
            PASSES * self.count * self.chunk_bytes,
        )

    def read(self) -> Run:
        run = timed(
            lambda: self._move(lambda n, tensor: self.store.read(f"chunk {n}", tensor)),
            PASSES * self.count * self.chunk_bytes,
        )
        last = (PASSES * self.count - 1) % self.window
        assert torch.equal(self.tensors[last], self.sources[last])
        return run

    def write_made(self) -> Run:
        """Write as `write` does, but the caller makes every byte anew just before it is written."""

        def start(number: int, tensor: torch.Tensor) -> Ticket[None]:
            array = tensor.numpy()
            np.bitwise_xor(array, number, out=array)
            return self.store.write(f"chunk {number}", tensor)

        return timed(lambda: self._move(start), PASSES * self.count * self.chunk_bytes)

    def write_known(self) -> Run:
        return self.known("write")

    def mixed_known(self) -> Run:
        return self.known("mixed")

    def known(self, kind: str) -> Run:
        """Run `write` or `mixed` with checksums that the caller knows already."""
        self._restore()
        sums = {tensor.data_ptr(): _sums_of(tensor) for tensor in self.tensors}

        def start(number: int, tensor: torch.Tensor) -> Ticket[None]:
            name = f"chunk {number}"
            if kind == "mixed" and number % 2 == 0:
                return self.store.read(name, tensor)
            return self.store.write(name, tensor, sums=sums[tensor.data_ptr()])

        return timed(lambda: self._move(start), PASSES * self.count * self.chunk_bytes)

    def write_updated(self, takes_sums: bool = True) -> Run:
        """Write as `write` does, but each chunk is the moments of an AdamW step that is done just
        before, as in training. takes_sums: the update takes the checksums in the same pass; else
        the engine does when the drive has had the bytes.
        """
        numel = self.chunk_bytes // 8
        param, grad = torch.zeros(numel), torch.full((numel,), 1e-3)
        known = np.zeros(self.chunk_bytes // SUM_BYTES, dtype=np.uint64)
        halves = np.split(known, 2)

        def start(number: int, tensor: torch.Tensor) -> Ticket[None]:
            moments = tensor.view(torch.float32).split(numel)
            sums = [None, *halves] if takes_sums else []
            kernels.update(RULE, param, grad, *moments, sums=sums)
            given = known if takes_sums else None
            return self.store.write(f"chunk {number}", tensor, sums=given)

        for tensor in self.tensors:
            tensor.zero_()
        return timed(lambda: self._move(start), PASSES * self.count * self.chunk_bytes)

    def read_used(self) -> Run:
        """Read as `read` does, but the caller uses every byte when it has been read."""
        return timed(
            lambda: self._move(
                lambda n, tensor: self.store.read(f"chunk {n}", tensor),
                lambda tensor: np.bitwise_or.reduce(tensor.numpy()),
            ),
            PASSES * self.count * self.chunk_bytes,
        )

    def mixed(self) -> Run:
        """Read every second chunk and write the others, as an optimizer step does."""

        def start(number: int, tensor: torch.Tensor) -> Ticket[None]:
            call = self.store.write if number % 2 else self.store.read
            return call(f"chunk {number}", tensor)

        self._restore()
        return timed(lambda: self._move(start), PASSES * self.count * self.chunk_bytes)

    def unchecked(self, kind: str, **options: bool) -> Run:
        """Run once without checksums. The chunks that it writes are never read: mixed runs read
        only the chunks that they do not write.
        """
        with NoSums.in_place_of(self.store.engine):
            return getattr(self, kind)(**options)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.store.close()
        self.tensors.clear()
        self.leases.clear()
        self.pool.close()


def _sums_of(tensor: torch.Tensor) -> NDArray[np.uint64]:
    parts = tensor.view(torch.uint8).split(SUM_BYTES)
    return np.array([kernels.checksum(part) for part in parts], dtype=np.uint64)


class Fio:
    """The measure: fio on its own file in that directory, O_DIRECT, as many requests in flight."""

    def __init__(self, directory: Path, total_bytes: int) -> None:
        self.directory, self.total_bytes = directory, total_bytes
        self.file = directory / "fio.bench"
        # Huge pages must be set aside for fio, which takes the rights of root. They count: on small
        # ones a drive behind virtio gets requests in many segments, and half the speed.
        self._huge_before = _NR_HUGE_PAGES.read_text() if _NR_HUGE_PAGES.exists() else None
        self.has_huge_pages = self._reserve_huge_pages(f"{96 + int(self._huge_before or 0)}")
        self.run("write", MI)  # lays the file out

    def _reserve_huge_pages(self, count: str) -> bool:
        try:
            _NR_HUGE_PAGES.write_text(count)
        except OSError:
            return False
        return int(_NR_HUGE_PAGES.read_text()) >= int(count)

    def run(self, kind: str, block_bytes: int, memory: str = "malloc") -> Run:
        options = {
            "name": "bench",
            "bs": block_bytes,
            "ioengine": "io_uring",  # libaio was never faster
            "fixedbufs": 1,  # registered memory, as ours is
            "iodepth": window(block_bytes),
            "direct": 1,
            "mem": memory,
            "output-format": "json",
        }
        if kind == "mixed":
            options |= {"read_iolog": self._log_of(block_bytes), "replay_no_stall": 1}
        else:
            options |= {"filename": self.file, "rw": kind, "size": self.total_bytes}
            options |= {"loops": PASSES, "fallocate": "none"}
        command = [fio_path(), *(f"--{key}={value}" for key, value in options.items())]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        nbytes = job["read"]["io_bytes"] + job["write"]["io_bytes"]
        seconds = job["job_runtime"] / 1e3
        runtime_s = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
        return Run(runtime_s or seconds, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds, nbytes)

    def _log_of(self, block_bytes: int) -> Path:
        """Write a log to replay: every second block is read, the others are written, as ours does
        it. fio's own mix draws lots, reads the blocks that it writes, and covers half of the file.
        """
        log = self.directory / f"{block_bytes}.fio.bench"
        count = self.total_bytes // block_bytes
        lines = ["fio version 2 iolog", f"{self.file} add", f"{self.file} open"]
        for turn in range(PASSES * count):
            number = turn % count
            kind = "write" if number % 2 else "read"
            lines.append(f"{self.file} {kind} {number * block_bytes} {block_bytes}")
        log.write_text("\n".join([*lines, f"{self.file} close", ""]))
        return log

    def close(self) -> None:
        self.file.unlink(missing_ok=True)
        if self._huge_before is not None:
            self._reserve_huge_pages(self._huge_before)


def fio_path() -> str:
    found = shutil.which("fio")
    assert found, "fio is missing: apt-get install fio"
    return found


class Plain:
    """The usual code by hand: aiofiles, torch.save, safetensors, one file of `total_bytes`."""

    def __init__(self, directory: Path, chunk_bytes: int, total_bytes: int, name: str) -> None:
        self.chunk_bytes, self.total_bytes = chunk_bytes, total_bytes
        self.tensor = torch.from_numpy(
            np.random.default_rng(0).integers(0, 255, total_bytes, dtype=np.uint8)
        )
        self.file = directory / f"{name}.bench"

    def _drop_cache(self) -> None:
        with open(self.file, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _sync(self) -> None:
        with open(self.file, "rb+") as file:
            os.fdatasync(file.fileno())

    def aiofiles_write(self) -> Run:
        import aiofiles

        async def work() -> None:
            data = memoryview(self.tensor.numpy())
            async with aiofiles.open(self.file, "wb", buffering=0) as file:
                for begin in range(0, self.total_bytes, self.chunk_bytes):
                    await file.write(data[begin : begin + self.chunk_bytes])

        return timed(lambda: (asyncio.run(work()), self._sync()), self.total_bytes)

    def aiofiles_read(self) -> Run:
        import aiofiles

        async def work() -> None:
            async with aiofiles.open(self.file, "rb", buffering=0) as file:
                while await file.read(self.chunk_bytes):
                    pass

        self._drop_cache()
        return timed(lambda: asyncio.run(work()), self.total_bytes)

    def torch_write(self) -> Run:
        return timed(lambda: (torch.save(self.tensor, self.file), self._sync()), self.total_bytes)

    def torch_read(self) -> Run:
        self._drop_cache()
        return timed(lambda: torch.load(self.file, weights_only=True), self.total_bytes)

    def safetensors_write(self) -> Run:
        from safetensors.torch import save_file

        return timed(
            lambda: (save_file({"t": self.tensor}, self.file), self._sync()), self.total_bytes
        )

    def safetensors_read(self) -> Run:
        from safetensors.torch import load_file

        self._drop_cache()
        # The file is mapped: touch every page, or nothing would be read.
        return timed(lambda: int(load_file(self.file)["t"].max()), self.total_bytes)

    def close(self) -> None:
        self.file.unlink(missing_ok=True)


class DeepSpeed:
    """A contestant on DeepSpeed's `aio_handle`, with our piece size and depth, and its pinned
    buffer.
    """

    def __init__(self, directory: Path, total_bytes: int) -> None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        from deepspeed.ops.op_builder import AsyncIOBuilder

        self.handle = AsyncIOBuilder().load(verbose=False).aio_handle(MI, DEPTH, False, True, 1)
        self.file = directory / "deepspeed.bench"
        self.total_bytes = total_bytes
        self.buffer = self.handle.new_cpu_locked_tensor(
            total_bytes, torch.empty(0, dtype=torch.uint8)
        )
        self.buffer.fill_(7)

    def write(self) -> Run:
        return timed(lambda: self._end(self.handle.async_pwrite, self.buffer), self.total_bytes)

    def read(self) -> Run:
        self.buffer.zero_()
        run = timed(lambda: self._end(self.handle.async_pread, self.buffer), self.total_bytes)
        assert int(self.buffer[-1]) == 7
        return run

    def _end(self, start: Callable[..., int], buffer: torch.Tensor) -> None:
        assert start(buffer, str(self.file), 0) == 0
        assert self.handle.wait() == 1

    def close(self) -> None:
        self.handle.free_cpu_locked_tensor(self.buffer)
        self.file.unlink(missing_ok=True)
