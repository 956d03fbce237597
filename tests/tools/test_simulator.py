"""The simulator moves what the engine moves, and its times follow from speeds and bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import offload
from offload.core.errors import CapacityError, ConfigError
from offload.core.timeline import DISK_READS, DISK_WRITES
from offload.planning.planner import Budgets
from offload.planning.profile import DriveProfile, Profile, Tuning
from offload.storage.engine import PIECE_BYTES, Priority
from offload.telemetry import run_file
from offload.telemetry.run_file import ParamFact, Run, UnitFact
from offload.tools.forecast.simulation.clock import Clock, DriveRequest, Drives, Rates
from offload.tools.forecast.simulator import Outcome, simulate
from offload.tools.forecast.workload import BACKWARD, FORWARD, Workload, WorkloadUse

KI, MI, GI = 1 << 10, 1 << 20, 1 << 30
WORDS, WIDTH, LAYERS, STEPS = 96, 96, 5, 6
MACHINE = Profile(
    name="a machine",
    is_measured=False,
    sources=("made up",),
    date="2026-11-17",
    cpu="none",
    cores=2,
    memory_bytes_per_s=1e10,
    update_bytes_per_s=8e9,
    disk_read_bytes_per_s=2e9,
    disk_write_bytes_per_s=1.5e9,
    disk_mixed_bytes_per_s=1.8e9,
)


# --- what a run moves -----------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """A model with words in and words out. is_tied: embedding and head are one. thrice: the layers
    run three times.
    """

    def __init__(self, is_tied: bool = True, thrice: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self.times = 3 if thrice else 1

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for _ in range(self.times):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


class Shared(nn.Module):
    """A model in which each pair of neighbours shares a weight: units need one another's."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS + 1))
        for one, other in zip(self.layers[::2], self.layers[1::2], strict=True):
            other.up.weight = one.up.weight
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def frozen_below() -> Model:
    model = Model(is_tied=False)
    for layer in model.layers[:3]:
        layer.requires_grad_(False)
    return model


LAYER_BYTES = sum(param.nbytes for param in Layer().parameters())


@dataclass(frozen=True)
class Case:
    """A training that is run and simulated.

    host: KiB of host memory. passes: micro-batches of a step. fields: more arguments of `prepare`
    or `wrap`. late: layers a step that a real run may read once more or once less, because it
    depends on the drive whether a block has arrived when room is looked for.
    """

    host: int
    make: Callable[[], nn.Module] = Model
    depth: int = 2
    dtype: torch.dtype = torch.float32
    wraps: bool = False
    passes: int = 1
    evaluates: bool = False
    late: int = 0
    directories: int = 1
    optimizer: Callable[[Any], torch.optim.Optimizer] = torch.optim.AdamW
    fields: dict[str, Any] = field(default_factory=dict)


CASES = {
    "everything in memory": Case(16 * KI),
    "state on disk": Case(4200),
    "some parameters away": Case(3300),
    "everything on disk": Case(2200),
    "spilled gradients": Case(1500),
    "one unit at a time": Case(1180, depth=1),
    "no prefetch": Case(2400, depth=0),
    "far ahead": Case(2600, depth=5),
    "bf16": Case(1300, dtype=torch.bfloat16),
    "bf16, some away": Case(1900, dtype=torch.bfloat16, depth=3),
    "wrap": Case(1500, wraps=True),
    "wrap, bf16": Case(1100, wraps=True, dtype=torch.bfloat16),
    "an untied head": Case(2300, make=lambda: Model(is_tied=False)),
    "units that need others": Case(2600, make=Shared),
    "layers that run thrice": Case(2300, make=lambda: Model(thrice=True)),
    "frozen layers": Case(1500, make=frozen_below),
    "two passes a step": Case(2400, passes=2),
    "evaluation between steps": Case(2400, evaluates=True, late=1),
    "recomputed layers": Case(2400, fields={"activations": "recompute"}),
    "two directories": Case(2300, directories=2),
    "momentum": Case(2000, optimizer=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9)),
}


@dataclass(frozen=True)
class Recorded:
    """The record of a real run. counts: the totals after each step and the transfers that it has
    begun.
    """

    run: Run
    counts: list[Mapping[str, int]]

    def mean(self, count: str) -> float:
        """Return the mean of a count over the steps after the first two. It is not taken from the
        steps of the run itself: there a transfer that ends late counts for the step after it.
        """
        first, last = self.counts[1], self.counts[-1]
        return (last.get(count, 0) - first.get(count, 0)) / (len(self.counts) - 2)


def settle(model: nn.Module) -> None:
    made = getattr(model, "_offload_prepared", None)
    for block in made.engine.residency.blocks if made is not None else ():
        made.engine.residency.cache.await_arrival(block)


def record(case: Case, directory: Path) -> Recorded:
    model: Any = case.make().to(case.dtype)
    optimizer: Any = case.optimizer([p for p in model.parameters() if p.requires_grad])
    nvme = [directory / str(number) for number in range(case.directories)]
    for path in nvme:
        path.mkdir()
    place = {"host_memory": case.host * KI, "nvme": nvme, **case.fields}
    if case.wraps:
        optimizer = offload.wrap(optimizer, **place)
    else:
        model, optimizer = offload.prepare(model, optimizer, prefetch_depth=case.depth, **place)
    counts = []
    with optimizer:
        for step in range(STEPS):
            for _ in range(case.passes):
                words = torch.randint(WORDS, (4, 16), generator=torch.Generator().manual_seed(step))
                functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()
            if case.evaluates:
                with torch.no_grad():
                    model(words)
            optimizer.step()
            optimizer.zero_grad()
            settle(model)
            counts.append(offload.report(optimizer).counts)
        offload.report(optimizer).save_trace(directory / "run.json")
    return Recorded(run_file.load(directory / "run.json"), counts)


def replay(run: Run, machine: Profile = MACHINE, **tuned: Any) -> Outcome:
    about = run.about
    budgets = Budgets(about.host_bytes, about.device_bytes, about.directories, about.activations)
    return simulate(Workload.of_run(run), budgets, machine, Tuning(**tuned), iterations=STEPS)


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_hits_are_those_of_a_real_run(name: str, seed: int, tmp_path: Path) -> None:
    case = CASES[name]
    recorded = record(case, tmp_path)
    run, mean = recorded.run, recorded.mean
    outcome = replay(run, prefetch_depth=case.depth)
    read_bytes = mean("disk_read_bytes")
    apart_bytes = 0.03 * read_bytes + case.late * LAYER_BYTES
    assert outcome.read_bytes == pytest.approx(read_bytes, abs=apart_bytes)
    assert outcome.written_bytes == pytest.approx(mean("disk_written_bytes"), rel=0.03)
    assert outcome.hits == pytest.approx(mean("parameter_hits"), rel=0.03, abs=1.5)
    assert outcome.misses == pytest.approx(mean("parameter_misses"), rel=0.03, abs=1.5)
    assert outcome.host_bytes_taken == sum(
        nbytes for kind, nbytes in run.about.shares.items() if kind != "gradients on disk"
    ) or (case.wraps and outcome.host_bytes_taken <= case.host * KI)
    assert (outcome.spilled_bytes > 0) == (run.about.shares.get("gradients on disk", 0) > 0)
    assert bool(outcome.read_bytes) == (name != "everything in memory")


def test_the_cases_are_what_they_are_called(seed: int, tmp_path: Path) -> None:
    """Otherwise a kind of move would not be compared."""
    found = {}
    for name in ("state on disk", "some parameters away", "everything on disk", "no prefetch"):
        (tmp_path / name).mkdir()
        found[name] = replay(
            record(CASES[name], tmp_path / name).run, prefetch_depth=CASES[name].depth
        )
    assert not found["state on disk"].misses and not found["state on disk"].hits
    assert found["some parameters away"].params_on_host_bytes > 4 * WIDTH * 4 * WIDTH * 4
    assert found["everything on disk"].hits + found["everything on disk"].misses > LAYERS
    assert found["no prefetch"].misses and not found["no prefetch"].hits


# --- times ----------------------------------------------------------------------------------------


def chain(layers: int = 8, nbytes: int = 64 * MI, compute_s: float = 0.05) -> Workload:
    """Make a workload: layers one after the other, forward and backward, trained with AdamW."""
    numel = nbytes // 4
    fields = "exp_avg", "exp_avg_sq"
    units = tuple(UnitFact(f"layer {n}", nbytes, (n,), False, False) for n in range(layers))
    params = tuple(
        ParamFact(f"weight {n}", numel, 4, fields, n, nbytes, False) for n in range(layers)
    )
    uses = [WorkloadUse(FORWARD, n, compute_s) for n in range(layers)]
    uses += [WorkloadUse(BACKWARD, n, 2 * compute_s) for n in reversed(range(layers))]
    return Workload(
        units=units,
        params=params,
        uses=tuple(uses),
        between_s=0.01,
        activation_bytes=0,
        logits_bytes=0,
        tokens=1,
        dtype="float32",
        device="cpu",
    )


def budget(mib: int, **others: Any) -> Budgets:
    return Budgets(host_bytes=mib * MI, **others)


def test_seconds_add_up() -> None:
    for mib in (450, 900, 2500, 9000):
        found = simulate(chain(), budget(mib), MACHINE)
        parts = found.compute_s + found.update_s + found.other_s + found.stalled_s
        assert parts == pytest.approx(found.step_s)
        assert found.step_s >= found.limit_s * (1 - 1e-9)
        assert found.compute_s == pytest.approx(8 * 3 * 0.05)


def test_in_memory_a_step_is_compute_and_update() -> None:
    work = chain()
    found = simulate(work, budget(9000), MACHINE)
    touched = 8 * 64 * MI * (2 * 3 + 1)
    assert found.update_s == pytest.approx(touched / 8e9)
    assert found.step_s == pytest.approx(work.compute_s + 0.01 + touched / 8e9)
    assert not found.stalls and not found.read_bytes and found.limit == "compute and update"


def test_a_slow_disk_is_the_limit_and_a_fast_one_is_hidden() -> None:
    slow = dataclasses.replace(
        MACHINE,
        disk_read_bytes_per_s=2e8,
        disk_write_bytes_per_s=2e8,
        disk_mixed_bytes_per_s=2e8,
    )
    found = simulate(chain(), budget(900), slow)
    assert found.limit == "disk"
    assert found.limit_s == pytest.approx((found.read_bytes + found.written_bytes) / 2e8)
    assert found.step_s < 1.25 * found.limit_s
    fast = dataclasses.replace(
        MACHINE,
        disk_read_bytes_per_s=1e12,
        disk_write_bytes_per_s=1e12,
        disk_mixed_bytes_per_s=1e12,
    )
    hidden = simulate(chain(), budget(900), fast)
    assert hidden.stalled_s < 0.01 * hidden.step_s and hidden.limit == "compute and update"


def test_more_memory_moves_less_and_is_never_slower() -> None:
    found = [simulate(chain(), budget(mib), MACHINE) for mib in (450, 700, 1100, 2000, 9000)]
    moved = [one.read_bytes + one.written_bytes for one in found]
    assert moved == sorted(moved, reverse=True) and moved[-1] == 0
    seconds = [one.step_s for one in found]
    assert seconds == sorted(seconds, reverse=True)


def test_fetching_ahead_hides_reads_behind_compute() -> None:
    at_depth = [
        simulate(chain(), budget(900), MACHINE, Tuning(prefetch_depth=depth)) for depth in (0, 1, 2)
    ]
    waits = [one.stalls.get("model: parameter read", 0.0) for one in at_depth]
    assert waits[0] > 0.1 and waits[1] < 0.2 * waits[0] and waits[2] <= waits[1]
    assert [one.depth for one in at_depth] == [0, 1, 2]


def test_the_depth_is_derived_from_the_speeds() -> None:
    """As in the engine: the slower the drive, the further ahead."""
    slow = dataclasses.replace(
        MACHINE,
        disk_read_bytes_per_s=6e8,
        disk_write_bytes_per_s=6e8,
        disk_mixed_bytes_per_s=6e8,
    )
    assert simulate(chain(), budget(900), MACHINE).depth == 2
    assert simulate(chain(), budget(900), slow).depth > 2


def test_what_computes_beside_the_drives_is_slower() -> None:
    work = chain()
    beside = dataclasses.replace(MACHINE, compute_beside_disk=0.5, update_beside_disk=0.8)
    before, after = (simulate(work, budget(900), m) for m in (MACHINE, beside))
    assert work.compute_s < after.compute_s <= 2 * work.compute_s
    assert before.update_s < after.update_s <= before.update_s / 0.8
    in_memory = [simulate(work, budget(9000), machine) for machine in (MACHINE, beside)]
    assert in_memory[0] == in_memory[1]


def test_the_same_is_simulated_alike_and_allocates_nothing() -> None:
    huge = chain(layers=8, nbytes=4 * GI)  # with gradients and state: 128 GiB
    tuning = Tuning(chunk_numel=1 << 26)
    found = [simulate(huge, budget(60 * KI), MACHINE, tuning, iterations=2) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0].host_bytes_taken == 60 * GI and found[0].disk_bytes > 60 * GI


def test_offloaded_activations_go_to_disk_and_come_back() -> None:
    work = dataclasses.replace(chain(), activation_bytes=800 * MI)
    kept = simulate(work, budget(2400), MACHINE)
    away = simulate(work, budget(2400, activations="offload"), MACHINE)
    moved = away.written_bytes - kept.written_bytes
    assert 100 * MI < moved < 800 * MI
    assert away.read_bytes - kept.read_bytes == moved


def test_spilled_gradients_are_among_what_the_drives_move() -> None:
    found = simulate(chain(), budget(380), MACHINE)
    assert 0 < found.spilled_bytes <= 8 * 64 * MI
    state = found.written_bytes - found.spilled_bytes
    assert state > 0 and found.read_bytes > found.spilled_bytes + state


# --- what cannot work -----------------------------------------------------------------------------


def test_budgets_are_refused_with_the_engines_own_words(seed: int, tmp_path: Path) -> None:
    work = Workload.of_run(record(CASES["everything on disk"], tmp_path).run)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    for host, directories in ((256 * KI, [tmp_path]), (1024 * KI, [])):
        with pytest.raises(CapacityError) as refused:
            offload.prepare(model, optimizer, host_memory=host, nvme=directories or None)
        with pytest.raises(CapacityError) as foreseen:
            simulate(work, Budgets(host, None, len(directories)), MACHINE)
        assert str(foreseen.value) == str(refused.value)


def test_what_the_profile_does_not_say_is_asked_for() -> None:
    unknown = dataclasses.replace(MACHINE, disk_mixed_bytes_per_s=None)
    with pytest.raises(ConfigError, match=r"speeds of its drives.*offload bench"):
        simulate(chain(), budget(900), unknown)
    simulate(chain(), Budgets(), unknown, iterations=1)
    with pytest.raises(ConfigError, match="update_bytes_per_s"):
        simulate(chain(), budget(900), dataclasses.replace(MACHINE, update_bytes_per_s=None))
    with pytest.raises(ConfigError, match="to_device_bytes_per_s"):
        simulate(dataclasses.replace(chain(), device="cuda"), budget(900), MACHINE)
    with pytest.raises(ConfigError, match="iterations"):
        simulate(chain(), budget(900), MACHINE, iterations=0)


# --- a device -------------------------------------------------------------------------------------

WITH_DEVICE = dataclasses.replace(
    MACHINE,
    device="one",
    device_memory_bytes=4 * GI,
    to_device_bytes_per_s=4e9,
    to_host_bytes_per_s=2e9,
)


def on_device(**changes: Any) -> Workload:
    return dataclasses.replace(chain(), device="cuda", **changes)


def test_parameters_go_to_the_device_and_gradients_come_from_it() -> None:
    whole = 8 * 64 * MI
    wide = simulate(on_device(), budget(9000, device_bytes=3 * GI), WITH_DEVICE)
    assert wide.to_device_bytes == whole  # new values of all, once a step
    assert wide.to_host_bytes == whole
    narrow = simulate(on_device(), budget(9000, device_bytes=200 * MI), WITH_DEVICE)
    assert 1.5 * whole < narrow.to_device_bytes <= 2 * whole  # again for backward
    assert narrow.to_host_bytes == whole and narrow.step_s >= wide.step_s
    for found in (wide, narrow):
        assert found.compute_s == pytest.approx(chain().compute_s)
        parts = found.compute_s + found.update_s + found.other_s + found.stalled_s
        assert parts == pytest.approx(found.step_s)


def test_slow_copies_make_the_device_wait() -> None:
    slow = dataclasses.replace(WITH_DEVICE, to_device_bytes_per_s=2e8)
    found = simulate(on_device(), budget(9000, device_bytes=200 * MI), slow)
    assert found.limit == "copies to the device"
    assert found.stalls["model: the device waits"] > 0.5 * found.step_s


def test_activations_take_memory_of_the_device() -> None:
    room = budget(9000, device_bytes=700 * MI)
    bare = simulate(on_device(), room, WITH_DEVICE)
    full = simulate(on_device(activation_bytes=400 * MI), room, WITH_DEVICE)
    assert full.to_device_bytes > bare.to_device_bytes
    sent = simulate(
        on_device(activation_bytes=400 * MI),
        dataclasses.replace(room, activations="offload"),
        WITH_DEVICE,
    )
    assert sent.to_host_bytes == pytest.approx(bare.to_host_bytes + 400 * MI, abs=16)
    for others in ({"activation_bytes": 700 * MI}, {"logits_bytes": 700 * MI}):
        with pytest.raises(CapacityError, match=r"device_memory: 700 MiB.*the least that works"):
            simulate(on_device(**others), room, WITH_DEVICE)


def test_a_wrapped_optimizer_updates_a_devices_parameters_over_desks() -> None:
    params = tuple(
        dataclasses.replace(param, unit=None, is_on_device=True) for param in chain().params
    )
    work = on_device(units=(), uses=(), params=params, between_s=0.5)
    whole = 8 * 64 * MI
    roomy = simulate(work, budget(9000), WITH_DEVICE)
    assert (roomy.to_device_bytes, roomy.to_host_bytes) == (whole, 2 * whole)
    assert roomy.step_s > 0.5 + whole / 4e9
    tight = simulate(work, budget(900), WITH_DEVICE)
    assert tight.read_bytes == tight.written_bytes > 0 and tight.step_s > roomy.step_s


# --- drives and clock -----------------------------------------------------------------------------

RATES = Rates(read=100.0 * MI, write=50.0 * MI, mixed=80.0 * MI)


def ask(
    drives: Drives, mib: int, is_write: bool = False, priority: Priority = Priority.PREFETCH
) -> DriveRequest:
    return drives.submit(DriveRequest("x", mib * MI, is_write, priority, 0.0))


def test_a_request_takes_its_bytes_over_the_rate_of_its_kind() -> None:
    for is_write, rate in ((False, 100), (True, 50)):
        drives = Drives(RATES)
        assert drives.finish(ask(drives, 200, is_write)) == pytest.approx(200 / rate)
        assert drives.busy_s == pytest.approx(200 / rate) and drives.next_end_s is None


def test_both_kinds_at_once_share_the_mixed_rate() -> None:
    drives = Drives(RATES, depth=1000)
    read, write = ask(drives, 80), ask(drives, 80, is_write=True)
    drives.advance(10.0)
    assert read.end_s is not None and write.end_s is not None
    first_s = 20 / 100  # a piece that was served when there was no write yet
    assert read.end_s == pytest.approx(first_s + 60 / 80)
    assert write.end_s == pytest.approx(read.end_s + 80 / 50)  # alone again
    assert [event.row for event in drives.done] == [DISK_READS, DISK_WRITES]


def test_what_is_waited_for_goes_first_but_not_before_what_is_with_the_drives() -> None:
    drives = Drives(RATES, depth=10)
    write = ask(drives, 100, True, Priority.WRITE_BACK)
    prefetch = ask(drives, 100)
    urgent = ask(drives, 10, False, Priority.WAITED_FOR)
    ends_s = [drives.finish(one) for one in (urgent, prefetch, write)]
    assert ends_s == sorted(ends_s)
    window = max(10, 100 // 4) * MI  # one piece of the write is on its way
    assert ends_s[0] < (window + 36 * MI) / (50.0 * MI)


def test_an_urged_request_overtakes() -> None:
    drives = Drives(RATES, depth=4)
    first, second = ask(drives, 400), ask(drives, 4)
    drives.urge(second)
    assert drives.finish(second) < 1.5 < drives.finish(first)


def test_drives_that_are_idle_begin_when_they_are_asked() -> None:
    drives = Drives(RATES)
    drives.advance(5.0)
    request = drives.submit(DriveRequest("x", 100 * MI, False, Priority.PREFETCH, 5.0))
    assert drives.finish(request) == pytest.approx(6.0) and drives.busy_s == pytest.approx(1.0)
    empty = drives.submit(DriveRequest("x", 0, True, Priority.PREFETCH, 6.0))
    assert empty.end_s == 6.0


def test_pieces_add_up_whatever_their_size() -> None:
    drives = Drives(RATES)
    sizes = [1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 9 * PIECE_BYTES + 5]
    requests = [
        drives.submit(DriveRequest("x", size, False, Priority.PREFETCH, 0.0)) for size in sizes
    ]
    drives.advance(100.0)
    assert all(one.end_s is not None and not one.unserved for one in requests)
    assert drives.busy_s == pytest.approx(sum(sizes) / RATES.read)


def test_work_beside_the_drives_takes_longer_until_they_are_done() -> None:
    clock = Clock(Drives(RATES))
    assert clock.drives is not None
    ask(clock.drives, 100)  # a second
    with clock.cause("compute"):
        clock.spend(2.0, beside_disk=0.5)
    assert clock.now_s == pytest.approx(2.5) == clock.seconds["compute"]
    ask(clock.drives, 100)
    clock.spend(0.25, beside_disk=0.5)
    assert clock.now_s == pytest.approx(3.0)


def test_waiting_goes_to_the_end_of_a_request() -> None:
    clock = Clock(Drives(RATES))
    assert clock.drives is not None
    request = ask(clock.drives, 100)
    assert not clock.has_ended(request)
    with clock.cause("disk read"):
        clock.wait_for(request)
        clock.wait_for(request)
    assert clock.has_ended(request) and clock.seconds == {"disk read": pytest.approx(1.0)}


def test_rates_are_those_of_as_many_drives_as_are_used() -> None:
    disk = DriveProfile("a", 1e9, 2e9, 3e9)
    two = dataclasses.replace(MACHINE, disks=(disk, disk))
    assert Rates.of(two, 2) == Rates(2e9, 1.5e9, 1.8e9)  # all at once, as measured
    assert Rates.of(two, 1) == Rates(1e9, 2e9, 3e9)
    apart = dataclasses.replace(two, disk_read_bytes_per_s=None)
    assert Rates.of(apart, 2) == Rates(2e9, 4e9, 6e9)
    assert Rates.of(apart, 4) == Rates(4e9, 8e9, 12e9)
