"""Config: sizes, dtypes, paths; a wrong value is a ConfigError that says what would be right."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.core.config import Config, format_size, parse_size
from offload.core.errors import ConfigError


@pytest.mark.parametrize(
    "text,nbytes",
    [
        (1, 1),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("512MiB", 512 << 20),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("2TiB", 2 << 40),
        ("1.5GiB", 3 << 29),
        ("8GB", 8 * 10**9),
        ("3kb", 3000),
        ("3KiB", 3072),
        (" 7 MB ", 7 * 10**6),
        ("123456789012345678", 123456789012345678),
        (2**63 - 1, 2**63 - 1),
    ],
)
def test_sizes_are_read(text: int | str, nbytes: int) -> None:
    assert parse_size("host_memory", text) == nbytes
    assert Config(host_memory=text).host_memory == nbytes


@pytest.mark.parametrize(
    "value",
    [
        "",
        "GiB",
        "-1GiB",
        "8 bananas",
        "8GiBs",
        "1e9",
        "0x10",
        "8,5GiB",
        "nan",
        1.5,
        True,
        b"8GiB",
        0,
        -4,
        2**63,
        pytest.param(10**5000, id="huge"),
        pytest.param(-(10**5000), id="minus huge"),  # repr of it raises
        pytest.param("9" * 5000, id="many digits"),
        pytest.param("9" * 400 + ".0GiB", id="infinite float"),
        "8388608TiB",
    ],
)
def test_what_is_no_size_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^host_memory: expected .*got"):
        Config(host_memory=value)


@pytest.mark.parametrize(
    "nbytes,text",
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 50, "1024 TiB"),
    ],
)
def test_sizes_are_shown(nbytes: int, text: str) -> None:
    assert format_size(nbytes) == text


def test_shown_sizes_can_be_read_again() -> None:
    for exponent in range(50):
        assert parse_size("n", format_size(1 << exponent)) == 1 << exponent


@pytest.mark.parametrize("value", [torch.bfloat16, "bfloat16", "torch.bfloat16"])
def test_dtypes_by_value_or_name(value: Any) -> None:
    assert Config(param_dtype=value).param_dtype == "bfloat16"
    assert Config(state_dtype=value).state_dtype == "bfloat16"


def test_paths() -> None:
    assert Config().nvme is None
    assert Config(nvme="/a").nvme == (Path("/a"),)
    assert Config(nvme=Path("/a")).nvme == (Path("/a"),)
    assert Config(nvme=["/a", Path("/b")]).nvme == (Path("/a"), Path("/b"))
    assert Config(nvme="~/x").nvme == (Path.home() / "x",)


class BytesPath(os.PathLike):  # type: ignore[type-arg]
    def __fspath__(self) -> bytes:
        return b"/a"


class NumberPath(os.PathLike):  # type: ignore[type-arg]
    def __fspath__(self) -> int:  # type: ignore[override]
        return 3


@pytest.mark.parametrize(
    "field,value,message",
    [
        (
            "param_dtype",
            "bfloat61",
            "got 'bfloat61'; did you mean 'bfloat16'?",
        ),
        ("param_dtype", torch.int8, "param_dtype: expected"),
        ("state_dtype", "int4", "state_dtype: expected"),
        ("activations", "recompte", "did you mean 'recompute'?"),
        (
            "prefetch_depth",
            -1,
            'prefetch_depth: expected a whole number from 0 on or "auto", got -1',
        ),
        ("prefetch_depth", 1.5, "prefetch_depth: expected"),
        ("prefetch_depth", "deep", "prefetch_depth: expected"),
        ("prefetch_depth", True, "prefetch_depth: expected"),
        ("max_grad_norm", 0, "max_grad_norm: expected a finite number above 0"),
        ("max_grad_norm", float("nan"), "max_grad_norm: expected"),
        ("max_grad_norm", "1", "max_grad_norm: expected"),
        ("self_check", -3, "self_check: expected a whole number from 0 on, got -3"),
        ("strict", 1, "strict: expected True or False, got 1"),
        ("release_grads", None, "release_grads: expected True or False"),
        ("device", "nonsense", "device: expected \"auto\" or a torch device, got 'nonsense'"),
        ("device", 1.5, "device: expected"),
        ("nvme", [], "nvme: expected one path or several, got an empty list"),
        ("nvme", "", "nvme: expected a path, got ''"),
        ("nvme", ["/a", 3], "nvme: expected a path, got 3"),
        ("nvme", 7, "nvme: expected a path, got 7"),
        ("nvme", ["/a", "/a"], "nvme: the same path is given twice"),
        ("nvme", b"/a", "nvme: expected a path, got b'/a'"),
        ("nvme", BytesPath(), "nvme: expected a path, got"),
        ("nvme", NumberPath(), "nvme: expected a path, got"),
        ("nvme", "/a\0b", r"nvme: expected a path without NUL characters, got '/a\x00b'"),
        ("nvme", "/a\ud800", "nvme: expected a path, got"),
        ("nvme", "~nosuchuser/x", "nvme: no home directory for the ~ in '~nosuchuser/x'"),
        ("profile", "~nosuchuser/x", "profile: no home directory"),
        ("profile", "a\0", "profile: expected a path without NUL"),
        ("param_dtype", np.ones(2), "param_dtype: expected"),
        pytest.param("state_dtype", 10**5000, "state_dtype: expected", id="huge dtype"),
        ("prefetch_depth", np.ones(2), "prefetch_depth: expected"),
        pytest.param("prefetch_depth", -(10**5000), "prefetch_depth: exp", id="minus huge depth"),
        ("max_grad_norm", 10**400, "max_grad_norm: expected"),
        ("strict", np.ones(2), "strict: expected True or False"),
        ("device", 10**30, "device: expected"),
        ("device", True, "device: expected"),
        ("device", b"cpu", "device: expected \"auto\" or a torch device, got b'cpu': the type is"),
        ("device", np.ones(2), "device: expected"),
        ("device", "\ud800", "device: expected"),
        ("profile", "", "profile: expected a path"),
        ("profile", 3, "profile: expected a path, got 3"),
    ],
)
def test_wrong_values_are_refused_with_what_would_be_right(
    field: str, value: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Config.of(**{field: value})


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu"), torch.device("cpu", 0)])
def test_device_memory_needs_a_device(device: Any) -> None:
    assert Config(device=device).device == device
    with pytest.raises(ConfigError, match="device_memory: the CPU has no device memory"):
        Config(device=device, device_memory="1GiB")


def test_messages_stay_short() -> None:
    with pytest.raises(ConfigError) as refusal:
        Config(host_memory="9" * 5000)
    assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    "wrong,right",
    [
        ("host_mem", "host_memory"),
        ("prefetch", "prefetch_depth"),
        ("nvm", "nvme"),
        ("grad_norm", "max_grad_norm"),
    ],
)
def test_an_unknown_field_names_the_nearest(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"^{wrong}: no such field; did you mean '{right}'"):
        Config.of(**{wrong: 1})
    with pytest.raises(ConfigError, match=f"^{wrong}: no such field; did you mean '{right}'"):
        Config.of(Config(), **{wrong: 1})
    with pytest.raises(ConfigError, match=f"^{wrong}: no such field; did you mean '{right}'"):
        Config(**{wrong: 1})


def test_the_signature_shows_every_field() -> None:
    assert list(inspect.signature(Config).parameters) == [
        field.name for field in dataclasses.fields(Config)
    ]


def test_a_config_with_changes() -> None:
    base = Config(host_memory="1GiB", nvme="/a")
    changed = Config.of(base, host_memory="2GiB", strict=True)
    assert (changed.host_memory, changed.nvme, changed.strict) == (2 << 30, (Path("/a"),), True)
    assert base.host_memory == 1 << 30
    assert Config.of(base) == base
    with pytest.raises(ConfigError, match=r"config: expected an offload\.Config, got dict"):
        Config.of({"host_memory": 1})  # type: ignore[arg-type]


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().strict = True  # type: ignore[misc]
