"""Checkpoints on disk: written whole or not at all, read with every byte checked.

`CheckpointWriter` writes a directory in the format that `format` describes, and `CheckpointReader`
reads one. Read in this order: `disk`, `output`, `shard`, `draft`, `writer`, `retention`, `reader`.
The contents of a checkpoint are defined by `tensors`, `trees`, `model` and `optimizer`; `saves`
and `loading` put everything together.
"""
