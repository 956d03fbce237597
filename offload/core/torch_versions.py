"""The versions of torch whose fused optimizers were compared bit by bit with the engine's update.

`make versions` compares them. This file does not import torch: the doctor also reports on a torch
that is broken.
"""

from __future__ import annotations

import re
import warnings
from typing import Final

from offload.core.errors import TorchVersionWarning

KNOWN: Final = ("2.13", "2.14", "2.15")

_told: set[str] = set()


def is_known(version: str) -> bool:
    """Return whether `version`, a `torch.__version__`, is a release of a known version. Builds from
    other sources are not: their compiler may have fused other multiply-adds.
    """
    release = re.fullmatch(r"(\d+\.\d+)\.\d+(\+.*)?", version)
    return release is not None and release[1] in KNOWN


def describe(version: str) -> str:
    """Describe the version, and whether it is a known one, for a table."""
    one = "one" if is_known(version) else "none"
    return f"{version}, {one} of those whose bits were compared ({', '.join(KNOWN)})"


def warn_if_unknown(version: str) -> None:
    """Warn once about each version that was not compared. For functions that the user's code calls:
    the warning points at its line.
    """
    if is_known(version) or version in _told:
        return
    warnings.warn(
        f"torch {version} is not among the versions whose fused optimizers were compared with "
        f"offload ({', '.join(KNOWN)}): the update may differ from torch's in last bits. "
        "`offload selftest` compares them on this machine",
        TorchVersionWarning,
        stacklevel=4,
    )
    _told.add(version)
