"""What several test files use: exact comparison, awkward numbers, slices of memory that starts
anywhere.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

SIZES = [0, 1, 7, 8, 9, 15, 16, 17, 4097, 1048579]

_WORDS = {4: torch.int32, 2: torch.int16}

# Infinity, NaN, zeros, the smallest and largest denormals and normals, numbers whose squares over-
# and underflow.
SPECIAL = [
    *(
        sign * value
        for value in (float("inf"), 0.0, 1e-45, 1.1754942e-38, 1.1754944e-38)
        for sign in (1, -1)
    ),
    *(
        sign * value
        for value in (3.4028235e38, 1e-30, 2e19, 65504.0, 65520.0, 6e-8)
        for sign in (1, -1)
    ),
    float("nan"),
]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit by bit; any NaN matches any NaN."""
    word = _WORDS[a.element_size()]
    equal = (a.view(word) == b.view(word)) | (torch.isnan(a) & torch.isnan(b))
    return a.dtype == b.dtype and a.shape == b.shape and bool(equal.all())


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    if same_bits(got, expected):
        return
    word = _WORDS[got.element_size()]
    wrong = (got.view(word) != expected.view(word)) & ~(torch.isnan(got) & torch.isnan(expected))
    index = int(wrong.nonzero()[0])
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {got.numel()} elements differ, first at {index}: "
        f"got {got[index].item()!r}, expected {expected[index].item()!r}"
    )


def awkward(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Ordinary numbers with a special one in every seventh place."""
    values = torch.randn(numel)
    special = torch.tensor(SPECIAL)
    places = torch.arange(0, numel, 7)
    values[places] = special[torch.randint(len(special), (len(places),))]
    return values.to(dtype)


def unaligned(tensor: Tensor, shift: int) -> Tensor:
    """A copy that starts `shift` elements behind a 64-byte boundary."""
    memory = torch.empty(tensor.numel() + 64 + shift, dtype=tensor.dtype)
    start = (-memory.data_ptr() % 64) // tensor.element_size() + shift
    copy = memory[start : start + tensor.numel()]
    copy.copy_(tensor)
    return copy


def misaligned(tensor: Tensor) -> Tensor:
    """A copy at an odd address, as a file format may hand it out."""
    memory = bytearray(tensor.nbytes + 1)
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=1)
    copy.copy_(tensor)
    return copy


def cuts(numel: int, pieces: int, multiple: int = 1) -> list[tuple[int, int]]:
    """[0, numel) in at most `pieces` random slices; inner borders are multiples of `multiple`."""
    inner = torch.randint(0, numel // multiple + 1, (pieces - 1,)) * multiple
    edges = sorted({0, numel, *inner.tolist()})
    return list(itertools.pairwise(edges))
