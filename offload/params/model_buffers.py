"""A model's buffers (running means, for example), which stay where the model computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn


class ModelBuffers:
    """The buffers of a model, moved to a device until `return_to_model`.

    They are small, and written in every run, so they are never evicted.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._original_devices: dict[tuple[nn.Module, str], torch.device] = {}
        moved: dict[Tensor, Tensor] = {}  # several modules may share a buffer
        for module, name, buffer in _buffers(model):
            if buffer.device != device:
                self._original_devices[module, name] = buffer.device
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]

    def return_to_model(self) -> None:
        """Move the buffers back to their original devices. Idempotent."""
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
