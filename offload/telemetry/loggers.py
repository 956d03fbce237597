"""Writers for numbers while training runs: TensorBoard, Weights & Biases, and objects with the
methods of either. Neither is imported, and neither is needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from offload.core.errors import ConfigError


class ScalarWriter(Protocol):
    """The method that TensorBoard's SummaryWriter has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


class RunLogger(Protocol):
    """The method that a run of Weights & Biases has, and the module `wandb` itself."""

    def log(self, data: dict[str, float], *, step: int) -> Any: ...


Writer = ScalarWriter | RunLogger


def check_writer(writer: object, what: str) -> None:
    """Raise a `ConfigError` unless numbers can be written there. what: the argument, for the
    message.
    """
    if not any(callable(getattr(writer, name, None)) for name in ("add_scalar", "log")):
        raise ConfigError(
            f"{what}: expected TensorBoard's SummaryWriter (add_scalar) or a run of W&B (log), got "
            f"{type(writer).__name__}, which has neither"
        )


def log_numbers(writer: Writer, numbers: Mapping[str, float], step: int) -> None:
    """Write all numbers for one step: one by one with `add_scalar` if the writer has it, else at
    once.
    """
    check_writer(writer, "log_to")
    add: Any = getattr(writer, "add_scalar", None)
    if callable(add):
        for name, value in numbers.items():
            add(name, value, step)
    else:
        log: Any = writer.log  # type: ignore[union-attr]
        log(dict(numbers), step=step)
