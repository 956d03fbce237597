"""Bytes that move between ranks, and what happens when one does something else."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.loops import SEED, chosen
from support.ranks.launch import outcomes, run

from offload import distributed, kernels
from offload.core import node_share
from offload.core.config import Config
from offload.core.errors import CapacityError, ConfigError, OffloadError, StateError, StoreError
from offload.core.ticket import Ticket
from offload.distributed import side_channel
from offload.distributed.consensus import by_consensus, check_alike, each_by_consensus
from offload.distributed.placing import Partition
from offload.distributed.ranks import Ranks, ranks_of
from offload.planning.limits import host_bytes

pytestmark = pytest.mark.ranks
SIZES = (0, 1, 16, 1000, chosen(test=1 << 17, torture=3 << 20))  # elements of a slice
PART_BYTES = chosen(test=192 << 10, torture=4 << 20)  # at a time: not all of the largest
DTYPES = (torch.float32, torch.bfloat16)


def ranks(deadline_s: float = 120) -> Ranks:
    found = ranks_of(None, deadline_s)
    assert found is not None
    return found


# --- partition ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("nbytes", [0, 1, 63, 64, 65, 4096, 1_000_003])
def test_slices_are_equal_aligned_and_all_of_it(nbytes: int, count: int) -> None:
    partition = Partition(nbytes, count)
    spans = [partition.span(rank) for rank in range(count)]
    assert partition.shard_bytes % 64 == 0
    assert spans[0][0] == 0 and spans[-1][1] == nbytes
    assert all(one[1] == next_[0] for one, next_ in pairwise(spans))
    assert all(begin % 64 == 0 or begin == nbytes for begin, _ in spans)
    assert partition.shard_bytes * count < nbytes + 64 * count


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_element_has_one_owner(itemsize: int, count: int) -> None:
    members, begin = [], 0
    for numel in (1, 5, 1000, 0, 37, 4096, 3):
        members.append((begin, numel))
        begin += -(-numel * itemsize // 64) * 64
    partition = Partition(begin, count)
    for at, numel in members:
        owned = [partition.own(rank, at, numel, itemsize) for rank in range(count)]
        elements = [i for first, end in owned for i in range(first, end)]
        assert elements == list(range(numel))
        for rank, (first, end) in enumerate(owned):
            low, high = partition.span(rank)
            if first < end:
                assert low <= at + first * itemsize and at + end * itemsize <= max(high, low)


# --- moving bytes ---------------------------------------------------------------------------------


def move(rank: int, dtype: torch.dtype) -> dict[str, Any]:
    group = ranks()
    count = group.count
    generator = torch.Generator().manual_seed(SEED)
    found: dict[str, Any] = {}
    for numel in SIZES:
        inputs = torch.randn((count, count * numel), generator=generator).to(dtype)
        own = torch.empty(numel, dtype=dtype)
        group.reduce_scatter(own, inputs[rank].clone(), f"sum of {numel}").wait()
        total = torch.zeros(numel, dtype=torch.float32)
        for one in inputs.view(count, count, numel)[:, rank]:
            total += one.float() / count
        assert torch.equal(own, total.to(dtype)), numel
        whole = torch.empty(count * numel, dtype=dtype)
        group.gather(whole, own, f"all of {numel}").wait()
        again = torch.empty(count * numel, dtype=dtype)
        again[rank * numel : (rank + 1) * numel] = own
        group.gather(again, again[rank * numel : (rank + 1) * numel], "in place").wait()
        assert torch.equal(whole, again)
        found[f"{numel}"] = whole
    found["sent"] = dict(group.sent_bytes)
    return found


def move_all(rank: int) -> list[dict[str, Any]]:
    distributed.ranks._PART_BYTES = PART_BYTES
    return [move(rank, dtype) for dtype in DTYPES]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_gathered_and_reduced(count: int) -> None:
    numel = sum(SIZES)
    for dtype, results in zip(DTYPES, zip(*run(count, move_all), strict=True), strict=True):
        for key in map(str, SIZES):
            assert all(torch.equal(one[key], results[0][key]) for one in results)
        for one in results:
            theory = (count - 1) * numel * dtype.itemsize
            assert one["sent"]["reduce"] == theory
            assert one["sent"]["gather"] == 2 * theory


def count_on_the_network(rank: int) -> tuple[int, int]:
    group = ranks()
    numel = chosen(test=1 << 20, torture=8 << 20)
    whole, own = torch.zeros(group.count * numel), torch.zeros(numel)
    group.exchange(None, "all are there")
    before = _received_bytes()
    sent = sum(group.sent_bytes.values())
    group.gather(whole, own, "g").wait()
    group.reduce_scatter(own, whole, "r").wait()
    group.exchange(None, "all have ended")
    return _received_bytes() - before, sum(group.sent_bytes.values()) - sent


def _received_bytes() -> int:
    """Return the bytes that this process's connections have received, as the kernel counts them."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                found += int.from_bytes(info[128:136], "little")  # tcpi_bytes_received
    return found


def test_what_is_counted_is_what_the_kernel_counts() -> None:
    for seen, counted in run(2, count_on_the_network):
        assert 0.99 * counted <= seen <= 1.01 * counted  # gloo has headers of its own


def fail_on(number: int, rank: int, error: Exception) -> None:
    if rank == number:
        raise error


def talk(rank: int) -> None:
    group = ranks()
    assert group.exchange({"rank": rank, "text": "ä" * rank}, "talk") == [
        {"rank": r, "text": "ä" * r} for r in range(group.count)
    ]
    values = [0.1 * (rank + 1), 1e300 if rank else -1e300, float("inf") if rank else 1.0]
    first, second, third = group.sum(values, "sum")
    assert first == math.fsum(0.1 * (r + 1) for r in range(group.count))
    assert second == math.fsum([-1e300] + [1e300] * (group.count - 1)) and third == math.inf
    alike = each_by_consensus(group, "wrap", lambda: {"the number of layers": 3})
    check_alike("wrap", alike, "use the same model on all ranks")
    apart = each_by_consensus(group, "wrap", lambda: {"the number of layers": 3 + rank})
    with pytest.raises(
        ConfigError, match=r"differ in the number of layers \(4 and 3\); use the sa"
    ):
        check_alike("wrap", apart, "use the same model on all ranks")
    assert by_consensus(group, "wrap", lambda: rank) == rank
    ways: tuple[Any, ...] = by_consensus, each_by_consensus
    for error, kinds in (
        (ValueError("mine"), (StateError, StateError)),
        (CapacityError("mine"), (StateError, CapacityError)),
    ):
        for way, kind in zip(ways, kinds, strict=True):
            with pytest.raises(type(error) if rank == 1 else kind) as raised:
                way(group, "wrap", partial(fail_on, 1, rank, error))
            told = f"wrap: rank 1 failed, so no rank continues: {type(error).__name__}: mine"
            assert str(raised.value) == ("mine" if rank == 1 else told)
    other = Ranks(list(range(group.count)), group.deadline_s)
    assert other.exchange(rank, "beside") == list(range(group.count))
    other.close()
    with pytest.raises(StateError, match="closed"):
        other.exchange(rank, "beside")


def test_small_things_are_exchanged() -> None:
    run(3, talk)


def test_alone() -> None:
    assert ranks_of(None) is None
    assert ranks_of(False) is None
    with pytest.raises(ConfigError, match="not initialised"):
        ranks_of("nccl")


# --- ranks that part ways -------------------------------------------------------------------------


def part_ways(rank: int) -> str:
    group = ranks()
    whole, own = torch.zeros(group.count * 64), torch.zeros(64)
    group.gather(whole, own, "layer 0").wait()
    with pytest.raises(StateError) as raised:
        group.gather(whole, own, f"layer {1 + rank}").wait()
    with pytest.raises(StateError, match="an earlier error stands"):
        group.gather(whole, own, "layer 9").wait()
    return str(raised.value)


def test_other_layers_on_another_rank_are_told() -> None:
    first, second = run(2, part_ways)
    assert "rank 0 gathers layer 1" in first and "rank 1 gathers layer 2" in first
    assert "rank 1 gathers layer 2" in second and "rank 0 gathers layer 1" in second


def fail_before(rank: int) -> str:
    group = ranks()
    whole, own = torch.zeros(group.count * 64), torch.zeros(64)
    reading: Ticket[None] = Ticket("a read")
    if rank:
        reading.fail(StoreError("layer 3: EIO"))
    else:
        reading.finish(None)
    with pytest.raises(OffloadError) as raised:
        group.gather(whole, own, "layer 3", after=reading).wait()
    return f"{type(raised.value).__name__}: {raised.value}"


def test_a_failed_read_on_one_rank_ends_it_on_all() -> None:
    first, second = run(2, fail_before)
    assert second.startswith("StoreError") and "EIO" in second
    assert "rank 1 has failed before layer 3" in first and "EIO" in first


def go_missing(rank: int, how: str, folder: Path) -> str:
    group = ranks()
    whole, own = torch.zeros(group.count << 20), torch.zeros(1 << 20)
    group.gather(whole, own, "layer 0").wait()
    if rank == 1:
        if how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        while len(list(folder.iterdir())) < 2:  # until both others have been told
            time.sleep(0.1)
        return "slept"
    group.deadline_s = 3.0
    begin = time.monotonic()
    with pytest.raises(StateError, match="has ended, or did not answer within 3 s") as raised:
        group.gather(whole, own, "layer 1").wait()
    assert time.monotonic() - begin < 25  # torch's own limit is 30 s
    (folder / f"{rank}").touch()
    return str(raised.value)


@pytest.mark.parametrize("how", ["die", "sleep"])
def test_a_rank_that_is_missing_is_told_by_the_deadline(how: str, tmp_path: Path) -> None:
    found = outcomes(3, go_missing, how, tmp_path)
    for rank in (0, 2):
        assert found[rank].error is None, found[rank].error
        assert found[rank].result
    if how == "die":
        assert found[1].exit_code == -signal.SIGKILL


def long_name(rank: int) -> list[int]:
    return [int(one) for one in ranks().exchange(rank, "Schicht für Schicht " * 20 + "ü" * 200)]


def test_names_may_be_long_and_of_any_letters() -> None:
    assert run(2, long_name) == [[0, 1], [0, 1]]


def the_groups_limit(rank: int) -> tuple[float | None, float | None]:
    some = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    found = [ranks_of(group) for group in (None, some)]
    return tuple(one.deadline_s for one in found if one is not None)  # type: ignore[return-value]


def test_waits_are_as_long_as_those_of_the_group() -> None:
    assert run(2, the_groups_limit) == [(30.0, 7.0)] * 2


# --- one machine ----------------------------------------------------------------------------------


def share(rank: int) -> tuple[set[int], int, str, int, int | None]:
    group = ranks()
    portion = node_share.current()
    assert group.on_this_machine() == list(range(group.count))
    allowed, _ = host_bytes(Config())
    depth = portion.part_of(16, 4)
    return os.sched_getaffinity(0), kernels.num_threads(), str(portion), depth, allowed


def test_ranks_on_one_machine_share_it() -> None:
    cores = os.sched_getaffinity(0)
    results = run(2, share)
    bound = [one[0] for one in results]
    if len(cores) >= 2 and "bound to cores" in results[0][2]:
        assert bound[0] and bound[1] and not bound[0] & bound[1]
    assert all(one[1] == 1 and one[3] == 8 for one in results)
    allowed, _ = host_bytes(Config())
    assert allowed is not None
    for one in results:  # half of what is free, which changes all the time
        assert one[4] is not None and one[4] < 0.75 * allowed


# --- meetings -------------------------------------------------------------------------------------


class PressedWhenAllAreThere:
    """A store that raises SIGINT when the last rank has come. sees: what `check` returns then."""

    def __init__(self, store: Any, sees: bool) -> None:
        self._store, self._sees = store, sees

    def check(self, keys: list[str]) -> bool:
        while not self._store.check(keys):
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)
        return self._sees

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def meet_with_ctrl_c(rank: int) -> list[tuple[str, float]]:
    """Meet three times, the last one undisturbed; return how each ended, and after how long."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    plain, found = side_channel.default_store, []
    for sees in (False, True, None):
        if rank == 0 and sees is not None:
            store = PressedWhenAllAreThere(plain(), sees)
            side_channel.default_store = lambda store=store: store
        else:
            side_channel.default_store = plain
        if rank == 1:  # is the last one
            time.sleep(0.3)
        begin_s = time.monotonic()
        try:
            met = side_channel.open_side_channel("a test", None, 60.0)
            assert met is not None
            met.begin("a test")
            said = str(met.exchange(rank))
            met.leave()
        except KeyboardInterrupt:
            said = "Ctrl-C"
        except StateError as error:
            said = "ended" if "ended" in str(error) else str(error)
        found.append((said, time.monotonic() - begin_s))
    return found


def test_ctrl_c_in_the_moment_in_which_the_last_rank_comes_to_a_meeting() -> None:
    """It had been swallowed. The other rank hears at once; the next meeting is whole."""
    interrupted, other = run(2, meet_with_ctrl_c)
    assert [said for said, _ in interrupted] == ["Ctrl-C", "Ctrl-C", "[0, 1]"]
    assert [said for said, _ in other] == ["ended", "ended", "[0, 1]"]
    assert all(seconds < 30 for _, seconds in other)
