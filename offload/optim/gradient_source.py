"""Gradients that are not in memory, as the update gets them, and the sources of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor


class SpilledGradientInput(Protocol):
    """A flat gradient that is not in memory: the update stages it slice by slice."""

    def numel(self) -> int: ...

    def element_size(self) -> int: ...

    def load(self) -> Tensor:
        """Load all values into memory of their own."""

    def block_sums(self) -> Sequence[float]:
        """Return sums of squares, as `kernels.grad_stats` computes them for the whole gradient."""


Gradient: TypeAlias = Tensor | SpilledGradientInput  # as the update gets it


def in_memory(grads: Mapping[int, Gradient]) -> dict[int, Tensor]:
    """Return the gradients of a wrapped optimizer, none of which is spilled."""
    assert all(isinstance(one, Tensor) for one in grads.values()), "only prepare spills gradients"
    return cast("dict[int, Tensor]", grads)


@dataclass(frozen=True)
class GradientEdit:
    """An in-place change that works on each element by itself, so that it gives the same bits now
    or later, on the whole or part by part. is_blank: the values before it do not matter.
    """

    act: Callable[..., object]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_blank: bool = False

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GradientEdit:
        """Make the edit that calls a method of `Tensor` with numbers or one-element tensors. The
        tensors are copied: user code may change them before the edit is applied.
        """
        named = {key: _kept(one) for key, one in kwargs.items()}
        return cls(getattr(Tensor, name), tuple(map(_kept, args)), named, name == "zero_")

    def check(self, like: Tensor) -> None:
        """Raise now what torch would raise later, for values of the dtype of `like`."""
        shape = (0,) if like.dim() else ()
        self(torch.zeros(shape, dtype=like.dtype, device="cpu"))

    def __call__(self, values: Tensor) -> None:
        self.act(values, *self.args, **self.kwargs)


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, Tensor) else value


class GradientSource(Protocol):
    """The owner of the values of one gradient: they are in the store, or shared out over ranks."""

    @property
    def answers(self) -> Mapping[Any, Callable[..., Any]]:
        """The functions of torch that are answered without all values in memory."""

    @property
    def input(self) -> Gradient:
        """The values for the update: of this rank, if they are shared out."""

    def load(self, func: Callable[..., Any]) -> Tensor:
        """Load all values into memory of their own, with the gradient's shape, for `func` to use;
        refuse it by its name where no rank has all of them.
        """

    def store(self, values: Tensor) -> None:
        """Replace the values by these."""

    def edit(self, edit: GradientEdit) -> None:
        """Change the values, now or when they are used."""

    def add(self, values: Tensor) -> None:
        """Add as many values of the same type, as torch adds in place."""

    def norm(self, order: float = 2.0) -> Tensor | None:
        """Return what `torch.linalg.vector_norm` gives for the present values; None: not known."""
