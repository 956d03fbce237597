"""A piece of host memory to move: where it is, how long, and who keeps it alive."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from offload.arguments import check_pages, check_tensor
from offload.errors import ConfigError


class Buffer(NamedTuple):
    """`owner` is held while an operation may touch the memory, so that nobody can reuse it."""

    address: int
    nbytes: int
    owner: object

    @classmethod
    def of(cls, name: str, memory: Any, writable: bool) -> Buffer:
        """The memory of a contiguous host tensor, or of anything that shows its bytes (a lease's
        `buffer()`, an array).
        """
        if isinstance(memory, torch.Tensor):
            found = cls._of_tensor(name, memory)
        else:
            found = cls._of_view(name, memory, writable)
        check_pages(name, found.address, found.address + found.nbytes, writable)
        return found

    @classmethod
    def _of_view(cls, name: str, memory: Any, writable: bool) -> Buffer:
        try:
            view = memoryview(memory)
        except TypeError as error:
            kind = type(memory).__name__
            raise ConfigError(f"{name}: expected a tensor or a buffer, got {kind}") from error
        if not view.c_contiguous:
            raise ConfigError(f"{name}: expected contiguous memory, got strides {view.strides}")
        if writable and view.readonly:
            raise ConfigError(f"{name}: expected memory that can be written, got a read-only view")
        if view.nbytes == 0:
            return cls(0, 0, memory)
        array = np.frombuffer(view, dtype=np.uint8)
        return cls(array.ctypes.data, view.nbytes, array)

    @classmethod
    def _of_tensor(cls, name: str, tensor: torch.Tensor) -> Buffer:
        with torch._C.DisableTorchFunction():
            found = check_tensor(name, tensor)
            # Not the tensor, which may be given other memory at any time.
            return cls(found.begin, found.end - found.begin, tensor.untyped_storage())

    def part(self, begin: int, nbytes: int) -> Buffer:
        if nbytes == self.nbytes and begin == 0:
            return self
        assert 0 <= begin <= begin + nbytes <= self.nbytes
        return Buffer(self.address + begin, nbytes, self.owner)
