"""Checkpoints on disk: written whole or not at all, read with every byte checked.

`CheckpointWriter` makes a directory that `format` describes, `CheckpointReader` reads one. Read in
this order: `disk`, `io_buffers`, `output`, `shard`, `draft`, `writer`, `retention`, `reader`. What
is in one is said by `tensors`, `trees`, `model`, `optimizer` and `rng`; `saving`, `background` and
`loading` put it together.
"""
