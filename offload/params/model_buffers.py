"""A model's buffers, which are where the model runs: running means and the like."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class ModelBuffers:
    """Moved to a device, and back by `give_back`. Small, and written in every run, so they stay."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._original_devices: dict[tuple[nn.Module, str], torch.device] = {}
        moved: dict[Tensor, Tensor] = {}  # several modules may have the same
        for module, name, buffer in _buffers(model):
            if buffer.device != device:
                self._original_devices[module, name] = buffer.device
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]

    def give_back(self) -> None:
        """To where they were; idempotent."""
        moved: dict[Tensor, Tensor] = {}
        for (module, name), original_device in self._original_devices.items():
            buffer = module._buffers.get(name)
            if buffer is not None:
                if buffer not in moved:
                    moved[buffer] = buffer.to(original_device)
                module._buffers[name] = moved[buffer]
        self._original_devices = {}


def buffer_bytes(model: nn.Module) -> int:
    distinct = {buffer: buffer.nbytes for _, _, buffer in _buffers(model)}
    return sum(distinct.values())


def _buffers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
