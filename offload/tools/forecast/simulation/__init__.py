"""The engine in virtual time: its own decisions, on memory without bytes and drives without files.

`clock`, `drives` and `device` model the machine; `memory` has the pools, stores and units that the
engine's own classes work with; `staging`, `gradients` and `activations` take the place
of the others. So what the engine decides is decided here by the same code. `facts` plans the
memory, `world` puts all this together, and `training` runs iterations.
"""
