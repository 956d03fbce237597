"""Checks of `offload.wrap`: the bits of plain torch, with the state in any tier.

With an accelerator, parameters and gradients are on it; the update runs on the host, so it is
compared with torch's own update on the CPU, from the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.api import report, wrap
from offload.optim import Lion
from offload.tools.selftest.bits import (
    normal,
    require_promise,
    require_same,
    require_same_states,
    without_promise,
)
from offload.tools.selftest.check import PassedCheck, Setting, require
from offload.tools.selftest.model import adamw, least_bytes, native

SIZES = ((300, 130), (5,), (257, 64), (3, 7), (1,), (70_001,), (40, 1000))
_Make = Callable[[list[Any]], Any]
_NATIVE: dict[str, _Make] = {
    "AdamW": adamw,
    "Adam": partial(native, torch.optim.Adam, lr=1e-2, weight_decay=0.1),
    "SGD": partial(native, torch.optim.SGD, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": partial(native, torch.optim.Adagrad, lr=1e-2, lr_decay=0.01),
}
_GENERIC: dict[str, _Make] = {
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, momentum=0.9, foreach=False),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2, foreach=False),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2, foreach=False),
    "AdamW with amsgrad": partial(torch.optim.AdamW, lr=1e-2, amsgrad=True, foreach=False),
}


def memory(setting: Setting) -> PassedCheck:
    """Compare updates with all state in host memory with torch's fused ones."""
    require_promise()
    count = sum(compare(setting, name, make, wrap) for name, make in _NATIVE.items())
    return PassedCheck(f"tensors beside torch, fused: {', '.join(_NATIVE)}", count)


def disk(setting: Setting) -> PassedCheck:
    """Compare updates in the least host memory that works, so that most of the state is on disk.

    The reference is torch's own update where it has the bits of ours, else ours with all state in
    memory.
    """
    on_little, count = partial(tight, setting), 0
    has_promise = without_promise() is None
    for name, make in _NATIVE.items():
        count += compare(setting, name, make, on_little, None if has_promise else wrap)
    beside = "torch" if has_promise else "the same in memory"
    return PassedCheck(f"tensors beside {beside}, state on disk: {', '.join(_NATIVE)}", count)


def optimizers(setting: Setting) -> PassedCheck:
    """Compare torch's other optimizers, whose own code runs slice by slice, and Lion, with state on
    disk.

    The reference is torch's own class on the CPU; for Lion, ours with all state in memory.
    """
    chosen = dict(list(_GENERIC.items())[:2]) if setting.is_quick else _GENERIC
    on_little = partial(tight, setting)
    count = sum(compare(setting, name, make, on_little) for name, make in chosen.items())
    lion = partial(Lion, lr=1e-3, weight_decay=0.1)
    count += compare(setting, "Lion", lion, on_little, judge=wrap)
    return PassedCheck(f"tensors: {', '.join(chosen)}, Lion", count)


def half(setting: Setting) -> PassedCheck:
    """Check that 16-bit parameters are rounded from exact fp32 master weights: torch trains the
    same masters in fp32 for comparison.
    """
    require_promise()
    count = 0
    for dtype in (torch.bfloat16, torch.float16):
        start = tensors(setting.seed, dtype)
        masters = [nn.Parameter(tensor.float()) for tensor in start]
        theirs = adamw(masters)
        params = parameters(start, setting.device)
        mine = tight(setting, adamw(params))
        for step in range(_steps(setting)):
            grads = tensors(setting.seed + step + 1, dtype)
            take_step(masters, theirs, [grad.float() for grad in grads])
            take_step(params, mine, grads)
            rounded = [master.detach().to(dtype) for master in masters]
            count += require_same(params, rounded, f"{dtype}, step {step}: parameter")
        expected = theirs.state_dict()["state"]
        for number, master in enumerate(masters):
            expected[number]["master"] = master.detach()
        count += require_same_states(
            mine.state_dict()["state"], expected, f"{dtype}: master and moments"
        )
        mine.close()
    return PassedCheck("16-bit parameters, fp32 masters and moments", count)


# --- comparison of plain and wrapped training -----------------------------------------------------


def compare(
    setting: Setting,
    name: str,
    make: _Make,
    wrapped: Callable[[Any], Any],
    judge: Callable[[Any], Any] | None = None,
) -> int:
    """Compare a plain loop on the CPU with a wrapped one on the device, from the same gradients;
    return how many tensors were compared. wrapped: wraps ours, with state on disk unless it is
    `wrap`. judge: wraps the reference; None: that is the plain optimizer.
    """
    start = tensors(setting.seed)
    plain = parameters(start, "cpu")
    theirs = make(plain) if judge is None else judge(make(plain))
    expected, expected_states = train_steps(plain, theirs, setting)
    if judge is not None:
        theirs.close()
    ours = parameters(start, setting.device)
    mine = wrapped(make(ours))
    got, states = train_steps(ours, mine, setting)
    count = require_same(got, expected, f"{name}: parameter")
    count += require_same_states(states, expected_states, f"{name}: state")
    moved, on_disk = report(mine).disk_read_bytes, wrapped is not wrap
    require(bool(moved) is on_disk, f"{name}: bytes read", got=moved, expected=f"{on_disk=}")
    mine.close()
    return count


def train_steps(
    params: list[nn.Parameter], optimizer: Any, setting: Setting
) -> tuple[list[Tensor], dict[int, Any]]:
    """Take several steps; return all parameters after each step, and the state in the end."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    seen: list[Tensor] = []
    for step in range(_steps(setting)):
        take_step(params, optimizer, tensors(setting.seed + step + 1))
        scheduler.step()
        seen += [param.detach().cpu().clone() for param in params]
    return seen, optimizer.state_dict()["state"]


def tight(setting: Setting, optimizer: Any) -> Any:
    """Wrap the optimizer in the least host memory that works: most of its state is on disk."""
    folder = setting.directory
    return wrap(optimizer, host_memory=least_bytes(optimizer, nvme=folder), nvme=folder)


def _steps(setting: Setting) -> int:
    return 4 if setting.is_quick else 10


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [normal(*size, generator=generator).to(dtype) for size in SIZES]


def parameters(values: Sequence[Tensor], device: str) -> list[nn.Parameter]:
    return [nn.Parameter(value.clone().to(device)) for value in values]


def take_step(params: Sequence[Tensor], optimizer: Any, grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device) * 1  # still in flight on the device when step() begins
    optimizer.step()
    optimizer.zero_grad()
