"""The states of all random generators: Python's, numpy's if imported, torch's, the devices'."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from offload.core.errors import FormatError
from offload.device import device_random_states, set_device_random_states


def random_states() -> dict[str, Any]:
    """Return the states as a tree of plain values."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "torch": bytes(torch.get_rng_state().tolist()),
        "devices": device_random_states(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["numpy"] = (kind, tuple(keys.tolist()), *rest)
    return found


def check_random_states(states: Any) -> None:
    """Try the states on new generators that no other code uses. Raises `FormatError`."""
    try:
        random.Random().setstate(states["python"])
        torch.Generator("cpu").set_state(_tensor(states["torch"]))
        if any(not isinstance(each, bytes) for each in states["devices"]):
            raise TypeError("expected bytes for devices")
        if "numpy" in states:
            importlib.import_module("numpy").random.RandomState().set_state(states["numpy"])
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise FormatError(
            f"checkpoint: its random numbers are not as a save writes them ({error!r}), though its "
            "bytes are whole; something else has made it: take another checkpoint"
        ) from error


def set_random_states(states: Mapping[str, Any]) -> None:
    """Set all generators to these states, which have been checked."""
    random.setstate(states["python"])
    torch.set_rng_state(_tensor(states["torch"]))
    set_device_random_states(states["devices"])
    if "numpy" in states:
        importlib.import_module("numpy").random.set_state(states["numpy"])


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)
