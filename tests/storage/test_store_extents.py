"""The native core's lists of free space against Python's, which are their judge, and what the store
finds out about memory before it is moved.
"""

from __future__ import annotations

import mmap
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.stores import BLOCK, MIB, memory_at, open_store, read, write

from offload import _native
from offload.core.errors import ConfigError
from offload.core.extents import Extents, best_extents
from offload.core.pool import Pool
from offload.storage import buffers
from offload.storage.buffers import Buffer, ByteRange, _of_plain_tensor, find_anonymous

CAPACITY, ALIGN = 96 * 16, 16


def facts(extents: Any, taken: dict[int, int]) -> tuple[Any, ...]:
    """Return the answers to all that can be asked."""
    sizes = (1, ALIGN, 5 * ALIGN + 1, 40 * ALIGN, CAPACITY, CAPACITY + 1, 1 << 62)
    return (
        extents.capacity,
        extents.used,
        extents.largest_free,
        [extents.find(size) for size in sizes],
        [extents.is_taken(begin) for begin in range(0, CAPACITY, ALIGN)],
        sorted(taken),
    )


@pytest.mark.kernels
@pytest.mark.parametrize("largest", [3, 20, 96])
def test_the_native_lists_do_what_pythons_do(largest: int, seed: int) -> None:
    """Random takes, at the place that both find, and returns, until it is full and empty again."""
    rng = random.Random(seed + largest)
    judge, native = Extents(CAPACITY, ALIGN), _native.Extents(CAPACITY, ALIGN)
    taken: dict[int, int] = {}
    refused = 0
    for turn in range(3000):
        if taken and (rng.random() < 0.45 or turn > 2800):
            begin = rng.choice(sorted(taken))
            del taken[begin]
            judge.give_back(begin)
            native.give_back(begin)
        else:
            size = rng.randrange(1, largest * ALIGN + 1)
            found = native.find(size)
            assert found == judge.find(size)
            if found is None:
                refused += 1
                continue
            judge.take_at(found, size)
            native.take_at(found, size)
            taken[found] = size
        assert facts(native, taken) == facts(judge, taken)
    assert refused > 20, "it was never full: the test is too easy"
    for begin in list(taken):
        native.give_back(begin)
    assert (native.used, native.largest_free) == (0, CAPACITY)


@pytest.mark.kernels
def test_the_native_lists_refuse_what_is_wrong_and_stay_as_they_are() -> None:
    for capacity, align in ((-16, 16), (10, 4), (10, 0)):
        with pytest.raises(ValueError, match="is not a multiple of"):
            _native.Extents(capacity, align)
    native = _native.Extents(CAPACITY, ALIGN)
    native.take_at(0, 40)
    before = facts(native, {0: 40})
    for act, message in (
        (lambda: native.find(0), "expected a size from 1 on, got 0"),
        (lambda: native.take_at(0, 1), "1 are not free at 0"),
        (lambda: native.take_at(64, 1), "1 are not free at 64"),
        (lambda: native.take_at(48, CAPACITY), "are not free at 48"),
        (lambda: native.take_at(48, 0), "0 are not free at 48"),
        (lambda: native.take_at(48, (1 << 63) - 1), "are not free at 48"),
        (lambda: native.give_back(16), "nothing is taken at 16"),
    ):
        with pytest.raises(ValueError, match=message):
            act()
    assert facts(native, {0: 40}) == before
    assert _native.Extents(0, 1).find(1) is None


def test_without_the_native_core_the_lists_are_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    assert best_extents() is _native.Extents
    monkeypatch.setitem(__import__("sys").modules, "offload._native", None)
    monkeypatch.delattr("offload._native")
    assert best_extents() is Extents


# --- where tensors lie ----------------------------------------------------------------------------

TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": lambda: torch.arange(100),
    "a part": lambda: torch.arange(100)[10:20],
    "a row": lambda: torch.ones(3, 5)[1],
    "a column": lambda: torch.ones(3, 5)[:, 1],
    "transposed": lambda: torch.ones(3, 5).t(),
    "scalar": lambda: torch.tensor(2.5),
    "of bytes": lambda: torch.zeros(7, dtype=torch.bool),
    "complex": lambda: torch.ones(5, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(5, dtype=torch.complex64).conj(),
    "negated": lambda: torch._neg_view(torch.ones(5)),
    "empty": lambda: torch.empty(0),
    "expanded": lambda: torch.ones(1).expand(10),
    "wants a gradient": lambda: torch.ones(5, requires_grad=True),
    "meta": lambda: torch.empty(5, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "all zero": lambda: torch._efficientzerotensor(5),
    "shrunk": lambda: shrunk(),
    "parameter": lambda: torch.nn.Parameter(torch.ones(5)),
}


def shrunk() -> torch.Tensor:
    tensor = torch.ones(100)
    tensor.untyped_storage().resize_(40)
    return tensor


@pytest.mark.parametrize("kind", TENSORS)
def test_the_short_way_to_a_tensors_memory_finds_the_same(kind: str) -> None:
    """Or nothing, and the long way decides."""
    tensor = TENSORS[kind]()
    short = _of_plain_tensor(tensor)
    try:
        long = Buffer._of_tensor("w", tensor)
    except ConfigError:
        assert short is None
        return
    if short is None:
        assert long.nbytes == 0
        return
    assert (short.address, short.nbytes) == (long.address, long.nbytes)
    assert short.owner.data_ptr() == long.owner.data_ptr()  # type: ignore[attr-defined]
    assert kind in ("plain", "a part", "a row", "scalar", "of bytes", "complex") or (
        kind in ("wants a gradient", "parameter")
    )


def test_a_mode_of_torch_is_not_asked_about_a_tensor() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *call: Any) -> Any:
            raise AssertionError(f"asked for {call[0]}")

    tensor = torch.ones(5)
    address = tensor.data_ptr()
    with Mode():
        found = Buffer.of("w", tensor, writable=True)
    assert (found.address, found.nbytes) == (address, 20)


# --- memory that need not be tried ----------------------------------------------------------------


def test_memory_of_no_file_is_found(tmp_path: Path) -> None:
    """What a file stands behind, or others share, or cannot be written, is tried each time."""
    file = tmp_path / "file"
    file.write_bytes(bytes(4 * BLOCK))
    mapped = np.memmap(file, dtype=np.uint8, mode="r+")
    private = np.memmap(file, dtype=np.uint8, mode="c")
    shared = np.frombuffer(mmap.mmap(-1, 4 * BLOCK), dtype=np.uint8)
    locked = np.frombuffer(
        mmap.mmap(-1, 4 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=mmap.PROT_READ),
        dtype=np.uint8,
    )
    pool = Pool(MIB)
    arena = Buffer.of("memory", pool.buffer(), writable=True)
    others = [Buffer(a.ctypes.data, a.nbytes, a) for a in (mapped, private, shared, locked)]
    beyond = Buffer(arena.address, 1 << 40, None)
    found = find_anonymous([*others, arena, beyond])
    assert found == (ByteRange(arena.address, arena.address + arena.nbytes),)
    pool.close()


def test_only_what_lies_in_such_memory_as_a_whole_is_not_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[str] = []
    monkeypatch.setattr(buffers, "check_pages", lambda name, *_: tried.append(name))
    area = memory_at(0, 4 * BLOCK)
    begin = area.ctypes.data
    spans = (ByteRange(0, 1), ByteRange(begin + BLOCK, begin + 3 * BLOCK))
    for first, last in ((0, 1), (0, 4), (1, 2), (1, 3), (2, 3), (2, 4), (3, 4)):
        name = f"{first}-{last}"
        Buffer.of(name, area[first * BLOCK : last * BLOCK], True, spans)
        Buffer.of(f"{name} without", area[first * BLOCK : last * BLOCK], True)
    assert [name for name in tried if "without" not in name] == ["0-1", "0-4", "2-4", "3-4"]
    assert len(tried) == 4 + 7


def test_a_store_does_not_try_its_own_arena_and_tries_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(MIB)
    lease = pool.lease(BLOCK)
    tried: list[str] = []
    for engine, expected in (("io_uring", ["else"]), ("threads", ["arena", "arena", "else"])):
        with open_store(tmp_path, engine, memory=[pool.buffer()]) as store:
            monkeypatch.setattr(buffers, "check_pages", lambda name, *_: tried.append(name))
            tensor = lease.tensor(torch.uint8)
            tensor.fill_(7)
            store.write("arena", tensor).wait()
            tensor.zero_()
            store.read("arena", tensor).wait()
            assert (tensor == 7).all()
            write(store, "else", np.ones(10, dtype=np.uint8))
            monkeypatch.undo()
            assert (read(store, "else") == 1).all()
        assert tried == expected, engine
        tried.clear()
    del tensor, lease
    pool.close()
