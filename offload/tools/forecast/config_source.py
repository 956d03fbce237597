"""Sources of models that a configuration file describes: a `config.json` of the transformers or the
diffusers library. The shapes of some published models come with the package.

A file that asks for code to be fetched is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError, FormatError
from offload.core.portable import read_small
from offload.core.strict_json import parse_json, printable
from offload.tools.forecast.model_source import ModelSource, Texts, labelled

_PUBLISHED = Path(__file__).parent / "models"
_CONFIG_NAME = "config.json"
_MOST_CONFIG_BYTES = 1 << 20
_CLASS = "_class_name"  # of a model of diffusers
_LANGUAGE = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM")
_IMAGES = "AutoModelForImageClassification"
_PROMPT = 512  # tokens of the text that an image is made for


def published() -> dict[str, Path]:
    """Return the files with the shapes of published models, by name."""
    return {path.stem: path for path in sorted(_PUBLISHED.glob("*.json"))}


def config_source_at(path: Path, name: str) -> ModelSource:
    """Return the source of the model that this file, or the one in this directory, describes."""
    file = path / _CONFIG_NAME if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"model: {printable(file)} is not there")
    data = _read(file)
    if _CLASS in data:
        return _diffusion_source(file, name, data)
    return _transformers_source(file, name)


def _read(file: Path) -> Mapping[str, Any]:
    try:
        data = parse_json(read_small(file, _MOST_CONFIG_BYTES))
    except FormatError as error:
        raise FormatError(f"model: {printable(file)}: {error}") from error
    if not isinstance(data, dict) or not data.keys() & {"model_type", _CLASS}:
        raise ConfigError(f'model: {printable(file)} has no "model_type"; expected a config.json')
    if data.get("auto_map"):
        raise ConfigError(
            f"model: {printable(file)} wants code of its own to be fetched and run (auto_map), "
            "which plan does not do; give module:function instead"
        )
    return data


# --- transformers ---------------------------------------------------------------------------------


def _transformers_source(file: Path, name: str) -> ModelSource:
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
    for kind in _LANGUAGE:
        auto = getattr(transformers, kind)
        if type(config) in auto._model_mapping:
            return ConfigSource(name, config, auto.from_config)
    images = getattr(transformers, _IMAGES)
    if type(config) in images._model_mapping and hasattr(config, "patch_size"):
        return ImageSource(name, config, images.from_config)
    raise ConfigError(
        f"model: {printable(file)} is of type {config.model_type}, which is neither a language "
        "model nor a transformer for images; give module:function, of a model with a method "
        "offload_example(batch, sequence)"
    )


@dataclass(frozen=True)
class ConfigSource(ModelSource):
    """A source of a language model of the `transformers` library, with new values that the library
    draws.
    """

    name: str
    config: Any
    make: Callable[[Any], nn.Module]

    remedy: ClassVar[str] = (
        "if it is not the length, the model does what shapes cannot tell: give module:function of "
        "a model that can be run so, or a size such as 7B"
    )

    def make_model(self) -> nn.Module:
        return self.make(self.config)

    def feed(self, texts: Texts) -> Any:
        return labelled(texts.tokens(int(self.config.get_text_config().vocab_size)))

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


@dataclass(frozen=True)
class ImageSource(ConfigSource):
    """A source of a model of the `transformers` library that classifies images. Its tokens are the
    patches of an image.
    """

    item: ClassVar[str] = "image"

    def tokens_of(self, sequence: int) -> int:
        return (int(self.config.image_size) // int(self.config.patch_size)) ** 2

    def feed(self, texts: Texts) -> Any:
        size = int(self.config.image_size)
        pixels = texts.values(int(self.config.num_channels), size, size)
        labels = texts.tokens(int(self.config.num_labels))[:, 0]
        return {"pixel_values": pixels, "labels": labels}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return ModelSource.loss(self, model, _as_the_model(model, batch))


# --- diffusers ------------------------------------------------------------------------------------


def _diffusion_source(file: Path, name: str, data: Mapping[str, Any]) -> ModelSource:
    if data[_CLASS] not in _INPUTS:
        raise ConfigError(
            f"model: {printable(file)} describes a {printable(data[_CLASS])}; of diffusers, plan "
            f"knows the input of {', '.join(_INPUTS)}; give module:function instead"
        )
    try:
        import diffusers
    except ImportError as error:
        raise ConfigError(
            f"model: {printable(file)} needs the diffusers library, which cannot be imported: "
            f"{error}; install it, or give module:function or a size such as 7B"
        ) from error
    return DiffusionSource(name, data, getattr(diffusers, data[_CLASS]).from_config)


@dataclass(frozen=True)
class DiffusionSource(ModelSource):
    """A source of a diffusion transformer of the `diffusers` library. Its tokens are the patches of
    an image's latent values; the loss is the mean of the squares of what it predicts.
    """

    name: str
    config: Mapping[str, Any]
    make: Callable[[Mapping[str, Any]], nn.Module]
    item: ClassVar[str] = "image"

    def make_model(self) -> nn.Module:
        given = {key: value for key, value in self.config.items() if key != "torch_dtype"}
        model = self.make(given)
        dtype = self.config.get("torch_dtype")
        return model if dtype is None else model.to(getattr(torch, str(dtype)))

    def tokens_of(self, sequence: int) -> int:
        return sequence if self.config[_CLASS] == _FLUX else _latent_size(self.config) ** 2

    def feed(self, texts: Texts) -> Any:
        return _INPUTS[self.config[_CLASS]](self.config, texts)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return super().loss(model, _as_the_model(model, batch))


def _latent_size(config: Mapping[str, Any]) -> int:
    """Return the patches of one side of a square image."""
    return int(config["sample_size"]) // int(config["patch_size"])


def _flux_input(config: Mapping[str, Any], texts: Texts) -> dict[str, Tensor]:
    axes = len(config["axes_dims_rope"])
    made = {
        "hidden_states": texts.values(texts.sequence, config["in_channels"]),
        "encoder_hidden_states": texts.values(_PROMPT, config["joint_attention_dim"]),
        "pooled_projections": texts.values(config["pooled_projection_dim"]),
        "timestep": texts.values(),
        "img_ids": torch.zeros(texts.sequence, axes, dtype=torch.float32, device=texts.device),
        "txt_ids": torch.zeros(_PROMPT, axes, dtype=torch.float32, device=texts.device),
    }
    return made | ({"guidance": texts.values()} if config.get("guidance_embeds") else {})


def _sd3_input(config: Mapping[str, Any], texts: Texts) -> dict[str, Tensor]:
    size = int(config["sample_size"])
    return {
        "hidden_states": texts.values(config["in_channels"], size, size),
        "encoder_hidden_states": texts.values(_PROMPT, config["joint_attention_dim"]),
        "pooled_projections": texts.values(config["pooled_projection_dim"]),
        "timestep": texts.values(),
    }


def _dit_input(config: Mapping[str, Any], texts: Texts) -> dict[str, Tensor]:
    size, classes = int(config["sample_size"]), int(config["num_embeds_ada_norm"])
    return {
        "hidden_states": texts.values(config["in_channels"], size, size),
        "timestep": texts.tokens(classes)[:, 0],
        "class_labels": texts.tokens(classes)[:, 0],
    }


_FLUX = "FluxTransformer2DModel"
_INPUTS: dict[str, Callable[[Mapping[str, Any], Texts], dict[str, Tensor]]] = {
    _FLUX: _flux_input,
    "SD3Transformer2DModel": _sd3_input,
    "DiTTransformer2DModel": _dit_input,
}


def _as_the_model(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the batch with its values in the dtype of the model's parameters."""
    dtype = next(param.dtype for param in model.parameters() if param.is_floating_point())
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
