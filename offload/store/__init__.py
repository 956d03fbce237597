"""Bytes that do not fit in memory, on drives: files, I/O engines, and the store above them.

`DiskStore` and `MemoryStore` keep the promises of `contract.Store`. Read in this order: contract,
disk, space, files, engine, native_engine, python_engine.
"""

from __future__ import annotations

from offload.store.contract import DirectoryStats, Store, StoreSnapshot, StoreStats
from offload.store.disk import DiskStore
from offload.store.engine import Priority
from offload.store.memory import MemoryStore

__all__ = [
    "DirectoryStats",
    "DiskStore",
    "MemoryStore",
    "Priority",
    "Store",
    "StoreSnapshot",
    "StoreStats",
]
