"""All that can fail does: right bytes or a typed error, the old data still there, no leak."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loops import chosen, tally
from support.storage_faults import FaultySystem
from support.stores import (
    BLOCK,
    ENGINES,
    HANG_S,
    HEALTHY,
    MIB,
    PIECE,
    Bytes,
    nothing_left,
    open_store,
    places,
    random_bytes,
    read,
    write,
)

from offload.core.errors import (
    CapacityError,
    ConfigError,
    CorruptionError,
    OffloadError,
    StateError,
    StoreError,
    StoreTimeout,
)
from offload.core.metrics import Metrics
from offload.storage import choose
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind

CHUNKS = {"layer.0": 4 * PIECE, "layer.1": 3 * PIECE + 100, "layer.2": PIECE - 1, "layer.3": 1}
OPERATIONS = 10  # pieces of all chunks: the positions a fault can have

# name -> kind, code of ERROR or milliseconds
KINDS: dict[str, tuple[FaultKind, int]] = {
    "EIO": (FaultKind.ERROR, errno.EIO),
    "ENOSPC": (FaultKind.ERROR, errno.ENOSPC),
    "EDQUOT": (FaultKind.ERROR, errno.EDQUOT),
    "EAGAIN": (FaultKind.ERROR, errno.EAGAIN),
    "EINTR": (FaultKind.ERROR, errno.EINTR),
    "short half": (FaultKind.SHORT_HALF, 0),
    "short zero": (FaultKind.SHORT_ZERO, 0),
    "flip": (FaultKind.FLIP, 0),
    "lost write": (FaultKind.LOST_WRITE, 0),
    "lost completion": (FaultKind.LOST_COMPLETION, 0),
    "delay": (FaultKind.DELAY, 3),
}
FATAL = {"EIO", "ENOSPC", "EDQUOT"}  # at once; the others are mended unless they last
SILENT = {"flip", "lost write"}  # not noticed until the bytes are read
REMEDIES = {
    errno.EIO: "use another drive",
    errno.ENOSPC: "make room on it",
    errno.EDQUOT: "raise it, or use another directory",
    errno.EAGAIN: "out of I/O resources",
    errno.ENODATA: "was it cut short?",
    errno.EBADMSG: "go back to a checkpoint and use another drive",
    errno.ETIMEDOUT: "see dmesg",
    errno.ETIME: "see dmesg",
}


@dataclass(frozen=True)
class Case:
    kind: str
    is_write: bool
    nth: int
    forever: bool

    @property
    def fault(self) -> Fault:
        kind, code = KINDS[self.kind]
        return Fault(kind, self.nth, self.forever, code, seed=977 * self.nth)


def cases_of(kind: str) -> list[Case]:
    """List every position, in writes and in reads, once and for ever; few of those that last long,
    and out of torture few of those that last for ever.
    """
    slow = kind in ("lost completion", "EAGAIN")
    lasting = chosen(test=(1, 6, OPERATIONS), torture=range(1, OPERATIONS + 1))
    found = []
    for nth, is_write, forever in product(range(1, OPERATIONS + 1), (True, False), (False, True)):
        is_many = not forever and kind != "lost completion"
        if is_many or nth in ((1, 6) if slow else lasting):
            found.append(Case(kind, is_write, nth, forever))
    return found


def check_error(error: OffloadError, name: str, store: DiskStore, case: Case) -> None:
    """Check that the error says all there is to know."""
    assert isinstance(error, StoreError), repr(error)
    assert error.errno is not None
    assert error.tensor == name
    assert error.operation == ("write" if case.is_write else "read")
    assert error.file == store._files[0].label
    assert error.offset_bytes is not None
    message = str(error)
    assert f"{error.operation} of {name}" in message
    assert f"offset {error.offset_bytes}" in message
    assert error.file in message
    assert REMEDIES.get(error.errno, "see dmesg") in message
    if not case.is_write:
        ((_, begin, nbytes),) = places(store, name)
        assert begin <= error.offset_bytes < begin + nbytes
        assert (error.offset_bytes - begin) % PIECE == 0
    kind, code = KINDS[case.kind]
    if kind is FaultKind.ERROR:
        assert error.errno == code
    elif kind in (FaultKind.SHORT_HALF, FaultKind.SHORT_ZERO):
        assert error.errno == (errno.EIO if case.is_write else errno.ENODATA)
    elif kind is FaultKind.LOST_COMPLETION:
        assert isinstance(error, StoreTimeout)
    else:
        assert isinstance(error, CorruptionError)


class Trial:
    """One store, with one fault after the other."""

    def __init__(self, directory: Path, engine: str, timeout_s: float) -> None:
        self.store = open_store(
            directory,
            engine,
            capacity_bytes=2 * MIB,
            piece_bytes=PIECE,
            depth=4,
            timeout_s=timeout_s,
        )
        self.right: dict[str, Bytes] = {}
        self.seed = 0
        self.stuck_reads = 0
        self.stuck_writes = 0  # bytes
        for name in CHUNKS:
            self.renew(name)

    def renew(self, name: str) -> None:
        self.right[name] = self.fresh(name)
        write(self.store, name, self.right[name])

    def fresh(self, name: str) -> Bytes:
        self.seed += 1
        return random_bytes(CHUNKS[name], self.seed)

    def run(self, case: Case) -> bool:
        """Run one case; return whether its fault was met."""
        store = self.store
        data = {n: self.fresh(n) if case.is_write else np.empty_like(self.right[n]) for n in CHUNKS}
        start = store.write if case.is_write else store.read
        store.engine.inject(case.fault)
        tickets = {name: start(name, data[name]) for name in CHUNKS}
        errors: dict[str, OffloadError] = {}
        for name, ticket in tickets.items():
            try:
                ticket.wait(HANG_S)
            except OffloadError as error:
                check_error(error, name, store, case)
                errors[name] = error
        met = store.engine.attempts() >= case.nth
        store.engine.inject(HEALTHY)
        for name in CHUNKS.keys() - errors.keys():
            if case.is_write:
                self.right[name] = data[name]
            else:
                assert (data[name] == self.right[name]).all(), "wrong bytes were handed over"
        self.check_errors(case, errors, met)
        self.check_bytes(case)
        self.check_space()
        return met

    def check_errors(self, case: Case, errors: dict[str, OffloadError], met: bool) -> None:
        """Check that there are as many errors as there must be."""
        stuck = [n for n, e in errors.items() if e.errno == errno.ETIMEDOUT]  # type: ignore
        if case.is_write:
            self.stuck_writes += sum(-(-CHUNKS[name] // BLOCK) * BLOCK for name in stuck)
        else:
            self.stuck_reads += len(stuck)
        assert met
        if case.kind == "lost completion":
            assert stuck
        elif case.kind == "delay" or (case.is_write and case.kind in SILENT):
            assert not errors
        elif case.kind == "lost write":
            pass  # a buffer may have the right bytes from before
        elif case.forever:
            assert errors
        else:
            assert len(errors) == (case.kind in FATAL or case.kind == "flip")

    def check_bytes(self, case: Case) -> None:
        """Check that all chunks are right, the old ones after a failed write, and that spoilt ones
        are found.
        """
        spoilt = 0
        for name in CHUNKS:
            try:
                assert (read(self.store, name) == self.right[name]).all()
            except CorruptionError:
                assert case.is_write
                assert case.kind in SILENT
                spoilt += 1
                self.renew(name)
            except StoreTimeout as error:
                assert case.kind == "lost completion"
                assert case.forever
                assert error.errno == errno.ETIME, "no place was left"
        if case.is_write and case.kind in SILENT:
            assert spoilt >= 1 if case.forever else spoilt == 1

    def check_space(self) -> None:
        store = self.store
        needed = sum(-(-nbytes // BLOCK) * BLOCK for nbytes in CHUNKS.values())
        stats = store.stats()
        assert stats.used_bytes == needed + self.stuck_writes
        assert sum(v.holders - 1 for v in store._table.current.values()) == self.stuck_reads
        assert bool(stats.quarantined_bytes) == bool(self.stuck_writes or self.stuck_reads)
        assert not store._table.writing
        assert store._space.waiting_bytes == [0]
        assert bool(store.engine.abandoned_bytes) == bool(self.stuck_writes or self.stuck_reads)
        assert not store.engine._flying


def try_all(directory: Path, engine: str, cases: Sequence[Case], timeout_s: float) -> int:
    """Run the cases with one store; return how many faults were met."""
    trial = Trial(directory, engine, timeout_s)
    try:
        return sum(trial.run(case) for case in cases)
    finally:
        trial.store.close()


@pytest.mark.quick
@pytest.mark.parametrize("kind", chosen(test=[*KINDS], torture=[*KINDS], quick=["ENOSPC", "EIO"]))
@pytest.mark.parametrize("engine", ENGINES)
def test_a_fault_at_every_position(engine: str, kind: str, tmp_path: Path) -> None:
    """Over a thousand in all, in torture. Those that last long run side by side."""
    cases = cases_of(kind)
    if kind != "lost completion":
        parts = [[case for case in cases if not case.forever]]
        parts += [[case] for case in cases if case.forever] if kind == "EAGAIN" else []
        parts += [[case for case in cases if case.forever]] if kind != "EAGAIN" else []
        with nothing_left(), ThreadPoolExecutor(len(parts)) as threads:
            ends = [threads.submit(try_all, tmp_path, engine, part, 20.0) for part in parts]
            met = sum(end.result(HANG_S) for end in ends)
    else:  # what never ended keeps its file open
        with ThreadPoolExecutor(len(cases)) as threads:
            ends = [threads.submit(try_all, tmp_path, engine, [case], 0.3) for case in cases]
            met = sum(end.result(HANG_S) for end in ends)
    assert met == len(cases)
    tally("planted faults", met)


def test_there_are_hundreds_of_them() -> None:
    planted = len(ENGINES) * sum(len(cases_of(kind)) for kind in KINDS)
    assert planted >= chosen(test=700, torture=1000)


# --- calls beside the engines ---------------------------------------------------------------------

CODES = (errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EMFILE)


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", ["open", "reserve"])
def test_a_store_that_cannot_be_opened(call: str, code: int, nth: int, tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    is_full = call == "reserve" and code in (errno.ENOSPC, errno.EDQUOT)
    with nothing_left(), pytest.raises(CapacityError if is_full else StoreError) as caught:
        DiskStore(paths, MIB, system=FaultySystem(call, code, nth))
    message = str(caught.value)
    assert errno.errorcode[code] in message
    assert str(paths[nth - 1]) in message
    if is_full:
        assert "524288 bytes" in message
        assert "make room, add a directory" in message
    else:
        error = caught.value
        assert isinstance(error, StoreError)
        assert (error.errno, error.operation, error.file) == (code, call, str(paths[nth - 1]))
        assert "offload doctor" in message
    assert list(paths[0].iterdir()) == list(paths[1].iterdir()) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path / "missing", "ENOENT .*make the directory, or mount the drive"),
        (lambda path: path / "file", "ENOTDIR .*give the directory itself, not a file"),
    ],
)
def test_a_directory_that_is_none(make: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with nothing_left(), pytest.raises(StoreError, match=message):
        DiskStore([tmp_path, make(tmp_path)], MIB)


def test_more_than_the_drive_has(tmp_path: Path) -> None:
    with (
        nothing_left(),
        pytest.raises(CapacityError, match=r"are needed, .* are free: .*make room"),
    ):
        DiskStore(tmp_path, 1 << 60)


def test_directories_are_given_once(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    for paths in ([], [tmp_path, tmp_path], [tmp_path, tmp_path / "x" / ".."]):
        with pytest.raises(ConfigError, match="directories: expected one or several, each once"):
            DiskStore(paths, MIB)


@pytest.mark.parametrize("nbytes", [0, -BLOCK, 1000, BLOCK + 512])
def test_pieces_are_whole_blocks(tmp_path: Path, nbytes: int) -> None:
    with pytest.raises(
        ConfigError, match=f"piece_bytes: expected a multiple of 4096, got {nbytes}"
    ):
        DiskStore(tmp_path, MIB, piece_bytes=nbytes)


# --- which engine runs ----------------------------------------------------------------------------


def refuse(error: Exception) -> Callable[..., Any]:
    def opener(*args: object) -> Any:
        raise error

    return opener


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_is_forced_by_the_environment(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_IO", name)
    with nothing_left(), DiskStore(tmp_path, MIB) as store:
        assert store.stats().engine == name
        assert not store.metrics.snapshot().fallbacks


def test_an_unknown_engine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_IO", "uring")
    message = "OFFLOAD_IO: expected io_uring or threads or aiofiles, got 'uring'"
    with nothing_left(), pytest.raises(ConfigError, match=message):
        DiskStore(tmp_path, MIB)


def replace_opening(monkeypatch: pytest.MonkeyPatch, act: Any, *names: str) -> None:
    """Have `act` open the native engines called `names`."""
    real = choose.open_native

    def open_native(name: str, *rest: Any) -> Any:
        return (act if name in names else real)(name, *rest)

    monkeypatch.setattr(choose, "open_native", open_native)


def test_without_io_uring_threads_run_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    replace_opening(monkeypatch, refuse(OSError(errno.EPERM, "no")), "io_uring")
    with DiskStore(tmp_path, MIB) as store:
        assert store.stats().engine == "threads"
        (why,) = store.metrics.snapshot().fallbacks.values()
        assert why.startswith("EPERM: forbidden, by seccomp or kernel.io_uring_disabled")
        write(store, "w", random_bytes(5000, 1))
        assert (read(store, "w") == random_bytes(5000, 1)).all()
    with (
        nothing_left(),
        pytest.raises(StateError, match=r"I/O engine io_uring: EPERM.*strict=True"),
    ):
        DiskStore(tmp_path, MIB, metrics=Metrics(strict=True))
    with (
        nothing_left(),
        pytest.raises(ConfigError, match="OFFLOAD_IO=io_uring: not available here"),
    ):
        DiskStore(tmp_path, MIB, engine="io_uring")


def test_without_the_native_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    replace_opening(monkeypatch, refuse(ImportError("no _native")), "io_uring", "threads")
    with DiskStore(tmp_path, MIB) as store:
        assert store.stats().engine == "aiofiles"
        assert store.metrics.snapshot().fallbacks == {
            "I/O engine io_uring": "the native core is missing (no _native)",
            "I/O engine threads": "the native core is missing (no _native)",
        }


def test_a_refused_wish_is_a_fall_back_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With strict=True the engine that has just been opened is closed again."""

    real = choose.open_native

    def lesser(name: str, *rest: Any) -> Any:
        engine = real("threads", *rest)
        engine.notes.append("memory is not registered")
        return engine

    monkeypatch.delenv("OFFLOAD_IO", raising=False)
    replace_opening(monkeypatch, lesser, "io_uring")
    with DiskStore(tmp_path, MIB) as store:
        assert store.metrics.snapshot().fallbacks == {
            "I/O engine io_uring": "memory is not registered"
        }
    with nothing_left(), pytest.raises(StateError, match="memory is not registered"):
        DiskStore(tmp_path, MIB, metrics=Metrics(strict=True))
