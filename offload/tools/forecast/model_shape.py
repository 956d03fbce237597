"""The shape of a decoder, derived from its size, such as "7B", and as much more as the user gives.

Values that are not given come from a published model of that size if there is one, otherwise from
the proportions that such models have. Pure arithmetic; needs no torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from offload.core.errors import ConfigError

VOCABULARY = 32_000
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmbt])", re.IGNORECASE)
_FACTORS = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NEAR = 0.05  # the share by which a model may be larger or smaller than its size says
_OFF = 0.15  # beyond this share, size and shape contradict each other
_MOST_LAYERS = 200
_HEAD_WIDTH = 128
_SMALL_HEAD_WIDTH = 64
_SMALL_HIDDEN = 1024
_SLENDER = 128.0  # hidden features per layer in usual models
_WIDENED = 256  # intermediate features are a multiple of this


@dataclass(frozen=True)
class Shape:
    """The shape of a decoder. None: to be derived. key_value_heads: None after deriving means as
    many as heads.
    """

    layers: int | None = None
    hidden: int | None = None
    vocabulary: int | None = None
    heads: int | None = None
    intermediate: int | None = None
    key_value_heads: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{field.name}: expected a whole number above 0, got {value!r}")
        if self.heads and self.hidden and self.hidden % (2 * self.heads):
            raise ConfigError(
                f"heads: {self.heads} do not cut hidden={self.hidden} into even widths; "
                "give a divisor of half of it"
            )

    @property
    def is_given(self) -> bool:
        return any(getattr(self, field.name) is not None for field in fields(self))

    @property
    def numel(self) -> int:
        """The number of parameters of a whole shape whose output head is not tied."""
        assert self.layers and self.hidden and self.vocabulary and self.heads and self.intermediate
        shared = (self.key_value_heads or self.heads) * (self.hidden // self.heads)
        attention = 2 * self.hidden * (self.hidden + shared)
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.layers * layer + self.hidden * (2 * self.vocabulary + 1)

    def __str__(self) -> str:
        heads = f"{self.heads} heads"
        if self.key_value_heads:
            heads += f" ({self.key_value_heads} of keys and values)"
        return (
            f"{self.layers} layers, {self.hidden} hidden, {heads}, {self.intermediate} "
            f"intermediate, a vocabulary of {self.vocabulary}"
        )


NO_SHAPE = Shape()
# Published: Llama 1, 2 and 3, and TinyLlama.
PUBLISHED = (
    Shape(22, 2048, 32_000, 32, 5632, 4),
    Shape(32, 4096, 32_000, 32, 11_008),
    Shape(32, 4096, 128_256, 32, 14_336, 8),
    Shape(40, 5120, 32_000, 40, 13_824),
    Shape(60, 6656, 32_000, 52, 17_920),
    Shape(80, 8192, 32_000, 64, 22_016),
    Shape(80, 8192, 32_000, 64, 28_672, 8),
    Shape(126, 16_384, 128_256, 128, 53_248, 8),
)


def parse_count(text: str) -> float | None:
    """Return how many parameters a size such as "7B", "350M" or "1.3b" means; None if the text is
    no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    count = float(match[1]) * _FACTORS[match[2].lower()]
    if not 0 < count < math.inf:
        raise ConfigError(f"model: expected a size such as 7B, above 0, got {text!r}")
    return count


def derive_shape(count: float, given: Shape = NO_SHAPE) -> Shape:
    """Derive a whole shape of about `count` parameters. Raises `ConfigError` if the values in
    `given` make another size.
    """
    best = min(_candidates(count, given), key=lambda pair: pair[0], default=None)
    if best is None or abs(best[1].numel / count - 1) > _OFF:
        got = f", the nearest has {best[1].numel / 1e9:.3g}B: {best[1]}" if best else ""
        raise ConfigError(
            f"{count / 1e9:.3g}B: expected a shape of about so many parameters{got}; "
            "leave out some of layers, hidden, vocabulary, heads and intermediate, or name "
            "another size"
        )
    return best[1]


def _candidates(count: float, given: Shape) -> Iterator[tuple[float, Shape]]:
    """Yield shapes with the given values, each with a number for how unusual it is."""
    for shape in PUBLISHED:
        if _agree(shape, given) and abs(shape.numel / count - 1) <= _NEAR:
            yield abs(shape.numel / count - 1) - 1.0, shape  # less than that of any derived shape
    for layers in [given.layers] if given.layers else range(1, _MOST_LAYERS + 1):
        for hidden in [given.hidden] if given.hidden else _hiddens(count, layers, given):
            whole = _fill(replace(given, layers=layers, hidden=hidden), count)
            if whole is not None:
                slender = abs(math.log(hidden / layers / _SLENDER))
                yield 20 * abs(whole.numel / count - 1) + slender, whole


def _agree(shape: Shape, given: Shape) -> bool:
    pairs = [(getattr(shape, f.name), getattr(given, f.name)) for f in fields(shape)]
    return all(wanted is None or wanted == own for own, wanted in pairs)


def _hiddens(count: float, layers: int, given: Shape) -> Iterator[int]:
    """Yield the two nearest to the solution of 12 layers hidden^2 + 2 vocabulary hidden = count."""
    vocabulary = given.vocabulary or _vocabulary(count)
    root = (math.sqrt(vocabulary**2 + 12 * layers * count) - vocabulary) / (12 * layers)
    step = _HEAD_WIDTH if root >= _SMALL_HIDDEN else _SMALL_HEAD_WIDTH
    if given.heads:
        step = math.lcm(step, 2 * given.heads)
    below = int(root // step) * step
    yield from (hidden for hidden in (below, below + step) if hidden)


def _fill(shape: Shape, count: float) -> Shape | None:
    hidden = shape.hidden
    assert hidden is not None
    width = _HEAD_WIDTH if hidden >= _SMALL_HIDDEN else _SMALL_HEAD_WIDTH
    heads = shape.heads or (hidden // width if hidden % width == 0 else 1)
    usual = -(-8 * hidden // (3 * _WIDENED)) * _WIDENED
    if hidden % (2 * heads):
        return None
    whole = replace(
        shape,
        heads=heads,
        vocabulary=shape.vocabulary or _vocabulary(count),
        intermediate=shape.intermediate or usual,
    )
    if shape.intermediate is None and abs(whole.numel / count - 1) > _NEAR:
        layers = whole.layers or 1
        missing = (count - whole.numel) / (3 * hidden * layers)
        wanted = usual + round(missing / _WIDENED) * _WIDENED
        if usual / 2 <= wanted <= 2 * usual:
            whole = replace(whole, intermediate=wanted)
    return whole


def _vocabulary(count: float) -> int:
    """Return the usual vocabulary, or a smaller one for models so small that the usual one would be
    most of their parameters.
    """
    return VOCABULARY if count >= 2e7 else 512
