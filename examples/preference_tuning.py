"""Preference tuning (DPO): a policy that learns, and the frozen model it started from.

Two prepared models share one budget. `host_memory` is what the process may hold in all: the
reference takes its part of it first, the policy gets the rest.

    python examples/preference_tuning.py [steps]
"""

from __future__ import annotations

import copy
import sys

import torch
import torch.nn.functional as F
from gpt import GPT
from telling import NVME, tell, tell_bytes
from torch import Tensor

import offload

LENGTH, BETA = 32, 0.1


def log_probability(model: GPT, text: Tensor) -> Tensor:
    """Return the log probability of each text as a whole."""
    words = model(text[:, :-1]).log_softmax(dim=-1)
    return words.gather(-1, text[:, 1:, None]).sum(dim=(1, 2))


def preferences(count: int) -> tuple[Tensor, Tensor]:
    """Make pairs of texts: counting upwards is liked, counting downwards is not."""
    starts = torch.randint(100, 108, (count, 1))
    steps = torch.arange(LENGTH + 1)
    return starts + steps, starts - steps


def dpo_loss(policy: GPT, reference: GPT, liked: Tensor, other: Tensor) -> tuple[Tensor, float]:
    """Return the loss, and how often the policy tells the liked text from the other."""
    both = torch.cat([liked, other])
    with torch.no_grad():
        before = log_probability(reference, both)
    gained = log_probability(policy, both) - before
    margin = gained[: len(liked)] - gained[len(liked) :]
    return -F.logsigmoid(BETA * margin).mean(), (margin > 0).float().mean().item()


def main(steps: int = 15) -> None:
    torch.manual_seed(0)
    policy = GPT(layers=8, width=256, heads=4, length=LENGTH)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-4, fused=True)

    reference = offload.prepare(reference, host_memory="10MiB", nvme=NVME)
    policy, optimizer = offload.prepare(policy, optimizer, host_memory="56MiB", nvme=NVME)

    losses, right = [], 0.0
    for _ in range(steps):
        loss, right = dpo_loss(policy, reference, *preferences(8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    tell(policy, losses)
    tell_bytes("the reference", reference)
    print(f"prefers the liked text: {right:.0%}")
    offload.close(policy)
    offload.close(reference)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
