"""The names of all checks, in the order of execution. Imports no check, so it needs no torch.

`group.name` is the function `name` in the file of that group.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import Any, Final

from offload.core.errors import ConfigError
from offload.tools.selftest.check import PassedCheck, Setting

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
