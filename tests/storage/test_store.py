"""The contract of stores: generations, snapshots, exact space, refusals that change nothing."""

from __future__ import annotations

import contextlib
import gc
import itertools
import mmap
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import memory_store
from support.interrupts import interrupt_at
from support.loops import chosen
from support.memory_store import MemoryStore
from support.stores import (
    BLOCK,
    ENGINES,
    HANG_S,
    HEALTHY,
    KIB,
    MIB,
    PIECE,
    PinningStore,
    SlowLock,
    nbytes_of,
    nothing_left,
    open_store,
    places,
    plug,
    random_bytes,
    read,
    until,
    write,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef

from offload import _native
from offload.core.budget import Budget
from offload.core.errors import CapacityError, ConfigError, StateError, StoreError
from offload.core.extents import Extents
from offload.core.ticket import Ticket
from offload.storage.buffers import Buffer
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind
from offload.storage.files import SwapFile
from offload.storage.space import Extent, Space

CAPACITY = 512 * KIB


def make(kind: str, tmp_path: Path, **options: Any) -> Any:
    if kind == "memory":
        return MemoryStore(CAPACITY)
    options.setdefault("capacity_bytes", CAPACITY)
    return open_store(tmp_path, kind, piece_bytes=PIECE, **options)


@pytest.fixture(params=("memory", *ENGINES))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    with make(request.param, tmp_path) as store:
        yield store


@pytest.fixture(params=ENGINES)
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PinningStore]:
    with make(request.param, tmp_path, depth=4) as store:
        yield store


@pytest.fixture(params=ENGINES)
def narrow(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[PinningStore]:
    with make(request.param, tmp_path, depth=1) as store:
        yield store


def room(store: Any, *sizes: int) -> int:
    """Return the bytes that chunks of these sizes take."""
    align = 1 if isinstance(store, MemoryStore) else BLOCK
    return sum(-(-nbytes // align) * align for nbytes in sizes)


# --- every store ----------------------------------------------------------------------------------


def test_a_write_replaces_the_one_before(store: Any) -> None:
    generations = []
    for i, nbytes in enumerate((1, 5000, 0, 3 * PIECE + 1, 5000)):
        data = random_bytes(nbytes, i)
        write(store, "w", data)
        assert nbytes_of(store, "w") == nbytes
        assert (read(store, "w") == data).all()
        assert store.stats().used_bytes == room(store, nbytes)
        generations.append(store.generation_of("w"))
    assert generations == sorted(set(generations))
    assert store.names() == ["w"]


def test_tensors_and_buffers(store: Any) -> None:
    tensor = torch.arange(1000, dtype=torch.float32).reshape(10, 100)
    store.write("t", tensor).wait(HANG_S)
    back = torch.empty(1000, dtype=torch.float32)
    store.read("t", back).wait(HANG_S)
    assert torch.equal(back, tensor.flatten())
    store.write("b", b"some bytes").wait(HANG_S)
    target = bytearray(10)
    store.read("b", target).wait(HANG_S)
    assert target == b"some bytes"


def test_what_is_unknown_is_refused_by_name(store: Any) -> None:
    write(store, "v", random_bytes(10, 1))
    for use in (store.generation_of, store.free, lambda n: store.snapshot([n])):
        with pytest.raises(StateError, match=r"nothing is stored as 'w'.*1 chunks are stored"):
            use("w")
    with pytest.raises(StateError, match="nothing is stored as 'w'"):
        store.read("w", bytearray(10))


READ_ONLY = np.zeros(100, dtype=np.uint8)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (np.zeros(99, dtype=np.uint8), "w: expected a target of 100 bytes as stored, got 99"),
        (bytearray(101), "w: expected a target of 100 bytes as stored, got 101"),
        (READ_ONLY, "w: expected memory that can be written, got a read-only view"),
        (bytes(100), "w: expected memory that can be written, got a read-only view"),
        (np.zeros(200, dtype=np.uint8)[::2], r"w: expected contiguous memory, got strides \(2,\)"),
        (torch.zeros(10, 20, dtype=torch.uint8)[:, :10], "w: expected a contiguous tensor"),
        (torch.zeros(100, dtype=torch.uint8, device="meta"), "w: expected a tensor in host memory"),
        (None, "w: expected a tensor or a buffer, got NoneType"),
    ],
)
def test_a_wrong_target_is_refused_and_holds_nothing(store: Any, target: Any, message: str) -> None:
    write(store, "w", random_bytes(100, 1))
    snapshot = store.snapshot()
    for source in (store, snapshot):
        with pytest.raises(ConfigError, match=message):
            source.read("w", target)
    snapshot.release()
    store.free("w")
    assert store.stats().used_bytes == 0


def test_a_wrong_source_is_refused(store: Any) -> None:
    for source in (np.zeros(200, dtype=np.uint8)[::2], torch.zeros(4, 4)[:, 1], None, 3):
        with pytest.raises(ConfigError, match="layer: expected"):
            store.write("layer", source)
    assert store.names() == []
    assert store.stats().used_bytes == 0


def test_a_wrong_name_or_priority_is_refused(store: Any) -> None:
    write(store, "w", random_bytes(100, 1))
    used, target = store.stats().used_bytes, bytearray(100)
    for priority in (-1, 3, 1 << 40, "high", None):
        for use in (store.write, store.read, store.snapshot().read):
            with pytest.raises(
                ConfigError, match=r"priority: expected one of Priority\.WAITED_FOR"
            ):
                use("w", target, priority=priority)  # type: ignore[operator]
    for use in (store.write, store.read):
        with pytest.raises(ConfigError, match="name: expected a string, got list"):
            use(["w"], target)
    store.read("w", target, priority=2).wait(HANG_S)  # type: ignore[arg-type]
    assert store.stats().used_bytes == used


def resized(nbytes: int) -> torch.Tensor:
    tensor = torch.zeros(100, dtype=torch.uint8)
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(100, dtype=torch.uint8)


def read_only() -> torch.Tensor:
    array = np.frombuffer(mmap.mmap(-1, 100, prot=mmap.PROT_READ), dtype=np.uint8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(array)


def cut_short() -> np.ndarray[Any, Any]:
    with tempfile.TemporaryFile() as file:
        file.truncate(BLOCK)
        found = np.frombuffer(mmap.mmap(file.fileno(), BLOCK), dtype=np.uint8)
        file.truncate(0)
    return found[:100]


WITHOUT_MEMORY: dict[str, tuple[Callable[[], Any], str]] = {
    "freed": (lambda: resized(0), "reaches to byte 100 of a storage that has 0"),
    "one byte short": (lambda: resized(99), "reaches to byte 100 of a storage that has 99"),
    "zeros without memory": (
        lambda: torch._efficientzerotensor(100, dtype=torch.uint8),
        "without memory",
    ),
    "fake": (fake, "a FakeTensor without memory"),
    "conjugated": (lambda: torch.ones(25, dtype=torch.complex32).conj(), "resolve_conj"),
    "negated": (lambda: torch._neg_view(torch.ones(25)), "resolve_neg"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(25)]), "got a nested tensor"),
    "sparse": (lambda: torch.zeros(25).to_sparse(), r"got layout torch\.sparse_coo"),
    "cut short": (cut_short, "behind the end of its memory-mapped file"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # of torch: some are prototypes
def test_memory_that_is_not_there_is_refused(store: Any) -> None:
    """It would be a crash, or other bytes than the tensor's."""
    write(store, "w", random_bytes(100, 1))
    for make_it, message in WITHOUT_MEMORY.values():
        for use in (store.read, store.write):
            with pytest.raises(ConfigError, match=f"^w: .*{message}"):
                use("w", make_it())
        assert (read(store, "w") == random_bytes(100, 1)).all(), message


def test_a_target_on_a_read_only_map_is_refused(store: Any) -> None:
    write(store, "w", random_bytes(100, 1))
    with pytest.raises(ConfigError, match=r"^w: lies in read-only memory"):
        store.read("w", read_only())
    store.write("w", read_only()).wait(HANG_S)
    assert (read(store, "w") == 0).all()


def test_a_snapshot_keeps_what_it_saw(store: Any) -> None:
    old = {name: random_bytes(nbytes, nbytes) for name, nbytes in (("a", 5000), ("b", PIECE))}
    for name, data in old.items():
        write(store, name, data)
    with store.snapshot() as snapshot:
        assert snapshot.generations == {name: store.generation_of(name) for name in old}
        write(store, "a", random_bytes(6000, 1))
        write(store, "c", random_bytes(1, 1))
        store.free("b")
        for name, data in old.items():
            target = np.empty_like(data)
            snapshot.read(name, target).wait(HANG_S)
            assert (target == data).all()
        with pytest.raises(StateError, match="snapshot: without 'c'"):
            snapshot.read("c", bytearray(1))
        assert store.stats().used_bytes == room(store, 5000, PIECE, 6000, 1)
    assert store.stats().used_bytes == room(store, 6000, 1)
    snapshot.release()
    with pytest.raises(StateError, match="snapshot: released"):
        snapshot.read("a", bytearray(5000))
    assert (read(store, "a") == random_bytes(6000, 1)).all()


def test_two_snapshots_of_one_generation_count_once(store: Any) -> None:
    write(store, "w", random_bytes(5000, 1))
    first, second = store.snapshot(["w"]), store.snapshot()
    store.free("w")
    assert store.stats().used_bytes == room(store, 5000)
    first.release()
    assert store.stats().used_bytes == room(store, 5000)
    second.release()
    assert store.stats().used_bytes == 0


def test_a_forgotten_snapshot_lets_go(store: Any) -> None:
    write(store, "w", random_bytes(5000, 1))
    snapshot = store.snapshot()
    write(store, "w", random_bytes(100, 2))
    assert store.stats().used_bytes == room(store, 5000, 100)
    del snapshot
    gc.collect()
    assert store.stats().used_bytes == room(store, 100)


def test_free_gives_the_room_back(store: Any) -> None:
    for i in range(40):
        write(store, f"w{i}", random_bytes(CAPACITY // 2, i))
        store.free(f"w{i}")
    stats = store.stats()
    assert (stats.used_bytes, stats.chunks) == (0, 0)
    assert stats.peak_bytes == CAPACITY // 2


def test_too_much_is_refused_with_the_numbers(store: Any) -> None:
    write(store, "v", random_bytes(CAPACITY // 4, 1))
    message = (
        rf"layer\.7 needs 448 KiB \({448 * KIB} bytes\), 384 KiB \({384 * KIB} bytes\) of 512 KiB"
    )
    with pytest.raises(CapacityError, match=message):
        store.write("layer.7", np.empty(448 * KIB, dtype=np.uint8))
    assert store.names() == ["v"]
    write(store, "w", random_bytes(384 * KIB, 1))
    assert store.stats().used_bytes == CAPACITY


def test_use_after_close(store: Any) -> None:
    write(store, "w", random_bytes(100, 1))
    snapshot = store.snapshot()
    store.close()
    store.close()
    uses: list[Callable[[], object]] = [
        lambda: store.write("w", b"x"),
        lambda: store.read("w", bytearray(100)),
        lambda: snapshot.read("w", bytearray(100)),
        lambda: store.free("w"),
        store.snapshot,
        store.names,
        lambda: store.generation_of("w"),
    ]
    for use in uses:
        with pytest.raises(StateError, match="store: closed"):
            use()
    snapshot.release()
    store.stats()


def test_free_in_a_finalizer(store: Any) -> None:
    """It may run at any moment in any thread, also where the store's own lock is held."""
    for name in ("v", "w"):
        write(store, name, random_bytes(100, 1))
    lock: threading.Lock = store._lock  # type: ignore[attr-defined]
    with lock:
        store.free("w")
    assert store.names() == ["v"]
    with pytest.raises(StateError, match="nothing is stored as 'w'"):
        store.free("w")
    with lock:
        store.free("v")
    write(store, "v", random_bytes(200, 2))
    assert (read(store, "v") == random_bytes(200, 2)).all(), "what was written later stays"
    assert store.stats().used_bytes == room(store, 200)


def test_readers_see_a_whole_generation(store: Any) -> None:
    """Each generation is full of one number: a mix of two would show."""
    write(store, "w", np.full(5 * PIECE, 1, dtype=np.uint8))
    stop = threading.Event()
    seen: set[int] = set()

    def look() -> None:
        while not stop.is_set():
            found = read(store, "w")
            assert (found == found[0]).all()
            seen.add(int(found[0]))

    with ThreadPoolExecutor(3) as threads:
        looks = [threads.submit(look) for _ in range(3)]
        try:
            for i in range(2, 60):
                write(store, "w", np.full(5 * PIECE, i, dtype=np.uint8))
                if i % 10 == 0:
                    until(lambda: max(seen, default=0) == i)  # noqa: B023
        finally:
            stop.set()
        for end in looks:
            end.result(HANG_S)
    assert store.stats().used_bytes == room(store, 5 * PIECE)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_store_needs_room(tmp_path: Path, nbytes: int) -> None:
    for kind in (MemoryStore, lambda n: DiskStore(tmp_path, n)):
        with pytest.raises(ConfigError, match=f"capacity_bytes: expected 1 or more, got {nbytes}"):
            kind(nbytes)


# --- stores in memory -----------------------------------------------------------------------------


def test_copies_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some ways to copy have a C int for the size. Nothing of this memory is touched."""
    sizes: list[int] = []
    monkeypatch.setattr("ctypes.memmove", lambda to, source, nbytes: sizes.append(nbytes))
    nbytes = (4 << 30) + 10
    data = memory_store._copy_in(Buffer(0, nbytes, None))
    memory_store._copy_out("w", data, np.empty(nbytes, dtype=np.uint8))
    assert (data.nbytes, sizes) == (nbytes, [nbytes, nbytes])


def test_old_and_new_generation_count_while_both_are_there() -> None:
    budget = Budget()
    store = MemoryStore(1000, budget)
    write(store, "w", random_bytes(600, 1))
    with pytest.raises(CapacityError, match=r"needs 401 B .*, 400 B .* beside the old one"):
        store.write("w", random_bytes(401, 2))
    write(store, "w", random_bytes(400, 2))
    assert store.stats().peak_bytes == 1000
    snapshot = store.snapshot()
    (kept,) = [weakref.ref(data) for _, data in snapshot.chunks.values()]
    store.close()
    assert budget.used_bytes == 0
    assert kept() is None, "memory that nobody counts any more"


# --- stores on disk -------------------------------------------------------------------------------


def test_the_later_write_wins(disk: PinningStore) -> None:
    """Also when the earlier one ends later; and the earlier one's room comes back."""
    for i in range(30):
        first, second = random_bytes(6 * PIECE, i), random_bytes(PIECE // (1 + i % 3), i + 1)
        tickets = disk.write("w", first), disk.write("w", second)
        for ticket in reversed(tickets):
            ticket.wait(HANG_S)
        assert (read(disk, "w") == second).all()
        assert disk.stats().used_bytes == room(disk, len(second))


def test_a_target_that_is_given_other_memory_keeps_its_own(narrow: DiskStore) -> None:
    """The usual way to free a parameter: a read in flight must not hit the next owner of its
    memory.
    """
    write(narrow, "w", random_bytes(BLOCK, 1))
    tensors = [torch.zeros(BLOCK, dtype=torch.uint8) for _ in range(2)]
    kept = [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]
    plugged = plug(narrow, random_bytes(BLOCK, 2))
    ticket = narrow.read("w", tensors[0])
    tensors[0].data = tensors[1].data = torch.empty(0, dtype=torch.uint8)
    assert not kept[0].expired()
    gc.collect()  # may last longer than the plug
    assert kept[1].expired()
    for each in (plugged, ticket):
        each.wait(HANG_S)
    until(kept[0].expired, "the end of the memory")


def test_what_is_not_yet_written_is_not_there(narrow: DiskStore) -> None:
    data = random_bytes(BLOCK, 1)
    first = plug(narrow, data)
    with pytest.raises(StateError, match=r"'plug' \(its first write is not done\); 0 chunks"):
        read(narrow, "plug")
    first.wait(HANG_S)
    assert (read(narrow, "plug") == data).all()
    again = plug(narrow, random_bytes(100, 2))
    assert (nbytes_of(narrow, "plug"), len(narrow.names())) == (BLOCK, 1)
    again.wait(HANG_S)
    assert nbytes_of(narrow, "plug") == 100


def test_free_forgets_writes_under_way(narrow: DiskStore) -> None:
    data = random_bytes(BLOCK, 1)
    tickets = [plug(narrow, data), narrow.write("w", data), narrow.write("w", data)]
    narrow.free("w")
    narrow.free("plug")
    last = narrow.write("w", random_bytes(10, 1))
    for ticket in (*tickets, last):
        ticket.wait(HANG_S)
    assert narrow.names() == ["w"]
    assert nbytes_of(narrow, "w") == 10
    assert narrow.stats().used_bytes == BLOCK
    assert not narrow._table.writing
    assert not narrow._table.freed_at


def test_a_failed_write_leaves_the_old_generation(disk: PinningStore) -> None:
    data = random_bytes(3 * PIECE, 1)
    write(disk, "w", data)
    before = disk.generation_of("w")
    for nth in (1, 2, 3):
        disk.engine.inject(Fault(FaultKind.ERROR, nth=nth))
        with pytest.raises(StoreError):
            write(disk, "w", random_bytes(3 * PIECE, 2))
        disk.engine.inject(HEALTHY)
        assert (read(disk, "w") == data).all()
        assert disk.generation_of("w") == before
        assert disk.stats().used_bytes == 3 * PIECE


def test_a_writer_waits_for_room_that_comes(narrow: DiskStore) -> None:
    """The old generation is in the way until the write before has ended."""
    large = random_bytes(CAPACITY // 2, 1)
    write(narrow, "plug", large)
    first = plug(narrow, large)
    second = narrow.write("plug", large[: CAPACITY // 2 - 5])
    assert narrow.engine.attempts() > 1, "it did not wait"
    for ticket in (first, second):
        ticket.wait(HANG_S)
    with pytest.raises(CapacityError, match=r"beside the old one.*keep more in host_memory"):
        narrow.write("v", random_bytes(CAPACITY // 2 + 1, 1))


def test_writers_that_wait_are_never_refused_for_a_race(disk: PinningStore) -> None:
    """The second write of a round finds room when the old generation goes, and not before."""
    disk._lock = SlowLock()  # type: ignore[assignment]
    disk._room = threading.Condition(disk._lock)
    for i in range(4):
        tickets = [disk.write("w", random_bytes(CAPACITY // 2, i)) for _ in range(2)]
        for ticket in tickets:
            ticket.wait(HANG_S)


def test_room_that_is_taken_is_expected_back(narrow: DiskStore) -> None:
    """In the same hold of the lock: another writer would otherwise see nothing under way."""
    seen = []

    class Lock:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *exception: object) -> None:
            seen.append((narrow._space.used_bytes, sum(narrow._space.waiting_bytes)))
            lock.release()

    lock, narrow._lock = narrow._lock, Lock()  # type: ignore[assignment]
    ticket = narrow.write("w", random_bytes(BLOCK, 1))
    assert seen[0] == (BLOCK, BLOCK)
    ticket.wait(HANG_S)
    seen.clear()
    narrow.read("w", bytearray(BLOCK)).wait(HANG_S)
    assert seen[0] == (BLOCK, BLOCK)
    narrow._lock = lock


def test_a_write_in_a_follow_up_does_not_wait_for_room(narrow: DiskStore) -> None:
    """It would wait in the only thread that can make room."""
    large = random_bytes(CAPACITY // 2, 1)
    write(narrow, "plug", large)
    first = plug(narrow, large)
    small = Ticket.of(None).then(lambda _: narrow.write("w", large))
    with pytest.raises(StateError, match=r"w has to wait for room, in the follow-up of a ticket"):
        small.wait(HANG_S)
    first.then(lambda _: narrow.write("w", large[: CAPACITY // 2])).wait(HANG_S)
    assert narrow.names() == ["plug", "w"]


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("use", ["write", "read"])
def test_an_interrupted_start_gives_everything_back_once(
    narrow: DiskStore, use: str, started: bool
) -> None:
    """Ctrl-C just before or after the engine has one of three transfers."""
    for i in range(5):
        write(narrow, f"hole {i}", random_bytes(BLOCK, i))
    write(narrow, "rest", random_bytes(CAPACITY - 5 * BLOCK, 1))
    for name in ("hole 0", "hole 2", "hole 4"):
        narrow.free(name)
    data, start, numbers = random_bytes(3 * BLOCK, 9), narrow.engine._start, []

    def interrupted(number: int, *rest: Any) -> None:
        numbers.append(number)
        if len(numbers) < 2 or started:
            start(number, *rest)
        if len(numbers) == 2:
            raise KeyboardInterrupt

    if use == "read":
        write(narrow, "w", data)
        assert len(places(narrow, "w")) == 3
    used = narrow.stats().used_bytes
    narrow.engine._start = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        (narrow.write if use == "write" else narrow.read)("w", data.copy())
    narrow.engine._start = start  # type: ignore[method-assign]
    until(lambda: not narrow.engine._flying, "the end of what has started")
    until(lambda: narrow._space.waiting_bytes == [0], "the end of the operation")
    assert narrow.stats().used_bytes == used
    assert not narrow._table.writing
    if use == "write":
        assert "w" not in narrow.names()
        write(narrow, "w", data)
    assert (read(narrow, "w") == data).all()
    for name in narrow.names():
        narrow.free(name)
    assert narrow.stats().used_bytes == 0


@pytest.mark.parametrize("where", ["_wait_for_room", "_begin_write", "_transfers"])
def test_an_interruption_before_the_start_gives_the_room_back(
    narrow: DiskStore, where: str
) -> None:
    real = getattr(narrow, where)

    def interrupted(*arguments: Any) -> Any:
        real(*arguments)
        raise KeyboardInterrupt

    write(narrow, "w", random_bytes(BLOCK, 1))
    setattr(narrow, where, interrupted)
    for use in (narrow.write, narrow.read):
        with contextlib.suppress(KeyboardInterrupt):
            use("w", random_bytes(BLOCK, 2)).wait(HANG_S)
    setattr(narrow, where, real)
    assert narrow._space.waiting_bytes == [0]
    assert not narrow._table.writing
    assert (read(narrow, "w") == random_bytes(BLOCK, 1)).all()


def test_a_writer_that_waits_is_told_when_the_store_closes(narrow: DiskStore) -> None:
    large = random_bytes(CAPACITY // 2, 1)
    write(narrow, "plug", large)
    plugged = plug(narrow, large)
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(narrow.write, "w", large)
        until(lambda: len(narrow._room._waiters) > 0, "the waiting writer")  # type: ignore
        narrow.close()
        with pytest.raises(StateError, match="store: closed"):
            waiting.result(HANG_S)
    with contextlib.suppress(StateError):  # the rest of its pieces had not begun
        plugged.wait(HANG_S)


def test_fragments_do_not_eat_the_room(disk: PinningStore) -> None:
    """Hundreds of overwrites of random sizes at 90 % fill: never refused, nothing leaks."""
    rng = np.random.default_rng(1)
    largest = 6 * BLOCK
    sizes = {f"w{i}": 0 for i in range(32)}
    split = 0
    rounds = chosen(test=500, torture=15_000)
    for i in range(rounds):
        name = f"w{rng.integers(32)}"
        nbytes = int(rng.integers(1, largest))
        others = room(disk, *(size for other, size in sizes.items() if other != name))
        if others + room(disk, sizes[name], nbytes) > CAPACITY:
            nbytes = min(nbytes, CAPACITY - others - room(disk, sizes[name]))
            if nbytes < 1:
                disk.free(name)
                sizes[name] = 0
                continue
        data = np.full(nbytes, i % 251, dtype=np.uint8)
        write(disk, name, data)
        sizes[name] = nbytes
        split += len(places(disk, name)) > 1
        assert (read(disk, name) == data).all()
    assert split > 20, "no chunk was ever cut: the test is too easy"
    stats = disk.stats()
    assert stats.used_bytes == room(disk, *sizes.values())
    assert stats.used_bytes > 0.8 * CAPACITY
    for name in disk.names():
        disk.free(name)
    assert disk.stats().used_bytes == 0
    write(disk, "whole", random_bytes(CAPACITY, 1))
    assert len(places(disk, "whole")) == 1, "free neighbours have not been joined"


@pytest.mark.parametrize("engine", ENGINES)
def test_bytes_are_counted_and_spread_over_the_directories(engine: str, tmp_path: Path) -> None:
    paths = [tmp_path / str(i) for i in range(3)]
    for path in paths:
        path.mkdir()
    written = [0, 0, 0]  # by directory
    with nothing_left(), open_store(paths, engine, capacity_bytes=3 * MIB) as store:
        for i in range(30):
            data = random_bytes(10_001 * (1 + i % 3), i)
            write(store, f"w{i}", data)
            for file, _, nbytes in places(store, f"w{i}"):
                written[file] += nbytes
            for _ in range(2):
                assert (read(store, f"w{i}") == data).all()
        stats = store.stats()
        assert (stats.read_bytes, stats.written_bytes) == (2 * sum(written), sum(written))
        assert [file.directory for file in store._files] == paths
        assert [file.nbytes for file in store._files] == [MIB] * 3
        assert min(written) > 0.8 * max(written), "writes are not spread over the directories"
        assert stats.used_bytes == sum(extents.used for extents in store._space.extents)


def files(*sizes: int) -> list[SwapFile]:
    return [SwapFile(-1, Path(f"/{i}"), nbytes, BLOCK) for i, nbytes in enumerate(sizes)]


def taken_from(space: Space, nbytes: int) -> list[Extent]:
    found: list[Extent] = []
    assert space.take(nbytes, found)
    return found


def test_writes_go_where_the_queue_is_shortest() -> None:
    space = Space(files(MIB, MIB, MIB))
    space.waiting_bytes = [500, 100, 300]
    assert [e.file for e in taken_from(space, BLOCK)] == [1]
    space.waiting_bytes = [0, 100, 0]
    assert [e.file for e in taken_from(space, BLOCK)] == [0]
    assert [e.file for e in taken_from(space, BLOCK)] == [2], "of equals the emptier one"
    space.waiting_bytes = [0, 0, 10**9]
    taken = taken_from(space, 5 * MIB // 2)
    assert [e.file for e in taken] == [0, 1, 2], "whatever does not fit goes on in the next"
    assert sum(e.nbytes for e in taken) == 5 * MIB // 2
    assert not space.take(MIB, [])
    space.give_back(taken)
    assert space.used_bytes == 3 * BLOCK
    assert [space.extents[i].used for i in range(3)] == [BLOCK] * 3
    assert space.peak_bytes == 3 * BLOCK + 5 * MIB // 2


def test_a_chunk_prefers_one_piece_to_a_short_queue() -> None:
    space = Space(files(2 * BLOCK, 8 * BLOCK))
    space.waiting_bytes = [0, 10**6]
    taken = taken_from(space, 3 * BLOCK)
    assert [(e.file, e.nbytes) for e in taken] == [(1, 3 * BLOCK)]


@pytest.mark.parametrize("kind", [Extents, _native.Extents], ids=["python", "native"])
@pytest.mark.parametrize("nbytes", [2 * BLOCK, 5 * BLOCK])
def test_room_is_not_lost_by_an_interruption(nbytes: int, kind: Any) -> None:
    """A signal handler raises between any two instructions: nothing is taken, or the caller has it.
    The larger request is cut over three free pieces in two files.
    """
    outcomes = set()
    for instruction in itertools.count(1):
        space = Space(files(5 * BLOCK, 2 * BLOCK), kind)
        space.waiting_bytes = [0, 1]  # the first file first
        first = [taken_from(space, BLOCK) for _ in range(7)]
        for place in (0, 1, 3, 4, 5, 6):
            space.give_back(first[place])
        before, found = space.used_bytes, list[Extent]()
        with (
            contextlib.suppress(KeyboardInterrupt),
            interrupt_at(instruction, Space, Extents) as reached,
        ):
            space.take(nbytes, found)
        assert space.used_bytes == before + space.round_up(sum(e.nbytes for e in found))
        assert len(found) in (0, 1 if nbytes == 2 * BLOCK else 3)
        outcomes.add(len(found))
        space.give_back(found)
        assert [space.extents[i].used for i in range(2)] == [BLOCK, 0]
        assert len(taken_from(space, 6 * BLOCK)) == 3, "the free pieces are whole again"
        if not reached:
            break
    assert instruction > (100 if kind is Extents else 50)
    assert len(outcomes) == 2, "both before and after it was taken"
