"""Checks of byte budgets: requests beyond one are refused, and the process stays within it."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from offload.api import prepare, report, wrap
from offload.core.budget import Budget
from offload.core.errors import CapacityError
from offload.core.heap import resident_bytes
from offload.core.pool import Pool
from offload.params.prepared import prepared_of
from offload.tools.selftest.check import (
    NotRun,
    PassedCheck,
    Setting,
    require,
    require_equal,
    require_error,
)
from offload.tools.selftest.model import least_bytes, make_model, make_optimizer

_PAGE = 4096
_MIB = 1 << 20
_SLACK_BYTES = 24 * _MIB  # threads and buffers of an I/O engine, torch, and Python


def pool(setting: Setting) -> PassedCheck:
    """Check that leases never overlap, never exceed the arena, and all return to the pool."""
    pages, count = 64, 0
    budget = Budget(pages * _PAGE)
    with Pool(pages * _PAGE, budget=budget) as arena:
        for turn in range(2 if setting.is_quick else 8):
            count += _fill_arena(arena, turn)
        with require_error(CapacityError, "a second pool beyond the budget"):
            Pool(_PAGE, budget=budget)
        with require_error(CapacityError, "a lease larger than the pool"):
            arena.lease((pages + 1) * _PAGE)
    gc.collect()
    require_equal(budget.used_bytes, 0, "held after close")
    return PassedCheck("leases, each with bytes of its own", count + 2)


def _fill_arena(arena: Pool, turn: int) -> int:
    """Take leases of odd sizes until one is refused; check that each keeps the bytes written to it.
    Returns the number of leases.
    """
    held: list[tuple[Tensor, int]] = []
    most = arena.capacity_bytes // _PAGE
    while True:
        nbytes = 1 + (turn * 7919 + len(held) * 104_729) % (3 * _PAGE)
        got = f"{len(held)} at once"
        require(len(held) <= most, "leases of a full pool", got=got, expected=f"at most {most}")
        try:
            lease = arena.lease(nbytes)
        except CapacityError:
            break
        held.append((lease.tensor().fill_(len(held) % 251), len(held) % 251))
    stats = arena.stats()
    require(
        stats.used_bytes <= stats.peak_bytes <= arena.capacity_bytes,
        "used and most bytes of the pool",
        got=f"{stats.used_bytes}, {stats.peak_bytes}",
        expected=f"at most {arena.capacity_bytes}",
    )
    for number, (tensor, value) in enumerate(held):
        is_own = bool((tensor == value).all())
        require(is_own, f"bytes of lease {number}", got="another's", expected=value)
    count = len(held)
    held.clear()
    del tensor, lease
    gc.collect()
    require_equal(arena.stats().used_bytes, 0, "bytes held after all leases")
    return count


def refusals(setting: Setting) -> PassedCheck:
    """Check that a budget that is too small is refused before anything changes, and that a budget
    one page larger than the largest refused one works.
    """
    model = make_model(setting.seed)
    optimizer = make_optimizer(model)
    before = [value.clone() for value in model.state_dict().values()]
    folder, device = setting.directory, setting.device
    least = least_bytes(model, optimizer, nvme=folder, device=device)
    for nbytes in (_PAGE, least // 2, least - _PAGE):
        with require_error(CapacityError, f"host_memory={nbytes}"):
            prepare(model, optimizer, host_memory=nbytes, nvme=folder, device=device)
        require(prepared_of(model) is None, "a refused model", got="prepared", expected="plain")
    values = model.state_dict().values()
    is_same = all(torch.equal(a, b) for a, b in zip(values, before, strict=True))
    require(is_same, "values of a refused model", got="others", expected="those before")
    prepare(model, optimizer, host_memory=least, nvme=folder, device=device)
    peak = report(optimizer).host_peak_bytes
    require(peak <= least, "peak of host bytes", got=peak, expected=f"up to {least}")
    optimizer.close()
    return PassedCheck("budgets, refused or kept", 4)


def memory(setting: Setting) -> PassedCheck:
    """Check that the resident memory of the process, as the system counts it, grows by no more than
    the budget and 24 MiB, not by the size of the state.
    """
    if resident_bytes() is None:
        raise NotRun("this system does not tell a process's memory in /proc/self/statm")
    numel = (8 if setting.is_quick else 24) * _MIB
    param = nn.Parameter(torch.zeros(numel // 8, 8, dtype=torch.float32, device="cpu"))
    param.grad = torch.ones_like(param)
    budget = 16 * _MIB
    plain = torch.optim.AdamW([param], lr=1e-2)
    before, most = resident_bytes() or 0, 0
    optimizer = wrap(plain, host_memory=budget, nvme=setting.directory)
    for _ in range(3):
        optimizer.step()
        most = max(most, resident_bytes() or 0)
    peak, state = report(optimizer).host_peak_bytes, 8 * numel
    grown, allowed = most - before, budget + _SLACK_BYTES
    require(peak <= budget, "peak of the pool", got=peak, expected=f"at most {budget}")
    require(grown <= allowed, "growth of the process", got=grown, expected=f"at most {allowed}")
    optimizer.close()
    return PassedCheck(
        f"MiB of state, the process grew by {max(0, grown) // _MIB} MiB for a budget of "
        f"{budget // _MIB} MiB",
        state // _MIB,
    )
