"""Power failures during a save over an older checkpoint: the old one or the new one, to the bit."""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.checkpoints import SMALL, contents_of, same, save
from support.checkpoints import read as read_checkpoint
from support.loops import chosen, tally
from support.power_loss import SYNCS, Change, RecordingDisk, Tree, crash_states

from offload.checkpoint.format.directory import find_newest
from offload.checkpoint.format.verify import verify
from offload.core.errors import OffloadError

OLD, NEW = contents_of(1), contents_of(2)
DRAWS = chosen(test=30, torture=2000, quick=3)  # disk states of each prefix of the changes


class Recording:
    """The record of one save with keep=1 beside two older checkpoints and a file of the user's."""

    def __init__(self, root: Path) -> None:
        root.mkdir()
        save(root / "older", contents_of(3))
        save(root / "old", OLD)
        (root / "notes.txt").write_text("mine")
        self.images = {name: image(root / name) for name in ("old", "older")}
        self.disk = RecordingDisk(root)
        save(root / "new", NEW, keep=1, disk=self.disk, buffer_bytes=SMALL)
        self.images["new"] = image(root / "new")

    @property
    def changes(self) -> list[Change]:
        return self.disk.changes

    def count_at(self, point: str) -> int:
        return next(count for count, name in self.disk.points if name == point)


def image(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return Recording(tmp_path_factory.mktemp("power") / "root")


@pytest.fixture
def place() -> Iterator[Path]:
    """Yield a place for the disks as they may be after a failure; in memory where possible, for
    speed.
    """
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory) / "disk"


def found_after(tree: Tree, place: Path, images: dict[str, dict[str, bytes]]) -> str:
    """Return which checkpoint is found after the power is back: "old", "new", or what is wrong."""
    shutil.rmtree(place, ignore_errors=True)
    tree.write_to(place)
    assert (place / "notes.txt").read_text() == "mine"
    try:
        with warnings.catch_warnings():  # about torn checkpoints
            warnings.simplefilter("ignore")
            newest = find_newest(place)
        findings = verify(newest)
    except OffloadError as error:
        return f"none: {error}"
    if not findings.is_whole or findings.foreign:
        return f"{newest.name} is torn: {findings.damage or findings.foreign}"
    if newest.name not in images or image(newest) != images[newest.name]:
        return f"{newest.name} is another one"
    return newest.name


@pytest.mark.quick
def test_old_or_new_after_every_power_failure(recording: Recording, place: Path, seed: int) -> None:
    changes = recording.changes
    begun, done = recording.count_at("renamed") - 1, recording.count_at("parent synced")
    assert [c.call for c in changes[begun:done]] == ["rename", "fsync_dir"]
    outcomes: Counter[tuple[str, str]] = Counter()
    states = crash_states(recording.disk.tree, changes, random.Random(seed), DRAWS)
    for count, tree in states:
        outcome = found_after(tree, place, recording.images)
        when = "before" if count <= begun else "after" if count >= done else "in between"
        assert outcome in {"before": ("old",), "after": ("new",)}.get(when, ("old", "new")), (
            f"{outcome}, after {count} changes, the last {changes[max(0, count - 1)]}; seed {seed}"
        )
        outcomes[when, outcome] += 1
    print(dict(outcomes))
    assert outcomes.total() >= 10 * DRAWS
    tally("power-loss states", outcomes.total())
    assert set(outcomes) == {
        ("before", "old"),
        ("in between", "old"),
        ("in between", "new"),
        ("after", "new"),
    }


def test_the_next_save_cleans_up_after_a_power_failure(
    recording: Recording, tmp_path: Path, seed: int
) -> None:
    states = list(crash_states(recording.disk.tree, recording.changes, random.Random(seed), 3))
    for _, tree in states[:: len(states) // chosen(test=20, torture=len(states))]:
        tally("power-loss states")
        shutil.rmtree(tmp_path / "disk", ignore_errors=True)
        tree.write_to(tmp_path / "disk")
        save(tmp_path / "disk" / "next", NEW, keep=1)
        assert sorted(path.name for path in (tmp_path / "disk").iterdir()) == ["next", "notes.txt"]
        assert same(read_checkpoint(tmp_path / "disk" / "next"), NEW)


def without(changes: list[Change], number: int) -> list[Change]:
    """Return the changes of a save that leaves out the `number`-th of its syncs."""
    at = [i for i, change in enumerate(changes) if change.call in SYNCS][number]
    return changes[:at] + changes[at + 1 :]


def test_every_single_sync_is_needed(recording: Recording, place: Path, seed: int) -> None:
    """If a save left out any one sync, some state of the disk would show it: a torn or lost
    checkpoint.
    """
    syncs = [change.call for change in recording.changes if change.call in SYNCS]
    assert syncs == ["fsync", "fsync", "fsync", "fsync_dir", "fsync_dir", "fsync_dir"]
    for number in range(len(syncs)):
        changes = without(recording.changes, number)
        renamed = next(i for i, c in enumerate(changes) if c.other == "new")
        wrong = 0
        for count, tree in crash_states(recording.disk.tree, changes, random.Random(seed), 40):
            if count <= renamed:
                continue
            outcome = found_after(tree, place, recording.images)
            torn = any(
                path.name in recording.images and image(path) != recording.images[path.name]
                for path in place.iterdir()
            )
            lost = count > renamed + 2 and outcome != "new"
            wrong += torn or lost or outcome not in recording.images
            if wrong:
                break
        assert wrong, f"the {number}-th sync can be left out, and nobody sees it"
