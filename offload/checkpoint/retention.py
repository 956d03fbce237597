"""Retention: which number a new checkpoint gets, and which older ones are removed once it is safe.

Numbers order the checkpoints of a directory. Those of saves in flight count, too: they can be read
in their hidden directories. Two saves at the same moment may get the same number; neither is older
than the other then, and neither removes the other.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

from offload.checkpoint.disk import OLD, CheckpointDisk, hidden_name, name_within, remove
from offload.checkpoint.format.directory import CheckpointDirectory, list_numbers
from offload.checkpoint.format.manifest import MANIFEST, Manifest, claimed_number
from offload.core.errors import FormatError, StoreError
from offload.core.metrics import Metrics


def next_number(parent: CheckpointDirectory) -> int:
    """Return one more than the number of the newest checkpoint, saves in flight included."""
    numbers = list(list_numbers(parent).values())
    for hidden in parent.names():
        if name_within(hidden) is not None:
            with (
                suppress(FormatError, StoreError),
                CheckpointDirectory(hidden, parent) as directory,
            ):
                numbers.append(claimed_number(directory.begin_of_manifest()) or 0)
    return 1 + max(numbers, default=0)


class OlderCheckpoints:
    """The checkpoints in `parent` that are older than `newest`, and of the same model: with the
    same names, types and shapes.
    """

    def __init__(
        self, parent: CheckpointDirectory, newest: Manifest, disk: CheckpointDisk, metrics: Metrics
    ) -> None:
        self._parent, self._newest = parent, newest
        self._disk, self._metrics = disk, metrics

    def remove_all_but(self, count: int) -> None:
        """Remove whole checkpoints beyond the newest `count` of them.

        The new checkpoint is safe by now: a failed removal is reported as a fall-back, not raised.
        A checkpoint that is not whole, is being read, or has other files in it is not touched.
        """
        doing = "look at older checkpoints"
        try:
            with ExitStack() as opened:
                doomed = self._whole()[count:]
                doing = "hide older checkpoints"
                hidden = []
                for name, files in doomed:
                    directory = opened.enter_context(CheckpointDirectory(name, self._parent))
                    if self._may_go(name, directory, files):
                        hidden.append((hidden_name(name, OLD), directory, files))
                        self._disk.rename(self._parent.fd, name, hidden[-1][0])
                        self._disk.hook("old one hidden")
                if hidden:
                    # Durable before a file is removed: no power failure shows a torn checkpoint.
                    self._disk.fsync_dir(self._parent.fd)
                doing = "remove older checkpoints"
                for name, directory, files in hidden:
                    remove(self._disk, self._parent, name, directory, files)
                    self._disk.hook("old one removed")
        except (OSError, FormatError) as error:
            self._tell(f"could not {doing}: {error}; the new one is whole")

    def _whole(self) -> list[tuple[str, list[str]]]:
        """Return name and files of each that is whole and of the same model, newest first."""
        found = []
        for name, number in list_numbers(self._parent).items():
            if number >= self._newest.number:
                continue
            with (
                suppress(FormatError, StoreError),
                CheckpointDirectory(name, self._parent) as directory,
            ):
                manifest = directory.read_whole()
                if manifest.fingerprint == self._newest.fingerprint:
                    found.append((name, [*manifest.files, MANIFEST]))
        return found

    def _may_go(self, name: str, directory: CheckpointDirectory, files: list[str]) -> bool:
        """Lock the directory, and return whether it may be removed."""
        foreign = sorted(set(os.listdir(directory.fd)) - set(files))
        if foreign:
            self._tell(f"{name} stays: another program has put {foreign[0]!r} in it")
        elif directory.try_lock() is False:
            self._tell(f"{name} stays: another process reads or removes it now")
        else:
            return directory.is_at(self._parent, name)
        return False

    def _tell(self, why: str) -> None:
        self._metrics.fall_back(f"checkpoints in {self._parent.path}", why)
