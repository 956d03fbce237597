"""The profile: one schema for writing and reading it, and what the engine does with it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import kernels
from offload.core.config import Config
from offload.core.errors import ConfigError, FormatError, StateError
from offload.planning import profile, tuning
from offload.planning.profile import DriveProfile, Profile, Tuned, Tuning, TuningTarget

WIDTH = 64
HOST_BYTES = 390 << 10


def layers(count: int = 6) -> nn.Sequential:
    """Make repeated layers of two products each."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(count))
    )


def whole_profile(**changes: Any) -> Profile:
    """Make a profile with a value in every field."""
    cpu, cores = profile.this_machine()
    tuned = Tuned(
        model=tuning.fingerprint_of(layers().parameters()),
        name="layers",
        device="cpu",
        host_bytes=HOST_BYTES,
        device_bytes=None,
        directories=1,
        tuning=Tuning(3, 72 << 10, 4096, 5, 1, "recompute", 12.5),
        step_s=0.5,
        spread_s=0.1,
        stall_share=0.25,
        limit_s=0.4,
        date="2026-11-17",
    )
    values: dict[str, Any] = {
        field.name: 1.5e9 for field in dataclasses.fields(Profile) if field.name.endswith("_per_s")
    }
    whole = Profile(
        name="here",
        is_measured=True,
        sources=("offload bench",),
        date="2026-11-17",
        cpu=cpu,
        cores=cores,
        memory_bytes=24 << 30,
        disks=(DriveProfile("a", 1e9, 2e9, 3e9, 1e9),),
        device="cuda",
        device_memory_bytes=24 << 30,
        flops={"bfloat16": 4e11},
        compute_beside_disk=0.7,
        update_beside_disk=0.8,
        tuned=(tuned,),
        **values,
    )
    return dataclasses.replace(whole, **changes)


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path where the machine's own profile is looked for, in a new directory."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = profile.own_path()
    path.parent.mkdir(parents=True)
    return path


# --- the file -------------------------------------------------------------------------------------


def test_what_is_written_is_read_in_every_field(tmp_path: Path) -> None:
    wanted = whole_profile()
    assert all(getattr(wanted, field.name) is not None for field in dataclasses.fields(wanted))
    wanted.save(tmp_path / "p.json")
    assert profile.load(tmp_path / "p.json") == wanted
    assert (tmp_path / "p.json").stat().st_mode & 0o777 == 0o600


def damaged() -> list[tuple[Any, str]]:
    """List changes to the file's content, each with what the refusal must name."""
    return [
        (lambda d: d.pop("format"), "format"),
        (lambda d: d.update(version=2), "version"),
        (lambda d: d.update(prefetch_dept=3), "prefetch_dept"),
        (lambda d: d.pop("cpu"), "cpu"),
        (lambda d: d.update(cores="2"), "cores"),
        (lambda d: d.update(cores=True), "cores"),
        (lambda d: d.update(cores=-1), "cores"),
        (
            lambda d: d["tuned"][0]["tuning"].update(prefetch_depht=3),
            "did you mean 'prefetch_depth'",
        ),
        (lambda d: d["tuned"][0]["tuning"].update(queue_depth=0), r"tuned\[0\].tuning.queue_depth"),
        (lambda d: d["tuned"][0]["tuning"].update(activations="keeps"), "activations"),
        (lambda d: d["disks"].append(3), r"disks\[1\]"),
        (lambda d: d.update(flops={"bfloat16": "fast"}), "flops.bfloat16"),
        (lambda d: d.update(memory_bytes_per_s=-1.0), "memory_bytes_per_s"),
        (lambda d: d.update(update_bytes_per_s=1e-300), "update_bytes_per_s"),
        (lambda d: d["disks"][0].update(read_bytes_per_s=0.0), "read_bytes_per_s"),
        (lambda d: d["flops"].update(float32=0.0), "flops: float32"),
        (lambda d: d.update(name="\ud800"), "name"),
    ]


@pytest.mark.parametrize(("damage", "named"), damaged())
def test_a_file_that_is_not_exactly_that_is_refused_with_the_place(
    tmp_path: Path, damage: Any, named: str
) -> None:
    data = json.loads(json.dumps(whole_profile().to_dict()))
    damage(data)
    path = tmp_path / "p.json"
    path.write_text(json.dumps(data))
    with pytest.raises(FormatError, match=named):
        profile.load(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": NaN}', "[" * 10_000])
def test_what_is_no_json_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"p\.json"):
        profile.load(path)


def test_a_new_finding_takes_the_place_of_the_old_for_the_same_model_and_budget() -> None:
    whole = whole_profile()
    old = whole.tuned[0]
    newer = dataclasses.replace(old, step_s=0.3)
    other = dataclasses.replace(old, host_bytes=1 << 30)
    assert whole.with_tuned(newer).tuned == (newer,)
    assert whole.with_tuned(other).tuned == (old, other)


def test_budgets_are_the_same_within_a_tenth() -> None:
    whole = whole_profile()
    old = whole.tuned[0]

    def found(**changes: Any) -> Tuned | None:
        wanted = TuningTarget(old.model, "cpu", HOST_BYTES, None, 1)
        return whole.tuned_for(dataclasses.replace(wanted, **changes))

    assert found() is old
    assert found(host_bytes=370 << 10) is old
    assert found(host_bytes=450 << 10) is None
    assert found(host_bytes=None) is None
    assert found(model="another") is None
    assert found(device="cuda") is None
    assert found(directories=2) is None


def test_the_fingerprint_knows_shapes_types_and_training_not_names_or_order() -> None:
    one, same = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)), nn.ModuleDict()
    same["b"], same["a"] = nn.Linear(4, 5), nn.Linear(3, 4)
    print_of = lambda model: tuning.fingerprint_of(model.parameters())  # noqa: E731
    assert print_of(one) == print_of(same)
    assert print_of(one) != print_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 6)))
    assert print_of(one) != print_of(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)).bfloat16())
    one[0].weight.requires_grad_(False)
    assert print_of(one) != print_of(same)


# --- what the engine does with it -----------------------------------------------------------------


def prepared(path: Path, **fields: Any) -> Any:
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    return offload.prepare(model, optimizer, host_memory=HOST_BYTES, nvme=path, **fields)


def test_prepare_runs_with_every_number_of_the_profile(
    tmp_path: Path, own_budget: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "p.json"
    whole_profile().save(path)
    opened: list[dict[str, Any]] = []
    from offload.params import prepared as module

    class Store(module.DiskStore):  # type: ignore[name-defined,misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            opened.append(options)
            super().__init__(*args, **options)

    monkeypatch.setattr(module, "DiskStore", Store)
    model, optimizer = prepared(tmp_path, profile=path, activations="auto")
    with optimizer:
        made = module.prepared_of(model)
        assert made.engine.residency.prefetch.depth == 3
        assert made.config.activations == "recompute" and made.recompute is not None
        assert max(len(unit.modules) for unit in made.units) == 2  # 32.5 KiB each
        assert max(chunk.numel for chunk in made.session.plan.chunks) == 4096
        assert (opened[0]["depth"], opened[0]["timeout_s"]) == (5, 12.5)
        assert kernels.num_threads() == 1
        assert "prefetch_depth 3" in str(offload.report(model))
        assert "prefetch_depth 3" in str(made.prepare_plan.plan)


def test_what_the_user_says_wins_over_the_profile(tmp_path: Path, own_budget: Any) -> None:
    path = tmp_path / "p.json"
    whole_profile().save(path)
    model, optimizer = prepared(tmp_path, profile=path, prefetch_depth=1, activations="keep")
    with optimizer:
        made = model._offload_prepared
        assert made.engine.residency.prefetch.depth == 1
        assert made.recompute is None
        told = offload.report(model).tuned
        assert "chunk_numel 4096" in told and "prefetch_depth" not in told, told


def test_tuned_units_have_the_bits_of_plain_training(tmp_path: Path, own_budget: Any) -> None:
    path = tmp_path / "p.json"
    whole_profile().save(path)
    torch.manual_seed(1)
    model, optimizer = prepared(tmp_path, profile=path, activations="auto")
    torch.manual_seed(1)
    plain = layers()
    plain_optimizer = torch.optim.AdamW(plain.parameters(), fused=True)
    for step in range(3):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        for one, other in ((model, optimizer), (plain, plain_optimizer)):
            one(x).square().mean().backward()
            other.step()
            other.zero_grad()
    offload.close(model)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_wrap_takes_chunks_and_threads_of_the_profile(tmp_path: Path, own_budget: Any) -> None:
    path = tmp_path / "p.json"
    whole_profile().save(path)
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    offload.wrap(optimizer, host_memory=HOST_BYTES, nvme=tmp_path, profile=path)
    with optimizer:
        session = optimizer._offload_session
        assert max(chunk.numel for chunk in session.plan.chunks) == 4096
        assert kernels.num_threads() == 1
        assert "chunk_numel 4096" in str(offload.report(optimizer))


def test_the_machines_own_is_taken_without_being_named(tmp_path: Path, own_file: Path) -> None:
    config = Config(host_memory=HOST_BYTES, nvme=tmp_path)
    assert tuning.choose(config, layers().parameters(), "cpu", False) == tuning.NOTHING
    whole_profile().save(own_file)
    chosen = tuning.choose(config, layers().parameters(), "cpu", False)
    assert chosen.tuning.prefetch_depth == 3 and chosen.source == own_file
    assert chosen.apply_to(config).prefetch_depth == 3


def test_the_machines_own_of_another_machine_is_not_taken(tmp_path: Path, own_file: Path) -> None:
    whole_profile(cpu="another").save(own_file)
    config = Config(host_memory=HOST_BYTES, nvme=tmp_path)
    assert tuning.choose(config, layers().parameters(), "cpu", False) == tuning.NOTHING


def test_a_damaged_own_profile_is_a_fall_back_with_a_line(
    tmp_path: Path, own_file: Path, own_budget: Any
) -> None:
    own_file.write_text("{}")
    model, optimizer = prepared(tmp_path)
    with optimizer:
        assert "profile.json" in offload.report(model).fallbacks["profile"]
    with pytest.raises(StateError, match=r"profile\.json"):
        prepared(tmp_path, strict=True)


def test_a_named_profile_must_be_there_and_whole(tmp_path: Path, own_budget: Any) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        prepared(tmp_path, profile=tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(FormatError, match=r"bad\.json"):
        prepared(tmp_path, profile=tmp_path / "bad.json")


def test_a_named_profile_without_this_model_is_a_fall_back(tmp_path: Path, own_budget: Any) -> None:
    path = tmp_path / "p.json"
    whole_profile(tuned=()).save(path)
    model, optimizer = prepared(tmp_path, profile=path)
    with optimizer:
        assert "no tuning for this model" in offload.report(model).fallbacks["profile"]


def test_among_ranks_no_profile_is_used() -> None:
    chosen = tuning.choose(Config(profile="p.json"), [], "cpu", among_ranks=True)
    assert chosen.tuning == Tuning() and "ranks" in (chosen.note or "")
    assert tuning.choose(Config(), [], "cpu", among_ranks=True) == tuning.NOTHING
