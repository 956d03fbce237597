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

from offload.api import plan, report, wrap
from offload.optim import Lion
from offload.tools.selftest.bits import require_same, require_same_states
from offload.tools.selftest.check import PassedCheck, Setting, require
from offload.tools.selftest.model import least_bytes
from offload.tools.selftest.torch_bits import require_promise, without_promise

SIZES = ((300, 130), (5,), (257, 64), (3, 7), (1,), (70_001,), (40, 1000))


def _fused(params: Sequence[Tensor]) -> bool | None:
    """Return True on the CPU, where torch's fused update is the reference; elsewhere None, since
    torch may have no fused one there and ours needs none.
    """
    return True if all(param.is_cpu for param in params) else None


_Make = Callable[[list[Any]], torch.optim.Optimizer]
NATIVE: dict[str, _Make] = {
    "AdamW": lambda params: torch.optim.AdamW(
        params, lr=1e-2, weight_decay=0.1, fused=_fused(params)
    ),
    "Adam": lambda params: torch.optim.Adam(
        params, lr=1e-2, weight_decay=0.1, fused=_fused(params)
    ),
    "SGD": lambda params: torch.optim.SGD(
        params, lr=1e-2, momentum=0.9, nesterov=True, fused=_fused(params)
    ),
    "Adagrad": lambda params: torch.optim.Adagrad(
        params, lr=1e-2, lr_decay=0.01, fused=_fused(params)
    ),
}
GENERIC: dict[str, _Make] = {
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, foreach=False),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2, foreach=False),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-2, foreach=False),
    "AdamW with amsgrad": lambda params: torch.optim.AdamW(
        params, lr=1e-2, amsgrad=True, foreach=False
    ),
}


def memory(setting: Setting) -> PassedCheck:
    """Compare updates with all state in host memory with torch's fused ones."""
    require_promise()
    count = sum(_compare(setting, name, make, on_disk=False) for name, make in NATIVE.items())
    return PassedCheck(f"tensors beside torch, fused: {', '.join(NATIVE)}", count)


def disk(setting: Setting) -> PassedCheck:
    """Compare updates in the least host memory that works, so that most of the state is on disk.

    The reference is torch's own update where it has the bits of ours, else ours with all state in
    memory.
    """
    has_promise, count = without_promise() is None, 0
    for name, make in NATIVE.items():
        judge = None if has_promise else partial(_wrapped_in_memory, make)
        count += _compare(setting, name, make, on_disk=True, judge=judge)
    beside = "torch" if has_promise else "the same in memory"
    return PassedCheck(f"tensors beside {beside}, state on disk: {', '.join(NATIVE)}", count)


def _wrapped_in_memory(make: _Make, params: list[Any]) -> Any:
    return wrap(make(params))


def optimizers(setting: Setting) -> PassedCheck:
    """Compare torch's other optimizers, whose own code runs slice by slice, and Lion, with state on
    disk.

    The reference is torch's own class on the CPU; for Lion, ours with all state in memory.
    """
    chosen = dict(list(GENERIC.items())[:2]) if setting.is_quick else GENERIC
    count = sum(_compare(setting, name, make, on_disk=True) for name, make in chosen.items())
    count += _compare(
        setting,
        "Lion",
        lambda params: Lion(params, lr=1e-3, weight_decay=0.1),
        on_disk=True,
        judge=lambda params: wrap(Lion(params, lr=1e-3, weight_decay=0.1)),
    )
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
        theirs = NATIVE["AdamW"](masters)
        params = parameters(start, setting.device)
        mine = _wrapped(setting, NATIVE["AdamW"], params, on_disk=True)
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


def _compare(
    setting: Setting,
    name: str,
    make: _Make,
    on_disk: bool,
    judge: Callable[[list[Any]], Any] | None = None,
) -> int:
    """Compare a plain loop on the CPU with a wrapped one on the device, from the same gradients;
    return how many tensors were compared. judge: makes the reference optimizer; None: `make` does.
    """
    start = tensors(setting.seed)
    plain = parameters(start, "cpu")
    theirs: Any = (judge or make)(plain)
    expected, expected_states = train_steps(plain, theirs, setting)
    if judge is not None:
        theirs.close()
    ours = parameters(start, setting.device)
    mine = _wrapped(setting, make, ours, on_disk)
    got, states = train_steps(ours, mine, setting)
    count = require_same(got, expected, f"{name}: parameter")
    count += require_same_states(states, expected_states, f"{name}: state")
    moved = report(mine).disk_read_bytes
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


def _wrapped(
    setting: Setting,
    make: _Make,
    params: list[nn.Parameter],
    on_disk: bool,
) -> Any:
    """Make an optimizer and wrap it, with its state in memory or mostly on disk. The parameters may
    be on a device.
    """
    optimizer = make(params)
    return tight(setting, optimizer) if on_disk else wrap(optimizer)


def tight(setting: Setting, optimizer: torch.optim.Optimizer) -> Any:
    """Wrap the optimizer in the least host memory that works: most of its state is on disk."""
    folder = setting.directory
    least = least_bytes(lambda nbytes: plan(optimizer, host_memory=nbytes, nvme=folder))
    return wrap(optimizer, host_memory=least, nvme=folder)


def _steps(setting: Setting) -> int:
    return 4 if setting.is_quick else 10


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, generator=generator, dtype=torch.float32, device="cpu").to(dtype)
        for size in SIZES
    ]


def parameters(values: Sequence[Tensor], device: str) -> list[nn.Parameter]:
    return [nn.Parameter(value.clone().to(device)) for value in values]


def take_step(params: Sequence[Tensor], optimizer: Any, grads: Sequence[Tensor]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.to(param.device) * 1  # still in flight on the device when step() begins
    optimizer.step()
    optimizer.zero_grad()
