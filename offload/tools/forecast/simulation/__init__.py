"""The engine in virtual time: its own decisions, on memory without bytes and drives without files.

`drives` and `clock` are the world; `memory` gives the engine's own classes pools, stores and units
in it; `residency`, `device` and `update` are those classes, with what touches real tensors or a
real clock taken out. So what the engine decides is decided here by the same code.
"""
