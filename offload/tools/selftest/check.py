"""The interface of a check: its argument, its result, its exceptions, and its line in the table.

A check is a function of a `Setting` that returns `PassedCheck`: what it has compared, and how many.
It raises `CheckFailed` if a value is not the expected one, and `NotRun` if this machine lacks what
the check needs; any other exception is a failure, too. A check writes only in its own directory and
has removed all files there when it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class CheckFailed(Exception):
    """An exception for a value that is not the expected one; the message has both."""

    def __init__(self, what: str, *, got: object, expected: object) -> None:
        super().__init__(f"{what}: got {got}, expected {expected}")


class NotRun(Exception):
    """An exception for a check that cannot run on this machine; the message says why."""


class CheckStatus(Enum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Setting:
    """The argument of a check. device: a torch device's name, never "auto". directory: this check's
    own, empty at the beginning.
    """

    device: str
    directory: Path
    is_quick: bool
    seed: int

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class PassedCheck:
    """The result of a check that has passed. compared: the things that were compared, in words.
    count: the number of them; 0 is a failure, since the check has then proved nothing.
    """

    compared: str
    count: int


@dataclass(frozen=True)
class CheckResult:
    """A check's line in the table. text: what was compared, the error, or why it did not run."""

    name: str
    status: CheckStatus
    seconds: float
    text: str
    count: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status.value}

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> CheckResult:
        return cls(**{**values, "status": CheckStatus(values["status"])})


def require(is_so: bool, what: str, *, got: object, expected: object) -> None:
    """Raise `CheckFailed` unless `is_so`."""
    if not is_so:
        raise CheckFailed(what, got=got, expected=expected)
