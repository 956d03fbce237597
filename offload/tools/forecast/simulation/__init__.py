"""The engine in virtual time: its own decisions, on memory without bytes and drives without files.

`clock`, which has the drives, and `device` model the machine; `memory` has the pools, stores and
units that the engine's own classes work with; `staging`, `gradients` and `activations` take the
place of others. So what the engine decides is decided here by the same code. `training` puts all
this together and runs iterations.
"""
