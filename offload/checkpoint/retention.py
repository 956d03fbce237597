"""Retention: which number a new checkpoint gets, and which older ones are removed once it is safe.

Numbers order the checkpoints of a directory. Those of saves in flight count, too: they can be read
in their hidden directories. Two saves at the same moment may get the same number; neither is older
than the other then, and neither removes the other.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

from offload.checkpoint.disk import (
    OLD,
    CheckpointDisk,
    hidden_name,
    leads_to,
    name_within,
    open_directory,
    remove,
    try_lock,
)
from offload.checkpoint.format.directory import CheckpointDirectory, list_numbers
from offload.checkpoint.format.manifest import MANIFEST, Manifest
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
                numbers.append(directory.claimed_number() or 0)
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
                each = [self._hide(name, files, opened) for name, files in doomed]
                hidden = [one for one in each if one is not None]
                if hidden:
                    # Durable before a file is removed: no power failure shows a torn checkpoint.
                    self._disk.fsync_dir(self._parent.fd)
                doing = "remove older checkpoints"
                for name, fd, files in hidden:
                    remove(self._disk, self._parent.fd, name, fd, files)
                    self._disk.hook("old one removed")
        except (OSError, FormatError) as error:
            self._tell(f"could not {doing}: {error}; the new one is whole")

    def _whole(self) -> list[tuple[str, list[str]]]:
        """Return name and files of each that is whole and of the same model, newest first."""
        numbers = list_numbers(self._parent)
        older = [name for name, number in numbers.items() if number < self._newest.number]
        found = []
        for name in sorted(older, key=lambda name: (numbers[name], name), reverse=True):
            with (
                suppress(FormatError, StoreError),
                CheckpointDirectory(name, self._parent) as directory,
            ):
                manifest = directory.read_manifest()
                directory.check_files(manifest)
                if manifest.fingerprint == self._newest.fingerprint:
                    found.append((name, [*manifest.files, MANIFEST]))
        return found

    def _hide(
        self, name: str, files: list[str], opened: ExitStack
    ) -> tuple[str, int, list[str]] | None:
        """Return the hidden name, the descriptor and the files; None: it stays."""
        fd = open_directory(self._parent.fd, name)
        opened.callback(os.close, fd)
        foreign = sorted(set(os.listdir(fd)) - set(files))
        if foreign:
            self._tell(f"{name} stays: another program has put {foreign[0]!r} in it")
        elif try_lock(fd) is False:
            self._tell(f"{name} stays: another process reads or removes it now")
        elif leads_to(self._parent.fd, name, fd):
            hidden = hidden_name(name, OLD)
            self._disk.rename(self._parent.fd, name, hidden)
            self._disk.hook("old one hidden")
            return hidden, fd, files
        return None

    def _tell(self, why: str) -> None:
        self._metrics.fall_back(f"checkpoints in {self._parent.path}", why)
