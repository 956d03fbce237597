"""The user's weight files: a safetensors file, or a directory with one or with shards and their
index, as Hugging Face writes it. They are only read.
"""

from __future__ import annotations

import os
from pathlib import Path

from offload.core.errors import ConfigError, FormatError
from offload.core.log import LOG
from offload.core.portable import refused
from offload.storage.safetensors_file import MOST_HEADER_BYTES, Entry, SafetensorsFile, parse_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


class Weights:
    """A set of open weight files. entries: the file and the place of each tensor, by name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"weights: expected a path, got {type(path).__name__}")
        self.path = Path(path)
        self.files: list[SafetensorsFile] = []
        self.entries: dict[str, tuple[SafetensorsFile, Entry]] = {}
        try:
            if self.path.is_dir():
                self._open_directory()
            elif self.path.exists():
                self._open(self.path)
            else:
                raise ConfigError(f"weights: {self.path} does not exist")
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path) -> SafetensorsFile:
        file = SafetensorsFile(path)
        self.files.append(file)
        self.entries |= {name: (file, entry) for name, entry in file.entries.items()}
        return file

    def _open_directory(self) -> None:
        if (self.path / SINGLE).exists():
            self._open(self.path / SINGLE)
            return
        index = self.path / INDEX
        if not index.exists():
            raise ConfigError(
                f"weights: {self.path} has neither {SINGLE} nor {INDEX}; give a safetensors file, "
                "or a directory that save_pretrained has written"
            )
        places = _read_index(index)
        shards = {name: self._open(self.path / name) for name in dict.fromkeys(places.values())}
        missing = [name for name, shard in places.items() if name not in shards[shard].entries]
        if missing:
            raise FormatError(
                f"{index}: names tensors that their files do not have: {', '.join(missing[:20])}"
            )
        self.entries = {
            name: (shards[shard], shards[shard].entries[name]) for name, shard in places.items()
        }
        rest = sum(len(shard.entries) for shard in shards.values()) - len(places)
        if rest:
            LOG.info("weights: %d tensors in %s are not in its index", rest, self.path)

    def close(self) -> None:
        """Close the files. Idempotent. No read may be in flight."""
        for file in self.files:
            file.close()


def _read_index(path: Path) -> dict[str, str]:
    """Read the file name of each tensor's shard. A name that is a path is a `FormatError`, so that
    an index cannot lead out of its directory.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MOST_HEADER_BYTES + 1)
    except OSError as error:
        raise refused(path, "read", error) from error
    if len(text) > MOST_HEADER_BYTES:
        raise FormatError(f"{path}: has more than {MOST_HEADER_BYTES} bytes; expected an index")
    try:
        found = parse_json(text)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from error.__cause__
    places = found.get("weight_map") if type(found) is dict else None
    if type(places) is not dict or not places:
        raise FormatError(f"{path}: expected a weight_map of names and files")
    for name, shard in places.items():
        is_name = type(shard) is str and os.path.basename(shard) == shard and "\0" not in shard
        if not is_name or shard in ("", ".", ".."):
            raise FormatError(
                f"{path}: {name!a}: expected the name of a file beside it, got {shard!a}"
            )
    return places
