"""Checks of the allocator: budget, accounting, poison, reuse."""

from __future__ import annotations

import torch

from . import DeviceModule
from .checks import check, raises

MIB = 1 << 20


@check
def out_of_memory(fake: DeviceModule) -> None:
    fake.set_budget(MIB + 1024)  # and two numbers
    kept = torch.ones(MIB // 8, device="fake")
    raises(
        torch.OutOfMemoryError, "fake:0 is out of memory", lambda: torch.empty(MIB, device="fake")
    )
    assert torch.accelerator.memory_stats()["num_ooms"] >= 1
    more = torch.ones(MIB // 8, device="fake")
    raises(torch.OutOfMemoryError, "1048576 in use", lambda: torch.empty(300, device="fake"))
    assert kept.sum().item() == more.sum().item() == MIB // 8
    assert torch.empty(1, device="fake:1").device.index == 1
    del more
    assert torch.zeros(MIB // 8, device="fake").sum().item() == 0


@check
def cached_blocks_are_released_before_an_error(fake: DeviceModule) -> None:
    fake.set_budget(MIB + 512)
    with torch.Stream("fake") as side:
        cached = torch.ones(MIB // 4, device="fake")
    assert torch.accelerator.memory_reserved() == MIB
    del cached
    other = torch.zeros(MIB // 8, device="fake")
    assert torch.accelerator.memory_reserved() == MIB // 2
    recorded = torch.ones(MIB // 8, device="fake")
    recorded.record_stream(side)
    del recorded
    again = torch.zeros(MIB // 8, device="fake")
    assert again.sum().item() == 0 and other.sum().item() == 0


@check
def memory_is_counted(fake: DeviceModule) -> None:
    accelerator = torch.accelerator
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    one = torch.empty(1, device="fake")
    large = torch.empty(MIB, dtype=torch.uint8, device="fake")
    assert accelerator.memory_allocated() == before + 512 + MIB
    del large
    assert accelerator.memory_allocated() == before + 512
    assert accelerator.max_memory_allocated() == before + 512 + MIB
    assert accelerator.memory_allocated(1) == 0
    free, total = accelerator.get_memory_info()
    assert total == 1 << 30 and free == total - accelerator.memory_reserved()
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == accelerator.memory_allocated() == before + 512
    accelerator.reset_peak_memory_stats()
    assert accelerator.max_memory_allocated() == before + 512
    del one


@check
def memory_is_poisoned(fake: DeviceModule) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        fresh = torch.empty(100, dtype=dtype, device="fake")
        assert fresh.isnan().all().item()
        fresh.zero_()
        address = fresh.data_ptr()
        del fresh
        again = torch.empty(100, dtype=dtype, device="fake")
        assert again.data_ptr() == address and again.isnan().all().item()
    assert torch.empty(4, pin_memory=True).isnan().all()


@check
def memory_is_reused_per_stream(fake: DeviceModule) -> None:
    side = torch.Stream("fake")
    mine = torch.zeros(1000, device="fake")
    address = mine.data_ptr()
    del mine
    with side:
        theirs = torch.zeros(1000, device="fake")
        assert theirs.data_ptr() != address
    assert torch.zeros(1000, device="fake").data_ptr() == address


@check
def record_stream_delays_reuse(fake: DeviceModule) -> None:
    fake.set_schedule("lazy")
    side = torch.Stream("fake")
    target = torch.empty(1000, pin_memory=True)
    for recorded in (False, True):
        block = torch.full((1000,), 3.0, device="fake")
        address = block.data_ptr()
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            target.copy_(block, non_blocking=True)
        if recorded:
            block.record_stream(side)
        del block
        after = torch.zeros(1000, device="fake")
        assert (after.data_ptr() == address) == (not recorded)
        torch.accelerator.current_stream().synchronize()
        side.synchronize()
        assert target.eq(3).all() == recorded
        del after
    two = [torch.zeros(1000, device="fake") for _ in range(2)]
    assert address in [one.data_ptr() for one in two]
