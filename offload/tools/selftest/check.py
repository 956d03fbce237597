"""What a check is given, what it returns or raises, and what is told of it.

A check is a function of a `Setting` that returns `Proved`: what was compared, and how often. It
raises `CheckFailed` where something is not what it should be, and `NotRun` where this machine has
nothing to try it on; any other exception is a failure, too. What it writes is in its own directory
and is gone when it returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any


class CheckFailed(Exception):
    """Something is not what it should be."""

    def __init__(self, what: str, *, got: object, expected: object) -> None:
        super().__init__(f"{what}: got {got}, expected {expected}")


class NotRun(Exception):
    """There is nothing here to try it on; the message says why."""


class CheckStatus(Enum):
    """What came of a check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Setting:
    """device: a torch device's name, never "auto". directory: this check's own, empty."""

    device: str
    directory: Path
    is_quick: bool
    seed: int

    @property
    def is_on_cpu(self) -> bool:
        return self.device == "cpu"


@dataclass(frozen=True)
class Proved:
    """count: how many of `compared` there were. 0 is a failure: nothing was proved then."""

    compared: str
    count: int


@dataclass(frozen=True)
class CheckResult:
    """What is told of a check. text: what was compared, what went wrong, or why it did not run."""

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
    """Raise `CheckFailed` unless it is so."""
    if not is_so:
        raise CheckFailed(what, got=got, expected=expected)
