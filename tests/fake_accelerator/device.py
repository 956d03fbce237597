"""The module behind ``torch.fake``: what torch expects of a device, and the controls for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType

import torch

Device = torch.device | str | int | None


def _signed(number: int) -> int:
    """Return 64 bits as the signed number that torch's operators take."""
    return (number + 2**63) % 2**64 - 2**63


class DeviceModule(ModuleType):
    """The module that answers torch (counts, seeds, streams) and the tests (schedule, budget,
    counters).
    """

    def __init__(self) -> None:
        super().__init__("torch.fake", __doc__)
        self._core = torch.ops.fake_accelerator
        self.Stream = torch.Stream
        self.Event = torch.Event
        self._initialized = True  # checkpoints keep the random state of initialised devices

    def _index(self, device: Device) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index
        return torch.accelerator.current_device_index() if index is None else index

    # What torch asks for.

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return int(self._core.device_count())

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: Device) -> None:
        torch.accelerator.set_device_index(self._index(device))

    def synchronize(self, device: Device = None) -> None:
        torch.accelerator.synchronize(self._index(device))

    def current_stream(self, device: Device = None) -> torch.Stream:
        return torch.accelerator.current_stream(self._index(device))

    @contextlib.contextmanager
    def device(self, device: Device) -> Iterator[None]:
        with torch.accelerator.device_index(self._index(device)):
            yield

    @contextlib.contextmanager
    def stream(self, stream: torch.Stream | None) -> Iterator[None]:
        with contextlib.nullcontext() if stream is None else stream:
            yield

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def manual_seed(self, seed: int) -> None:
        self._core.set_generator_state(self.current_device(), _signed(int(seed)), 0)

    def manual_seed_all(self, seed: int) -> None:
        for index in range(self.device_count()):
            self._core.set_generator_state(index, _signed(int(seed)), 0)

    def get_rng_state(self, device: Device = None) -> torch.Tensor:
        """Return seed and offset, sixteen bytes."""
        state = self._core.generator_state(self._index(device))
        return torch.tensor(state, dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, state: torch.Tensor, device: Device = None) -> None:
        self._core.set_generator_state(self._index(device), *state.view(torch.int64).tolist())

    # What tests ask for.

    def set_schedule(self, schedule: str, seed: int = 0) -> None:
        """Finish all work, then change the rule: "eager", "lazy" or "seeded".

        Side streams made afterwards use the bits 1, 2, ... of the seed (the default stream: bit 0).
        """
        self._core.set_schedule(schedule, _signed(seed))

    def set_budget(self, nbytes: int, device: Device = None) -> None:
        """Set the bytes that a device can hold. Without a device: of each of them."""
        for index in range(self.device_count()) if device is None else [self._index(device)]:
            self._core.set_budget(index, nbytes)

    def counters(self, device: Device = None) -> dict[str, int]:
        """Return one device's counters, or their sums over all. The README says what they count."""
        indices = range(self.device_count()) if device is None else [self._index(device)]
        each = [self._core.counters(index) for index in indices]
        return {name: sum(one[name] for one in each) for name in each[0]}

    def reset_counters(self) -> None:
        for index in range(self.device_count()):
            self._core.reset_counters(index)

    def register_host_memory(self, address: int, nbytes: int) -> None:
        """Register these host bytes: copies from and to them can be asynchronous from now on."""
        self._core.register_host_memory(address, nbytes)

    def unregister_host_memory(self, address: int) -> None:
        """Take a registration back; refused while queued copies use the bytes."""
        self._core.unregister_host_memory(address)

    def operators_without_shapes(self) -> list[str]:
        """List operators that had to wait for their stream because torch has no Meta kernel for
        them.
        """
        return list(self._core.operators_without_shapes())
