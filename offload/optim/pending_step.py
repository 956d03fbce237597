"""The pending step: after the last check that can refuse a step, before its first change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offload import kernels
from offload.optim.gradient_source import Gradient
from offload.optim.recipe import Record


@dataclass
class PendingStep:
    """A step that can no longer be refused and has not changed anything yet, except that the
    records' step counts include it.

    squares: sums of squares over parts of this rank's gradients, by parameter number, for their
    norm; None if no norm is needed. sum_squares: their total; with the other ranks' after
    `take_squares` or `complete`.
    """

    grads: dict[int, Gradient]
    fresh: set[int]  # numbers of the parameters that have no state yet
    stepping: list[Record]
    before: list[float]  # the step counts of `stepping` before this step
    squares: Mapping[int, Sequence[float]] | None
    sum_squares: float | None = None

    def __post_init__(self) -> None:
        if self.squares is not None:
            sums = [one for each in self.squares.values() for one in each]
            self.sum_squares = kernels.GradStats.of(sums).sum_squares

    def count_steps(self) -> None:
        for record, step in zip(self.stepping, self.before, strict=True):
            record.step = step + 1.0

    def undo(self) -> None:
        for record, step in zip(self.stepping, self.before, strict=True):
            record.step = step

    @property
    def squares_text(self) -> str | None:
        """The sum of squares as exact text (hexadecimal), to be sent to other ranks."""
        return None if self.sum_squares is None else self.sum_squares.hex()

    def take_squares(self, said: Sequence[str | None]) -> None:
        """Take the sums of squares of all ranks; they are added exactly, in the same way on each
        rank.
        """
        if self.sum_squares is not None:
            sums = [float.fromhex(text) for text in said if text is not None]
            self.sum_squares = kernels.GradStats.of(sums).sum_squares

    def complete(self, sum_over_ranks: Callable[[float], float]) -> None:
        """Add the squares of other ranks. If that fails, undo the step and raise."""
        if self.sum_squares is not None:
            try:
                self.sum_squares = sum_over_ranks(self.sum_squares)
            except BaseException:
                self.undo()
                raise
