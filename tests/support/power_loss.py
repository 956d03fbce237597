"""Power failures: the calls of a save are recorded, and the disk is shown as it may be afterwards.

The model of the disk. Files and directories are inodes. A change of an inode is surely there once
that very inode was synced; until then each change is there or not, by itself, in any order, and of
a write any of its sectors. A sync of a file says nothing about its name in a directory, and one of
a directory nothing about the files in it. One rename within a directory is one change. So the model
assumes none of the further guarantees of the journals of ext4 or XFS: there is no order between
changes of metadata, and a rename lasts only from the sync of its parent on.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.disk_doubles import SECTOR, StraightDisk

ROOT = 0  # the number of the directory that is watched


@dataclass(frozen=True)
class Change:
    """A call that changes the disk.

    call: the name of the method of `CheckpointDisk`; "write" also for `write_data`.
    inode: whose contents it changes.
    """

    call: str
    inode: int
    name: str = ""
    other: str = ""
    target: int = -1  # the inode that a new name leads to
    offset: int = 0
    data: bytes = b""


@dataclass
class Tree:
    """A whole disk: bytes of files, names in directories."""

    files: dict[int, bytearray] = field(default_factory=dict)
    names: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})

    def copy(self) -> Tree:
        return Tree(
            {inode: bytearray(data) for inode, data in self.files.items()},
            {inode: dict(names) for inode, names in self.names.items()},
        )

    def apply(self, change: Change, sectors: set[int] | None = None) -> None:
        """Apply a change. sectors: those of a write that have arrived; None: all."""
        call, inode = change.call, change.inode
        if call in ("mkdir", "open_new"):
            self.names.setdefault(inode, {})[change.name] = change.target
        elif call in ("unlink", "rmdir"):
            self.names.setdefault(inode, {}).pop(change.name, None)
        elif call == "rename":
            names = self.names.setdefault(inode, {})
            names.pop(change.name, None)
            names[change.other] = change.target
        elif call in ("allocate", "truncate"):
            self._resize(self.files.setdefault(inode, bytearray()), change.offset, call)
        elif call == "write":
            data = self.files.setdefault(inode, bytearray())
            for begin in range(0, len(change.data), SECTOR):
                if sectors is None or begin // SECTOR in sectors:
                    piece = change.data[begin : begin + SECTOR]
                    self._resize(data, change.offset + begin + len(piece), "allocate")
                    data[change.offset + begin : change.offset + begin + len(piece)] = piece

    @staticmethod
    def _resize(data: bytearray, nbytes: int, call: str) -> None:
        if len(data) < nbytes:
            data.extend(bytes(nbytes - len(data)))
        elif call == "truncate":
            del data[nbytes:]

    def write_to(self, path: Path) -> None:
        self._write_names(ROOT, path)

    def _write_names(self, inode: int, path: Path) -> None:
        path.mkdir()
        for name, target in self.names.get(inode, {}).items():
            if target in self.names:
                self._write_names(target, path / name)
            else:
                (path / name).write_bytes(self.files.get(target, b""))

    def fingerprint(self) -> int:
        return hash(self._picture(ROOT))

    def _picture(self, inode: int) -> tuple[Any, ...]:
        return tuple(
            (name, self._picture(target) if target in self.names else bytes(self._bytes(target)))
            for name, target in sorted(self.names.get(inode, {}).items())
        )

    def _bytes(self, inode: int) -> bytes:
        return bytes(self.files.get(inode, b""))


class RecordingDisk(StraightDisk):
    """A disk that makes all calls and records the changes. root: the directory that it watches."""

    def __init__(self, root: Path) -> None:
        self.changes: list[Change] = []
        self.points: list[tuple[int, str]] = []
        self.tree = Tree()  # what was there before
        self._numbers: dict[int, int] = {os.stat(root).st_ino: ROOT}
        self._next = 1
        self._read(root, ROOT)

    def _read(self, path: Path, inode: int) -> None:
        names = self.tree.names.setdefault(inode, {})
        for entry in sorted(path.iterdir()):
            names[entry.name] = number = self._new(os.lstat(entry).st_ino)
            if entry.is_dir():
                self._read(entry, number)
            else:
                self.tree.files[number] = bytearray(entry.read_bytes())

    def _new(self, ino: int) -> int:
        self._numbers[ino] = self._next
        self._next += 1
        return self._numbers[ino]

    def _of(self, fd: int) -> int:
        return self._numbers[os.fstat(fd).st_ino]

    def _at(self, dir_fd: int, name: str) -> int:
        return self._numbers[os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_ino]

    def hook(self, point: str) -> None:
        self.points.append((len(self.changes), point))

    def mkdir(self, dir_fd: int, name: str) -> None:
        super().mkdir(dir_fd, name)
        number = self._new(os.stat(name, dir_fd=dir_fd).st_ino)
        self.tree.names[number] = {}  # that it is a directory; nothing leads there yet
        self.changes.append(Change("mkdir", self._of(dir_fd), name, target=number))

    def open_new(self, dir_fd: int, name: str) -> int:
        fd = super().open_new(dir_fd, name)
        number = self._new(os.fstat(fd).st_ino)
        self.changes.append(Change("open_new", self._of(dir_fd), name, target=number))
        return fd

    def allocate(self, fd: int, nbytes: int) -> None:
        super().allocate(fd, nbytes)
        self.changes.append(Change("allocate", self._of(fd), offset=nbytes))

    def truncate(self, fd: int, nbytes: int) -> None:
        super().truncate(fd, nbytes)
        self.changes.append(Change("truncate", self._of(fd), offset=nbytes))

    def write(self, fd: int, data: Any, offset: int) -> int:
        moved = super().write(fd, data, offset)
        written = bytes(data[:moved])
        self.changes.append(Change("write", self._of(fd), offset=offset, data=written))
        return moved

    def write_data(self, fd: int, data: Any, offset: int) -> int:
        return self.write(fd, data, offset)

    def fsync(self, fd: int) -> None:
        super().fsync(fd)
        self.changes.append(Change("fsync", self._of(fd)))

    def fsync_dir(self, fd: int) -> None:
        super().fsync_dir(fd)
        self.changes.append(Change("fsync_dir", self._of(fd)))

    def rename(self, dir_fd: int, old: str, new: str) -> None:
        target = self._at(dir_fd, old)
        super().rename(dir_fd, old, new)
        self.changes.append(Change("rename", self._of(dir_fd), old, new, target))

    def unlink(self, dir_fd: int, name: str) -> None:
        self.changes.append(Change("unlink", self._of(dir_fd), name))
        super().unlink(dir_fd, name)

    def rmdir(self, dir_fd: int, name: str) -> None:
        self.changes.append(Change("rmdir", self._of(dir_fd), name))
        super().rmdir(dir_fd, name)


SYNCS = ("fsync", "fsync_dir")
_FEW = 8


def crash_states(
    before: Tree, changes: list[Change], rng: random.Random, draws: int
) -> Iterator[tuple[int, Tree]]:
    """Yield the states of the disk after a power failure behind each prefix of `changes`.

    Each is the number of changes before it, and one of the trees that may be there; each tree comes
    once for a prefix.
    """
    for count in range(len(changes) + 1):
        durable, open_changes = _split(changes[:count])
        base = before.copy()
        for change in durable:
            base.apply(change)
        seen: set[int] = set()
        for choice in _choices(open_changes, rng, draws):
            tree = base.copy()
            for change, sectors in choice:
                tree.apply(change, sectors)
            picture = tree.fingerprint()
            if picture not in seen:
                seen.add(picture)
                yield count, tree


def _split(prefix: list[Change]) -> tuple[list[Change], list[Change]]:
    """Split changes into those that are surely there, and those that may be."""
    synced: set[int] = set()
    durable: list[Change] = []
    uncertain: list[Change] = []
    for change in reversed(prefix):
        if change.call in SYNCS:
            synced.add(change.inode)
        else:
            (durable if change.inode in synced else uncertain).append(change)
    return durable[::-1], uncertain[::-1]


Choice = list[tuple[Change, "set[int] | None"]]


def _choices(changes: list[Change], rng: random.Random, draws: int) -> Iterator[Choice]:
    """Yield choices of the uncertain changes that are there."""
    data = [c for c in changes if c.call in ("allocate", "write", "truncate")]
    names = [c for c in changes if c not in data]
    yield []
    yield [(c, None) for c in changes]
    yield [(c, None) for c in data]
    yield [(c, None) for c in names]
    if len(changes) <= _FEW:  # all choices of whole changes
        for bits in range(1 << len(changes)):
            yield [(c, None) for i, c in enumerate(changes) if bits >> i & 1]
    for one in changes[-4:]:
        yield [(one, None)]
        yield [(c, None) for c in changes if c is not one]
    for _ in range(draws if changes else 0):
        chosen: Choice = []
        share = rng.choice((0.2, 0.5, 0.8, 0.95))
        named = rng.random() < 0.7  # without names nothing of it shows
        for change in changes:
            if rng.random() >= share and not (named and change in names):
                continue
            sectors = None
            if change.call == "write" and rng.random() < 0.5:  # torn
                count = -(-len(change.data) // SECTOR)
                sectors = {n for n in range(count) if rng.random() < 0.5}
            chosen.append((change, sectors))
        if rng.random() < 0.3:
            rng.shuffle(chosen)
        yield chosen
