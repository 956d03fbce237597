"""The checks by name, and the interface of one: its argument, its result, its exceptions, and its
line in the table. Imports no check, so it needs no torch.

A check is a function of a `Setting` that returns `PassedCheck`: what it has compared, and how many.
It raises `CheckFailed` if a value is not the expected one, and `NotRun` if this machine lacks what
the check needs; any other exception is a failure, too. A check writes only in its own directory and
has removed all files there when it returns.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from offload.core.errors import ConfigError, OffloadError


class CheckFailed(Exception):
    """An exception for a value that is not the expected one; the message has both."""

    def __init__(self, what: str, *, got: object, expected: object) -> None:
        super().__init__(f"{what}: got {got}, expected {expected}")


class NotRun(Exception):
    """An exception for a check that cannot run on this machine; the message says why."""


class CheckStatus(StrEnum):
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

    @classmethod
    def of_dict(cls, values: Mapping[str, Any]) -> CheckResult:
        return cls(**{**values, "status": CheckStatus(values["status"])})


def require(is_so: bool, what: str, *, got: object, expected: object) -> None:
    """Raise `CheckFailed` unless `is_so`."""
    if not is_so:
        raise CheckFailed(what, got=got, expected=expected)


def require_equal(got: object, expected: object, what: str) -> None:
    """Raise `CheckFailed` unless both are equal."""
    require(got == expected, what, got=got, expected=expected)


@contextmanager
def require_error(kind: type[OffloadError], what: str, instead: str = "no error") -> Iterator[None]:
    """Raise `CheckFailed` unless the block raises an error of this type. instead: what else it has
    done, for the message.
    """
    try:
        yield
    except OffloadError as error:
        got = type(error).__name__
        require(isinstance(error, kind), what, got=got, expected=kind.__name__)
    else:
        raise CheckFailed(what, got=instead, expected=kind.__name__)


# --- all checks -----------------------------------------------------------------------------------

# In the order of execution; `group.name` is the function `name` in the file of that group.
CHECKS: Final[tuple[str, ...]] = (
    "kernels.reference",
    "kernels.torch_fused",
    "kernels.slices",
    "kernels.statistics",
    "kernels.casts",
    "wrap.memory",
    "wrap.disk",
    "wrap.half",
    "wrap.optimizers",
    "prepare.budgets",
    "prepare.device",
    "prepare.half",
    "prepare.activations",
    "prepare.checkpointing",
    "copies.transfer",
    "copies.slow_disk",
    "budgets.pool",
    "budgets.refusals",
    "budgets.memory",
    "faults.io_uring",
    "faults.threads",
    "faults.aiofiles",
    "faults.training",
    "checkpoints.resume",
    "checkpoints.damage",
    "checkpoints.kill",
    "leftovers.disk",
)


def group_of(name: str) -> str:
    return name.split(".")[0]


GROUPS: Final = tuple(dict.fromkeys(map(group_of, CHECKS)))


def choose(only: str | None) -> tuple[str, ...]:
    """Return the checks that a list such as "kernels,faults.threads" names, in the order of
    execution; None: all. Raises `ConfigError` for an unknown name or an empty list.
    """
    if only is None:
        return CHECKS
    wanted = [word.strip() for word in only.split(",") if word.strip()]
    for word in wanted:
        if word not in GROUPS and word not in CHECKS:
            near = difflib.get_close_matches(word, [*GROUPS, *CHECKS], n=1, cutoff=0.4)
            raise ConfigError(
                f"--only: no check and no group is called {word!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f"; groups: {', '.join(GROUPS)}"
            )
    if not wanted:
        raise ConfigError(f"--only: expected names, got {only!r}; groups: {', '.join(GROUPS)}")
    return tuple(name for name in CHECKS if name in wanted or group_of(name) in wanted)


def find(name: str) -> Callable[[Setting], PassedCheck]:
    """Return the function of a check. Imports torch."""
    group, own = name.split(".")
    found: Any = getattr(importlib.import_module(f"offload.tools.selftest.{group}"), own)
    check: Callable[[Setting], PassedCheck] = found
    return check
