"""Checkpoints that all ranks write and read together: the bytes of one process, any number of ranks
afterwards, and one rank that fails or dies at any point. checkpoint_cases.py has what each rank
does.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import read, same
from support.loops import SEED, chosen, tally
from support.ranks import checkpoint_cases as cases
from support.ranks import restart_loop
from support.ranks.launch import outcomes, run

import offload
from offload.checkpoint.disk import POINTS
from offload.checkpoint.format.directory import CheckpointDirectory, find_newest
from offload.checkpoint.format.verify import verify
from offload.core.format_limits import MOST_PART_BYTES

pytestmark = pytest.mark.ranks
DRAWN = chosen(test=2, torture=90)  # kills at any moment, beside those at each point
STRIDE = chosen(test=3, torture=1)  # of the calls that fail
# The points of a rank that is not the first.
PARTICIPANT_POINTS = ("joined", "shard opened", "data written", "files synced", "verified")
NAMED = [(0, point) for point in POINTS[:9]] + [(1, point) for point in PARTICIPANT_POINTS]


@pytest.mark.parametrize("kind", ["plain", "wrap"])
def test_the_bytes_are_those_of_one_process(tmp_path: Path, kind: str) -> None:
    found = run(3, cases.same_bytes, tmp_path, kind)
    model, optimizer = cases.build(kind)
    cases.train(model, optimizer, range(3))
    offload.save(tmp_path / "one", model, optimizer, extra={"rank": 0})
    assert {each["path"] for each in found} == {str(tmp_path / "all")}
    assert len({each["digest"] for each in found}) == 3  # a buffer differs
    assert same(read(tmp_path / "all"), read(tmp_path / "one"))
    with (
        CheckpointDirectory(tmp_path / "all") as all_,
        CheckpointDirectory(tmp_path / "one") as one,
    ):
        together, by_one = all_.read_manifest(), one.read_manifest()
    assert together.files == by_one.files
    assert together.fingerprint == by_one.fingerprint
    assert together.values["extra"] == by_one.values["extra"] == {"dict": {"rank": 0}}
    assert together.values["optimizer"] == by_one.values["optimizer"]
    assert together.values.keys() - by_one.values.keys() == {"rng_ranks"}
    assert len(together.values["rng_ranks"]) == 2
    parts = [part for tensor in together.tensors.values() for part in tensor.parts]
    assert all(part.nbytes <= MOST_PART_BYTES for part in parts)
    for name in together.files:  # header and all, but for nothing
        assert (tmp_path / "all" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()
    assert verify(tmp_path / "all").is_whole
    written, total = [each["written"] for each in found], sum(together.files.values())
    assert total <= sum(written) <= total + len(together.files) * 4096
    assert max(written) < 0.5 * total
    assert sorted(os.listdir(tmp_path)) == ["all", "one"]


RESUMED = [("plain", False), ("wrap", True), ("reduce", False), ("prepare", True)]


@pytest.mark.parametrize(("kind", "background"), RESUMED)
def test_resumed_by_other_numbers_of_ranks(tmp_path: Path, kind: str, background: bool) -> None:
    model, optimizer = cases.build("straight" if kind == "prepare" else "plain")
    expected, drawn = {}, {}
    for begin in range(0, 10, 2):
        cases.train(model, optimizer, range(begin, begin + 2))
        expected[begin + 2] = cases.digest(model, optimizer)
    # The mean of three equal gradients need not have their bits.
    three = 3 if kind in ("plain", "wrap") else 2
    counts = {0: 2, 2: 4, 4: 1, 6: three, 8: three}
    for begin, count in counts.items():
        steps = range(begin, begin + 2)
        found = run(count, cases.resume, count, tmp_path, kind, steps, background)
        assert {each["digest"] for each in found} == {expected[begin + 2]}, begin
        assert verify(tmp_path / f"{begin + 2}").is_whole
        drawn[begin] = [each["drawn"] for each in found]
    # Saved and loaded by as many: each goes on with its own random numbers.

    def first(seed: int) -> float:
        torch.manual_seed(seed)
        return float(torch.rand(()).item())

    assert drawn[8] == [first(1000 * three + rank) for rank in range(three)]
    assert drawn[6] == [first(1000), first(101), first(102)][:three]  # of one: the first's alone
    assert sorted(os.listdir(tmp_path)) == ["10", "8"]


def test_what_differs_over_ranks_is_refused_on_all(tmp_path: Path) -> None:
    run(2, cases.arguments_that_differ, tmp_path / "new")


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_has_a_failing_disk(tmp_path: Path, victim: int) -> None:
    found = run(2, cases.faults, tmp_path, victim, STRIDE)
    assert found[0] == found[1]
    expected = {"write_data", "fsync", "write"}
    assert expected <= found[0].keys(), found[0]
    tally("disk faults", sum(found[0].values()))


@dataclass(frozen=True)
class Kill:
    """The kill of one rank. point: the named point at which it dies; empty: after `delay_s`."""

    victim: int
    point: str
    delay_s: float
    background: bool
    name: str


def kills() -> list[Kill]:
    rng = random.Random(SEED)
    found = [
        Kill(victim, point, 0.0, bool(n % 2), f"rank {victim} {point}")
        for n, (victim, point) in enumerate(NAMED)
    ]
    for n in range(DRAWN):
        delay_s, background = rng.uniform(0.0, 0.3), rng.random() < 0.5
        found.append(Kill(n % 2, "", delay_s, background, f"drawn {n}"))
    return found


@pytest.mark.parametrize("victim", [0, 1])
def test_one_rank_is_stopped(tmp_path: Path, victim: int) -> None:
    """SIGSTOP: it is missed, by name, after the time-out of the group and not minutes later."""
    limit_s = 3.0
    found = run(2, cases.stop, tmp_path, victim, limit_s, deadline_s=120)
    kind, text = found[1 - victim]["error"]
    assert kind == "StateError" and f"rank {victim} has ended, or did not answer" in text, text
    assert found[1 - victim]["took_s"] < limit_s + 60
    assert found[victim]["error"][0] == "StateError", found[victim]
    assert sorted(os.listdir(tmp_path)) == ["1"] and verify(tmp_path / "1").is_whole


@pytest.mark.parametrize("kill", kills(), ids=lambda kill: kill.name)
def test_one_rank_is_killed(tmp_path: Path, kill: Kill) -> None:
    victim, point = kill.victim, kill.point
    found = outcomes(2, cases.kill, tmp_path, victim, point, kill.delay_s, kill.background)
    other: dict[str, Any] = found[1 - victim].result
    assert found[victim].exit_code == -9, found[victim]
    assert other is not None, found[1 - victim].error
    assert other["error"][0] == "StateError", other
    assert other["took_s"] < 60
    names = sorted(os.listdir(tmp_path))
    assert not [name for name in names if name.startswith(".")], names
    newest = int(find_newest(tmp_path).name)
    assert other["saved"] <= newest <= other["saved"] + 1
    assert all(verify(tmp_path / name).is_whole for name in names)
    if point:
        is_through = POINTS.index(point) >= POINTS.index("renamed") if victim == 0 else False
        assert newest == (2 if is_through else 1)
    tally("rank kills")


@pytest.mark.parametrize(("number", "victim"), [(signal.SIGUSR1, 1), (signal.SIGTERM, 0)])
def test_a_signal_to_one_rank_saves_all(tmp_path: Path, number: int, victim: int) -> None:
    found = run(3, cases.signalled, tmp_path, number, victim)
    ended = 6 if number == signal.SIGTERM else 12  # noticed in the fifth step, saved in the sixth
    assert [each["steps"] for each in found] == [ended] * 3
    assert found[0]["listed"] == ["at"]
    model, optimizer = cases.build(seed=8)
    assert offload.load(tmp_path, model, optimizer) == {"step": 6}
    if number == signal.SIGUSR1:
        assert {each["digests"][6] for each in found} == {cases.digest(model, optimizer)}


def test_a_signal_to_loops_that_never_wait(tmp_path: Path) -> None:
    run(2, cases.without_one_another, tmp_path)
    model, optimizer = cases.build(seed=8)
    step = offload.load(tmp_path, model, optimizer)["step"]
    assert step > 6
    expected = cases.build()
    cases.train(*expected, range(step))
    assert cases.digest(model, optimizer) == cases.digest(*expected)


def equal(left: dict[str, Any], right: dict[str, Any]) -> bool:
    assert left.keys() == right.keys()
    return all(left[name].tobytes() == right[name].tobytes() for name in left)


@pytest.mark.parametrize("kind", ["plain", "wrap"])
def test_sharded_models(tmp_path: Path, kind: str) -> None:
    """FSDP2, with copies and without; what is saved is what one process would have."""
    both = run(4, cases.sharded_and_back, tmp_path, kind, 2)
    first, again = zip(*both, strict=True)
    assert verify(tmp_path / "all").is_whole
    tensors = read(tmp_path / "all")
    for name, value in first[0]["saved"].items():
        section = "optimizer" if "/" in name else "model"
        assert tensors[section][name].tobytes() == value.tobytes(), name
    for before, after in zip(first, again, strict=True):
        assert equal(after["loaded"], before["saved"])
        assert equal(after["later"], before["later"])  # the bits of the run that was not cut
    fewer = run(3, cases.sharded, tmp_path, kind, 1, True)
    assert equal(fewer[2]["loaded"], first[0]["saved"])


def test_a_second_start_comes_back_from_the_newest(tmp_path: Path) -> None:
    """One rank is killed; the other ends with an error, and both are started again."""
    first, second = outcomes(2, restart_loop.train, tmp_path, 7, 4)
    assert second.exit_code == -signal.SIGKILL and first.exit_code == 1
    assert first.error is not None and "dist.barrier()" in first.error
    model, optimizer = cases.build()
    cases.train(model, optimizer, range(7))
    ended = (4, cases.digest(model, optimizer))
    assert run(2, restart_loop.train, tmp_path, 7, None) == [ended, ended]
    assert sorted(os.listdir(tmp_path)) == ["4", "6"]
    tally("rank kills")


@pytest.mark.torture
def test_torchrun_comes_back_from_the_newest(tmp_path: Path) -> None:
    """One rank is killed; torchrun ends the others and starts all of them again."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    # Otherwise gloo's own first connections may take the addresses of processes that have gone.
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    loop = Path(restart_loop.__file__)
    done = subprocess.run(
        [*launcher, "--nproc-per-node=2", "--max-restarts=1", loop, tmp_path, "7", "5"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **own_store, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    model, optimizer = cases.build()
    cases.train(model, optimizer, range(7))
    assert done.stdout.split() == ["ended", "4", cases.digest(model, optimizer)]
    assert sorted(os.listdir(tmp_path)) == ["4", "6"]
