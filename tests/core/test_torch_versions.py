"""Which versions of torch were compared, and who is told of another one."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import versions
from torch import nn

import offload
from offload.core import torch_versions
from offload.core.host_facts import Torch, read_machine
from offload.tools import judgement
from offload.tools.judgement import Severity
from offload.tools.selftest import worker
from offload.tools.selftest.check import Setting

ROOT = Path(__file__).parents[2]
UNKNOWN = "2.99.1+cpu"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that torch has another version, of which no user was told yet."""
    monkeypatch.setattr(torch, "__version__", UNKNOWN)
    monkeypatch.setattr(torch_versions, "_told", set())


def wrapped() -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    return offload.wrap(optimizer, host_memory="64MiB")


def prepared() -> nn.Module:
    return offload.prepare(nn.Sequential(nn.Linear(4, 4)), host_memory="64MiB")


@pytest.mark.parametrize(
    ("version", "is_known"),
    [
        ("2.13.0", True),
        ("2.13.0+cpu", True),
        ("2.14.1+cu130", True),
        ("2.15.0+rocm7.2", True),
        ("2.12.1", False),
        ("2.16.0", False),
        ("3.13.0", False),
        ("2.15.0a0+git1234567", False),
        ("2.15.0.dev20261001", False),
        ("2.150.0", False),
        ("unknown", False),
    ],
)
def test_releases_of_compared_versions_are_known(version: str, is_known: bool) -> None:
    assert torch_versions.is_known(version) is is_known


def test_make_compares_all_that_are_known() -> None:
    compared = {release.rpartition(".")[0] for release in versions.RELEASES}
    assert compared == set(torch_versions.KNOWN)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    least = f"torch>={torch_versions.KNOWN[0]}"
    assert least in project["dependencies"], "newer ones are tried, not refused"


@pytest.mark.parametrize(
    ("lines", "code", "cell"),
    [
        (["2983 passed in 150.12s (0:02:30)", "a library's last words"], 0, "2983 passed"),
        (["26 passed, 0 failed, 1 not run, in 88 s: all is right."], 0, "26 passed, 1 not run"),
        (
            ["1 failed, 7 passed, 1 error in 3.2s", "=== 3 passed, 9 deselected in 1s ==="],
            1,
            "FAILED (1), 1 failed, 1 error, 10 passed",
        ),
        (["Segmentation fault"], -11, "FAILED (-11)"),
    ],
)
def test_make_counts_what_was_run(lines: list[str], code: int, cell: str) -> None:
    assert versions.cell_of(lines, code) == cell


def test_make_takes_every_python_once(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {sys.executable: "3.11", "python3.12": "3.12", "other": "3.12"}
    monkeypatch.setattr(versions, "version_of", known.get)
    names = [row.name for row in versions.rows_for(None, ["other", "python3.12"])]
    assert names == [
        *(f"torch-{release}" for release in versions.RELEASES),
        f"torch-{versions.RELEASES[0]}-python3.12",
    ]
    assert [row.name for row in versions.rows_for(None, None)] == names
    assert [row.name for row in versions.rows_for("2.15.0", None)] == ["torch-2.15.0"]
    with pytest.raises(SystemExit, match="nowhere does not run"):
        versions.rows_for(None, ["nowhere"])


@pytest.mark.usefixtures("own_budget", "unknown")
@pytest.mark.parametrize("first", [wrapped, prepared])
def test_an_unknown_version_is_told_once_at_the_caller(first: type) -> None:
    with pytest.warns(offload.TorchVersionWarning) as told:
        made = [first(), wrapped(), prepared()]
    for each in made:
        offload.close(each)
    (warning,) = told
    assert warning.filename == __file__
    message = str(warning.message)
    assert message.startswith(f"torch {UNKNOWN} is not among") and "offload selftest" in message


@pytest.mark.usefixtures("own_budget", "unknown")
def test_a_warning_that_is_an_error_comes_before_anything_is_changed() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(4, 4).parameters())
    for _ in range(2):  # not only the first time: the caller has not let it pass
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(offload.TorchVersionWarning):
                offload.wrap(optimizer)
    assert type(optimizer) is torch.optim.AdamW
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", offload.TorchVersionWarning)
        offload.wrap(optimizer, host_memory="64MiB").close()


@pytest.mark.usefixtures("own_budget")
def test_of_a_known_version_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", f"{torch_versions.KNOWN[-1]}.7")
    monkeypatch.setattr(torch_versions, "_told", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for each in (wrapped(), prepared()):
            offload.close(each)


def test_importing_neither_warns_nor_needs_torch() -> None:
    program = "import sys, offload, offload.core.torch_versions; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("version", "word", "status"),
    [("2.13.0", "one", Severity.OK), (UNKNOWN, "none", Severity.DEGRADED)],
)
def test_doctor_and_selftest_say_which_it_is(
    version: str, word: str, status: Severity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = dataclasses.replace(read_machine(), torch=Torch(version, None))
    told = f"{version}, {word} of those whose bits were compared (2.13, 2.14, 2.15)"
    row = judgement.judge_torch(machine)
    assert (row.value, row.status) == (told, status)
    assert (row.advice is None) == (status is Severity.OK)
    monkeypatch.setattr(worker, "read_machine", lambda: machine)
    setting = Setting("cpu", tmp_path, is_quick=True, seed=1)
    assert worker.about_machine(setting)["torch"] == told
