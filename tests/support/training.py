"""Training loops as users write them, for the models of `support.models`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from support.models import batch, loss_of


def step(model: nn.Module, optimizer: Any, number: int, device: str = "cpu") -> Tensor:
    """Take one step on the batch of this number; return its loss without a wait for the device."""
    loss = loss_of(model, batch(number).to(device))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, steps: range, device: str = "cpu") -> list[float]:
    """Take these steps, and return their losses."""
    return [float(step(model, optimizer, number, device)) for number in steps]


def train_in_parts(
    model: nn.Module, optimizer: Any, steps: int, max_norm: float | None = 0.1
) -> list[float]:
    """Take steps of one or two batches each, clipped between backward and step.

    Returns the loss of the last batch of each step.
    """
    losses = []
    for number in range(steps):
        torch.manual_seed(number)  # of dropout
        for micro in range(1 + number % 2):
            loss = loss_of(model, batch(10 * number + micro))
            loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train_on_noise(model: nn.Module, optimizer: Any, width: int, steps: int = 3) -> None:
    """Take some steps of a model of plain vectors."""
    for _ in range(steps):
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
