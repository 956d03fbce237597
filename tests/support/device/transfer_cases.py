"""Small programs on the transfer layer. Each returns host tensors whose bits must not depend on the
schedule, and must be those of `expected`. Each is written so that one missing wait shows.

They take the module that has `DeviceTransfer`, so that the tests can hand in one with a fault.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from offload.core.budget import Budget
from offload.core.pool import Lease, Pool
from offload.core.ticket import Ticket
from offload.device.host import HostTransfer

WIDTH, LAYERS, STEPS, RATE = 16, 4, 3, 0.1
SIZE = 4 * WIDTH * WIDTH  # bytes of a layer
FILLER = 7.0
WAIT_S = 2.0  # where something is wrong; nothing here takes time


def register(address: int, nbytes: int, _: torch.device) -> Callable[[], None]:
    torch.fake.register_host_memory(address, nbytes)  # type: ignore[attr-defined]
    return lambda: torch.fake.unregister_host_memory(address)  # type: ignore[attr-defined]


@dataclass
class Bench:
    """A pool, a transfer, and a generator of the same numbers every time."""

    transfer: Any
    pool: Pool
    numbers: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(3))

    @property
    def device(self) -> torch.device:
        return self.transfer.device

    def host(self, *shape: int) -> Tensor:
        """Lease host memory; it returns to the pool when the tensor is freed."""
        numel = torch.Size(shape).numel()
        with self.pool.lease(4 * numel) as lease:
            return lease.tensor(torch.float32).view(shape)

    def random(self, *shape: int) -> Tensor:
        target = self.host(*shape)
        return target.copy_(torch.randn(shape, generator=self.numbers) / 4)

    def busy(self) -> Tensor:
        """Give the computing stream work, so that it has something to be late with."""
        return torch.ones(WIDTH, WIDTH, device=self.device) @ torch.ones(
            WIDTH, WIDTH, device=self.device
        )


def read_in_parts(
    transfer: Any, source: Tensor, host: Tensor | None, part_bytes: int
) -> list[Ticket[Tensor]]:
    """Download like `read`, with a ticket for every `part_bytes`, in order."""
    flat = source.detach().view(-1)
    there = None if host is None else host.view(-1)
    step, found = max(part_bytes // flat.element_size(), 1), []
    for begin in range(0, max(flat.numel(), 1), step):
        part = slice(begin, begin + step)
        found.append(transfer.read(flat[part], there if there is None else there[part]))
    return found


@contextmanager
def bench(module: ModuleType | None, pool_bytes: int = 1 << 20, **options: Any) -> Iterator[Bench]:
    """Open a pool and a transfer of this module; None runs on the CPU."""
    device = torch.device("fake") if module else None
    pool = Pool(pool_bytes, register=register, budget=Budget(1 << 24), device=device)
    transfer = module.DeviceTransfer("fake", **options) if module else HostTransfer()
    try:
        yield Bench(transfer, pool)
        assert module is None or not transfer.metrics.snapshot().fallbacks
    finally:
        if module:
            torch.accelerator.synchronize()
        transfer.close()
        gc.collect()
        pool.close()


def matrix(buffer: Any) -> Tensor:
    return buffer.use().view(torch.float32).view(WIDTH, WIDTH)


def train_with_fetched_parameters(module: ModuleType | None) -> list[Tensor]:
    """Train with parameters in host memory that are fetched into two buffers on the device."""
    with bench(module, budget_bytes=2 * SIZE) as b:
        weights = [b.random(WIDTH, WIDTH) for _ in range(LAYERS)]
        inputs, target = (b.random(8, WIDTH).to(b.device) for _ in range(2))
        for _ in range(STEPS):
            values, pending = [inputs], {}
            after = b.transfer.fetch(weights[0])
            for layer in range(LAYERS):
                buffer, after = after, b.transfer.fetch(weights[min(layer + 1, LAYERS - 1)])
                values.append(torch.tanh(values[-1] @ matrix(buffer)))
                buffer.release()
            slope = values[-1] - target
            for layer in reversed(range(LAYERS)):
                buffer, after = after, b.transfer.fetch(weights[max(layer - 1, 0)])
                slope = slope * (1 - values[layer + 1] ** 2)
                gradient = values[layer].t() @ slope
                slope = slope @ matrix(buffer).t()
                assert buffer.release()
                pending[layer] = read_in_parts(b.transfer, gradient, b.host(WIDTH, WIDTH), 256)
                del gradient
            after.release()
            for layer in reversed(range(LAYERS)):
                flat = weights[layer].view(-1)
                for number, ticket in enumerate(pending.pop(layer)):
                    flat[64 * number : 64 * (number + 1)].sub_(ticket.wait(WAIT_S), alpha=RATE)
        return [weight.clone() for weight in weights]


def train_with_resident_parameters(module: ModuleType | None) -> list[Tensor]:
    """Train with parameters on the device; the host updates copies and uploads them one by one."""
    with bench(module) as b:
        masters = [b.random(WIDTH, WIDTH) for _ in range(LAYERS)]
        weights = [master.clone().to(b.device) for master in masters]
        inputs, target = (b.random(8, WIDTH).to(b.device) for _ in range(2))
        for _ in range(STEPS):
            values = [inputs]
            for weight in weights:
                values.append(torch.tanh(values[-1] @ weight))
            slope = values[-1] - target
            pending = []
            for layer in reversed(range(LAYERS)):
                slope = slope * (1 - values[layer + 1] ** 2)
                gradient = values[layer].t() @ slope
                pending.append(b.transfer.read(gradient, b.host(WIDTH, WIDTH)))
                del gradient
                slope = slope @ weights[layer].t()
            mark = b.transfer.mark()
            for layer, ticket in zip(reversed(range(LAYERS)), pending, strict=True):
                masters[layer].sub_(ticket.wait(WAIT_S), alpha=RATE)
                staged = b.host(WIDTH, WIDTH).copy_(masters[layer])
                b.transfer.write(staged, weights[layer], mark)
                del staged
            b.transfer.join()
        output = inputs
        for weight in weights:
            output = torch.tanh(output @ weight)
        return [*masters, output.cpu()]


def fill_in_parts_through_staging(module: ModuleType | None) -> list[Tensor]:
    """Fill a block through two small staging buffers that are used again and again."""
    with bench(module, pool_bytes=8192) as b:  # two staging buffers of one page each
        whole = torch.randn(SIZE, generator=b.numbers)
        if module is None:
            return [whole * 2]
        buffer = b.transfer.allocate(whole.nbytes)
        flights: list[tuple[Any, Lease]] = []
        for begin in range(0, whole.numel(), 1024):
            if len(flights) == 2:
                ticket, lease = flights.pop(0)
                ticket.wait(WAIT_S)
                lease.release()
                del ticket
            lease = b.pool.lease(4096)
            part = lease.tensor(torch.float32).copy_(whole[begin : begin + 1024])
            flights.append((buffer.fill(part, 4 * begin), lease))
            del part
        doubled = buffer.use().view(torch.float32) * 2
        buffer.release()
        return [doubled.cpu()]


def leases_of_forgotten_copies(module: ModuleType | None) -> list[Tensor]:
    """Drop a copy's ticket and its host memory: the pool may not reuse the memory yet."""
    with bench(module, pool_bytes=64 * 4096) as b:
        results = []
        target = torch.zeros(1024, device=b.device)
        for number in range(12):
            staged = b.host(1024).fill_(number)
            if number % 2:
                b.transfer.write(staged, target, b.transfer.mark())
                b.transfer.join()
                seen = target
            else:
                buffer = b.transfer.fetch(staged)
                seen = buffer.use().view(torch.float32)
            del staged
            spoiler = b.host(1024).fill_(-1)  # in the same memory, if it was released too early
            results.append((seen + 0.5).sum().view(1))
            del spoiler, seen
        return [torch.cat(results).cpu()]


def memory_of_what_was_read(module: ModuleType | None) -> list[Tensor]:
    """Drop a gradient while it is read, so that the next kernel may get its memory."""
    results = []
    for limit in (0, 1 << 20):
        with bench(module, **({"reads_in_flight_bytes": limit} if module else {})) as b:
            for number in range(3):
                gradient = torch.full((WIDTH, WIDTH), float(number), device=b.device)
                gradient = gradient + 0.25
                ticket = b.transfer.read(gradient, b.host(WIDTH, WIDTH))
                del gradient
                spoilers = [torch.full((WIDTH, WIDTH), FILLER, device=b.device) for _ in range(3)]
                results.append(ticket.wait(WAIT_S).clone())
                del spoilers
    return results


def memory_of_what_is_written(module: ModuleType | None) -> list[Tensor]:
    """Drop a parameter while the write of its new bytes is in flight.

    They must not land in the tensor that has its memory now. Nor may they land while a kernel still
    reads the old ones.
    """
    with bench(module) as b:
        target = torch.ones(WIDTH, WIDTH, device=b.device)
        before = target + b.busy()  # reads the old bytes
        ticket = b.transfer.write(b.random(WIDTH, WIDTH), target, b.transfer.mark())
        del target
        other = torch.full((WIDTH, WIDTH), 3.0, device=b.device)
        results = [before, other]
        ticket.wait(WAIT_S)
        return [result.cpu() for result in (*results, other * 2)]


def memory_of_what_was_fetched(module: ModuleType | None) -> list[Tensor]:
    """Fetch into the same memory again: after buffers were released, forgotten, never used, and
    kept by a view.
    """
    with bench(module, budget_bytes=2 * SIZE) as b:
        results, host = [], [b.random(WIDTH, WIDTH) for _ in range(4)]
        first, second = b.transfer.fetch(host[0]), b.transfer.fetch(host[1])
        results.append(matrix(first) @ b.busy())
        first.release()
        third = b.transfer.fetch(host[2])  # in the first one's memory
        results.append(matrix(second) @ matrix(third))
        del second, third  # forgotten
        gc.collect()
        unused = b.transfer.fetch(host[3])
        del unused
        fourth = b.transfer.fetch(host[3])
        results.append(matrix(fourth) + b.busy())
        view = matrix(fourth)[2:4]
        assert fourth.release() is (module is None)
        fifth = b.transfer.fetch(host[0])
        results.append(matrix(fifth) * 2)
        fifth.release()
        results.append(view + b.busy()[2:4])
        del view
        sixth, seventh = b.transfer.fetch(host[1]), b.transfer.fetch(host[2])
        results.append(matrix(sixth) + matrix(seventh))
        return [result.cpu() for result in results]


def several_streams(module: ModuleType | None) -> list[Tensor]:
    """Use one buffer on two streams; a read names the mark that it comes after."""
    if module is None:
        return [torch.full((4,), 12.0), torch.full((4,), 5.0), torch.full((4,), 2.0)]
    with bench(module, budget_bytes=512) as b:
        side = torch.Stream("fake")
        buffer = b.transfer.fetch(b.host(4).fill_(6.0))
        main_sum = buffer.use().view(torch.float32) + 6
        with side:
            side_sum = buffer.use().view(torch.float32) - 1
            side_mark = b.transfer.mark()
        buffer.release()
        other = b.transfer.fetch(b.host(4).fill_(2.0))  # in the same memory
        ticket = b.transfer.read(side_sum, b.host(4), after=side_mark)
        del side_sum
        with side:
            spoiler = torch.full((4,), FILLER, device="fake")
        result = ticket.wait(WAIT_S).clone()
        del spoiler
        return [main_sum.cpu(), result, other.use().view(torch.float32).cpu()]


def closing(module: ModuleType | None) -> list[Tensor]:
    """Close the transfer, and find all copies done without any other wait."""
    with bench(module) as b:
        target = torch.zeros(WIDTH, WIDTH, device=b.device)
        source = torch.full((WIDTH, WIDTH), 5.0, device=b.device) + b.busy()
        there = b.host(WIDTH, WIDTH).zero_()
        reading = b.transfer.read(source, there)
        host = b.host(WIDTH, WIDTH).fill_(4.0)
        writing = b.transfer.write(host, target, b.transfer.mark())
        b.transfer.close()
        assert reading.done and writing.done
        host.fill_(-1.0)
        copy = reading.wait(WAIT_S).clone()
        writing.wait(WAIT_S)
        return [copy, target.cpu()]


def fills_and_uses_in_any_order(module: ModuleType | None) -> list[Tensor]:
    """Fill twice and use at once; fill after a use; use without a fill."""
    if module is None:
        parts = torch.cat([torch.full((64,), 1.0), torch.full((64,), 2.0)])
        return [parts * 2, torch.full((128,), 3.0), torch.full((128,), 5.0)]
    with bench(module, budget_bytes=512) as b:
        buffer = b.transfer.allocate(512)
        buffer.fill(b.host(64).fill_(1.0))
        buffer.fill(b.host(64).fill_(2.0), 256)
        doubled = buffer.use().view(torch.float32) * 2
        buffer.fill(b.host(128).fill_(3.0))
        again = buffer.use().view(torch.float32) + 0
        buffer.release()
        unused = b.transfer.fetch(b.host(128).fill_(9.0))
        unused.release()
        scratch = b.transfer.allocate(512)  # in the same memory, which is still being filled
        written = scratch.use().view(torch.float32).fill_(5.0)
        b.transfer.write(b.host(4), torch.empty(4, device="fake"), b.transfer.mark()).wait(WAIT_S)
        seen = written + 0
        del written
        return [doubled.cpu(), again.cpu(), seen.cpu()]


def a_tensor_that_is_kept(module: ModuleType | None) -> list[Tensor]:
    """Keep the tensor that `use` returned, and not a view of it, longer than the buffer."""
    with bench(module, **({"budget_bytes": 1024} if module else {})) as b:
        buffer = b.transfer.fetch(b.host(64).fill_(4.0))
        kept = buffer.use()
        assert buffer.release() is (module is None)
        late = kept.view(torch.float32) + b.busy()[0, 0]
        del kept
        other = b.transfer.fetch(b.host(64).fill_(-1.0))
        also = other.use().view(torch.float32) + 0
        return [late.cpu(), also.cpu()]


def a_forgotten_transfer(module: ModuleType | None) -> list[Tensor]:
    """Drop the last reference to the transfer, as after an error, with copies in flight."""
    with bench(module, pool_bytes=16 * 4096) as b:
        if module is None:
            return [torch.full((64,), 2.0), torch.full((64,), 6.0)]
        transfer = module.DeviceTransfer("fake")
        target, source = torch.zeros(64, device="fake"), torch.full((64,), 6.0, device="fake")
        transfer.write(b.host(64).fill_(2.0), target, transfer.mark())
        transfer.join()
        there = b.host(64)
        transfer.read(source, there)
        del transfer, source
        gc.collect()
        spoilers = [b.host(64).fill_(-1.0) for _ in range(8)]
        others = [torch.full((64,), -2.0, device="fake") for _ in range(4)]
        result = [target.cpu(), there.clone()]
        del spoilers, others
        return result


def hold_downloads(b: Bench, slow: Any) -> Ticket[Tensor]:
    """Let the next downloads wait behind the work of a stream. Each question of the host whether a
    download is over runs one piece of it; without this it would run the download.
    """
    with slow:
        for _ in range(32):
            last = torch.full((1,), 1.0, device=b.device)
        return b.transfer.read(last, b.host(1))


def memory_let_go_in_order(module: ModuleType | None) -> list[Tensor]:
    """Read more gradients, one of them in parts, than may be in flight at once."""
    slow = torch.Stream("fake") if module else contextlib.nullcontext()
    limit = {"reads_in_flight_bytes": 8192} if module else {}
    with bench(module, **limit) as b:
        tickets = [hold_downloads(b, slow)]
        for number in range(6):
            gradient = torch.full((1024,), float(number), device=b.device) + 0.5
            nbytes = 1024 if number == 1 else 4096
            tickets += read_in_parts(b.transfer, gradient, b.host(1024), nbytes)
            del gradient
            spoiler = torch.full((1024,), FILLER, device=b.device) * 2
            del spoiler
        results = [ticket.wait(WAIT_S).clone() for ticket in tickets]
    return results


def memory_let_go_by_another_stream(module: ModuleType | None) -> list[Tensor]:
    """Read a gradient on one stream, which frees one that belongs to another stream."""
    side, slow = (torch.Stream("fake") if module else contextlib.nullcontext() for _ in range(2))
    with bench(module, **({"reads_in_flight_bytes": 4096} if module else {})) as b:
        held = hold_downloads(b, slow)
        with side:
            gradient = torch.full((1024,), 3.0, device=b.device) + 0.5
            first = b.transfer.read(gradient, b.host(1024))
            del gradient
        gradient = torch.full((1024,), 4.0, device=b.device) + 0.5
        second = b.transfer.read(gradient, b.host(1024))
        del gradient
        with side:
            spoiler = torch.full((1024,), FILLER, device=b.device) * 2
        results = [ticket.wait(WAIT_S).clone() for ticket in (held, first, second)]
        del spoiler
        return results


def filled_by_other_devices(module: ModuleType | None) -> list[Tensor]:
    """Fill the first half of a block from the host, and the second from another device.

    Here the second half is computed from the first. The block is filled and used again, or released
    before any use.
    """
    half = WIDTH * WIDTH // 2
    with bench(module, budget_bytes=SIZE) as b:
        owns = [b.random(half) for _ in range(6)]
        other = b.random(2 * half)
        if module is None:
            found = []
            for number, own in enumerate(owns):
                found += [] if number % 2 else [other + 1]
                found += [torch.cat([own, own * 2]) + 1, torch.cat([own, own * 2]) * 3]
            return found
        found = []

        def double(memory: Tensor) -> None:
            values = memory.view(torch.float32)
            values[half:].copy_(values[:half] * 2)

        for turn in range(0, len(owns), 2):
            unused = b.transfer.allocate(SIZE)
            unused.fill(owns[turn + 1])
            unused.spread(double)
            unused.release()
            buffer = b.transfer.fetch(other)
            values = buffer.use().view(torch.float32)
            b.transfer.wait_for(b.transfer.across(lambda: None, [b.transfer.mark().event]))
            found.append(values + 1)
            del values
            for own in owns[turn : turn + 2]:
                buffer.fill(own)
                buffer.spread(double)
                b.busy()
                found.append(buffer.use().view(torch.float32) + 1)
                values = buffer.use().view(torch.float32)
                spread = b.transfer.across(
                    lambda values=values: values.mul_(3), [b.transfer.mark().event]
                )
                b.transfer.wait_for(spread)
                found.append(values + 0)
                del values
            buffer.spread(lambda memory: memory.zero_())
            buffer.fill(owns[turn])
            buffer.release()
        return [one.cpu() for one in found]


def sums_over_devices(module: ModuleType | None) -> list[Tensor]:
    """Send what the device has computed across the devices, and from there to the host."""
    with bench(module) as b:
        found = []
        for number in range(3):
            grad = b.busy() * (number + 1)
            if module is None:
                found.append(grad / 2)
                continue
            target = b.host(WIDTH, WIDTH)
            there = b.transfer.across(lambda grad=grad: grad.div_(2), [b.transfer.mark().event])
            found.append(b.transfer.read(grad, target, after=there).wait(WAIT_S).clone())
        return found


def filled_by_several_streams(module: ModuleType | None) -> list[Tensor]:
    """Zero a buffer on one stream and write to it on another; send both results across."""
    half = WIDTH * WIDTH // 2
    with bench(module) as b:
        found = []
        other = torch.Stream(b.device) if module else None
        for number in range(1, 4):
            if module is None:
                found.append(torch.cat([torch.full((half,), 2.0 * number), torch.ones(half)]))
                continue
            buffer = b.transfer.allocate(SIZE)
            buffer.use().view(torch.float32).copy_(b.busy().view(-1) * 0)
            buffer.note_fill()
            with other:
                value = b.busy()[0, 0] * 0 + number
                buffer.use().view(torch.float32)[:half].copy_(value)
            buffer.use().view(torch.float32)[half:].add_(0.5)
            memory = buffer.use()
            there = b.transfer.across(lambda m=memory: m.view(torch.float32).mul_(2), buffer.busy())
            target = b.host(WIDTH * WIDTH)
            read = b.transfer.read(memory.view(torch.float32), target, after=there)
            found.append(read.wait(WAIT_S).clone())
            del memory, read
            buffer.release()
        return found


def a_kernel_that_fails(module: ModuleType | None) -> list[Tensor]:
    """Run a kernel that fails: a wait for a copy that depends on it raises its error."""
    if module is None:
        return [torch.ones(1)]
    with bench(module) as b:
        told = 0.0
        try:
            wrong = torch.ones(4, 4, device="fake")[torch.tensor([9]).to("fake")] + 1
            b.transfer.read(wrong, b.host(1, 4)).wait(WAIT_S)
        except IndexError:
            told = 1.0
        try:
            torch.accelerator.synchronize()
        except IndexError:  # no wait had raised it
            told = 0.0
        return [torch.full((1,), told)]


CASES = [
    train_with_fetched_parameters,
    train_with_resident_parameters,
    fill_in_parts_through_staging,
    leases_of_forgotten_copies,
    memory_of_what_was_read,
    memory_of_what_is_written,
    memory_of_what_was_fetched,
    several_streams,
    closing,
    fills_and_uses_in_any_order,
    a_tensor_that_is_kept,
    a_forgotten_transfer,
    memory_let_go_in_order,
    memory_let_go_by_another_stream,
    filled_by_other_devices,
    sums_over_devices,
    filled_by_several_streams,
    a_kernel_that_fails,
]


def run(case: Callable[[ModuleType | None], list[Tensor]], module: ModuleType | None) -> bytes:
    """Run a case, and return the bytes of its results."""
    return b"".join(result.contiguous().numpy().tobytes() for result in case(module))
