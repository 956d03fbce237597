"""Checks of copies that are late: to and from the device, and to and from the disk.

On an accelerator, matrix products keep the compute stream busy, and large copies the copy streams,
so that a missing wait lets an operation read or write too early, which changes bits of the result.
All numbers are small integers: every device computes them exactly. On the CPU, device and host are
the same memory and there are no copies; the same programs run there.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.api import wrap
from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.device.host import open_transfer
from offload.storage.engine import Fault, FaultKind
from offload.tools.selftest.bits import require_same
from offload.tools.selftest.check import PassedCheck, Setting
from offload.tools.selftest.model import adamw
from offload.tools.selftest.wrap import compare, tight

SIDE = 64  # of a square matrix
_BALLAST_BYTES = 64 << 20
_BUSY_SIDE, _BUSY_TIMES = 2048, 8
_WAIT_S = 60.0
_DELAY_MS = 4
_BUFFERS = 2


@dataclass
class CopyBench:
    """A test bench: a transfer, a pool, and work that delays its streams. is_late: whether there is
    such work, which is so on an accelerator.
    """

    transfer: Any
    pool: Pool
    is_late: bool
    ballast: Tensor | None = None
    heavy: Tensor | None = None

    def host(self, value: float) -> Tensor:
        """Allocate a matrix in pinned host memory, so that copies are asynchronous to the CPU. On
        the CPU: in memory of the pool.
        """
        if not self.is_late:
            return self.leased(value)
        pinned: Tensor = self.transfer.pinned(SIDE * SIDE, torch.float32)
        return pinned.view(SIDE, SIDE).fill_(value)

    def leased(self, value: float) -> Tensor:
        """Lease a matrix from the pool; its memory returns when the tensor is freed."""
        memory = self.pool.lease(4 * SIDE * SIDE).tensor(torch.float32)
        return memory.view(SIDE, SIDE).fill_(value)

    def compute_late(self) -> None:
        """Queue long work on the compute stream."""
        if self.heavy is not None:
            for _ in range(_BUSY_TIMES):
                self.heavy @ self.heavy

    def arrive_late(self) -> None:
        """Queue a large upload on the stream to the device."""
        if self.ballast is not None:
            self.transfer.fetch(self.ballast, "ballast").release()

    def leave_late(self) -> None:
        """Queue a large download on the stream to the host."""
        if self.ballast is not None:
            source = torch.zeros_like(self.ballast, device=self.transfer.device)
            self.transfer.read(source, self.ballast, "ballast")


@contextmanager
def _bench(setting: Setting) -> Iterator[CopyBench]:
    transfer: Any = open_transfer(setting.device)
    pool = Pool(1 << 20, budget=Budget(), device=transfer.device)
    bench = CopyBench(transfer, pool, not setting.is_on_cpu)
    if bench.is_late:
        nbytes = _BALLAST_BYTES >> (2 if setting.is_quick else 0)
        side = _BUSY_SIDE >> (1 if setting.is_quick else 0)
        bench.ballast = transfer.pinned(nbytes, torch.uint8).zero_()
        bench.heavy = torch.zeros(side, side, dtype=torch.float32, device=transfer.device)
    try:
        yield bench
    finally:
        bench.ballast = bench.heavy = None
        transfer.close()
        gc.collect()
        pool.close()


def transfer(setting: Setting) -> PassedCheck:
    """Check the transfer layer with programs, each of which would reveal a certain missing wait."""
    count = 0
    with _bench(setting) as bench:
        for program in PROGRAMS:
            got, expected = program(bench)
            count += require_same(got, expected, f"{program.__name__[1:]}: result")
    where = "nothing is copied on the CPU" if setting.is_on_cpu else f"late, on {setting.device}"
    return PassedCheck(f"results of {len(PROGRAMS)} programs ({where})", count)


_Outcome = tuple[list[Tensor], list[Tensor]]  # got, expected


def _matrix(buffer: Any) -> Tensor:
    found: Tensor = buffer.use().view(torch.float32).view(SIDE, SIDE)
    return found


def _full(value: float, device: torch.device | str = "cpu") -> Tensor:
    return torch.full((SIDE, SIDE), float(value), dtype=torch.float32, device=device)


def _used_at_once(bench: CopyBench) -> _Outcome:
    """Use a block before its upload can have ended."""
    got = []
    for number in range(4):
        bench.arrive_late()
        buffer = bench.transfer.fetch(bench.host(number))
        got.append((_matrix(buffer) + 1).cpu())
        buffer.release()
    return got, [_full(number + 1) for number in range(4)]


def _refilled_while_used(bench: CopyBench) -> _Outcome:
    """Release a block's memory and refill it while its last use is still queued."""
    late = []
    for number in range(6):
        buffer = bench.transfer.fetch(bench.host(number))
        bench.compute_late()
        late.append(_matrix(buffer) * 2)
        buffer.release()
    return [each.cpu() for each in late], [_full(2 * number) for number in range(6)]


def _layers_through_two_buffers(bench: CopyBench) -> _Outcome:
    """Compute a chain of layers, with prefetches while earlier layers compute, in two buffers."""
    weights = [bench.host(number % 3) for number in range(12)]
    expected, got = _full(1), _full(1, bench.transfer.device)
    ahead = [bench.transfer.fetch(weight) for weight in weights[:_BUFFERS]]
    for number, weight in enumerate(weights):
        expected = torch.remainder(expected @ weight + number, 5)
        buffer = ahead.pop(0)
        bench.compute_late()
        got = torch.remainder(got @ _matrix(buffer) + number, 5)
        buffer.release()
        if number + _BUFFERS < len(weights):
            ahead.append(bench.transfer.fetch(weights[number + _BUFFERS]))
    return [got.cpu()], [expected]


def _read_while_made(bench: CopyBench) -> _Outcome:
    """Download gradients before they are computed, and let other tensors reuse their memory at
    once.
    """
    tickets = []
    for number in range(4):
        bench.compute_late()
        bench.leave_late()
        gradient = _full(number, bench.transfer.device) * 3
        tickets.append(bench.transfer.read(gradient, bench.host(-1)))
        del gradient
        spoilers = [_full(77, bench.transfer.device) for _ in range(3)]
        del spoilers
    got = [ticket.wait(_WAIT_S).clone() for ticket in tickets]
    return got, [_full(3 * number) for number in range(4)]


def _written_while_read(bench: CopyBench) -> _Outcome:
    """Upload new values of a parameter while computations on its old ones are still queued."""
    target = _full(0, bench.transfer.device)
    got = []
    for number in range(1, 5):
        bench.compute_late()
        got.append(target + 0.5)  # the old values
        bench.arrive_late()
        bench.transfer.write(bench.host(number), target, bench.transfer.mark())
        bench.transfer.join()
        got.append(target * 2)  # the new values
    expected = [each for number in range(1, 5) for each in (_full(number - 0.5), _full(2 * number))]
    return [each.cpu() for each in got], expected


def _leases_of_forgotten_copies(bench: CopyBench) -> _Outcome:
    """Drop the last reference to the host memory of an upload in flight: the pool may not lease
    that memory again before the upload has ended.
    """
    got = []
    for number in range(6):
        bench.arrive_late()
        staged = bench.leased(number)
        buffer = bench.transfer.fetch(staged)
        del staged
        spoilers = [bench.leased(-1) for _ in range(4)]  # get its memory if it was returned
        got.append((_matrix(buffer) + 1).cpu())
        del spoilers
        buffer.release()
    return got, [_full(number + 1) for number in range(6)]


PROGRAMS: tuple[Callable[[CopyBench], _Outcome], ...] = (
    _used_at_once,
    _refilled_while_used,
    _layers_through_two_buffers,
    _read_while_made,
    _written_while_read,
    _leases_of_forgotten_copies,
)


def slow_disk(setting: Setting) -> PassedCheck:
    """Check that the update waits for the drives: each read and write of state is delayed, so that
    an update that does not wait computes wrong values.
    """
    fault = Fault(FaultKind.DELAY, forever=True, code=_DELAY_MS)

    def wrap_late(optimizer: Any) -> Any:
        mine = tight(setting, optimizer)
        mine._offload_session.coordinator.store.engine.inject(fault)
        return mine

    count = compare(setting, "slow disk", adamw, wrap_late, judge=wrap)
    return PassedCheck(f"tensors, each disk operation {_DELAY_MS} ms late", count)
