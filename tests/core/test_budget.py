"""One limit for all host memory of the process."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from offload.core.budget import HOST, Budget
from offload.core.errors import CapacityError, ConfigError
from offload.core.pool import Pool

MI = 1 << 20


def test_shares_are_counted_and_refused_with_the_numbers() -> None:
    budget = Budget(10 * MI)
    first = budget.take(6 * MI, "host pool")
    budget.take(1 * MI, "buffers of io_uring")
    with pytest.raises(CapacityError) as caught:
        budget.take(4 * MI, "memory store")
    for part in ("memory store needs 4 MiB", "3 MiB of 10 MiB are free", "host pool 6 MiB"):
        assert part in str(caught.value)
    assert budget.used_bytes == 7 * MI
    first.release()
    first.release()  # idempotent
    budget.take(4 * MI, "memory store")
    assert (budget.used_bytes, budget.peak_bytes) == (5 * MI, 7 * MI)


def test_a_share_that_fits_exactly_fits() -> None:
    budget = Budget(MI)
    budget.take(MI, "all")
    with pytest.raises(CapacityError):
        budget.take(1, "one byte more")
    budget.take(0, "nothing")


def test_the_limit_cannot_go_below_what_is_held() -> None:
    budget = Budget()
    budget.take(5 * MI, "host pool")
    with pytest.raises(CapacityError, match="below what is held already: host pool 5 MiB"):
        budget.limit(4 * MI)
    assert budget.limit_bytes is None
    budget.limit(5 * MI)
    with pytest.raises(CapacityError):
        budget.take(1, "more")
    budget.limit(None)
    budget.take(MI, "more")


@pytest.mark.parametrize("nbytes", [0, -1])
def test_a_limit_is_at_least_one_byte(nbytes: int) -> None:
    with pytest.raises(ConfigError, match="limit: expected 1 byte or more"):
        Budget(nbytes)


def test_pools_share_one_budget() -> None:
    budget = Budget(8 * MI)
    pool = Pool(6 * MI, budget=budget)
    with pytest.raises(CapacityError, match="host pool 6 MiB"):
        Pool(3 * MI, budget=budget)
    with pytest.raises(CapacityError, match="host pool needs 3 MiB"):
        Pool(3 * MI, budget=budget)
    with Pool(2 * MI, budget=budget):
        assert budget.used_bytes == 8 * MI
    assert budget.used_bytes == 6 * MI
    pool.close()


def test_a_pool_holds_its_share_until_its_last_lease_is_gone() -> None:
    budget = Budget()
    pool = Pool(4 * MI, budget=budget)
    tensor = pool.lease(MI).tensor()
    pool.close()
    del pool
    gc.collect()
    assert budget.used_bytes == 4 * MI, "the arena is still mapped"
    del tensor
    gc.collect()
    assert budget.used_bytes == 0


def test_a_pool_that_cannot_be_registered_gives_its_share_back() -> None:
    def refuse(address: int, nbytes: int, device: torch.device) -> None:
        raise RuntimeError("no")

    budget = Budget()
    with pytest.raises(RuntimeError):
        Pool(MI, register=refuse, budget=budget, device=torch.device("meta"))
    gc.collect()
    assert budget.used_bytes == 0


def test_the_process_has_one_budget() -> None:
    before = HOST.used_bytes
    with Pool(MI):
        assert HOST.used_bytes == before + MI


def test_many_threads_never_exceed_the_limit() -> None:
    budget = Budget(100)
    refused = []

    def work() -> None:
        for _ in range(300):
            try:
                share = budget.take(7, "a thread")
            except CapacityError:
                refused.append(1)
                continue
            assert budget.used_bytes <= 100
            share.release()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 0
    assert budget.peak_bytes <= 100
