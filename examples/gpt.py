"""A small GPT and its text, for the examples. Nothing here knows about offload."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A transformer layer: attention and a feed-forward layer, each behind a layer norm and around
    a shortcut.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    """A GPT: tokens in, logits of the next token out; input and output embeddings are tied. A token
    is a byte, unless the vocabulary is larger.
    """

    def __init__(
        self,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
        length: int = 128,
        vocabulary: int = 256,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self._init_weights(self.tokens)

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise one module, also of a model that was made on the meta device."""
        if module is self.tokens:
            nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


def text(is_held_out: bool = False) -> Tensor:
    """Return the text that every checkout has, as tokens: nine tenths of each file, to learn from,
    or the rest, to see what was learned.
    """
    parts = []
    for path in sorted((Path(__file__).parent / "text").glob("*.txt")):
        tokens = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
        begin = len(tokens) * 9 // 10
        parts.append(tokens[begin:] if is_held_out else tokens[:begin])
    return torch.cat(parts)


def batches(steps: int, batch: int, length: int, seed: int) -> Iterator[Tensor]:
    """Yield random pieces of the text, the same ones for the same seed."""
    tokens = text()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length - 1, (batch,), generator=generator)
        yield torch.stack([tokens[s : s + length + 1] for s in starts.tolist()])
