"""The file of a run: what is written is read again, and any other file is refused."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from support.training import train_on_noise
from torch import nn

import offload
from offload.core.errors import FormatError, OffloadError, StoreError
from offload.core.timeline import COMPUTE, DISK_READS, DISK_WRITES, STEP, UPDATE, WAITING
from offload.telemetry import run_file
from offload.telemetry.run_file import Run
from offload.telemetry.words import STAGING
from offload.tools.html_report.timeline import tiers_of

LAYERS, WIDTH = 6, 128


def layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))
    )


@pytest.fixture(scope="module")
def prepared_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the file of a run of a prepared model that is mostly on disk."""
    directory = tmp_path_factory.mktemp("run")
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model, optimizer = offload.prepare(model, optimizer, host_memory="600KiB", nvme=directory)
    with optimizer:
        train_on_noise(model, optimizer, WIDTH)
        offload.report(model).save_trace(directory / "trace.json")
    return directory / "trace.json"


@pytest.fixture(scope="module")
def run(prepared_file: Path) -> Run:
    return run_file.load(prepared_file)


def test_a_run_is_read_as_it_was_written(prepared_file: Path, run: Run, tmp_path: Path) -> None:
    assert prepared_file.stat().st_mode & 0o777 == 0o600
    run.save(tmp_path / "again.json")
    assert run_file.load(tmp_path / "again.json") == run


def test_a_prepared_model_is_all_there(run: Run) -> None:
    about = run.about
    assert (about.kind, about.title, about.device) == ("prepare", "Sequential", "cpu")
    assert len(about.units) == LAYERS
    assert sum(param.numel for param in about.params) == LAYERS * (WIDTH * WIDTH + WIDTH)
    assert {param.unit for param in about.params} == set(range(LAYERS))
    once = [(0, n) for n in range(LAYERS)] + [(1, n) for n in reversed(range(LAYERS))]
    assert list(about.order) == once * 3
    assert [step.number for step in about.steps] == [1, 2, 3]
    assert {event.row for event in run.events} >= {
        STEP,
        COMPUTE,
        UPDATE,
        WAITING,
        DISK_READS,
        DISK_WRITES,
    }


def test_every_use_of_a_unit_is_drawn_in_its_order_and_without_overlap(run: Run) -> None:
    computed = sorted((e for e in run.events if e.row == COMPUTE), key=lambda e: e.begin_s)
    for one, other in itertools.pairwise(computed):
        assert one.end_s <= other.begin_s
    names = list(dict.fromkeys(event.name.split(":")[0] for event in computed))
    assert names[:LAYERS] == [f"forward {n}" for n in range(LAYERS)]
    assert names[LAYERS:] == [f"backward {n}" for n in reversed(range(LAYERS))]


def test_waits_are_no_compute(run: Run) -> None:
    computed = [e for e in run.events if e.row == COMPUTE]
    waited = [e for e in run.events if e.row == WAITING and "parameter read" in e.name]
    for wait in waited:
        assert not any(c.begin_s < wait.end_s and wait.begin_s < c.end_s for c in computed), wait


def test_memory_is_sampled_and_within_its_shares(run: Run) -> None:
    assert set(run.memory) == {"host: parameters", "host: optimizer state", "disk", "process"}
    assert run.samples
    at = run.memory.index("host: parameters")
    shares = run.about.shares  # spilled gradients pass through memory of the same pool
    most = max(nbytes[at] for _, nbytes in run.samples)
    assert most <= shares["parameters"] + shares[STAGING]
    host, *_ = (tier for tier in tiers_of(run) if tier.name == "host")
    assert host.budget_bytes and host.peak_bytes <= host.budget_bytes, "no byte counts twice"
    assert shares[STAGING] and shares["gradients on disk"]


def test_bytes_of_steps_are_those_of_the_report(run: Run) -> None:
    read = sum(step.counts["disk_read_bytes"] for step in run.about.steps)
    assert read == run.about.numbers["total/disk_read_bytes"]


def test_perfetto_finds_a_timeline(prepared_file: Path) -> None:
    data = json.loads(prepared_file.read_text())
    assert {event["cat"] for event in data["traceEvents"] if "cat" in event} >= {STEP, COMPUTE}


def test_a_wrapped_optimizer_has_no_units(tmp_path: Path) -> None:
    model = layers()
    optimizer = offload.wrap(
        torch.optim.AdamW(model.parameters(), fused=True), host_memory="512KiB", nvme=tmp_path
    )
    with optimizer:
        train_on_noise(model, optimizer, WIDTH)
        offload.report(optimizer).save_trace(tmp_path / "trace.json")
    about = run_file.load(tmp_path / "trace.json").about
    assert (about.kind, about.title, about.units, about.order) == ("wrap", "AdamW", (), ())
    assert {param.unit for param in about.params} == {None}


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda d: d.pop("offload"), "offload"),
        (lambda d: d["offload"].update(version=0), "version"),
        (lambda d: d["offload"]["about"].update(colour="red"), "colour"),
        (lambda d: d["offload"]["about"]["units"][0].update(needs=[77]), "unit 77"),
        (lambda d: d["offload"]["about"]["order"].append([3, 0]), "order"),
        (lambda d: d["offload"]["about"]["params"][1].update(unit=None), "params"),
        (lambda d: d["offload"]["events"].append(["step", "x", 2.0, 1.0, 0]), "events"),
        (lambda d: d["offload"]["events"].append(["nothing", "x", 1.0, 2.0, 0]), "events"),
        (lambda d: d["offload"]["samples"].append([1.0]), "samples"),
        (lambda d: d["offload"].update(samples=None), "samples"),
    ],
)
def test_other_files_are_refused_with_the_place(
    prepared_file: Path, tmp_path: Path, damage: Any, named: str
) -> None:
    data = json.loads(prepared_file.read_text())
    damage(data)
    (tmp_path / "t.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=named):
        run_file.load(tmp_path / "t.json")


def test_random_damage_gives_a_run_or_a_refusal(prepared_file: Path, seed: int) -> None:
    """A value of another kind is put anywhere in the part that is read."""
    whole = json.loads(prepared_file.read_text())["offload"]
    whole["events"], whole["samples"] = whole["events"][:20], whole["samples"][:5]
    chance = random.Random(seed)
    others = [None, -1, 1.5, "x", [], {}, True, 2**70, [[]]]
    for _ in range(500):
        data = copy.deepcopy(whole)
        place: Any = data
        while isinstance(place, dict | list) and place:
            key = chance.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], dict | list) or chance.random() < 0.2:
                place[key] = chance.choice(others)
                break
            place = place[key]
        try:
            run_file.from_dict({"offload": data})
        except OffloadError:
            continue


def test_a_missing_file_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"none\.json"):
        run_file.load(tmp_path / "none.json")


def test_a_run_that_could_not_be_read_again_is_not_written(run: Run, tmp_path: Path) -> None:
    about = dataclasses.replace(run.about, plan="x" * run_file.MOST_FILE_BYTES)
    with pytest.raises(FormatError, match="more than"):
        dataclasses.replace(run, about=about).save(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
