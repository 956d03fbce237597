"""An encoder for classification, in the manner of BERT, with gradient accumulation and a schedule.

Everything around the model is plain torch: gradients of several batches add up, the learning rate
warms up, evaluation runs between steps.

    python examples/text_classifier.py [steps]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from telling import NVME, tell
from torch import Tensor, nn

import offload

VOCABULARY, LENGTH, CLASSES = 4096, 32, 4
MICRO_BATCHES = 2


class Encoder(nn.Module):
    """An encoder: words in, one class out, read off the first word's place."""

    def __init__(self, layers: int = 8, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, text: Tensor) -> Tensor:
        x = self.words(text) + self.places.weight[: text.size(1)]
        return self.head(self.layers(x)[:, 0])


def texts(count: int) -> tuple[Tensor, Tensor]:
    """Draw random words; those of a text's class are more frequent in it."""
    labels = torch.randint(CLASSES, (count,))
    words = torch.randint(CLASSES, VOCABULARY, (count, LENGTH))
    marked = torch.rand(count, LENGTH) < 0.3
    return torch.where(marked, labels[:, None], words), labels


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    model, optimizer = offload.prepare(model, optimizer, host_memory="48MiB", nvme=NVME)

    losses = []
    for _ in range(steps):
        total = 0.0
        for _ in range(MICRO_BATCHES):
            words, labels = texts(16)
            loss = F.cross_entropy(model(words), labels) / MICRO_BATCHES
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(total)

    model.eval()
    with torch.no_grad():
        words, labels = texts(64)
        right = (model(words).argmax(dim=1) == labels).float().mean().item()
    tell(model, losses)
    print(f"right on new texts: {right:.0%}")
    offload.close(model)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
