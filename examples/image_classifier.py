"""An image classifier: a small ResNet with batch norm, larger than its host memory.

Buffers, such as the running means of batch norm, stay where they are; parameters are fetched and
evicted.

    python examples/image_classifier.py [steps]
"""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from telling import NVME, tell
from torch import Tensor, nn

import offload

CLASSES, SIDE = 10, 16


class Residual(nn.Module):
    """A residual block: two convolutions around a shortcut. stride: 2 halves the picture."""

    def __init__(self, inside: int, outside: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)
        self.shortcut = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.Sequential(
            Residual(64, 64),
            Residual(64, 128, stride=2),
            Residual(128, 256, stride=2),
            Residual(256, 512, stride=2),
            Residual(512, 512),
        )
        self.head = nn.Linear(512, CLASSES)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pictures)).mean(dim=(2, 3)))


def pictures(count: int, means: Tensor) -> tuple[Tensor, Tensor]:
    """Make noise around the mean picture of each class; return it with the classes."""
    labels = torch.randint(CLASSES, (count,))
    return means[labels] + torch.randn(count, 3, SIDE, SIDE), labels


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    means = torch.randn(CLASSES, 3, SIDE, SIDE)
    model = ResNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, fused=True)
    model, optimizer = offload.prepare(model, optimizer, host_memory="72MiB", nvme=NVME)

    losses = []
    for _ in range(steps):
        inputs, labels = pictures(32, means)
        loss = F.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    model.eval()
    with torch.no_grad():
        inputs, labels = pictures(64, means)
        right = (model(inputs).argmax(dim=1) == labels).float().mean().item()
    tell(model, losses)
    print(f"right on new pictures: {right:.0%}")
    offload.close(model)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
