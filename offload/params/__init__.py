"""The parameters of a prepared model: which tier holds them, and when they are moved.

Read in this order: `units` and `block` (what is moved), `trace` and `prefetch` (which units are
used next), `host_cache` (fetch and evict), `residency` (what is resident, in one of the tiers that
a model computes in: `host_tier`, `device_tier`, and `gathered_tier` for ranks that shard the
blocks), `gradients` and its siblings (what backward computes), `activations` (what backward needs),
`placeholder` (what a parameter is while its values are in another tier), `hooks` and `engine` (a
model that runs), `prepared` (the model and its optimizer).
"""
