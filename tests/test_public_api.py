"""The public surface: names, Config fields and errors. A change here is a change for every user."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch

import offload
from offload.core import errors

pytestmark = pytest.mark.quick

NAMES = {
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
}

# Promised and not built yet: not there, rather than there and empty. A name moves up when its work
# is done.
TO_COME: set[str] = set()

FIELDS = {
    "device": "auto",
    "device_memory": None,
    "host_memory": None,
    "nvme": None,
    "param_dtype": None,
    "state_dtype": "float32",
    "activations": "keep",
    "prefetch_depth": "auto",
    "max_grad_norm": None,
    "release_grads": False,
    "process_group": None,
    "self_check": 0,
    "profile": None,
    "strict": False,
}

ERRORS = {
    "OffloadError": Exception,
    "ConfigError": errors.OffloadError,
    "CapacityError": errors.OffloadError,
    "StoreError": errors.OffloadError,
    "StoreTimeout": errors.StoreError,
    "CorruptionError": errors.StoreError,
    "FormatError": errors.OffloadError,
    "StateError": errors.OffloadError,
    "TorchVersionWarning": UserWarning,
}


def test_names_that_are_loaded_late_are_listed_all_the_same() -> None:
    """For completion and `help(offload)`."""
    assert set(dir(offload)) >= NAMES


def test_the_public_names() -> None:
    assert set(offload.__all__) == NAMES
    for name in NAMES:
        assert getattr(offload, name) is not None
        assert inspect.getdoc(getattr(offload, name)), f"{name} has no docstring"


def test_names_to_come_are_not_stubbed() -> None:
    assert not NAMES & TO_COME
    assert not {name for name in TO_COME if hasattr(offload, name)}


def test_the_fields_of_config_and_their_defaults() -> None:
    fields = {field.name: field.default for field in dataclasses.fields(offload.Config)}
    assert fields == FIELDS
    assert list(fields) == list(FIELDS), "the order is part of the surface: positional arguments"


def test_the_arguments_beside_those_fields() -> None:
    options = "config=None, *, elementwise=False, measure=False, **fields"
    for call in (offload.wrap, offload.plan):
        named = [
            str(parameter.replace(annotation=inspect.Parameter.empty))
            for parameter in inspect.signature(call).parameters.values()
        ]
        assert ", ".join(named) == f"optimizer, {options}".replace("*, ", "")
    assert list(inspect.signature(offload.report).parameters) == ["optimizer"]


def test_the_errors_and_their_parents() -> None:
    for name, parent in ERRORS.items():
        assert issubclass(getattr(errors, name), parent), name
    defined = {name for name, value in vars(errors).items() if inspect.isclass(value)}
    assert defined == set(ERRORS)


def test_store_errors_carry_what_happened() -> None:
    error = offload.CorruptionError(
        "chunk 3 of w: checksum differs",
        errno=5,
        operation="read",
        file="/x",
        offset_bytes=4096,
        tensor="w",
    )
    assert (error.errno, error.operation, error.file, error.offset_bytes, error.tensor) == (
        5,
        "read",
        "/x",
        4096,
        "w",
    )
    assert str(error) == "chunk 3 of w: checksum differs"


def test_importing_does_not_touch_an_accelerator() -> None:
    assert offload.__version__
    assert not torch.cuda.is_initialized()
