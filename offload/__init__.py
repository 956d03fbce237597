"""Train models larger than memory in an unchanged PyTorch loop.

`wrap` moves an optimizer's state to host memory and NVMe, `prepare` a model's parameters and
gradients as well. `plan` shows beforehand what they would do, `report` afterwards what they have
done. `save` and `load` make and load checkpoints, `close` undoes `wrap` and `prepare`. Each call
has its own help: `help(offload.prepare)`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if sys.platform == "win32":
    raise ImportError(
        "offload: Windows lacks the system calls that it relies on; use WSL2 (wsl --install), "
        "where it is a Linux program"
    )

from offload.core.config import Config
from offload.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    FormatError,
    OffloadError,
    StateError,
    StoreError,
    StoreTimeout,
    TorchVersionWarning,
)

if TYPE_CHECKING:
    from offload.api import close, load, plan, prepare, report, resident, save, wrap
    from offload.integrations.huggingface import TrainerCallback
    from offload.integrations.progress_line import progress
    from offload.integrations.signals import save_on_signal
    from offload.optim import Lion
    from offload.planning.state_plan import Plan
    from offload.telemetry.report import Report

__version__ = "0.1.0.dev0"

__all__ = [
    "CapacityError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "FormatError",
    "Lion",
    "OffloadError",
    "Plan",
    "Report",
    "StateError",
    "StoreError",
    "StoreTimeout",
    "TorchVersionWarning",
    "TrainerCallback",
    "close",
    "load",
    "plan",
    "prepare",
    "progress",
    "report",
    "resident",
    "save",
    "save_on_signal",
    "wrap",
]

# Names that need torch, and the modules that define them. They are imported on first use, because
# `offload doctor` must be able to report that torch is broken.
_LATE = {
    "Lion": "offload.optim",
    "Plan": "offload.planning.state_plan",
    "Report": "offload.telemetry.report",
    "TrainerCallback": "offload.integrations.huggingface",
    "close": "offload.api",
    "load": "offload.api",
    "plan": "offload.api",
    "prepare": "offload.api",
    "progress": "offload.integrations.progress_line",
    "report": "offload.api",
    "resident": "offload.api",
    "save": "offload.api",
    "save_on_signal": "offload.integrations.signals",
    "wrap": "offload.api",
}


def __dir__() -> list[str]:
    """List the late names, too, for completion and `help`; none is loaded for it."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATE[name]), name)
