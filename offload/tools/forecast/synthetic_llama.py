"""A stand-in for a model that is not available: a Llama-like decoder of any shape.

It is plain torch with plain modules, so that what is counted or measured with it holds for a model
of that shape. It has no buffers, so that it can be made on the meta device and filled later. It
does not depend on the engine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.tools.forecast.model_shape import Shape

_BASE = 10_000.0  # of the angles of rotary positions
_STD = 0.02  # of the embedding's values


class StandIn(nn.Module):
    """A decoder from tokens to the logits of the next ones.

    hidden: features of a token. heads must divide it, and key_value_heads (None: as many) must
    divide heads. intermediate: features inside the gated MLP. length: the most tokens of a text.
    is_tied: the output head shares the embedding's parameter.
    """

    def __init__(
        self,
        layers: int,
        hidden: int,
        vocabulary: int,
        heads: int,
        intermediate: int,
        length: int,
        key_value_heads: int | None = None,
        is_tied: bool = False,
    ) -> None:
        super().__init__()
        self.length = length
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            LlamaLayer(hidden, heads, key_value_heads or heads, intermediate) for _ in range(layers)
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        self._init_weights(self.embedding)

    @classmethod
    def of(cls, shape: Shape, length: int) -> StandIn:
        """Make one of a whole shape."""
        s = shape
        assert s.layers and s.hidden and s.vocabulary and s.heads and s.intermediate
        sizes = s.layers, s.hidden, s.vocabulary, s.heads, s.intermediate
        return cls(*sizes, length, s.key_value_heads)

    def _init_weights(self, module: nn.Module) -> None:
        """Draw the values of `module` if it is the embedding, also of a model that was made on the
        meta device.
        """
        if module is self.embedding:
            nn.init.normal_(self.embedding.weight, std=_STD)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.size(1) > self.length:
            raise ValueError(
                f"StandIn: expected at most {self.length} tokens of a text, got {tokens.size(1)}"
            )
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: Tensor) -> Tensor:
        """Compute the mean loss of all tokens but the first of each text, in fp32."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class LlamaLayer(nn.Module):
    """A decoder layer: attention and a gated MLP, each after a norm, with a residual connection."""

    def __init__(self, hidden: int, heads: int, key_value_heads: int, intermediate: int) -> None:
        super().__init__()
        self.before_attention, self.before_gate = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = LlamaAttention(hidden, heads, key_value_heads)
        self.gate = nn.Linear(hidden, intermediate, bias=False)
        self.up = nn.Linear(hidden, intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        y = self.before_gate(x)
        inner: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + inner


class LlamaAttention(nn.Module):
    """A causal self-attention with rotary positions. Several query heads may share one head of keys
    and values.
    """

    def __init__(self, hidden: int, heads: int, key_value_heads: int) -> None:
        super().__init__()
        self.heads, self.key_value_heads, self.width = heads, key_value_heads, hidden // heads
        shared = key_value_heads * self.width
        self.query = nn.Linear(hidden, hidden, bias=False)
        self.key = nn.Linear(hidden, shared, bias=False)
        self.value = nn.Linear(hidden, shared, bias=False)
        self.mix = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        angles = _angles(length, self.width, x.device)
        query = _turn(self._split(self.query(x), self.heads), angles)
        key = _turn(self._split(self.key(x), self.key_value_heads), angles)
        value = self._split(self.value(x), self.key_value_heads)
        y = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, enable_gqa=self.heads != self.key_value_heads
        )
        return self.mix(y.transpose(1, 2).reshape(batch, length, hidden))  # type: ignore[no-any-return]

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.width).transpose(1, 2)


def _angles(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for each position and each pair of features."""
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    places = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(places, _BASE**-steps)
    return angles.cos(), angles.sin()


def _turn(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    cosine, sine = (part.to(x.dtype) for part in angles)
    one, other = x.chunk(2, dim=-1)
    return torch.cat((one * cosine - other * sine, other * cosine + one * sine), dim=-1)
