"""A recommender: embedding tables that are far larger than the network on top of them.

Each table is a unit by itself and is fetched only when it is looked up, so that host memory needs
room for the largest one, not for all.

    python examples/recommender.py [steps]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from telling import NVME, tell
from torch import Tensor, nn

import offload

TABLES = {"user": 100_000, "item": 200_000, "shop": 50_000, "word": 150_000}
WIDTH = 32


class Recommender(nn.Module):
    """A recommender: one row of each table in, whether the user will like it out."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {name: nn.Embedding(rows, WIDTH) for name, rows in TABLES.items()}
        )
        self.network = nn.Sequential(
            nn.Linear(WIDTH * len(TABLES), 128), nn.ReLU(), nn.Linear(128, 1)
        )

    def forward(self, rows: dict[str, Tensor]) -> Tensor:
        found = [table(rows[name]) for name, table in self.tables.items()]
        return self.network(torch.cat(found, dim=1)).squeeze(1)


def visits(count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Draw popular rows of each table; early users like early items."""
    rows = {name: torch.randint(32, (count,)) for name in TABLES}
    return rows, (rows["user"] + rows["item"] < 32).float()


def main(steps: int = 25) -> None:
    torch.manual_seed(0)
    model = Recommender()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=True)
    # Four tables with gradients and state need 250 MiB.
    model, optimizer = offload.prepare(
        model, optimizer, host_memory="130MiB", nvme=NVME, units=[nn.Embedding]
    )

    losses = []
    for _ in range(steps):
        rows, liked = visits(512)
        loss = F.binary_cross_entropy_with_logits(model(rows), liked)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    with torch.no_grad():
        rows, liked = visits(1000)
        right = ((model(rows) > 0) == liked.bool()).float().mean().item()
    tell(model, losses)
    print(f"right on new visits: {right:.0%}")
    offload.close(model)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
