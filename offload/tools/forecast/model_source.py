"""The sources of models that are named, not made: `module:function`, a Hugging Face `config.json`,
or a size.

A source makes the model on demand, also inside `with torch.device("meta")`, where nothing is
allocated; and it knows the model's input and its loss. It opens no network connection: a
`config.json` that asks for code to be fetched is refused.
"""

from __future__ import annotations

import importlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from offload.core.errors import ConfigError, FormatError
from offload.core.portable import read_small
from offload.core.strict_json import parse_json, printable
from offload.tools.forecast.model_shape import NO_SHAPE, Shape, derive_shape, parse_count
from offload.tools.forecast.synthetic_llama import StandIn

EXAMPLE_METHOD = "offload_example"
_CONFIG_NAME = "config.json"
_MOST_CONFIG_BYTES = 1 << 20
_LONGEST = 1 << 20  # tokens of a text, for a stand-in
_SOME_TOKENS = 256  # ids are below this if the model has no embedding that tells how many it knows


@dataclass(frozen=True)
class Texts:
    """The random texts of a batch to be made, for a generator's state the same on every device but
    meta. sequence: tokens that the model reads of each.
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


class ModelSource(ABC):
    """A source that makes a model, its input and its loss. For one thread. remedy: what the user
    can do if the model runs for real, but not on shapes alone.
    """

    name: str
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


def find_source(text: str | os.PathLike[str], shape: Shape = NO_SHAPE) -> ModelSource:
    """Return the source that `text` names. shape: for a size, as much of the shape as is known.
    Raises `ConfigError` if it names nothing.
    """
    name = os.fspath(text)
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
        return ConfigSource.at(path)
    module, colon, function = name.partition(":")
    if colon and module and function:
        return FunctionSource(name, _find_function(module, function))
    raise ConfigError(
        f"model: expected module:function, a config.json or its directory, or a size such as 7B "
        f"or 350M; got {printable(name)}"
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


# --- Hugging Face ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigSource(ModelSource):
    """A source of a model of the `transformers` library, with new values that the library draws."""

    name: str
    config: Any
    make: Callable[[Any], nn.Module]

    remedy: ClassVar[str] = (
        "if it is not the length, the model does what shapes cannot tell: give module:function of "
        "a model that can be run so, or a size such as 7B"
    )

    @classmethod
    def at(cls, path: Path) -> ConfigSource:
        file = path / _CONFIG_NAME if path.is_dir() else path
        if not file.exists():
            raise ConfigError(f"model: {printable(file)} is not there")
        _check_config(file)
        try:
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"model: {printable(file)} needs the transformers library, which cannot be "
                f"imported: {error}; install it, or give module:function or a size such as 7B"
            ) from error
        try:
            config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
        except Exception as error:  # the library's code, with errors of its own
            raise ConfigError(
                f"model: {printable(file)} is no configuration that transformers "
                f"{transformers.__version__} knows: {error}"
            ) from error
        config.use_cache = False  # the cache of keys and values, which only generation needs
        return cls(str(path), config, _auto_class(transformers, config, file))

    def make_model(self) -> nn.Module:
        return self.make(self.config)

    def feed(self, texts: Texts) -> Any:
        return _labelled(texts.tokens(int(self.config.get_text_config().vocab_size)))

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self._check_length(model, batch["input_ids"].shape[1])
        return super().loss(model, batch)

    def _check_length(self, model: nn.Module, length: int) -> None:
        """Refuse a text that is longer than the table of position embeddings; a run on shapes alone
        would not notice.
        """
        text = self.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        tables = {m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)}
        if most is None or not tables & {most, most + 2} - {text.vocab_size}:
            return  # positions are computed, there is no table
        if length > most:
            raise ConfigError(
                f"sequence: {self.name} has embeddings for {most} positions, got {length}; "
                "lower the sequence"
            )


def _check_config(file: Path) -> None:
    try:
        data = parse_json(read_small(file, _MOST_CONFIG_BYTES))
    except FormatError as error:
        raise FormatError(f"model: {printable(file)}: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise ConfigError(f'model: {printable(file)} has no "model_type"; expected a config.json')
    if data.get("auto_map"):
        raise ConfigError(
            f"model: {printable(file)} wants code of its own to be fetched and run (auto_map), "
            "which plan does not do; give module:function instead"
        )


def _auto_class(transformers: Any, config: Any, file: Path) -> Callable[[Any], nn.Module]:
    """Return the function that makes the model. Refuses all but language models of the three kinds
    that have a loss of their own.
    """
    kinds = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
    for name in kinds:
        auto = getattr(transformers, name)
        if type(config) in auto._model_mapping:
            make: Callable[[Any], nn.Module] = auto.from_config
            return make
    raise ConfigError(
        f"model: {printable(file)} is of type {config.model_type}, which is no language model; "
        f"give module:function, of a model with a method {EXAMPLE_METHOD}(batch, sequence)"
    )


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
            return _labelled(texts.tokens(vocabulary))
        return texts.tokens(vocabulary, more=1)

    return feed


def _labelled(tokens: Tensor) -> dict[str, Tensor]:
    """Return the arguments of a model that compares tokens with the next ones itself."""
    return {"input_ids": tokens, "labels": tokens}


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
