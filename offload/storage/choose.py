"""The choice of the I/O engine: probed, or forced by `OFFLOAD_IO`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from offload.core.errors import ConfigError
from offload.core.metrics import Metrics
from offload.core.node_share import current
from offload.storage.buffers import Buffer
from offload.storage.engine import (
    DEPTH,
    MOST_DEPTH,
    OPEN_ENGINES,
    PIECE_BYTES,
    TIMEOUT_S,
    IOEngine,
)
from offload.storage.files import BLOCK_BYTES
from offload.storage.native_engine import NativeEngine
from offload.storage.python_engine import PythonEngine

LEAST_DEPTH = 4  # however many processes share the drives
ENGINES = ("io_uring", "threads", "aiofiles")  # best first


def check_numbers(timeout_s: float, depth: int | None, piece_bytes: int) -> None:
    """Raise a `ConfigError` unless an engine can run with these numbers."""
    if piece_bytes < 1 or piece_bytes % BLOCK_BYTES:
        raise ConfigError(f"piece_bytes: expected a multiple of {BLOCK_BYTES}, got {piece_bytes}")
    if depth is not None and (not isinstance(depth, int) or not 1 <= depth <= MOST_DEPTH):
        raise ConfigError(f"depth: expected 1 to {MOST_DEPTH}, got {depth!r}")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= threading.TIMEOUT_MAX:
        raise ConfigError(
            f"timeout_s: expected seconds, up to {threading.TIMEOUT_MAX:g}, got {timeout_s!r}"
        )


def open_engine(
    files: Sequence[int],
    memory: Sequence[Buffer] = (),
    *,
    metrics: Metrics,
    name: str | None = None,
    timeout_s: float = TIMEOUT_S,
    depth: int | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> IOEngine:
    """Open the best engine that this system offers, or the one that `name` or `OFFLOAD_IO` forces.

    Each engine that cannot run, and each feature that the chosen one lacks, is noted as a fall-back
    in `metrics`. A forced engine that cannot run is a `ConfigError`. depth: operations in flight at
    once; None: this process's share of the depth at which a drive is fastest.
    """
    in_flight = current().part_of(DEPTH, LEAST_DEPTH) if depth is None else depth
    forced = name or os.environ.get("OFFLOAD_IO")
    if forced and forced not in ENGINES:
        raise ConfigError(f"OFFLOAD_IO: expected {' or '.join(ENGINES)}, got {forced!r}")
    engine: IOEngine
    for candidate in (forced,) if forced else ENGINES:
        try:
            if candidate == "aiofiles":
                engine = PythonEngine(timeout_s, in_flight, piece_bytes)
            else:
                engine = open_native(candidate, files, memory, timeout_s, in_flight, piece_bytes)
        except (OSError, ImportError) as error:
            why = _reason(error)
            if forced:
                raise ConfigError(f"OFFLOAD_IO={forced}: not available here: {why}") from error
            metrics.fall_back(f"I/O engine {candidate}", why)
            continue
        try:
            for note in engine.notes:
                metrics.fall_back(f"I/O engine {candidate}", note)
        except BaseException:
            engine.close()
            raise
        return engine
    raise AssertionError("the last engine needs nothing that could be missing")


def open_native(
    name: str,
    files: Sequence[int],
    memory: Sequence[Buffer],
    timeout_s: float,
    depth: int,
    piece_bytes: int,
) -> NativeEngine:
    """Open an engine of the native core. Raises ImportError without it, and OSError where the
    kernel forbids rings. memory: registered with the ring; held until `close`.
    """
    from offload import _native

    notes: Sequence[str] = ()
    if name == "threads":
        native, memory = _native.thread_engine(depth, piece_bytes), ()
    else:
        regions = [(each.address, each.nbytes) for each in memory]
        native, notes = _native.uring_engine(depth, piece_bytes, regions, list(files))
    try:
        return NativeEngine(name, native, notes, timeout_s, tuple(memory))
    except BaseException:  # Ctrl-C: its thread may run already, with no caller to close it
        for engine in list(OPEN_ENGINES):
            if isinstance(engine, NativeEngine) and engine._native is native:
                engine.close()
                break
        else:
            native.stop(timeout_s)
        raise


def _reason(error: OSError | ImportError) -> str:
    if isinstance(error, ImportError):
        return f"the native core is missing ({error})"
    code = error.errno or 0
    hint = {
        errno.EPERM: "forbidden, by seccomp or kernel.io_uring_disabled; see `offload doctor`",
        errno.ENOSYS: "this kernel has none",
        errno.ENOMEM: "not enough memory that may be locked; raise memlock",
    }.get(code, os.strerror(code))
    return f"{errno.errorcode.get(code, code)}: {hint}"
