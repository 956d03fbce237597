"""Copies between host memory and a device: the only owner of streams and events.

Two side streams: `up` carries copies to the device, `down` copies to the host; a third, made when
it is needed, carries what happens between the devices of several ranks. All run beside the stream
that computes, which is whatever stream is current in the thread that calls. The CPU does not
wait here: streams wait for one another, and only `Ticket.wait` and `close` block. What a copy reads
and writes is held until the copy is over: a lease cannot return to its pool, nor device memory to
its allocator, while bytes are under way.

Device memory for what is fetched comes from torch's allocator, out of the pool of `up`, and is
counted against a budget in bytes. It is given back in the order of `up`, after the streams that
used it: what `up` writes next may lie in the same memory, at once, without anybody waiting for it.
So the bytes in use never exceed the budget, however far the device runs behind the CPU.

`device.py` has the copies, `buffer.py` the device memory, `gauge.py` what else is on the device,
`host.py` the case without a device: the CPU's own memory, where nothing is copied. Any
thread. Knows no policy and no files.
"""

from __future__ import annotations

import torch

from offload.core.metrics import Metrics
from offload.device.buffer import HOLDERS, DeviceBuffer, DeviceFullError
from offload.device.device import READS_IN_FLIGHT_BYTES, DeviceTransfer, Mark
from offload.device.gauge import (
    DeviceGauge,
    DeviceReading,
    available_bytes,
    find_device,
    usable_bytes,
    used_bytes,
)
from offload.device.host import HostBuffer, HostTransfer
from offload.device.random import device_random_states, set_device_random_states

__all__ = [
    "HOLDERS",
    "READS_IN_FLIGHT_BYTES",
    "DeviceBuffer",
    "DeviceFullError",
    "DeviceGauge",
    "DeviceReading",
    "DeviceTransfer",
    "HostBuffer",
    "HostTransfer",
    "Mark",
    "Moment",
    "Transfer",
    "available_bytes",
    "device_random_states",
    "find_device",
    "open_transfer",
    "set_device_random_states",
    "usable_bytes",
    "used_bytes",
]

Transfer = DeviceTransfer | HostTransfer
Moment = torch.Event  # something that streams can wait for; others hand it on


def open_transfer(
    device: torch.device | str, budget_bytes: int | None = None, metrics: Metrics | None = None
) -> Transfer:
    """What moves bytes to and from `device`. budget_bytes: for device memory; the CPU has none."""
    if torch.device(device).type == "cpu":
        return HostTransfer()
    return DeviceTransfer(device, budget_bytes, metrics=metrics)
