"""What a forecast says, against what the engine then plans and does."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.core.errors import CapacityError, ConfigError, FormatError
from offload.planning import tuning
from offload.planning.layout import lay_out
from offload.planning.planner import LEAST_BUFFERS, LEAST_CHUNK_NUMEL
from offload.planning.profile import DriveProfile, Profile, Tuned, Tuning
from offload.tools.forecast.footprint import measure
from offload.tools.forecast.forecast import HIDDEN_SHARE, Forecast
from offload.tools.forecast.forecaster import forecast
from offload.tools.forecast.machines import NOMINAL, find_machine, shipped, with_drives
from offload.tools.forecast.request import FIELDS, ForecastRequest
from offload.tools.forecast.simulator import facts_of
from offload.tools.forecast.sources import FunctionSource, find_source
from offload.tools.forecast.synthetic_llama import StandIn

BATCH, SEQUENCE = 2, 32
MODEL = "test_forecast:make"
DEPTH = 2


def make() -> nn.Module:
    return StandIn(6, 128, 1000, 4, 256, 64)


def machine(**changes: Any) -> Profile:
    return dataclasses.replace(
        NOMINAL,
        name="here",
        disks=(DriveProfile("a", 3e9, 3e9, 3e9),),
        memory_bytes=16 << 30,
        **changes,
    )


@pytest.fixture
def on(tmp_path: Path) -> str:
    """Save the profile of a machine with one drive and 16 GiB of memory; return its path."""
    machine().save(tmp_path / "machine.json")
    return str(tmp_path / "machine.json")


def request(on: str | None, **given: Any) -> Forecast:
    given = {"batch": BATCH, "sequence": SEQUENCE, **given}
    return forecast(ForecastRequest.of(MODEL, on=on, **given))


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["40MiB", "14MiB", "6MiB", "3MiB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_where_the_engine_plans_them(
    on: str, tmp_path: Path, host: str, dtype: str
) -> None:
    model = make().to(getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    planned: Any = offload.plan(model, optimizer, host_memory=host, nvme=tmp_path)
    found = request(on, host_memory=host, dtype=dtype)
    assert found.tiers["optimizer state"] == planned.tiers["optimizer state"]
    assert found.tiers["parameters"] == planned.tiers["parameters"]
    assert found.tiers["gradients"]["disk"] == planned.tiers["gradients"]["disk"]
    assert found.taken_bytes == planned.shares.total


def moved_for_real(directory: Path, host: str, activations: str) -> tuple[float, float]:
    """Train, and return the bytes read and written in a step, as the mean of the last two: which
    chunks wait in buffers differs.
    """
    source = FunctionSource(MODEL, make)
    model: Any = make()
    optimizer: Any = torch.optim.AdamW(model.parameters())
    model, optimizer = offload.prepare(
        model,
        optimizer,
        device="cpu",
        host_memory=host,
        nvme=directory,
        prefetch_depth=DEPTH,
        activations=activations,
    )
    with optimizer:
        for _ in range(6):
            source.loss(model, source.make_batch(BATCH, SEQUENCE, device="cpu")).backward()
            optimizer.step()
            optimizer.zero_grad()
        steps = offload.report(optimizer).steps_done[-2:]
    read, written = (
        sum(step.counts.get(name, 0) for step in steps) / len(steps)
        for name in ("disk_read_bytes", "disk_written_bytes")
    )
    return read, written


def tuned_machine(path: Path, host: str, tuning_: Tuning) -> str:
    """Save the profile of a machine on which that model was tuned; return its path."""
    model = make()
    tuned = Tuned(
        model=tuning.fingerprint_of(model.parameters()),
        name="StandIn",
        device="cpu",
        host_bytes=offload.Config(host_memory=host).host_memory,  # type: ignore[arg-type]
        device_bytes=None,
        directories=1,
        tuning=tuning_,
        step_s=1.0,
        spread_s=0.1,
        stall_share=0.5,
        limit_s=0.5,
        date="2026-11-17",
    )
    machine(tuned=(tuned,)).save(path)
    return str(path)


@pytest.mark.parametrize(
    "host, activations",
    [("14MiB", "keep"), ("8MiB", "keep"), ("4MiB", "keep"), ("4MiB", "recompute")],
)
def test_a_run_moves_the_bytes_that_were_foretold(
    tmp_path: Path, host: str, activations: str
) -> None:
    on = tuned_machine(tmp_path / "machine.json", host, Tuning(prefetch_depth=DEPTH))
    found = request(on, host_memory=host, activations=activations)
    read, written = moved_for_real(tmp_path, host, activations)
    assert min(read, written) > 1e6
    assert found.read_bytes == pytest.approx(read, rel=0.03)
    assert found.written_bytes == pytest.approx(written, rel=0.03)
    assert found.timing is not None and found.timing.depth == DEPTH
    assert found.tuned is not None and f"prefetch_depth {DEPTH}" in found.tuned


def test_tuned_units_are_those_that_are_planned_with(tmp_path: Path) -> None:
    plain = request(tuned_machine(tmp_path / "a.json", "8MiB", Tuning()), host_memory="8MiB")
    large = tuned_machine(tmp_path / "b.json", "8MiB", Tuning(unit_bytes=2 << 20))
    assert request(large, host_memory="8MiB").units < plain.units


def test_a_checkpoint_has_the_size_that_was_foretold(on: str, tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    FunctionSource(MODEL, make).loss(model, torch.zeros(1, 9, dtype=torch.int64)).backward()
    optimizer.step()
    offload.save(tmp_path / "saved", model, optimizer)
    files = [path for path in (tmp_path / "saved").rglob("*") if path.is_file()]
    found = request(on, host_memory="40MiB", steps=100, save_every=30)
    real = sum(path.stat().st_size for path in files)
    assert found.saving.each_bytes == pytest.approx(real, rel=0.03)
    assert found.saving.count == 3
    assert found.saving.each_s == pytest.approx(found.saving.each_bytes / 3e9)


def test_wear_counts_steps_and_checkpoints_over_all_drives(on: str) -> None:
    found = request(on, host_memory="8MiB", steps=1000, save_every=100, endurance=2.0, nvme_count=4)
    steps = 1000 * found.written_bytes
    assert found.wear.written_tb == pytest.approx((steps + 10 * found.saving.each_bytes) / 1e12)
    assert found.wear.share == pytest.approx(found.wear.written_tb / 8)
    assert found.timing is not None and not found.wear.is_assumed
    rate = found.wear.written_tb / found.timing.training_s
    assert found.wear.life_s == pytest.approx(8 / rate)


# --- budgets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_disk", [True, False])
def test_the_smallest_host_memory_is_the_smallest_that_works(
    on: str, tmp_path: Path, has_disk: bool
) -> None:
    least = request(on, host_memory="40MiB").least
    nbytes = least["host memory with a drive" if has_disk else "host memory without one"]
    model = make()
    optimizer = torch.optim.AdamW(model.parameters())
    nvme = tmp_path if has_disk else None
    offload.plan(model, optimizer, host_memory=nbytes, nvme=nvme)
    with pytest.raises(CapacityError):
        offload.plan(model, optimizer, host_memory=int(0.99 * nbytes), nvme=nvme)


@pytest.mark.parametrize("text", ["1M", "20M"])
def test_few_elements_tell_how_small_chunks_get(text: str) -> None:
    work = measure(find_source(text), 1, 8).workload("adamw", NOMINAL)
    facts = facts_of(work, offloads_activations=False)
    chunks = lay_out(facts.params, LEAST_CHUNK_NUMEL)
    assert facts.least_state_bytes == LEAST_BUFFERS * max(chunk.nbytes for chunk in chunks)


def test_the_smallest_budgets_on_a_device_work(on: str) -> None:
    least = request(on, host_memory="40MiB", device_memory="40MiB").least
    host, device = least["host memory with a drive"], least["device memory"]
    assert request(on, host_memory=host, device_memory=device).works
    with pytest.raises(CapacityError, match=r"one unit at a time .* activations"):
        request(on, host_memory=host, device_memory=int(0.99 * device))


def test_a_refusal_carries_the_arithmetic_and_what_would_work(on: str) -> None:
    with pytest.raises(
        CapacityError, match=r"1 MiB \(1048576 bytes\) are allowed.*smallest budgets that work"
    ):
        request(on, host_memory="1MiB")
    with pytest.raises(CapacityError, match=r"give nvme=.*smallest budgets that work"):
        request(on, host_memory="8MiB", nvme_count=0)


def test_a_refusal_says_where_a_budget_comes_from_that_nobody_gave(tmp_path: Path) -> None:
    dataclasses.replace(machine(), memory_bytes=1 << 20).save(tmp_path / "small.json")
    with pytest.raises(CapacityError, match="host_memory was not given"):
        request(str(tmp_path / "small.json"))


def test_fewer_activations_need_less_of_a_device(on: str) -> None:
    def least(activations: str) -> int:
        found = request(on, host_memory="40MiB", device_memory="60MiB", activations=activations)
        return found.least["device memory"]

    assert least("recompute") < least("keep")
    assert least("offload") < least("keep")


def test_it_says_when_plain_torch_would_do(on: str) -> None:
    assert request(on).fits_without_us
    assert "fits without offload" in str(request(on))
    assert not request(on, host_memory="20MiB").fits_without_us
    assert not request(on, device_memory="20MiB").fits_without_us
    large = request(on, device_memory="200MiB")
    assert large.fits_without_us and large.plain_bytes <= 200 << 20


def test_activations_beyond_the_machine_are_a_problem(tmp_path: Path) -> None:
    dataclasses.replace(machine(), memory_bytes=32 << 20).save(tmp_path / "small.json")
    small = str(tmp_path / "small.json")
    assert request(small, host_memory="8MiB").works
    found = request(small, host_memory="8MiB", batch=32, sequence=64)
    assert not found.works
    assert found.passing_bytes > 24 << 20
    assert "PROBLEM" in str(found) and "does not fit as it is" in str(found)


def test_recomputing_in_vain_is_told(on: str) -> None:
    given: dict[str, Any] = {"on": on, "host_memory": "40MiB", "activations": "recompute"}
    in_vain = forecast(ForecastRequest.of("test_forecast:flat", batch=2, sequence=8, **given))
    assert any("finds no layer" in note for note in in_vain.notes)
    assert request(on, host_memory="40MiB", activations="recompute").notes == ()


def flat() -> nn.Module:
    return nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50))


# --- time -----------------------------------------------------------------------------------------


def test_a_step_is_the_sum_of_its_parts_and_no_shorter_than_its_limit(on: str) -> None:
    found = request(on, host_memory="8MiB", steps=50)
    timing = found.timing
    assert timing is not None
    parts = timing.compute_s + timing.update_s + timing.other_s + sum(timing.stalls.values())
    assert parts == pytest.approx(timing.step_s, rel=1e-6)
    assert timing.step_s >= 0.999 * timing.limit_s
    assert timing.tokens_per_s == pytest.approx(BATCH * SEQUENCE / timing.step_s)
    assert timing.training_s == pytest.approx(50 * timing.step_s)


def test_gains_are_those_of_a_forecast_with_more(on: str) -> None:
    found = request(on, host_memory="8MiB")
    assert found.timing is not None
    twice, more = (
        request(on, host_memory="8MiB", nvme_count=2),
        request(on, host_memory=(8 << 20) + 10**9),
    )
    for name, other in (("one more drive", twice), ("1 GB more host memory", more)):
        assert other.timing is not None
        gain = found.timing.step_s - other.timing.step_s
        assert gain > 0
        assert found.timing.gains[name] == pytest.approx(gain, rel=1e-6)


def test_nothing_is_gained_where_no_drive_is_used(on: str) -> None:
    timing = request(on, host_memory="100MiB").timing
    assert timing is not None
    assert timing.gains == {"1 GB more host memory": 0.0}
    assert timing.hidden_tokens is None


def test_with_that_many_tokens_the_drives_are_hidden(on: str) -> None:
    found = request(on, host_memory="8MiB")
    assert found.timing is not None and found.timing.hidden_tokens is not None
    before = sum(found.timing.stalls.values()) / found.timing.step_s
    assert before > HIDDEN_SHARE
    assert found.timing.hidden_tokens > found.tokens
    batch = -(-found.timing.hidden_tokens // SEQUENCE)
    then = request(on, host_memory="8MiB", batch=batch).timing
    assert then is not None
    assert sum(then.stalls.values()) / then.step_s <= 1.1 * HIDDEN_SHARE


def test_faster_machines_take_less(tmp_path: Path) -> None:
    times = {}
    for name, changes in {
        "as it is": {},
        "drives": {"disk_mixed_bytes_per_s": 9e9, "disk_read_bytes_per_s": 9e9},
        "products": {"flops": {"float32": 5e12}},
    }.items():
        path = tmp_path / f"{name}.json"
        dataclasses.replace(machine(), **changes).save(path)  # type: ignore[arg-type]
        timing = request(str(path), host_memory="8MiB").timing
        assert timing is not None
        times[name] = timing.step_s
    assert times["drives"] < times["as it is"] and times["products"] < times["as it is"]


def test_without_speeds_bytes_are_told_and_times_are_not(on: str) -> None:
    unknown, known = request(None, host_memory="8MiB"), request(on, host_memory="8MiB")
    assert unknown.timing is None and unknown.saving.each_s is None
    assert unknown.tiers == known.tiers
    assert (unknown.read_bytes, unknown.written_bytes) == (known.read_bytes, known.written_bytes)
    assert "speeds are unknown: run `offload bench` once" in str(unknown)


# --- the rest of the answer -----------------------------------------------------------------------


def test_a_forecast_cannot_be_changed_and_is_plain_json(on: str) -> None:
    found = request(on, host_memory="8MiB")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.steps = 3  # type: ignore[misc]
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (data["format"], data["version"]) == ("offload forecast", 2)
    assert data["timing"]["step_s"] == found.timing.step_s if found.timing else False
    assert data["tiers"] == found.tiers


def test_the_table_has_what_people_ask_for(on: str) -> None:
    text = str(request(on, host_memory="8MiB", device_memory="60MiB", save_every=10, endurance=600))
    for row in (
        "parameters",
        "gradients",
        "optimizer state",
        "activations",
        "logits",
        "moved each step",
        "life of the drives",
        "the call",
        "parts of a step",
        "a checkpoint",
        "a step takes",
        "limited by",
        "drives are hidden",
        "1 GB more host memory",
        "1 GB more device memory",
        "one more drive",
        "smallest host memory with a drive",
        "smallest device memory",
        "verdict",
    ):
        assert row in text, row


@pytest.mark.parametrize(
    "given, reason",
    [
        ({"batch": 0}, "batch: expected a whole number, 1 or more"),
        ({"sequence": 1.5}, "sequence: expected a whole number"),
        ({"host_memory": "lots"}, "host_memory: expected bytes"),
        ({"optimizer": "adamx"}, "optimizer: expected .*adamw"),
        ({"dtype": "int8"}, "dtype: expected"),
        ({"activations": "forget"}, "activations: expected"),
        ({"endurance": -1}, "endurance: expected terabytes"),
        ({"use": "wrap", "activations": "offload"}, "activations: wrap cannot offload them"),
        ({"use": "trainer"}, "use: expected"),
        ({"lora": 0}, "lora: expected a whole number, 1 or more"),
        ({"full": 1}, "full: expected True or False"),
        ({"nvme": "/nowhere/at/all"}, "nvme: .* is not a directory"),
        ({"nvme": "/", "nvme_count": 1}, "nvme_count: give it or nvme"),
        ({"nvme_count": -1}, "nvme_count: expected a whole number, 0 or more"),
        ({"bach": 1}, "bach: no such field .* did you mean batch"),
        ({"layers": 3}, "are for a size"),
        ({"on": "rtx409-1ssd"}, "did you mean rtx4090-1ssd"),
    ],
)
def test_a_wrong_question_is_refused(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        forecast(ForecastRequest.of(MODEL, **given))


def test_directories_are_counted(on: str, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    found = request(on, host_memory="8MiB", nvme=[tmp_path / "a", tmp_path / "b"])
    assert found.drives == 2
    assert not list((tmp_path / "a").iterdir()), "only planned"


# --- machines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_profile_says_where_it_comes_from_and_tells_enough(name: str) -> None:
    found = find_machine(name)
    profile = found.profile
    assert profile is not None and profile.name == name
    assert not profile.is_measured and len(profile.sources) >= 3
    assert found.note.startswith("published figures, not measured by us, ")
    speeds = (profile.update_bytes_per_s, profile.memory_bytes_per_s, profile.memory_bytes)
    assert all(speeds) and profile.flops and profile.disks
    count = len(profile.disks)
    assert profile.disk_read_bytes_per_s == pytest.approx(count * profile.disks[0].read_bytes_per_s)
    if profile.device is not None:
        assert profile.to_device_bytes_per_s and profile.to_host_bytes_per_s
    timing = forecast(
        ForecastRequest.of("5M", on=name, batch=1, sequence=32, host_memory="30MiB")
    ).timing
    assert timing is not None and 0 < timing.step_s < 1


def test_six_machines_are_shipped() -> None:
    assert {"rtx4090-1ssd", "rtx4090-2ssd", "rtx3090-1ssd"} <= set(shipped())
    assert {"a100-80g-2ssd", "h100-1node", "workstation-cpu"} <= set(shipped())


def test_the_machines_own_profile_is_taken_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "offload").mkdir()
    own = tmp_path / "offload" / "profile.json"
    assert find_machine(None).profile is None
    machine(is_measured=True).save(own)
    assert "is of another machine" in find_machine(None).note
    from offload.planning.profile import this_machine

    cpu, cores = this_machine()
    mine = machine(is_measured=True, cpu=cpu, cores=cores)
    mine.save(own)
    assert find_machine(None).profile == mine
    own.write_text("{}")
    assert find_machine(None).profile is None, "damaged: not used, and said"
    assert "profile.json" in find_machine(None).note


def test_a_damaged_profile_that_was_named_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": "offload profile", "version": 1}')
    with pytest.raises(FormatError, match=r"x\.json"):
        find_machine(tmp_path / "x.json")


def test_more_drives_are_so_much_faster() -> None:
    three = with_drives(machine(), 3)
    assert (len(three.disks), three.disk_mixed_bytes_per_s) == (3, 9e9)
    assert with_drives(machine(), 1) == machine()
    assert with_drives(machine(), 0) == machine()


def test_every_field_of_a_question_is_known_to_the_documentation() -> None:
    text = str(offload.plan.__doc__)
    assert all(f"`{name}`" in text for name in FIELDS if name != "optimizer")


@pytest.mark.parametrize(
    ("lacking", "named"),
    [
        ({"flops": None}, "compute"),
        ({"update_bytes_per_s": None}, "update"),
        ({"disk_mixed_bytes_per_s": None}, "disk"),
    ],
)
def test_without_a_speed_bytes_are_told_and_no_time(
    tmp_path: Path, on: str, lacking: dict[str, None], named: str
) -> None:
    dataclasses.replace(machine(), **lacking).save(tmp_path / "some.json")
    found = request(str(tmp_path / "some.json"), host_memory="40MiB")
    assert found.timing is None
    assert f"no speed of {named}" in found.machine_note and "offload bench" in str(found)
    whole = request(on, host_memory="40MiB")
    assert whole.timing is not None
    assert (found.read_bytes, found.written_bytes) == (whole.read_bytes, whole.written_bytes)
