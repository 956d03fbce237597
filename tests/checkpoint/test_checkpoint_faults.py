"""Every operation of a save fails, one after the other: a typed error, nothing left of the save,
what was there before is whole. A failed sync is never tried again.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from support.checkpoints import SMALL, contents_of, read, same, save
from support.disk_doubles import GROWING, FaultyDisk, StraightDisk
from support.stores import nothing_left

from offload.checkpoint.disk import POINTS, CheckpointDisk
from offload.checkpoint.format.directory import find_newest
from offload.core.errors import CorruptionError, StoreError
from offload.core.metrics import Metrics
from offload.storage.choose import ENGINES, open_engine
from offload.storage.engine import Fault, FaultKind, IOEngine

OLD, NEW = contents_of(1), contents_of(2)
CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT)
EVERYTHING = GROWING | {"chmod", "go_direct", "read_data", "truncate", "unlink", "rmdir"}


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def used_bytes(path: Path) -> int:
    return sum(os.stat(file).st_blocks for file in path.rglob("*")) * 512


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    """Make a directory with an older checkpoint and a file that is none of ours."""
    save(tmp_path / "old", OLD)
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def rehearse(parent: Path) -> FaultyDisk:
    """Save without a fault, to count the calls, and restore the directory afterwards."""
    disk = FaultyDisk()
    metrics = Metrics()
    save(parent / "new", NEW, keep=1, disk=disk, metrics=metrics, buffer_bytes=SMALL)
    assert metrics.snapshot().fallbacks == {}
    assert names(parent) == ["new", "notes.txt"]
    assert [point for _, point in disk.points if point != "shard opened"] == [
        point for point in POINTS if point != "shard opened"
    ]
    for file in (parent / "new").iterdir():
        file.unlink()
    (parent / "new").rmdir()
    save(parent / "old", OLD)
    return disk


def operation_of(call: str) -> str:
    """Return the operation that an error names for a call of the disk."""
    return {
        "open_new": "open",
        "fsync_dir": "fsync of directory",
        "write_data": "write",
        "read_data": "read",
        "go_direct": "open past the page cache",
    }.get(call, call)


def test_every_call_fails(parent: Path) -> None:
    good = rehearse(parent)
    used = used_bytes(parent)
    saved = good.point_of("parent synced")  # from there on it is saved, and no fault undoes that
    assert len(good.calls) > 40
    failures = 0
    for nth in range(1, len(good.calls) + 1):
        for code in CODES:
            for forever in (set(), GROWING):
                disk = FaultyDisk(nth=nth, code=code, forever=forever)
                metrics = Metrics()
                options = {"disk": disk, "metrics": metrics, "buffer_bytes": SMALL}
                if nth > saved:
                    save(parent / "new", NEW, keep=1, **options)
                    assert any("the new one is whole" in w for w in fallbacks(metrics))
                    put_back(parent)
                    continue
                with nothing_left(), pytest.raises(StoreError) as caught:
                    save(parent / "new", NEW, keep=1, **options)
                failures += 1
                operation, file = good.calls[nth - 1]
                assert caught.value.errno == code
                assert caught.value.operation == operation_of(operation)
                assert caught.value.file
                if "." in file and not file.startswith("."):
                    assert caught.value.file.endswith(file)
                assert names(parent) == ["notes.txt", "old"]
                assert used_bytes(parent) == used
    assert failures > 200
    assert find_newest(parent) == parent / "old"
    assert same(read(parent / "old"), OLD)


def fallbacks(metrics: Metrics) -> list[str]:
    return list(metrics.snapshot().fallbacks.values())


def put_back(parent: Path) -> None:
    """Restore the directory after a save that could not remove the older checkpoint."""
    assert same(read(parent / "new"), NEW)
    assert find_newest(parent) == parent / "new"
    for directory in [path for path in parent.iterdir() if path.is_dir()]:
        for file in directory.iterdir():
            file.unlink()
        directory.rmdir()
    save(parent / "old", OLD)


def test_a_disk_that_dies_shows_nothing_new(parent: Path) -> None:
    """From one call on every call fails, removals too: what is left is hidden, and the next save
    removes it.
    """
    good = rehearse(parent)
    left = 0
    for nth in range(1, good.point_of("renamed") + 1):
        disk = FaultyDisk(nth=nth, forever=EVERYTHING)
        with pytest.raises(StoreError):
            save(parent / "new", NEW, keep=1, disk=disk, buffer_bytes=SMALL)
        shown = [name for name in names(parent) if not name.startswith(".")]
        assert shown == ["notes.txt", "old"]
        left += len(names(parent)) > len(shown)
        assert find_newest(parent) == parent / "old"
    assert left > 30
    assert same(read(parent / "old"), OLD)
    save(parent / "new", NEW)
    assert names(parent) == ["new", "notes.txt", "old"]


def test_a_failed_sync_of_the_parent_takes_the_name_back(parent: Path) -> None:
    good = rehearse(parent)
    nth = good.point_of("parent synced")
    assert good.calls[nth - 1][0] == "fsync_dir"
    disk = FaultyDisk(nth=nth)
    with pytest.raises(StoreError, match="asking again would hide it") as caught:
        save(parent / "new", NEW, keep=1, disk=disk, buffer_bytes=SMALL)
    assert caught.value.operation == "fsync of directory"
    assert caught.value.file == str(parent)
    assert names(parent) == ["notes.txt", "old"]
    assert [call for call, _ in disk.calls[nth:]] == [
        "rename",
        "unlink",
        "unlink",
        "unlink",
        "rmdir",
    ]
    assert disk.calls[nth + 1] == ("unlink", "manifest.json")


def test_missing_parents_go_with_a_save_that_fails(tmp_path: Path) -> None:
    disk = FaultyDisk()
    save(tmp_path / "a" / "b" / "new", NEW, disk=disk, buffer_bytes=SMALL)
    count = len(disk.calls)
    assert count > 30
    for nth in range(1, count + 1):
        with pytest.raises(StoreError):
            disk = FaultyDisk(nth=nth)
            save(tmp_path / "x" / "y" / "new", NEW, disk=disk, buffer_bytes=SMALL)
        assert names(tmp_path) == ["a"]


class ShortDisk(StraightDisk):
    """A disk that writes few bytes of a manifest at a time, and none after `most` of them."""

    def __init__(self, most: int) -> None:
        self.most = most

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return super().write(fd, data[: min(100, self.most - offset)], offset)


def test_short_writes_of_the_manifest_go_on(parent: Path) -> None:
    save(parent / "new", NEW, keep=2, disk=ShortDisk(1 << 30))
    assert same(read(parent / "new"), NEW)
    with pytest.raises(StoreError) as caught:
        save(parent / "newer", NEW, keep=2, disk=ShortDisk(300))
    assert caught.value.file == str(parent / "newer" / "manifest.json")
    assert names(parent) == ["new", "notes.txt", "old"]


# --- faults of the engines ------------------------------------------------------------------------


class EngineFault(CheckpointDisk):
    """The system's disk, with one fault in the engine."""

    def __init__(self, name: str, fault: Fault) -> None:
        self._name, self._fault = name, fault
        self.engine: IOEngine | None = None

    def open_engine(self, metrics: Metrics) -> IOEngine:
        self.engine = open_engine([], metrics=metrics, name=self._name, timeout_s=20.0)
        self.engine.inject(self._fault)
        return self.engine


def attempts_of_save(parent: Path, engine: str) -> int:
    disk = EngineFault(engine, Fault(FaultKind.NONE))
    counted = []
    disk.hook = lambda point: counted.append(  # type: ignore[method-assign]
        disk.engine.attempts() if disk.engine and point == "data written" else 0
    )
    save(parent / "rehearsal", NEW, disk=disk, buffer_bytes=SMALL)
    for file in (parent / "rehearsal").iterdir():
        file.unlink()
    (parent / "rehearsal").rmdir()
    return max(counted)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_write_of_the_engine_fails(parent: Path, engine: str) -> None:
    count = attempts_of_save(parent, engine)
    assert count >= 10
    for nth in range(1, count + 1):
        for code in CODES:
            for forever in (False, True):
                fault = Fault(FaultKind.ERROR, nth, forever, code)
                with pytest.raises(StoreError) as caught:
                    save(parent / "new", NEW, disk=EngineFault(engine, fault), buffer_bytes=SMALL)
                error = caught.value
                assert (error.errno, error.operation) == (code, "write")
                assert error.file is not None and error.file.startswith(str(parent / "new"))
                assert error.tensor is not None and error.offset_bytes is not None
                assert names(parent) == ["notes.txt", "old"]
    assert same(read(parent / "old"), OLD)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [FaultKind.SHORT_HALF, FaultKind.SHORT_ZERO, "EAGAIN", "EINTR"])
def test_what_can_be_mended_is(parent: Path, engine: str, kind: FaultKind | str) -> None:
    for nth in (1, 5, 9):
        if isinstance(kind, str):
            fault = Fault(FaultKind.ERROR, nth, code=getattr(errno, kind))
        else:
            fault = Fault(kind, nth)
        path = parent / f"new{nth}"
        save(path, NEW, disk=EngineFault(engine, fault), buffer_bytes=SMALL)
        assert same(read(path), NEW)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [FaultKind.FLIP, FaultKind.LOST_WRITE])
def test_bytes_spoilt_on_the_way_are_found_before_anything_older_goes(
    parent: Path, engine: str, kind: FaultKind
) -> None:
    count = attempts_of_save(parent, engine)
    for nth in range(1, count + 1):
        disk = EngineFault(engine, Fault(kind, nth, seed=nth % 8))  # a bit of its first byte
        with pytest.raises(CorruptionError) as caught:
            save(parent / "new", NEW, keep=1, disk=disk, buffer_bytes=SMALL)
        assert caught.value.errno == errno.EBADMSG and caught.value.file
        assert names(parent) == ["notes.txt", "old"]
    assert same(read(parent / "old"), OLD)
