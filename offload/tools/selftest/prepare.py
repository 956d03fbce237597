"""Checks of `offload.prepare`: with any budgets, the bits of the plain model on the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.api import close, prepare, report
from offload.core.errors import CapacityError, OffloadError
from offload.device.accelerator import find_device, used_bytes
from offload.params.prepared import prepared_of
from offload.planning.unit import UnitSizes, on_device_bytes
from offload.tools.selftest.bits import require_same
from offload.tools.selftest.check import CheckFailed, NotRun, PassedCheck, Setting, require
from offload.tools.selftest.model import least_bytes, make_model, make_optimizer, train, train_plain

_MARGINS = (1.0, 1.5, 2.5, 4.0)
_Plain = tuple[list[Any], list[Tensor]]


def budgets(setting: Setting) -> PassedCheck:
    """Check budgets of host memory, from enough for everything down to the least that works, with
    several prefetch depths.
    """
    plain = _plain(setting)
    least, most = _bounds(setting)
    middle = (least + most) // 2
    tries: list[dict[str, Any]] = [
        {},
        {"host_memory": middle},
        {"host_memory": least},
        {"host_memory": least, "prefetch_depth": 0},
    ]
    if not setting.is_quick:
        tries += [
            {"host_memory": middle, "prefetch_depth": 1},
            {"host_memory": (least + middle) // 2, "prefetch_depth": 3},
        ]
    count = sum(_compare(setting, plain, each) for each in tries)
    return PassedCheck(f"losses, gradients, values within {len(tries)} budgets", count)


def device(setting: Setting) -> PassedCheck:
    """Check a budget of device memory below the size of the parameters, so that their blocks are
    fetched and evicted while the model computes.
    """
    if setting.is_on_cpu:
        raise NotRun("the CPU has no device memory of its own")
    plain = _plain(setting)
    least, _ = _bounds(setting)
    one_bytes, all_bytes, others_bytes = _device_needs(setting)
    count = 0
    for share, options in ((0.0, {"host_memory": least}), (0.5, {})):
        for margin in _MARGINS:  # how much the device's libraries take is not known
            limit = int(margin * others_bytes) + max(one_bytes, int(share * all_bytes))
            try:
                count += _compare(setting, plain, {**options, "device_memory": limit})
            except (CapacityError, torch.OutOfMemoryError):
                continue
            break
        else:
            raise CheckFailed(
                f"device memory for {share:.0%} of the parameters",
                got=f"none works up to {limit} bytes",
                expected=f"about {others_bytes} and {one_bytes} to {all_bytes} for blocks",
            )
    return PassedCheck("losses, gradients, values within little device memory", count)


def half(setting: Setting) -> PassedCheck:
    """Check a model of bf16 parameters, for which the update keeps exact master weights."""
    dtype = torch.bfloat16
    plain = _plain(setting, dtype=dtype)
    tries: list[dict[str, Any]] = [{}, {"host_memory": _bounds(setting, dtype=dtype)[0]}]
    count = sum(_compare(setting, plain, each, dtype=dtype) for each in tries)
    return PassedCheck("losses, gradients, values of a bf16 model", count)


def activations(setting: Setting) -> PassedCheck:
    """Check activations that are recomputed in backward or offloaded, on little host memory."""
    plain, count = _plain(setting), 0
    policies = ("recompute", "offload")
    for policy in policies:
        least, most = _bounds(setting, activations=policy)
        budget = most if setting.is_on_cpu and policy == "offload" else least
        count += _compare(setting, plain, {"activations": policy, "host_memory": budget})
    return PassedCheck(f"losses, gradients, values with activations {', '.join(policies)}", count)


def checkpointing(setting: Setting) -> PassedCheck:
    """Check torch.utils.checkpoint inside and around units, reentrant and not."""
    count, ways = 0, [{place: how} for place in ("around", "inside") for how in (False, True)]
    for kind in ways[:: 3 if setting.is_quick else 1]:
        plain = _plain(setting, **kind)
        least, _ = _bounds(setting)
        count += _compare(setting, plain, {"host_memory": least}, **kind)
    return PassedCheck("losses, gradients, values with torch.utils.checkpoint", count)


# --- comparison of plain and prepared training ----------------------------------------------------


def _steps(setting: Setting) -> int:
    return 3 if setting.is_quick else 6


def _plain(setting: Setting, **kind: Any) -> _Plain:
    """Train the plain model and return the expected results. Raises `NotRun` if torch cannot train
    it on the device, or if the device gives other bits from run to run.
    """

    def run() -> _Plain:
        return train_plain(make_model(setting.seed, **kind), setting, _steps(setting))

    if setting.is_on_cpu:
        return run()
    try:
        first = run()
    except OffloadError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        raise NotRun(f"plain torch cannot run it on {setting.device}: {error}") from error
    again = run()
    pairs = zip([*first[0], *first[1]], [*again[0], *again[1]], strict=True)
    if not all(a is b or torch.equal(a, b) for a, b in pairs):
        raise NotRun(f"plain torch has other bits from run to run on {setting.device}")
    return first


def _bounds(setting: Setting, activations: str = "keep", **kind: Any) -> tuple[int, int]:
    """Return the least host memory that works with a drive, and the least that works without one,
    with activations kept.
    """
    model = make_model(setting.seed, **kind)
    pair, device = (model, make_optimizer(model)), setting.device
    least = least_bytes(*pair, device=device, nvme=setting.directory, activations=activations)
    return least, least_bytes(*pair, device=device, activations="keep")


def _device_needs(setting: Setting) -> tuple[int, int, int]:
    """Measure the bytes of device memory that a run without a limit needs: for the blocks of one
    unit at a time, for those of all units, and for everything else at its peak.
    """
    model = make_model(setting.seed)
    optimizer = make_optimizer(model)
    prepare(model, optimizer, device=setting.device)
    train(model, optimizer, setting, _steps(setting))
    made: Any = prepared_of(model)
    others = made.engine.residency.tier.device_budget.others_peak_bytes
    every = sum(on_device_bytes(unit.nbytes) for unit in made.units)
    least = UnitSizes.of(made.units).least_device_bytes
    close(model)
    return least, every, others


def _compare(setting: Setting, plain: _Plain, options: dict[str, Any], **kind: Any) -> int:
    """Train a prepared model, compare its results and final values with `plain`, and return how
    many were compared. With a budget of host memory the run must have read from disk and stayed
    within the budget; with one of device memory it must have evicted blocks from the device.
    """
    shown = ", ".join(f"{name}={value}" for name, value in options.items()) or "no limit"
    model = make_model(setting.seed, **kind)
    optimizer = make_optimizer(model)
    prepare(model, optimizer, device=setting.device, nvme=setting.directory, **options)
    try:
        seen = train(model, optimizer, setting, _steps(setting), partial(_look, setting, options))
        found = report(optimizer)
    finally:
        close(model)
    count = require_same(seen, plain[0], f"{shown}: what was seen,")
    if "device_memory" in options:
        drops = found.counts.get("device_drops", 0)
        require(drops > 0, f"{shown}: blocks that left the device", got=drops, expected="some")
    limit = options.get("host_memory")
    if limit is not None:
        peak = found.host_peak_bytes
        require(peak <= limit, f"{shown}: peak of host bytes", got=peak, expected=f"up to {limit}")
        read = found.disk_read_bytes
        require(read > 0, f"{shown}: bytes read from disk", got=read, expected="some")
    values = [value.cpu() for value in model.state_dict().values()]
    return count + require_same(values, plain[1], f"{shown}: value")


def _look(setting: Setting, options: dict[str, Any]) -> None:
    """Require, in the middle of a step, that the bytes in use by the device's own count are within
    the budget of device memory.
    """
    limit = options.get("device_memory")
    if limit is not None:
        used = used_bytes(find_device(setting.device))
        require(used <= limit, "bytes on the device", got=used, expected=f"at most {limit}")
