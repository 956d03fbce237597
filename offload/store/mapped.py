"""Tensors on memory-mapped files without a name: for state that is larger than memory."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from offload.errors import StoreError


def mapped_tensor(
    directory: str | os.PathLike[str],
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """A tensor of that shape and those strides, dense, on a file that goes with it."""
    nbytes = shape.numel() * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    try:
        fd = os.open(Path(directory), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, nbytes)
            memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
    except OSError as error:
        raise StoreError(
            f"{os.fspath(directory)}: no room for {nbytes} bytes of state to hand out: {error}",
            errno=error.errno,
            operation="map",
            file=os.fspath(directory),
        ) from error
    flat = torch.frombuffer(memory, dtype=dtype)
    return flat.as_strided(shape, stride)
