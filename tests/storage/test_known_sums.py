"""Checksums that are taken by the update that makes the bytes, and believed by the store that
writes them: right ones save a look at every byte, wrong ones must not pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels import assert_same_bits, assert_untouched_around, awkward, unaligned
from support.loops import chosen
from support.memory_store import MemoryStore
from support.stores import (
    ENGINES,
    HANG_S,
    HEALTHY,
    MIB,
    PIECE,
    memory_at,
    places,
    random_bytes,
    read,
)
from torch import Tensor

import offload
from offload import _native, kernels
from offload.core.errors import ConfigError, CorruptionError, StoreError
from offload.core.pool import Pool
from offload.kernels import SUM_BYTES, rules
from offload.optim.tiers import HostChunk, Tiers
from offload.planning.layout import Chunk, ParamSpec, Slice
from offload.planning.planner import Budgets, TrainingFacts, plan_state
from offload.storage import engine
from offload.storage.disk import DiskStore
from offload.storage.engine import Fault, FaultKind, KnownSums

ISAS = kernels.available_isas()
NATIVE_ENGINES = [name for name in ENGINES if name != "aiofiles"]
BLOCK = SUM_BYTES // 4  # elements of one sum
RULES: list[rules.Rule] = [
    rules.Adam.at(3, lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True),
    rules.Sgd.at(lr=0.1, momentum=0.9, dampening=0, weight_decay=0, nesterov=False, first=False),
    rules.Sgd.at(lr=0.1, momentum=0, dampening=0, weight_decay=0, nesterov=False, first=True),
    rules.Adagrad.at(2, lr=0.1, lr_decay=0.1, eps=1e-10, weight_decay=0.0),
    rules.LionRule.at(lr=1e-4, beta1=0.9, beta2=0.99, weight_decay=0.1),
]


def sums_of(memory: Tensor) -> list[int]:
    """Return the checksum of every whole block, by the plain call."""
    flat = memory.view(-1)
    whole = range(0, flat.numel() - BLOCK + 1, BLOCK)
    return [kernels.checksum(flat[begin : begin + BLOCK]) for begin in whole]


def room_for(numel: int) -> tuple[KnownSums, KnownSums]:
    """Make places for the sums of so many elements; return them, and the memory around them."""
    around = np.full(numel // BLOCK + 2, 77, dtype=np.uint64)
    return around[1:-1], around


def test_everybody_means_the_same_bytes() -> None:
    assert kernels.SUM_BYTES == engine.SUM_BYTES == _native.SUM_BYTES


# --- the update -----------------------------------------------------------------------------------


@pytest.mark.kernels
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("numel", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_an_update_takes_the_sums_of_what_it_makes(rule: rules.Rule, numel: int, isa: str) -> None:
    torch.manual_seed(numel)
    before = [awkward(numel), *(awkward(numel).abs() for _ in rule.states)]
    grad, half = awkward(numel), torch.zeros(numel, dtype=torch.bfloat16)
    for shift, threads in ((0, 1), (1, 2), (3, 5)):
        plain = [tensor.clone() for tensor in before]
        summed = [unaligned(tensor, shift) for tensor in before]
        rooms = [room_for(numel) for _ in summed]
        with kernels.forced_isa(isa):
            kernels.update(rule, plain[0], grad, *plain[1:], out=half.clone(), threads=threads)
            kernels.update(
                rule,
                summed[0],
                grad,
                *summed[1:],
                out=half.clone(),
                threads=threads,
                sums=[room for room, _ in rooms],
            )
        for got, expected, (room, around) in zip(summed, plain, rooms, strict=True):
            assert_same_bits(got, expected, "the update")
            assert_untouched_around(got, "the update")
            assert around[0] == around[-1] == 77, "written outside of the room for sums"
            if isa == "reference":
                assert (room == 77).all()
            else:
                assert room.tolist() == sums_of(got)


@pytest.mark.kernels
def test_sums_of_some_tensors_only() -> None:
    numel = 2 * BLOCK
    param, m, v = torch.randn(numel), torch.randn(numel), torch.rand(numel)
    (room, _), adam = room_for(numel), RULES[0]
    kernels.update(adam, param, torch.randn(numel), m, v, sums=[None, None, room])
    assert room.tolist() == sums_of(v)
    assert len(set(room.tolist())) == 2


def wrong_sums() -> Iterator[tuple[Any, str]]:
    right = np.zeros(2, dtype=np.uint64)
    yield [right], "sums: expected one entry for each of param, exp_avg, exp_avg_sq, got 1"
    yield [None, [0, 0], None], "sums of exp_avg: expected an array of uint64, got list"
    yield [None, right.astype(np.int64), None], "sums of exp_avg: .* of uint64, got int64"
    yield [np.zeros(3, dtype=np.uint64), None, None], r"sums of param: expected 2 .* shape \(3,\)"
    yield [None, None, np.zeros(4, np.uint64)[::2]], r"of exp_avg_sq: .* strides \(16,\)"
    yield np.zeros((3, 2), dtype=np.uint64), "sums: expected a list, got "
    yield [right, right, None], "sums of exp_avg: overlaps sums of param by 16 bytes"
    fixed = right.copy()
    fixed.flags.writeable = False
    yield [fixed, None, None], "sums of param: expected 2 in one writable array"


@pytest.mark.kernels
@pytest.mark.parametrize(("sums", "message"), list(wrong_sums()))
def test_wrong_room_is_refused_before_anything_changes(sums: Any, message: str) -> None:
    numel = 2 * BLOCK
    tensors = [torch.rand(numel) for _ in range(4)]
    before = [tensor.clone() for tensor in tensors]
    with pytest.raises(ConfigError, match=message):
        kernels.update(RULES[0], *tensors, sums=sums)
    for got, expected in zip(tensors, before, strict=True):
        assert_same_bits(got, expected, "a refused update")


# --- the store ------------------------------------------------------------------------------------


def all_sums(data: Any) -> KnownSums:
    """Return the checksum of every block, the last one, which may be short, included."""
    tensor = torch.from_numpy(data)
    parts = [tensor[at : at + SUM_BYTES] for at in range(0, len(data), SUM_BYTES)]
    return np.array([kernels.checksum(part) for part in parts], dtype=np.uint64)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("nbytes", [0, 1, SUM_BYTES - 1, SUM_BYTES, MIB + 1, 3 * MIB + 7 * 4096])
def test_what_was_known_is_read_back(tmp_path: Path, name: str, nbytes: int) -> None:
    data = random_bytes(nbytes, nbytes)
    with DiskStore(tmp_path, 32 * MIB, engine=name) as store:
        for every in (0, 3, 1):  # none, each third, all
            sums = all_sums(data)
            sums[[number % every != 0 if every else True for number in range(len(sums))]] = 0
            ticket = store.write("w", data, sums=sums)
            sums[:] = 1  # they were taken at once
            ticket.wait(HANG_S)
            assert (read(store, "w") == data).all()


@pytest.mark.parametrize("name", NATIVE_ENGINES)
def test_sums_of_other_bytes_are_found_at_the_next_read(tmp_path: Path, name: str) -> None:
    """So they are believed: that is what saves the time, and what must not be wrong."""
    data = random_bytes(2 * MIB, 1)
    with DiskStore(tmp_path, 32 * MIB, engine=name) as store:
        for wrong in (0, 3, 8, 15):
            sums = all_sums(data)
            sums[wrong] ^= np.uint64(1 << 40)
            store.write("w", data, sums=sums).wait(HANG_S)
            begin = places(store, "w")[0][1]
            with pytest.raises(CorruptionError) as caught:
                read(store, "w")
            assert caught.value.offset_bytes == begin + wrong * SUM_BYTES
        store.write("w", data).wait(HANG_S)
        assert (read(store, "w") == data).all()


@pytest.mark.kernels
def test_room_within_the_state_is_refused() -> None:
    tensors = [torch.rand(2 * BLOCK) for _ in range(4)]
    inside = tensors[2].numpy().view(np.uint64)[5:7]
    with pytest.raises(ConfigError, match="sums of param: overlaps exp_avg"):
        kernels.update(RULES[0], *tensors, sums=[inside, None, None])


WRITE_FAULTS = {
    FaultKind.FLIP: CorruptionError,
    FaultKind.LOST_WRITE: CorruptionError,
    FaultKind.ERROR: StoreError,
    FaultKind.SHORT_HALF: None,
    FaultKind.SHORT_ZERO: None,
}


@pytest.mark.parametrize("name", NATIVE_ENGINES)
@pytest.mark.parametrize("kind", WRITE_FAULTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("every", [1, 2])
def test_faults_of_known_bytes(tmp_path: Path, name: str, kind: FaultKind, every: int) -> None:
    """A write that goes wrong is mended, told, or found by the next read; with all sums known, or
    every second one, at each piece, on aligned and on odd memory.
    """
    for shift in (0, 1):
        before, data = (memory_at(shift, MIB + 5) for _ in range(2))
        before[:] = random_bytes(MIB + 5, 1)
        with DiskStore(tmp_path, 8 * MIB, engine=name, piece_bytes=2 * SUM_BYTES) as store:
            for nth in range(1, 6):
                store.write("w", before).wait(HANG_S)
                data[:] = random_bytes(MIB + 5, nth + 1)  # others than lie there already
                sums = all_sums(data)
                sums[[number % every != 0 for number in range(len(sums))]] = 0
                store.engine.inject(Fault(kind, nth, seed=nth))
                ticket = store.write("w", data, sums=sums)
                if WRITE_FAULTS[kind] is StoreError:
                    with pytest.raises(StoreError, match="EIO"):
                        ticket.wait(HANG_S)
                    store.engine.inject(HEALTHY)
                    assert (read(store, "w") == before).all()
                    continue
                ticket.wait(HANG_S)
                store.engine.inject(HEALTHY)
                if WRITE_FAULTS[kind] is None:
                    assert (read(store, "w") == data).all()
                else:
                    with pytest.raises(CorruptionError):
                        read(store, "w")


@pytest.mark.parametrize("name", NATIVE_ENGINES)
@pytest.mark.parametrize("hole", [SUM_BYTES, 3 * 4096])
def test_chunks_in_several_places(tmp_path: Path, name: str, hole: int) -> None:
    """Where an extent ends within the bytes of one sum, no sum is known: all are computed."""
    with DiskStore(tmp_path, 8 * hole, engine=name) as store:
        for number in range(8):
            store.write(str(number), random_bytes(hole, number)).wait(HANG_S)
        for number in (1, 3, 5):
            store.free(str(number))
        data = random_bytes(3 * hole - 100, 9)
        store.write("w", data, sums=all_sums(data)).wait(HANG_S)
        assert len(places(store, "w")) == 3
        assert (read(store, "w") == data).all()
        wrong = all_sums(data) ^ np.uint64(1)
        store.free("w")
        store.write("w", data, sums=wrong).wait(HANG_S)
        if hole == SUM_BYTES:
            with pytest.raises(CorruptionError):
                read(store, "w")
        else:
            assert (read(store, "w") == data).all()


def test_pieces_that_are_no_number_of_sums(tmp_path: Path) -> None:
    data = random_bytes(MIB, 1)
    with DiskStore(tmp_path, 8 * MIB, engine="threads", piece_bytes=PIECE) as store:
        assert store.engine.sum_bytes == PIECE
        store.write("w", data, sums=all_sums(data) ^ np.uint64(1)).wait(HANG_S)  # of no use here
        assert (read(store, "w") == data).all()


@pytest.mark.parametrize("kind", ["memory", *ENGINES])
def test_what_cannot_be_sums_is_refused(tmp_path: Path, kind: str) -> None:
    memory = kind == "memory"
    data, right = random_bytes(MIB, 1), all_sums(random_bytes(MIB, 1))
    with MemoryStore(MIB) if memory else DiskStore(tmp_path, MIB, engine=kind) as store:
        for sums, message in (
            (right[:-1], f"w: sums: expected 8, one for each {SUM_BYTES} of {MIB} bytes, got 7"),
            (right.astype(np.int64), "w: sums: expected an array .* of uint64, got 1 of int64"),
            (right.reshape(2, 4), "w: sums: expected an array of one dimension .* got 2 of uint64"),
            (right.tolist(), "w: sums: expected an array of one dimension .* got list"),
        ):
            with pytest.raises(ConfigError, match=message):
                store.write("w", data, sums=sums)
        assert store.names() == []
        store.write("w", data, sums=right).wait(HANG_S)
        assert (read(store, "w") == data).all()


# --- both, in training ----------------------------------------------------------------------------


def test_a_piece_knows_where_sums_of_its_fields_go() -> None:
    """Only where a field's elements begin with a sum's; the others are summed up when written."""
    numel = 3 * BLOCK + 8
    slices = Slice(0, 0, BLOCK, 0), Slice(1, 5, 2 * BLOCK + 13, BLOCK)
    chunk = Chunk(0, "some", ("m", "v"), slices, numel)
    sums = np.arange(-(-2 * numel // BLOCK), dtype=np.uint64)
    piece = HostChunk(chunk, torch.empty(2 * numel), torch.empty(2 * numel), sums)
    first, second = map(piece.sums_of, chunk.slices)
    assert {field: room.tolist() for field, room in first.items()} == {"m": [0]}
    assert {field: room.tolist() for field, room in second.items()} == {"m": [1, 2]}
    first["m"][0] = 99
    assert sums[0] == 99
    assert HostChunk(chunk, piece.memory, piece.whole).sums_of(chunk.slices[0]) == {}


def test_sums_are_forgotten_before_a_chunk_changes() -> None:
    plan = plan_state(TrainingFacts((ParamSpec("p", 8 * BLOCK, ("m",)),)), Budgets())
    chunk = plan.chunks[0]
    piece = HostChunk(chunk, torch.empty(0), torch.empty(0), np.full(8, 7, dtype=np.uint64))
    with Pool(plan.arena_bytes) as pool:
        Tiers(plan, pool, None).before_change(piece)
    assert piece.sums is not None
    assert not piece.sums.any()


MAKERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-3),
    "Lion": lambda params: offload.Lion(params, lr=1e-4),
}


WIDE, NARROW = torch.float32, torch.bfloat16
TRAININGS = chosen(
    test=[("AdamW", WIDE), ("SGD", NARROW), ("Adagrad", WIDE), ("Lion", NARROW)],
    torture=list(itertools.product(MAKERS, (WIDE, NARROW))),
)


@pytest.mark.usefixtures("own_budget")
@pytest.mark.parametrize(("make", "dtype"), TRAININGS, ids=str)
def test_training_writes_with_sums_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: str, dtype: torch.dtype
) -> None:
    """Nearly all bytes of large parameters are known when they are written, and no read is refused,
    however the state changes in between: steps without some gradients, loads.
    """
    known = written = 0
    real = Tiers.write

    def write(tiers: Tiers, piece: HostChunk) -> Any:
        nonlocal known, written
        assert piece.sums is not None
        known += int((piece.sums != 0).sum())
        written += len(piece.sums)
        right = all_sums(piece.memory.view(torch.uint8).numpy())
        assert ((piece.sums == 0) | (piece.sums == right)).all()
        return real(tiers, piece)

    expected = train(make, dtype)
    monkeypatch.setattr(Tiers, "write", write)
    got = train(make, dtype, host_memory="16MiB", nvme=tmp_path)
    for mine, param in zip(got, expected, strict=True):
        assert_same_bits(mine, param, "the parameter")
    assert written > 100
    assert known / written > 0.6, "of the sums that were written"


def train(make: str, dtype: torch.dtype, **place: Any) -> list[Tensor]:
    """Train seven steps, one without most gradients and one after a load of an earlier save."""
    torch.manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(n).to(dtype)) for n in (9 * 524288, 524288, 70_001)]
    saved: Any = None
    with offload.wrap(MAKERS[make](params), **place) as optimizer:
        for step in range(7):
            for number, param in enumerate(params):
                grad = torch.randn_like(param)
                param.grad = None if step == 3 and number != 1 else grad
            if step == 5:
                optimizer.load_state_dict(saved)
            optimizer.step()
            if step == 2:
                saved = optimizer.state_dict()
        return [param.detach().clone() for param in params]
