"""Train a GPT that does not fit: parameters, gradients and optimizer state need three times the
host memory that they get. The rest is on disk, and is fetched before it is needed.

    python examples/gpt_larger_than_memory.py [steps]
"""

from __future__ import annotations

import sys

import torch
from gpt import GPT, batches
from telling import NVME, tell

import offload


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    model = GPT(layers=12, width=384, heads=6)  # 21 M parameters, 330 MiB with all they need
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)

    # The one line that is not in every other training script.
    model, optimizer = offload.prepare(model, optimizer, host_memory="112MiB", nvme=NVME)

    losses = []
    for batch in batches(steps, batch=2, length=64, seed=0):
        loss = model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    tell(model, losses)
    offload.close(model)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
