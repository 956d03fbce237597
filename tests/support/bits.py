"""Exact comparison of tensors, models and optimizer state, on any device.

The comparison itself is that of `offload selftest`: equal bit by bit, any NaN matches any NaN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offload.tools.selftest.bits import require_same, require_same_bits, require_same_states
from offload.tools.selftest.check import CheckFailed


def assert_same_bits(got: Tensor, expected: Tensor, what: str) -> None:
    """Raise AssertionError unless both have the same type, shape and bits."""
    _judged(require_same_bits, got, expected, what)


def assert_same_tensors(
    got: Iterable[Tensor | None], expected: Iterable[Tensor | None], what: str = "tensor"
) -> None:
    """Raise AssertionError unless two lists of tensors have the same bits; both may hold None."""
    _judged(require_same, list(got), list(expected), what)


def assert_same_named(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise AssertionError unless both have the same names, with tensors of the same bits."""
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert_same_bits(got[name], value, name)


def assert_same_model(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare parameters and buffers, as `state_dict()` has them."""
    assert_same_named(ours.state_dict(), theirs.state_dict())


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    """Compare the gradients of all parameters, None where the other has none; and all buffers."""
    for (name, p), q in zip(theirs.named_parameters(), ours.parameters(), strict=True):
        assert_same_tensors([q.grad], [p.grad], f"the gradient of {name}")
    assert_same_named(dict(ours.named_buffers()), dict(theirs.named_buffers()))


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Compare the state of two optimizers; each may be given as its `state_dict()`."""
    left, right = (one if isinstance(one, Mapping) else one.state_dict() for one in (ours, theirs))
    _judged(require_same_states, left["state"], right["state"], "the state of parameter")


def same_tensors(left: Iterable[Tensor], right: Iterable[Tensor]) -> bool:
    """Return whether two lists hold equal tensors, pair by pair."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor as a flat uint8 tensor."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _judged(judge: Any, *args: Any) -> None:
    try:
        judge(*args)
    except CheckFailed as error:
        raise AssertionError(str(error)) from None
