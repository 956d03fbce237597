"""The host pool: exact bytes, leases that return themselves, numbers in every refusal."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from offload.core.errors import CapacityError, ConfigError, StateError
from offload.core.pool import ARENA_ALIGN, PIECE_ALIGN, Pool

MIB = 1 << 20


DEVICE = torch.device("meta")  # any that is not the CPU


def no_accelerator(address: int, nbytes: int, _: torch.device) -> Callable[[], None] | None:
    return None


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(16 * MIB, no_accelerator) as pool:
        yield pool


def test_the_arena_has_its_exact_size_and_alignment(pool: Pool) -> None:
    assert pool.address % ARENA_ALIGN == 0
    assert pool.stats().capacity_bytes == 16 * MIB
    lease = pool.lease(16 * MIB)  # every byte of it can be had at once
    assert lease.address == pool.address
    assert pool._extents.largest_free == 0
    lease.tensor().fill_(7)


def test_no_rounding_to_powers_of_two(pool: Pool) -> None:
    leases = [pool.lease(5 * MIB) for _ in range(3)]
    assert pool.stats().used_bytes == 15 * MIB
    assert all(lease.nbytes == 5 * MIB for lease in leases)


def test_a_lease_returns_at_the_end_of_its_block(pool: Pool) -> None:
    with pool.lease(MIB):
        assert pool.stats().used_bytes == MIB
    assert pool.stats().used_bytes == 0


def test_a_lease_returns_when_the_block_raises(pool: Pool) -> None:
    with pytest.raises(KeyError), pool.lease(MIB):
        raise KeyError
    assert pool.stats().used_bytes == 0


def test_a_forgotten_lease_returns(pool: Pool) -> None:
    pool.lease(MIB)
    gc.collect()
    assert pool.stats().used_bytes == 0


def test_release_is_idempotent_and_ends_access(pool: Pool) -> None:
    lease = pool.lease(MIB)
    lease.release()
    lease.release()
    assert pool.stats().used_bytes == 0
    for use in (lease.tensor, lambda: lease.address):
        with pytest.raises(StateError, match="lease: already released"):
            use()


def test_memory_is_not_reused_while_a_tensor_lives_on_it(pool: Pool) -> None:
    with pool.lease(4 * MIB) as lease:
        tensor = lease.tensor(torch.float32)
        view = tensor[1000:2000]
    del tensor, lease
    assert pool.stats().used_bytes == 4 * MIB, "a view still lives on it"
    view.fill_(3.0)
    with pool.lease(8 * MIB) as other:
        other.tensor().zero_()
        assert (view == 3.0).all()
    del view
    gc.collect()
    assert pool.stats().used_bytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4095, 4096, 4097, MIB + 1])
def test_odd_sizes(pool: Pool, nbytes: int) -> None:
    with pool.lease(nbytes) as lease:
        assert lease.nbytes == nbytes
        assert lease.address % PIECE_ALIGN == 0
        assert lease.tensor().numel() == nbytes
        assert pool.stats().used_bytes == max(PIECE_ALIGN, -(-nbytes // PIECE_ALIGN) * PIECE_ALIGN)


def test_typed_tensors_lie_where_they_should(pool: Pool) -> None:
    with pool.lease(64) as lease:
        lease.tensor().copy_(torch.arange(64, dtype=torch.uint8))
        part = lease.tensor(torch.int16, numel=4, offset_bytes=10)
        assert part.view(torch.uint8).tolist() == list(range(10, 18))
        for numel, offset in ((33, 0), (32, 2), (1, -2), (-1, 0)):
            with pytest.raises(ConfigError, match="is not within 64 bytes"):
                lease.tensor(torch.int16, numel=numel, offset_bytes=offset)


def test_too_much_is_refused_at_once_with_the_numbers(pool: Pool) -> None:
    with pytest.raises(
        CapacityError, match=r"w needs 17 MiB \(17825792 bytes\), 16 MiB of 16 MiB are free"
    ):
        pool.lease(17 * MIB, timeout_s=None, what="w")
    kept = [pool.lease(5 * MIB) for _ in range(3)]
    message = (
        r"needs 2 MiB .* 1 MiB of 16 MiB are free, the largest piece is 1 MiB; .*raise host_memory"
    )
    with pytest.raises(CapacityError, match=message):
        pool.lease(2 * MIB)
    assert len(kept) == 3


def test_fragments_are_told_apart_from_free_bytes(pool: Pool) -> None:
    pieces = [pool.lease(MIB) for _ in range(16)]
    for piece in pieces[::2]:
        piece.release()
    with pytest.raises(
        CapacityError, match=r"8 MiB of 16 MiB are free, the largest piece is 1 MiB"
    ):
        pool.lease(2 * MIB)
    for piece in pieces:
        piece.release()
    assert pool.stats().used_bytes == 0 and pool._extents.largest_free == 16 * MIB


def test_waiting_gets_what_another_thread_returns(pool: Pool) -> None:
    first = pool.lease(12 * MIB)
    asked = threading.Event()

    def later() -> None:
        asked.wait()
        first.release()

    thread = threading.Thread(target=later)
    thread.start()
    asked.set()
    with pool.lease(12 * MIB, timeout_s=60) as second:
        assert second.nbytes == 12 * MIB
    thread.join()


def test_small_requests_do_not_overtake_a_large_one_that_waits(pool: Pool) -> None:
    first = pool.lease(12 * MIB)
    got: list[str] = []

    def ask(name: str, nbytes: int) -> None:
        lease = pool.lease(nbytes, timeout_s=60)
        got.append(name)
        lease.release()

    large = threading.Thread(target=ask, args=("large", 16 * MIB))
    large.start()
    while not pool._queue:  # until the large one stands in line
        threading.Event().wait(0.001)
    small = threading.Thread(target=ask, args=("small", MIB))
    small.start()
    while len(pool._queue) < 2:
        threading.Event().wait(0.001)
    first.release()
    large.join()
    small.join()
    assert got == ["large", "small"]


def test_the_peak_is_kept(pool: Pool) -> None:
    with pool.lease(3 * MIB), pool.lease(4 * MIB):
        pass
    with pool.lease(MIB):
        assert pool.stats().peak_bytes == 7 * MIB


def test_the_accelerator_hears_of_the_arena_and_of_its_end() -> None:
    heard: list[tuple[str, int, int]] = []

    def register(address: int, nbytes: int, _: torch.device) -> Callable[[], None]:
        heard.append(("register", address, nbytes))
        return lambda: heard.append(("unregister", address, nbytes))

    pool = Pool(4 * MIB, register, device=DEVICE)
    assert heard == [("register", pool.address, 4 * MIB)]
    pool.close()
    pool.close()
    assert heard[1:] == [("unregister", pool.address, 4 * MIB)]
    with pytest.raises(StateError, match="host pool: closed"):
        pool.lease(1)


def test_what_is_held_outlives_the_pool() -> None:
    pool = Pool(4 * MIB, no_accelerator)
    tensor = pool.lease(MIB).tensor()
    tensor.fill_(9)
    pool.close()
    del pool
    gc.collect()
    assert (tensor == 9).all()


@pytest.mark.parametrize("nbytes", [0, -1, 4095])
def test_a_pool_needs_a_page(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="nbytes: expected at least 4096 bytes"):
        Pool(nbytes, no_accelerator)


def test_negative_leases_are_refused(pool: Pool) -> None:
    with pytest.raises(ConfigError, match="nbytes: expected a whole number from 0 on, got -1"):
        pool.lease(-1)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused(pool: Pool) -> None:
    """The arena is not there in the child; touching it would end the process."""
    lease = pool.lease(MIB)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: pool.lease(1), lease.tensor, lambda: lease.address):
            try:
                use()
            except StateError:
                refused += 1
        os._exit(0 if refused == 3 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.tensor().fill_(1)


def test_the_arena_asks_for_huge_pages_and_is_not_inherited(pool: Pool) -> None:
    """As the kernel tells it: `hg` is MADV_HUGEPAGE, `dc` is MADV_DONTFORK."""
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=1)[0]
        if "-" in head and not head.endswith(":"):
            begin, end = (int(part, 16) for part in head.split("-"))
            inside = begin <= pool.address < end
        elif inside and head == "VmFlags:":
            flags = line.split()[1:]
    assert "dc" in flags
    if hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists():
        assert "hg" in flags


def test_many_threads_never_share_a_byte() -> None:
    """Each thread writes its number all over its lease and finds nothing else there."""
    with Pool(8 * MIB, no_accelerator) as pool:

        def work(number: int) -> int:
            rng = random.Random(number)
            for _ in range(60):
                with pool.lease(rng.randrange(1, 2 * MIB), timeout_s=60) as lease:
                    tensor = lease.tensor()
                    tensor.fill_(number)
                    assert bool((tensor == number).all())
                    del tensor
            return number

        with ThreadPoolExecutor(8) as threads:
            assert list(threads.map(work, range(8))) == list(range(8))
        gc.collect()
        stats = pool.stats()
        assert (stats.used_bytes, pool._extents.largest_free) == (0, 8 * MIB)
        assert stats.peak_bytes <= 8 * MIB


def test_a_forked_child_that_drops_a_pool_keeps_its_own_memory() -> None:
    """The arena is not mapped in the child, so unmapping it there would hit the maps that took its
    place.
    """
    code = """
import gc, mmap, os
from offload.core.pool import Pool
pool = Pool(64 << 20, lambda address, nbytes: None)
child = os.fork()
if child == 0:
    mine = [mmap.mmap(-1, 1 << 20) for _ in range(2000)]
    for memory in mine: memory[0] = 1
    del pool
    gc.collect()
    for memory in mine: memory[0] += 1
    os._exit(0 if all(memory[0] == 2 for memory in mine) else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "0", done.stderr


# --- the accelerator knows the arena exactly as long as it is there -------------------------------


def test_the_arena_is_known_until_its_last_piece_is_back() -> None:
    heard: list[str] = []

    def register(address: int, nbytes: int, _: torch.device) -> Callable[[], None]:
        def unregister() -> None:
            ctypes.string_at(address, nbytes)  # it is still mapped
            heard.append("unregister")

        return unregister

    pool = Pool(MIB, register, device=DEVICE)
    lease = pool.lease(100)
    tensor = lease.tensor()
    pool.close()
    lease.release()
    assert heard == [], "a copy to this tensor may be under way"
    del tensor, lease
    gc.collect()
    assert heard == ["unregister"]
    forgotten = Pool(MIB, register, device=DEVICE)
    del forgotten
    gc.collect()
    assert heard == ["unregister"] * 2


def test_whoever_has_the_buffer_keeps_the_arena() -> None:
    pool = Pool(MIB, no_accelerator)
    arena, buffer = weakref.ref(pool._map), pool.buffer()
    assert buffer.nbytes == MIB
    pool.close()
    with pytest.raises(StateError, match="host pool: closed"):
        pool.buffer()
    assert arena() is not None
    del buffer
    assert arena() is None


def test_a_refused_lease_takes_nothing(pool: Pool) -> None:
    for nbytes in (1e6, "1", None, -1):
        with pytest.raises(ConfigError, match="nbytes: expected a whole number from 0 on"):
            pool.lease(nbytes)  # type: ignore[arg-type]
    assert pool.stats().used_bytes == 0


def test_a_lease_that_cannot_be_made_gives_its_piece_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(pool, "_memory", broken)
    with pytest.raises(MemoryError):
        pool.lease(100)
    assert pool.stats().used_bytes == 0
