"""`offload plan`, and `offload.plan` for a model that is named: what it tells, what it refuses."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.core.errors import CapacityError, ConfigError
from offload.telemetry import run_file, words
from offload.tools import cli
from offload.tools.forecast.machines import NOMINAL
from offload.tools.forecast.replay import replay
from offload.tools.forecast.request import ForecastRequest
from offload.tools.forecast.synthetic_llama import StandIn
from offload.tools.forecast.workload import Workload

SMALL = ["5M", "--batch", "1", "--sequence", "32", "--host-memory", "20MiB"]
ON = ["--on", "workstation-cpu"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.main(["plan", *arguments])
    told = capsys.readouterr()
    return code, told.out, told.err


# --- a model that is named ------------------------------------------------------------------------


def test_the_table_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL, *ON)
    assert (code, err) == (0, "")
    assert "workstation-cpu (published figures, not measured by us, 64 GiB of memory)" in out
    assert out.splitlines()[0].startswith("verdict"), "what matters most is on top"
    assert out.splitlines()[-1].startswith("one more drive"), "and what more would bring, last"


def test_json_is_one_object_and_the_same_as_from_python(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = run(capsys, *SMALL, *ON, "--optimizer", "lion", "--json")
    given: dict[str, Any] = {"batch": 1, "sequence": 32, "host_memory": "20MiB", "on": ON[1]}
    found: Any = offload.plan("5M", "lion", **given)
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(found.to_dict()))
    assert found.optimizer == "lion" and str(found).startswith("verdict")


def test_every_option_has_its_effect(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = {
        "--layers": 2,
        "--hidden": 256,
        "--vocabulary": 4000,
        "--heads": 8,
        "--intermediate": 512,
        "--steps": 77,
        "--save-every": 7,
        "--optimizer": "sgd",
        "--dtype": "float32",
        "--activations": "recompute",
        "--nvme": tmp_path,
        "--endurance": 300,
    }
    words = [str(word) for pair in options.items() for word in pair]
    code, out, _ = run(capsys, "3M", *SMALL[1:], *ON, *words, "--json")
    data = json.loads(out)
    assert code == 0
    names = ("steps", "optimizer", "dtype", "activations", "drives")
    assert [data[name] for name in names] == [77, "sgd", "float32", "recompute", 1]
    assert data["saving"]["count"] == 11
    assert data["wear"]["endurance_tb"] == 300
    model = StandIn(2, 256, 4000, 8, 512, 32)
    assert data["numel"] == sum(param.numel() for param in model.parameters())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_told_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    code, out, _ = run(capsys, *SMALL, *ON)
    assert code == 0 and "simulating" not in out
    assert "counting what the model" in terminal.getvalue()
    assert terminal.getvalue().endswith(" \r"), "an empty line is left"


def test_help_ends_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "--help"])
    assert left.value.code == 0
    lines = capsys.readouterr().out.strip().splitlines()
    assert lines[-1].strip().startswith("offload plan --trace")


@pytest.mark.parametrize(
    "arguments, reason",
    [
        ([], "expected MODEL, or --trace FILE"),
        (["7Q"], "expected module:function"),
        (["no_such_module:make"], "ModuleNotFoundError"),
        (["5M", "--host-memory", "many"], "host_memory: expected bytes"),
        (["5M", "--batch", "0"], "batch: expected"),
        (["5M", "--batch", "9" * 20], "cannot be made"),
        (["5M", "--sequence", "9" * 20], "cannot be made"),
        (["9" * 11 + "T"], "cannot be made"),
        (["5M", "--nvme", "/nowhere"], "is not a directory"),
        (["5M", "--nvme", "/no\x1bwhere"], r"nvme: /no\x1bwhere is not a directory"),
        (["--trace", "no\x1b\n.json"], r"trace: no\x1b\n.json is not there"),
        (["5M", "--on", "nothing.json"], "expected a profile's file or one of"),
        (["5M", "--from", "rtx4090-1ssd"], "--from: is for --trace"),
        (["5M", "--trace", "run.json"], "exclude each other"),
        (["--trace", "nowhere.json"], "is not there"),
        (["--trace", "run.json", "--batch", "3"], "--batch: a recorded run has its own"),
    ],
)
def test_wrong_input_is_an_error_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert reason in err and len(err.strip().splitlines()) == 1


def test_what_does_not_fit_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "5M", "--host-memory", "1MiB", *ON)
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[0].split() == ["verdict", "does", "not", "fit"]
    assert lines[1].startswith("what would fit") and "s a step" in lines[1]
    assert "1 MiB (1048576 bytes) are allowed" in " ".join(out.split())


def test_what_does_not_fit_is_told_to_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "5M", "--host-memory", "1MiB", *ON, "--json")
    data = json.loads(out)
    assert (code, data["works"]) == (1, False)
    assert "are allowed" in data["reason"]
    assert all(change["step_s"] > 0 for change in data["changes"]) and data["changes"]


def test_the_table_stands_before_what_more_would_bring_is_known(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from offload.tools.forecast.case import ForecastCase

    def gains(*_: object) -> dict[str, float]:
        assert capsys.readouterr().out.startswith("verdict")
        return {"one more drive": 1.0}

    monkeypatch.setattr(ForecastCase, "gains", gains)
    code, out, _ = run(capsys, *SMALL, *ON)
    assert (code, out.splitlines()) == (0, ["one more drive  1 s less a step"])


@pytest.mark.parametrize("more", [["5M"], ["--batch", "2"], ["--trace", "run.json"], ON])
def test_the_table_of_sizes_takes_nothing_else(
    capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    code, out, err = run(capsys, "--table", *more)
    assert (code, out) == (2, "") and "--table: has models, machines and options of its own" in err


def test_a_damaged_profile_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    code, _, err = run(capsys, *SMALL, "--on", str(tmp_path / "p.json"))
    assert code == 2 and "p.json" in err


def test_what_does_not_fit_the_machine_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    dataclasses.replace(NOMINAL, memory_bytes=24 << 20).save(tmp_path / "tiny.json")
    large = [*SMALL, "--on", str(tmp_path / "tiny.json"), "--sequence", "512"]
    code, out, _ = run(capsys, *large)
    assert code == 1 and "PROBLEM" in out


def test_as_a_program_it_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(
        "from torch import nn\n"
        "def make():\n"
        "    return nn.Sequential(nn.Embedding(90, 16), nn.Linear(16, 90))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "offload", "plan", "models:make", *SMALL[1:], *ON, "--json"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == "models:make"
    assert [path.name for path in tmp_path.iterdir()] == ["models.py"]


# --- from Python ----------------------------------------------------------------------------------


def test_a_path_names_a_model_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        offload.plan(tmp_path / "config.json")


def test_arguments_for_optimizers_are_refused_for_a_name() -> None:
    with pytest.raises(ConfigError, match="elementwise and measure are for wrapped"):
        offload.plan("5M", measure=True)
    with pytest.raises(ConfigError, match="the name of an optimizer"):
        offload.plan("5M", offload.Config())
    with pytest.raises(ConfigError, match="no such field"):
        offload.plan("5M", prefetch_depth=3)
    with pytest.raises(CapacityError):
        offload.plan("5M", host_memory="1MiB", batch=1, sequence=16)


def test_a_model_and_the_name_of_an_optimizer_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected an optimizer or a Config, got str"):
        offload.plan(nn.Linear(2, 2), "adamw")


# --- a recorded run -------------------------------------------------------------------------------

HOST_BYTES = 3 << 20


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record the run of a model that was trained with most of it on disk; return the file."""
    directory = tmp_path_factory.mktemp("run")
    model: Any = StandIn(4, 128, 500, 4, 256, 64)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = offload.prepare(
        model, optimizer, device="cpu", host_memory=HOST_BYTES, nvme=directory
    )
    with optimizer:
        for _ in range(6):
            model.loss(torch.zeros(2, 33, dtype=torch.int64)).backward()
            optimizer.step()
            optimizer.zero_grad()
        offload.report(optimizer).save_trace(directory / "run.json")
    return directory / "run.json"


def test_a_run_is_replayed_on_another_machine(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    budget = ["--host-memory", str(HOST_BYTES)]
    code, out, err = run(capsys, "--trace", str(trace), *ON, *budget)
    assert (code, err) == (0, "")
    assert "computing is left as recorded" in out and "<- recommended" in out
    shown = out
    code, out, _ = run(capsys, "--trace", str(trace), *ON, *budget, "--json")
    data = json.loads(out)
    assert (code, data["format"]) == (0, "offload replay")
    assert data["recommended"] in data["trials"]
    assert data["machine"] == "workstation-cpu" and data["factor"] == 1.0
    typical_s = run_file.load(trace).iterations.typical_s
    assert data["recorded_step_s"] == typical_s
    assert f", {words.show_seconds(typical_s)} an iteration (median)" in " ".join(shown.split())


def test_computing_is_scaled_by_the_speed_of_both_machines(trace: Path, tmp_path: Path) -> None:
    for name, flops in (("slow", 1e11), ("fast", 4e11)):
        known = dataclasses.replace(NOMINAL, name=name, flops={"float32": flops})
        known.save(tmp_path / f"{name}.json")
    slow, fast = str(tmp_path / "slow.json"), str(tmp_path / "fast.json")
    found = replay(trace, fast, slow)
    assert found.factor == 0.25 and found.notes == ()
    recorded = Workload.of_run(run_file.load(trace))
    assert found.outcome.compute_s == pytest.approx(recorded.compute_s / 4, rel=0.01)
    back = replay(trace, slow, fast)
    assert back.outcome.compute_s == pytest.approx(recorded.compute_s * 4, rel=0.01)


def test_depths_budgets_and_drives_are_tried_and_the_least_good_one_is_recommended(
    trace: Path,
) -> None:
    found = replay(trace, "rtx4090-2ssd")
    depths = {trial.depth for trial in found.trials}
    budgets = {trial.host_bytes for trial in found.trials}
    assert len(depths) >= 5 and len(budgets) >= 4
    assert {trial.drives for trial in found.trials} == {1, 2}
    times = [trial.step_s for trial in found.trials if trial.step_s is not None]
    best = found.recommended
    assert best.step_s is not None and best.step_s <= 1.02 * min(times)
    assert found.outcome.step_s == best.step_s
    assert best.host_bytes == min(b for b in budgets if b is not None), "all of it fits anyway"
    assert any("activations" in note for note in found.notes), "on a device"


def test_budgets_that_are_too_small_are_told_among_the_trials(trace: Path) -> None:
    found = replay(trace, "workstation-cpu", None, ForecastRequest("", host_bytes=HOST_BYTES))
    assert any(trial.step_s is None for trial in found.trials)
    assert "too little" in str(found)
    with pytest.raises(CapacityError):
        replay(trace, "workstation-cpu", None, ForecastRequest("", host_bytes=64 << 10))


def test_without_a_profile_a_replay_is_refused(trace: Path) -> None:
    with pytest.raises(ConfigError, match="speeds are unknown"):
        replay(trace)


def test_what_is_no_recorded_run_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.json").write_text("[]")
    code, _, err = run(capsys, "--trace", str(tmp_path / "run.json"), *ON)
    assert code == 2 and "save_trace" in err
