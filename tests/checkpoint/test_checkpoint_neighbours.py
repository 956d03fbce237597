"""What a save does to the directory it is in: older checkpoints, leftovers, files of other
programs, modes, other savers.
"""

from __future__ import annotations

import os
import shutil
import stat
import sys
import threading
from pathlib import Path

import pytest
from support import children
from support.checkpoints import SMALL, contents_of, fill, read, same, save, umask
from support.disk_doubles import FaultyDisk, StraightDisk
from support.stores import HANG_S, nothing_left

from offload.checkpoint.disk import POINTS, CheckpointDisk
from offload.checkpoint.format.directory import CheckpointDirectory, find_newest
from offload.checkpoint.format.verify import verify
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.writer import CheckpointWriter
from offload.core.errors import ConfigError, StateError, StoreError
from offload.core.metrics import Metrics

CONTENTS = contents_of(1)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def number_of(path: Path) -> int:
    with CheckpointReader(path) as reader:
        return reader.manifest.number


# --- keep -----------------------------------------------------------------------------------------


def test_keep_counts_this_one(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path / f"{step}", contents_of(step), keep=3)
        assert names(tmp_path) == [f"{n}" for n in range(max(1, step - 2), step + 1)]
    save(tmp_path / "6", contents_of(6))
    assert names(tmp_path) == ["3", "4", "5", "6"]
    save(tmp_path / "0", contents_of(7), keep=1)  # the number counts, not the name
    assert names(tmp_path) == ["0"]
    assert number_of(tmp_path / "0") == 7


def test_keep_counts_those_of_the_same_model_alone(tmp_path: Path) -> None:
    for step in range(3):
        for fingerprint in ("aaaa", "bbbb"):
            path = tmp_path / f"{fingerprint}-{step}"
            save(path, contents_of(step), keep=2, fingerprint=fingerprint)
    assert names(tmp_path) == ["aaaa-1", "aaaa-2", "bbbb-1", "bbbb-2"]


def test_others_are_never_touched(tmp_path: Path) -> None:
    """Files, links, directories and damaged checkpoints beside the new one stay as they are."""
    for step in (1, 2, 3):
        save(tmp_path / f"{step}", contents_of(step))
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    shutil.copytree(tmp_path / "1", outside)
    (tmp_path / "link").symlink_to(outside)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text("{}")
    shutil.copytree(tmp_path / "1", tmp_path / "torn")
    os.truncate(tmp_path / "torn" / "model-00001.safetensors", 4096)
    shutil.copytree(tmp_path / "1", tmp_path / "spoilt")
    with open(tmp_path / "spoilt" / "manifest.json", "r+b") as file:
        file.seek(200)
        file.write(b"!")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".2.part").mkdir()
    (tmp_path / ".x.0123456789abcdef.part").write_text("a file")
    (tmp_path / ".y.0123456789abcdef.part").mkdir()
    (tmp_path / ".y.0123456789abcdef.part" / "mine.txt").write_text("mine")
    (tmp_path / ".z.0123456789abcdef.old").symlink_to(outside)
    (tmp_path / "2" / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    metrics = Metrics()
    save(tmp_path / "new", contents_of(4), keep=1, metrics=metrics)
    after = snapshot(tmp_path)
    gone = {path for path in before if path not in after}
    assert gone == {path for path in before if path.split("/")[0] in ("1", "3")}
    assert {p: s for p, s in before.items() if p in after} == {
        p: s for p, s in after.items() if p.split("/")[0] != "new"
    }
    assert names(outside) == names(tmp_path / "new")
    (why,) = metrics.snapshot().fallbacks.values()
    assert "2 stays: another program has put 'notes.txt' in it" in why


def snapshot(root: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(root)): (
            path.lstat().st_ino,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in root.rglob("*")
    }


def test_one_that_is_being_read_stays(tmp_path: Path) -> None:
    save(tmp_path / "1", contents_of(1))
    metrics = Metrics()
    with CheckpointReader(tmp_path / "1") as reader:
        save(tmp_path / "2", contents_of(2), keep=1, metrics=metrics)
        assert names(tmp_path) == ["1", "2"]
        assert "another process reads" in str(metrics.snapshot().fallbacks)
        reader.check()
    save(tmp_path / "3", contents_of(3), keep=1)
    assert names(tmp_path) == ["3"]


class SpoilingDisk(StraightDisk):
    """A disk that flips a bit of the `nth` write; the writes of the manifest count, too."""

    def __init__(self, nth: int) -> None:
        self.nth, self.count = nth, 0

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.count += 1
        spoilt = bytearray(data)
        spoilt[0] ^= 4 if self.count == self.nth else 0
        return super().write(fd, bytes(spoilt), offset)

    def write_data(self, fd: int, data: memoryview, offset: int) -> int:
        return self.write(fd, data, offset)


def test_nothing_older_goes_before_the_new_one_was_read_back(tmp_path: Path) -> None:
    save(tmp_path / "old", CONTENTS)
    disk = SpoilingDisk(0)
    save(tmp_path / "rehearsal", contents_of(2), disk=disk, buffer_bytes=SMALL)
    shutil.rmtree(tmp_path / "rehearsal")
    assert disk.count >= 10
    for nth in range(1, disk.count + 1):
        with pytest.raises(StoreError, match=r"not what was|is not the one|sha256|expected JSON"):
            save(
                tmp_path / "new",
                contents_of(2),
                keep=1,
                disk=SpoilingDisk(nth),
                buffer_bytes=SMALL,
            )
        assert names(tmp_path) == ["old"]
    assert same(read(tmp_path / "old"), CONTENTS)


def test_the_points_come_in_their_order(tmp_path: Path) -> None:
    """At each point one thing more has happened."""
    save(tmp_path / "old", CONTENTS)
    seen: list[str] = []

    class Watching(CheckpointDisk):
        def hook(self, point: str) -> None:
            seen.append(point)
            shown = [name for name in names(tmp_path) if not name.startswith(".")]
            hidden = [name for name in names(tmp_path) if name.startswith(".")]
            index = POINTS.index(point)
            assert shown == (
                ["old"]
                if index < POINTS.index("renamed")
                else ["new", "old"]
                if index < POINTS.index("old one hidden")
                else ["new"]
            )
            assert len(hidden) == (index < 7 or point == "old one hidden")
            if "new" in shown:
                assert verify(tmp_path / "new").is_whole

    save(tmp_path / "new", contents_of(2), keep=1, disk=Watching())
    assert seen[:3] == ["created", "shard opened", "shard opened"]
    assert tuple(dict.fromkeys(seen)) == POINTS


# --- leftovers ------------------------------------------------------------------------------------


def leave(parent: Path, name: str, token: str, kind: str = "part") -> Path:
    """Make a hidden directory as a killed saver leaves it."""
    path = parent / f".{name}.{token * 16}.{kind}"
    path.mkdir(mode=0o700)
    (path / "model-00001.safetensors").write_bytes(bytes(5000))
    if kind == "old":
        (path / "manifest.json").write_bytes(b"{")
    return path


def test_leftovers_go_only_if_their_lock_is_free(tmp_path: Path) -> None:
    dead, old, live = (
        leave(tmp_path, "x", "a"),
        leave(tmp_path, "y", "b", "old"),
        leave(tmp_path, "z", "c"),
    )
    with CheckpointDirectory(live) as directory:
        assert directory.try_lock()
        with CheckpointWriter(tmp_path / "new"):
            assert not dead.exists() and not old.exists() and live.exists()
        with pytest.raises(ConfigError, match="another save is under way there"):
            CheckpointWriter(tmp_path / "z")
        assert names(tmp_path) == [live.name]
    save(tmp_path / "z", CONTENTS)
    assert names(tmp_path) == ["z"]


KILLED = """
import os, signal, sys
from support.checkpoints import contents_of, save
from offload.checkpoint.disk import CheckpointDisk

class Killing(CheckpointDisk):
    def hook(self, point):
        if point == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGKILL)

save(sys.argv[1], contents_of(2), keep=1, disk=Killing())
"""


@pytest.mark.parametrize("point", ["data written", "old one hidden"])
def test_what_a_killed_saver_leaves_goes_with_the_next_save(tmp_path: Path, point: str) -> None:
    save(tmp_path / "old", CONTENTS)
    done = children.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "new"), point],
        cwd=Path(__file__).parents[1],
        timeout=HANG_S,
        check=False,
    )
    assert done.returncode == -9
    expected = "old" if point == "data written" else "new"
    assert [name for name in names(tmp_path) if not name.startswith(".")] == [expected]
    assert len(names(tmp_path)) == 2
    assert same(read(find_newest(tmp_path)), contents_of(1 if expected == "old" else 2))
    save(tmp_path / "next", contents_of(3))
    assert names(tmp_path) == sorted([expected, "next"])


def test_a_directory_taken_for_a_leftover_is_made_again(tmp_path: Path) -> None:
    """Between mkdir and lock another saver may remove it."""

    class Unlucky(CheckpointDisk):
        count = 0

        def mkdir(self, dir_fd: int, name: str) -> None:
            super().mkdir(dir_fd, name)
            self.count += 1
            if self.count < 4:
                os.rmdir(name, dir_fd=dir_fd)

    disk = Unlucky()
    save(tmp_path / "a", CONTENTS, disk=disk)
    assert disk.count == 4
    assert names(tmp_path) == ["a"]

    class Hopeless(CheckpointDisk):
        def mkdir(self, dir_fd: int, name: str) -> None:
            super().mkdir(dir_fd, name)
            os.rmdir(name, dir_fd=dir_fd)

    with nothing_left(), pytest.raises(StateError, match="others remove"):
        save(tmp_path / "b", CONTENTS, disk=Hopeless())


# Newer Pythons warn of forks in a process with threads, which is what this test does.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_leaves_the_save_alone(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a") as writer:
        fill(writer, CONTENTS)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                writer.commit({}, "00")
            except StateError:
                writer.abandon()
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.commit({}, "00", keep=1)
    assert same(read(tmp_path / "a"), CONTENTS)


# --- paths and modes ------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o777])
def test_only_the_owner_may_look(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        save(tmp_path / "made" / "a", CONTENTS)
    assert stat.S_IMODE((tmp_path / "made" / "a").stat().st_mode) == 0o700
    if mask != 0o777:
        assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    for file in (tmp_path / "made" / "a").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
        assert file.stat().st_nlink == 1


def test_what_is_there_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    (tmp_path / "directory").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "dangling").symlink_to("nowhere")
    save(tmp_path / "saved", CONTENTS)
    before = snapshot(tmp_path)
    for name in ("directory", "file", "dangling", "saved"):
        disk = FaultyDisk()
        with pytest.raises(ConfigError, match="is there already"):
            CheckpointWriter(tmp_path / name, disk=disk)
        assert disk.calls == []
    for bad in ("", ".", "..", "/", ".hidden", "x" * 201, "a\0b", b"bytes", 7, None):
        with pytest.raises(ConfigError, match="path"):
            CheckpointWriter(bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="expected a directory to save in"):
        CheckpointWriter(tmp_path / "file" / "a")
    assert snapshot(tmp_path) == before


def test_parents_may_be_missing_or_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert save("a/b/c", CONTENTS) == tmp_path / "a" / "b" / "c"
    (tmp_path / "link").symlink_to("a")
    assert save("link/d", CONTENTS, keep=1) == tmp_path / "link" / "d"
    assert names(tmp_path / "a") == ["b", "d"]
    with CheckpointWriter("a/e") as writer:
        fill(writer, CONTENTS)
        monkeypatch.chdir("/")  # relative paths were resolved when they were given
        writer.commit({}, "abc123", keep=1)
    assert names(tmp_path / "a") == ["b", "e"]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    from offload.storage.safetensors_header import TensorSpec

    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    disk = CheckpointDisk()
    with CheckpointWriter(tmp_path / "a", disk=disk) as writer:
        with pytest.raises(StoreError, match=r"ENOSPC.*are needed, .* free; make room") as caught:
            writer.open_shard("model", [TensorSpec("w", "U8", (2 * free,))])
        assert caught.value.operation == "allocate"
        with pytest.raises(StoreError, match="ENOSPC"):
            writer.commit({}, "00")
    assert names(tmp_path) == []


# --- several savers -------------------------------------------------------------------------------


class Meeting(CheckpointDisk):
    """A disk of one of two savers: neither goes on from `point` before both have reached it."""

    def __init__(self, barrier: threading.Barrier, point: str) -> None:
        self._barrier, self._point = barrier, point

    def hook(self, point: str) -> None:
        if point == self._point:
            self._barrier.wait(HANG_S)


def save_at_once(paths: list[Path], point: str, keep: int | None) -> list[BaseException | None]:
    barrier = threading.Barrier(len(paths))
    errors: list[BaseException | None] = [None] * len(paths)

    def work(index: int) -> None:
        try:
            save(paths[index], contents_of(index), keep=keep, disk=Meeting(barrier, point))
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(paths))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    return errors


@pytest.mark.parametrize("point", ["created", "files synced", "verified", "renamed"])
def test_two_savers_in_one_directory(tmp_path: Path, point: str) -> None:
    save(tmp_path / "old", contents_of(9))
    paths = [tmp_path / "a", tmp_path / "b"]
    assert save_at_once(paths, point, keep=2) == [None, None]
    numbers = sorted(number_of(path) for path in paths)
    assert numbers in ([2, 2], [2, 3])
    for index, path in enumerate(paths):
        assert same(read(path), contents_of(index))
    assert set(names(tmp_path)) - {"old"} == {"a", "b"}
    save(tmp_path / "c", contents_of(3), keep=1)
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("point", ["files synced", "verified"])
def test_two_savers_to_one_path(tmp_path: Path, point: str) -> None:
    """Both have begun before either could see the other; one of them wins."""

    class Blind(Meeting):
        """A disk that lets neither saver make and lock its directory before both have looked
        around.
        """

        def mkdir(self, dir_fd: int, name: str) -> None:
            self._barrier.wait(HANG_S)
            super().mkdir(dir_fd, name)

    barrier = threading.Barrier(2)
    errors: list[BaseException | None] = [None, None]

    def work(index: int) -> None:
        try:
            save(tmp_path / "a", contents_of(index), keep=2, disk=Blind(barrier, point))
        except BaseException as error:
            errors[index] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    (lost,) = [error for error in errors if error is not None]
    assert isinstance(lost, StoreError)
    assert (lost.operation, lost.file) == ("rename", str(tmp_path / "a"))
    assert same(read(tmp_path / "a"), contents_of(errors.index(None)))
    assert names(tmp_path) == ["a"]
