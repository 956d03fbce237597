"""A child that trains a prepared model and tells its peak RSS: `tests/test_rss.py` starts it.

Its argument is JSON: how (`prepare` or `wrap`), sizes_kib by layer (two gradients each),
budget_bytes, tokens, steps, updates (whether `step()` is called), directory, and group (a cgroup to
join, or None). Prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import offload
from offload.core.heap import HEAP
from support.memory_group import join

WIDTH = 1024  # a row of a weight has 4 KiB


class Layer(nn.Module):
    """A residual layer with two weights of each of these KiB."""

    def __init__(self, sizes_kib: list[int]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        rows = [kib // (4 * WIDTH // 1024) for kib in sizes_kib]
        self.up = nn.ModuleList(Zeros(WIDTH, n) for n in rows)
        self.down = nn.ModuleList(Zeros(n, WIDTH) for n in rows)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(nn.functional.gelu(up(self.norm(x))))
        return x


class Zeros(nn.Linear):
    """A linear layer that is initialized with zeros, which is cheap."""

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.zeros_(param)


def status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise AssertionError(f"{name} is not in /proc/self/status")


def forget_peak() -> None:
    """Let the peak begin anew at what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def main(wish: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    torch.ones(64, 64) @ torch.ones(64, 64)  # loads the libraries that the first product loads
    if wish["group"] is not None:
        join(wish["group"])
    forget_peak()
    before = status_bytes("VmRSS")
    device = "meta" if wish["how"] == "prepare" else "cpu"
    with torch.device(device):
        model: Any = nn.Sequential(*(Layer(sizes) for sizes in wish["sizes_kib"]))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    options = {"host_memory": wish["budget_bytes"], "nvme": wish["directory"]}
    if wish["how"] == "prepare":
        model, optimizer = offload.prepare(model, optimizer, units=[Layer], **options)
    else:
        optimizer = offload.wrap(optimizer, **options)
    for _ in range(wish["steps"]):
        model(torch.ones(wish["tokens"], WIDTH)).square().mean().backward()
        if wish["updates"]:
            optimizer.step()
        optimizer.zero_grad()
    told = offload.report(optimizer)
    return {
        "grown_bytes": status_bytes("VmHWM") - before,
        "spilled_bytes": told.total.moved["spilled_bytes"],
        "engine_bytes": told.host_peak_bytes,
        "trims": HEAP.trims,
        "report": str(told),
    }


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
