"""What ranks do with their devices, for test_network_device.py: each function runs in every
process, and returns host tensors.
"""

from __future__ import annotations

import torch
from fake_accelerator import collectives, load
from torch import Tensor

from offload.core.budget import Budget
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.device.device import DeviceTransfer
from offload.distributed.device_network import DeviceNetwork
from offload.distributed.ranks import ranks_of
from support.device.transfer_cases import register

SLICE, BLOCKS = 96, 5  # elements of a slice


def values(rank: int, number: int, numel: int = SLICE) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(numel, generator=generator)


def network(schedule: str, seed: int) -> DeviceNetwork:
    load(schedule, seed)
    collectives.register()
    ranks = ranks_of(None, deadline_s=30)
    assert ranks is not None
    return DeviceNetwork(ranks, DeviceTransfer("fake"))


def gather_and_sum(rank: int, schedule: str, seed: int) -> tuple[list[Tensor], int, int]:
    """Prefetch blocks by all-gather and use them; reduce-scatter the results to host memory.

    Returns the tensors seen, and the bytes sent by all-gathers and by reduce-scatters.
    """
    net = network(schedule, seed)
    count = net.ranks.count
    pool = Pool(1 << 20, register=register, budget=Budget(1 << 24), device=net.transfer.device)

    def host(given: Tensor) -> Tensor:
        with pool.lease(given.nbytes) as lease:
            return lease.tensor(torch.float32).copy_(given)

    coming = []
    for number in range(BLOCKS):
        buffer = net.transfer.allocate(4 * SLICE * count)
        own = host(values(rank, number))
        coming.append((buffer, net.gather(buffer, own, f"block {number}")))
        del own
    found, sums = [], []
    for number, (buffer, ticket) in enumerate(coming):
        upload: Ticket[None] = ticket.wait()
        whole = buffer.use().view(torch.float32)
        made = net.transfer.allocate(whole.nbytes)
        made.use().view(torch.float32).copy_(whole * (rank + 1))
        found.append(whole + 0)
        del whole
        buffer.release()
        upload.wait()
        target = host(torch.zeros(SLICE))
        sums.append((made, net.reduce_scatter(made, torch.float32, target, f"sums of {number}")))
        del target
    results = [one.cpu() for one in found]
    for made, ticket in sums:
        results.append(ticket.wait().clone())
        made.release()
    assert not net.transfer.metrics.snapshot().fallbacks
    sent = net.ranks.sent_bytes
    net.ranks.close()
    net.transfer.close()
    return results, sent["gather"], sent["reduce"]


def under_all(rank: int, schedules: list[tuple[str, int]]) -> list[tuple[list[Tensor], int, int]]:
    return [gather_and_sum(rank, *schedule) for schedule in schedules]


def without_a_backend(rank: int) -> str:
    load("eager", 0)
    if rank == 0:
        collectives.register()
    ranks = ranks_of(None, deadline_s=30)
    assert ranks is not None
    try:
        DeviceNetwork(ranks, DeviceTransfer("fake"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
