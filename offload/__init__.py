"""Train models larger than memory in an unchanged PyTorch loop."""

from offload.config import Config
from offload.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    FormatError,
    OffloadError,
    StateError,
    StoreError,
    StoreTimeout,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "CapacityError",
    "Config",
    "ConfigError",
    "CorruptionError",
    "FormatError",
    "OffloadError",
    "StateError",
    "StoreError",
    "StoreTimeout",
]
