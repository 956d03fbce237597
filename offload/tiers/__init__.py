"""Which blocks of a prepared model are where: on the device, in host memory, on the drive.

`residency` decides it on the CPU, `device_residency` with a device above, `sharded_residency` among
ranks; `gradients`, `device_gradients`, `mean_gradients` and `sharded_gradients` do so for what
backward makes, `activations` and `outside` for what it needs. Below them are `block_store` (where
bytes come from and go to), `edits` (what others have changed), `prefetch` (how far ahead),
`device_budget` (how much of a device), `copies`, `device_tier`, `gathered_tier` and `gather_memory`
(what is computed with). What comes next is told by `scheduler` and `trace`; bytes are moved by
`transfer`, `store`, `shard`.
"""
