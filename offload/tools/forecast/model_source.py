"""A source of a model that is named, not made.

It makes the model on demand, also inside `with torch.device("meta")`, where nothing is allocated;
and it knows the model's input and its loss. It opens no network connection.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.core.errors import ConfigError


@dataclass(frozen=True)
class Texts:
    """The random texts (or images) of a batch to be made, for a generator's state the same on every
    device but meta. sequence: tokens that the model reads of each.
    """

    batch: int
    sequence: int
    generator: torch.Generator | None
    device: torch.device

    def tokens(self, vocabulary: int, more: int = 0) -> Tensor:
        """Make token ids, `more` than the model reads of each text."""
        shape = self.batch, self.sequence + more
        if self.device.type == "meta":
            return torch.empty(*shape, dtype=torch.int64, device=self.device)
        tokens = torch.randint(vocabulary, shape, generator=self.generator, device="cpu")
        return tokens.to(self.device)

    def values(self, *shape: int) -> Tensor:
        """Make normal values in fp32, of that shape for each text."""
        if self.device.type == "meta":
            return torch.empty(self.batch, *shape, dtype=torch.float32, device=self.device)
        size = self.batch, *shape
        made = torch.randn(*size, generator=self.generator, dtype=torch.float32, device="cpu")
        return made.to(self.device)


class ModelSource(ABC):
    """A source that makes a model, its input and its loss. For one thread. item: what a batch has
    several of. remedy: what the user can do if the model runs for real, but not on shapes alone.
    """

    name: str
    item: ClassVar[str] = "text"
    remedy: ClassVar[str] = "a size such as 7B is planned without the model itself"

    @abstractmethod
    def make_model(self) -> nn.Module:
        """Make a new model, on the device of the `torch.device(...)` around the call."""

    def make_batch(
        self,
        batch: int,
        sequence: int,
        generator: torch.Generator | None = None,
        device: torch.device | str | None = None,
    ) -> Any:
        """Make random input of `batch` texts, of which the model reads `sequence` tokens each; if
        `loss` itself compares tokens with the next ones, there is one token more. device: None is
        torch's default device, so that of a `torch.device(...)` around the call.
        """
        where = torch.get_default_device() if device is None else torch.device(device)
        return self.feed(Texts(batch, sequence, generator, where))

    def tokens_of(self, sequence: int) -> int:
        """Return the tokens of a text (or image), if `sequence` of them are asked for."""
        return sequence

    @abstractmethod
    def feed(self, texts: Texts) -> Any:
        """Make the model's input: token ids, or arguments of `forward`, by place and by name."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Run the model on the batch and return a scalar to call `backward` on: the loss of the
        next token if it gets tokens and returns logits.
        """
        if isinstance(batch, dict):
            return _loss_of_output(model(**batch))
        if not isinstance(batch, Tensor):
            return _loss_of_output(model(*batch))
        output = model(batch[:, :-1])
        if isinstance(output, Tensor) and output.dim() == 3 and output.is_floating_point():
            return F.cross_entropy(output.flatten(0, 1).float(), batch[:, 1:].flatten())
        return _loss_of_output(output)


def labelled(tokens: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a model that compares tokens with the next ones itself."""
    return {"input_ids": tokens, "labels": tokens}


def _loss_of_output(output: Any) -> Tensor:
    """Return the model's own loss. Without one: the first tensor of the output if it is a scalar,
    otherwise the mean of its squares.
    """
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    while isinstance(output, tuple | list | dict) and output:
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    if not isinstance(output, Tensor) or not output.is_floating_point():
        raise ConfigError(
            f"model: forward returned {type(output).__name__}, from which no loss can be made; "
            "return a floating point tensor, or something with a loss"
        )
    return output if output.dim() == 0 else output.float().square().mean()
