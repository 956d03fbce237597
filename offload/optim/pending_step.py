"""A step between the last refusal and the first change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offload import kernels
from offload.optim.recipe import Record
from offload.optim.spilled_gradient import Gradient


@dataclass
class PendingStep:
    """A step that nothing stands in the way of any more. Steps are counted already. squares: sums
    over parts of the gradients that are ours, by number, for their norm; None where nobody asked.
    sum_squares: of all of them, and of other ranks' when those have told.
    """

    grads: dict[int, Gradient]
    fresh: set[int]  # numbers of those that have no state yet
    stepping: list[Record]
    before: list[float]  # their counts of steps
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
        """For other ranks."""
        return None if self.sum_squares is None else self.sum_squares.hex()

    def take_squares(self, said: Sequence[str | None]) -> None:
        """Of all ranks: added up exactly, in the same way on each."""
        if self.sum_squares is not None:
            sums = [float.fromhex(text) for text in said if text is not None]
            self.sum_squares = kernels.GradStats.of(sums).sum_squares

    def complete(self, sum_over_ranks: Callable[[float], float]) -> None:
        """Add the squares of other ranks; where that fails, the step is undone."""
        if self.sum_squares is not None:
            try:
                self.sum_squares = sum_over_ranks(self.sum_squares)
            except BaseException:
                self.undo()
                raise
