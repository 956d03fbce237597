"""Checkpoints on disk: written whole or not at all, read with every byte checked.

`CheckpointWriter` makes a directory that the format (offload/format) describes, `CheckpointReader`
reads one. Read in this order: disk, rooms, output, shard, draft, writer, older, reader. What is in
one is said by tensors, trees, model, optimizer, rng; saving, background, loading put it together.
"""

from __future__ import annotations

from offload.checkpoint.disk import CheckpointDisk
from offload.checkpoint.reader import CheckpointReader, SavedTensorSource
from offload.checkpoint.shard import Shard
from offload.checkpoint.writer import CheckpointWriter

__all__ = ["CheckpointDisk", "CheckpointReader", "CheckpointWriter", "SavedTensorSource", "Shard"]
