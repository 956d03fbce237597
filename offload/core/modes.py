"""Helpers that run the engine's code outside of the caller's inference mode.

A tensor made under `torch.inference_mode()` can never be trained, and neither can a parameter whose
values are in one. Tensors that the engine makes while the user evaluates outlive the evaluation, so
the engine leaves that mode while it works. The user's code keeps its mode.
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
    """Leave the caller's inference mode while the block runs; autograd stays off."""
    with torch.inference_mode(False), torch.no_grad():  # the first alone would enable autograd
        yield


def outside_inference_mode(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function to leave its caller's inference mode, if there is one."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with left_inference_mode():
            return function(*args, **kwargs)

    return call


@contextmanager
def entered_outside(manager: AbstractContextManager[None]) -> Iterator[None]:
    """Enter and leave `manager` outside of inference mode; the block keeps the caller's mode."""
    outside_inference_mode(manager.__enter__)()
    leave = outside_inference_mode(manager.__exit__)
    try:
        yield
    except BaseException:
        if not leave(*sys.exc_info()):
            raise
    else:
        leave(None, None, None)
