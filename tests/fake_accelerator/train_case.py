"""Trains a small transformer on the CPU and on the device, and prints the results as JSON."""

from __future__ import annotations

import hashlib
import json
import sys

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import load

SCHEDULES = [("eager", 0), ("lazy", 0), *(("seeded", seed) for seed in range(8))]
STEPS = 5


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.inputs(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, words: int = 61, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))


def train(device: str, autocast: bool = False, foreach: bool | None = None) -> list[torch.Tensor]:
    """Train a few steps on `device`; return the losses and the parameters, on the CPU."""
    torch.manual_seed(7)
    model = Model()
    data = torch.randint(0, 61, (STEPS, 4, 17))
    model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=foreach)
    losses = []
    for tokens in data:
        tokens = tokens.to(device)
        optimizer.zero_grad()
        mixed = torch.autocast(device, dtype=torch.bfloat16, enabled=autocast)
        with mixed, sdpa_kernel(SDPBackend.MATH):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [one.cpu() for one in [*losses, *(p.detach() for p in model.parameters())]]


def digest(tensors: list[torch.Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(tensor.flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def furthest(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))


def main() -> None:
    torch.set_num_threads(1)
    answer: dict[str, object] = {}
    module = load()  # before any backward: the engine counts the devices once
    host = train("cpu")
    for schedule, seed in SCHEDULES:
        module.set_schedule(schedule, seed)
        result = train("fake")
        answer[f"{schedule}-{seed}"] = {"digest": digest(result), "off": furthest(result, host)}
    for name, schedule in (("autocast-eager", "eager"), ("autocast-lazy", "lazy")):
        module.set_schedule(schedule)
        result = train("fake", autocast=True, foreach=False)
        answer[name] = {"digest": digest(result), "off": furthest(result, host)}
    answer["without_shapes"] = module.operators_without_shapes()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
