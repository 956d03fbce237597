"""Finds the source of a model that is named: `module:function`, a size, a published model or a
configuration file.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.tools.forecast.config_source import config_source_at, published
from offload.tools.forecast.model_shape import NO_SHAPE, Shape, derive_shape, parse_count
from offload.tools.forecast.model_source import ModelSource, Texts, labelled
from offload.tools.forecast.synthetic_llama import StandIn

EXAMPLE_METHOD = "offload_example"
_LONGEST = 1 << 20  # tokens of a text, for a stand-in
_SOME_TOKENS = 256  # ids are below this if the model has no embedding that tells how many it knows


def find_source(text: str | os.PathLike[str], shape: Shape = NO_SHAPE) -> ModelSource:
    """Return the source that `text` names. shape: for a size, as much of the shape as is known.
    Raises `ConfigError` if it names nothing.
    """
    name = os.fspath(text)
    if name in published():
        return config_source_at(published()[name], name)
    count = parse_count(name)
    if count is not None:
        return SizeSource(name, derive_shape(count, shape))
    if shape.is_given:
        raise ConfigError(
            f"model: layers, hidden, vocabulary, heads and intermediate are for a size such as "
            f"7B; {printable(name)} has its own"
        )
    path = Path(name)
    if name and (path.is_dir() or path.suffix == ".json"):
        return config_source_at(path, str(path))
    module, colon, function = name.partition(":")
    if colon and module and function:
        return FunctionSource(name, _find_function(module, function))
    raise ConfigError(
        f"model: expected module:function, a config.json or its directory, a size such as 7B or "
        f"350M, or one of {', '.join(published())}; got {printable(name)}"
        + ("; there is no such file or directory" if os.sep in name else "")
    )


# --- a size ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SizeSource(ModelSource):
    """A source of a stand-in of that shape, in bfloat16, as models of such sizes are trained."""

    name: str
    shape: Shape

    def make_model(self) -> nn.Module:
        return StandIn.of(self.shape, _LONGEST).to(torch.bfloat16)

    def feed(self, texts: Texts) -> Tensor:
        assert self.shape.vocabulary
        return texts.tokens(self.shape.vocabulary, more=1)


# --- a function -----------------------------------------------------------------------------------


@dataclass
class FunctionSource(ModelSource):
    """A source of the model that a function without arguments returns. The input depends on the
    model: its method `offload_example(batch, sequence)` returns the arguments of `forward`; a model
    without this method gets token ids.
    """

    name: str
    function: Callable[[], Any]
    _feed: Callable[[Texts], Any] | None = field(default=None, repr=False)
    remedy: ClassVar[str] = (
        "a model that takes something else than tokens says so by a method "
        f"{EXAMPLE_METHOD}(batch, sequence); one that looks at values is planned by a size such as "
        "7B"
    )

    def make_model(self) -> nn.Module:
        try:
            model = self.function()
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(f"{self.name}: {type(error).__name__}: {error}") from error
        if not isinstance(model, nn.Module):
            raise ConfigError(
                f"{self.name}: expected a torch.nn.Module, got {type(model).__name__}"
            )
        self._feed = _feed_of(model)
        return model

    def feed(self, texts: Texts) -> Any:
        if self._feed is None:
            with torch.device("meta"):
                self.make_model()
        assert self._feed is not None
        return self._feed(texts)


def _find_function(module_name: str, name: str) -> Callable[[], Any]:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception as error:  # the user's code may raise anything
        raise ConfigError(
            f"model: {module_name}:{name}: {type(error).__name__}: {error}; expected a module "
            "that can be imported from the current directory, and a function in it"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"model: {module_name}:{name} is a {type(found).__name__}; expected a function "
            "without arguments that returns a torch.nn.Module"
        )
    function: Callable[[], Any] = found
    return function


def _feed_of(model: nn.Module) -> Callable[[Texts], Any]:
    """Return a function that makes the model's input. It holds no reference to the model, unless
    the model has an example method.
    """
    example = getattr(model, EXAMPLE_METHOD, None)
    is_huggingface = hasattr(model, "get_input_embeddings") and hasattr(model, "config")
    vocabulary = _vocabulary_of(model)

    def feed(texts: Texts) -> Any:
        if example is not None:
            return _example(example(texts.batch, texts.sequence), texts.device)
        if is_huggingface:
            return labelled(texts.tokens(vocabulary))
        return texts.tokens(vocabulary, more=1)

    return feed


def _example(given: Any, device: torch.device) -> dict[str, Any] | tuple[Any, ...]:
    """Convert what an example method returned to arguments of `forward`, on that device."""
    moved = tree_map_only(Tensor, lambda tensor: tensor.to(device), given)
    if isinstance(moved, dict):
        return moved
    return tuple(moved) if isinstance(moved, tuple | list) else (moved,)


def _vocabulary_of(model: nn.Module) -> int:
    """Return the number of ids of the model's first embedding, which is that of tokens in most
    models.
    """
    embeddings = (m for m in model.modules() if isinstance(m, nn.Embedding))
    first = next(embeddings, None)
    return _SOME_TOKENS if first is None else first.num_embeddings
