"""By how much torch's own AdamW implementations differ from one another: `make numerics`.

The same gradients, the same start, 64 Ki fp32 parameters. Ours gives the bits of `fused=True` on
the CPU; `foreach=True` and the plain loop, and `fused=True` on another device (--device cuda), do
the same arithmetic in another order. The distance is told in units of the last place (ulp) and as
a share of the way that the parameters have gone.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch

NUMEL = 64 << 10
STEPS = (1, 10, 100, 1000)
HYPER = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
ROW = "{:<22} {:>6} {:>11} {:>9} {:>9} {:>15}"


def trained(device: str, seed: int, **how: bool) -> dict[int, torch.Tensor]:
    """Train; return the parameters after each number of steps."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(NUMEL, generator=generator) * 0.02
    param = torch.nn.Parameter(start.clone().to(device))
    optimizer = torch.optim.AdamW([param], **HYPER, **how)
    found = {0: start}
    for step in range(1, max(STEPS) + 1):
        grad = torch.randn(NUMEL, generator=generator) * 1e-2
        param.grad = grad.to(device)
        optimizer.step()
        if step in STEPS:
            found[step] = param.detach().cpu().clone()
    return found


def ulps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return how many floats lie between the two, element by element."""
    keys = []
    for tensor in (one, other):
        bits = tensor.view(torch.int32).long()
        keys.append(torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits))
    return (keys[0] - keys[1]).abs()


def compare(name: str, ours: dict[int, torch.Tensor], theirs: dict[int, torch.Tensor]) -> None:
    for step in STEPS:
        apart = ulps(ours[step], theirs[step])
        gone = (ours[step] - ours[0]).norm()
        share = (ours[step] - theirs[step]).norm() / gone
        differ = (apart > 0).double().mean()
        middle = int(apart.double().quantile(0.5))
        print(ROW.format(name, step, f"{differ:.1%}", middle, int(apart.max()), f"{share:.1e}"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="also compare fused=True on this device, cuda say")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {NUMEL} fp32 parameters, seed {options.seed}")
    names = ("against fused, CPU", "steps", "that differ", "ulp, half", "ulp, most", "of the way")
    print(ROW.format(*names))
    fused = trained("cpu", options.seed, fused=True)
    others: list[tuple[str, str, dict[str, Any]]] = [
        ("foreach, CPU", "cpu", {"foreach": True}),
        ("plain loop, CPU", "cpu", {"foreach": False, "fused": False}),
    ]
    if options.device:
        others.append((f"fused, {options.device}", options.device, {"fused": True}))
    for name, device, how in others:
        compare(name, fused, trained(device, options.seed, **how))


if __name__ == "__main__":
    main()
