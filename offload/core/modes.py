"""The engine's own work in the mode of an ordinary program, whatever mode its caller is in.

Tensors that are made under `torch.inference_mode()` can never be trained, and a parameter whose
values lie in such a tensor is one of them. What the engine makes while somebody evaluates outlives
the evaluation, so it leaves that mode for as long as it works. Code of users keeps its mode.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


@contextmanager
def left_inference_mode() -> Iterator[None]:
    """Leave the caller's inference mode inside the block; gradients stay off."""
    with torch.inference_mode(False), torch.no_grad():  # the first alone would turn them on
        yield


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function leave its caller's inference mode, if there is one."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with left_inference_mode():
            return function(*args, **kwargs)

    return call


@contextmanager
def entered_outside(manager: AbstractContextManager[None]) -> Iterator[None]:
    """Enter and leave `manager` outside of inference mode; the block keeps its caller's mode."""
    outside_inference_mode(manager.__enter__)()
    leave = outside_inference_mode(manager.__exit__)
    try:
        yield
    except BaseException:
        if not leave(*sys.exc_info()):
            raise
    else:
        leave(None, None, None)
