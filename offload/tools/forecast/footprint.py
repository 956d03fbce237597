"""The footprint of a model in one iteration of training, found by a run on shapes alone.

The model is made on the meta device and its forward and backward pass run there, with the hooks
that the engine itself uses: so the units, the order in which they are used, the activations that
autograd keeps, and the cost of a recomputed layer are those of a real run. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError, OffloadError
from offload.optim import Lion
from offload.optim.choose import choose_recipe
from offload.optim.records import make_records, spec_of
from offload.params.model_methods import buffer_bytes
from offload.params.recompute import layers_of
from offload.params.units import find_units, refuse_lazy
from offload.planning.layout import ParamSpec
from offload.planning.profile import Profile
from offload.planning.unit import (
    DEVICE_SPARE_BYTES,
    Unit,
    UnitSizes,
    enclosing,
    on_device_bytes,
)
from offload.telemetry.run_file import ParamFact, UnitFact
from offload.tools.forecast.adapters import add_adapters
from offload.tools.forecast.counting import Count, ShapeRun, first_line
from offload.tools.forecast.machines import flops_of
from offload.tools.forecast.meta_cost import Cost, without_initial_values
from offload.tools.forecast.model_source import ModelSource
from offload.tools.forecast.repeats import Repeat, shortened
from offload.tools.forecast.request import OPTIMIZERS, PREPARE, WRAP
from offload.tools.forecast.workload import Workload, WorkloadUse

_LAYERS_HERE = 2  # whose activations are on the device while the others are offloaded
_MOMENTUM = 0.9  # with momentum SGD has state; models of this kind are trained with it


@dataclass(frozen=True)
class Footprint:
    """The footprint of a model in one iteration of training.

    activation_bytes: what autograd keeps of the layers until backward. logits_bytes: the most that
    is held beside them: the output, the loss, their gradients, and the temporaries of one layer.
    layer_bytes: the most that one use adds to activations. recomputed_layers: how many run twice.
    item: what a batch has several of. on_device: the model runs on a device. unit_bytes: as in the
    tuner's `Tuning`. reads_files: frozen parameters stay in the files that they come from.
    """

    name: str
    model: nn.Module  # on the meta device
    units: tuple[Unit, ...]
    uses: tuple[Cost, ...]
    activation_bytes: int
    logits_bytes: int
    layer_bytes: int
    buffer_bytes: int
    recomputed_layers: int
    tokens: int
    item: str
    activations: str
    on_device: bool
    count: Count
    unit_bytes: int | None
    reads_files: bool

    @property
    def flops(self) -> int:
        return sum(use.flops for use in self.uses)

    @property
    def numel(self) -> int:
        return sum(param.numel() for param in self.model.parameters())

    @property
    def param_bytes(self) -> int:
        return sum(param.numel() * param.element_size() for param in self.model.parameters())

    @property
    def dtype(self) -> str:
        """The dtype of most of the model's values."""
        counts: dict[str, int] = {}
        for param in self.model.parameters():
            name = str(param.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + param.numel()
        return max(counts, key=lambda name: counts[name], default="float32")

    # --- where the model runs ---------------------------------------------------------------------

    @property
    def passing_bytes(self) -> int:
        """The bytes of activations and logits there, at the largest moment."""
        return self.activations_here_bytes + self.logits_bytes

    @property
    def activations_here_bytes(self) -> int:
        """The bytes of activations there. On a device from which they are offloaded, only some
        layers' are there at once.
        """
        if self.activations == "offload" and self.on_device:
            return min(self.activation_bytes, _LAYERS_HERE * self.layer_bytes)
        return self.activation_bytes

    @property
    def recompute_note(self) -> str | None:
        """Why recompute has no effect, if it was requested and finds no layer; otherwise None."""
        if self.activations != "recompute" or self.recomputed_layers:
            return None
        return (
            'activations="recompute" finds no layer to run again: none is in a list of layers; '
            "checkpoint them in the model itself"
        )

    def device_parts(self, use: str = PREPARE) -> dict[str, int]:
        """Return the least bytes that must be on the device at once, by what they are for."""
        grads = [p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad]
        wrapped = {"parameters": self.param_bytes, "gradients": sum(grads)}
        prepared = {"one unit at a time": UnitSizes.of(self.units).least_device_bytes}
        return {
            **(wrapped if use == WRAP else prepared),
            "buffers": on_device_bytes(self.buffer_bytes) + DEVICE_SPARE_BYTES,
            "activations": self.activations_here_bytes,
            "logits and what passes": self.logits_bytes,
        }

    def check_device(self, device_bytes: int, use: str = PREPARE) -> None:
        """Raise `CapacityError` if what must be on the device at once has no room in the budget."""
        parts, note = self.device_parts(use), self.recompute_note
        needed = sum(parts.values())
        if needed <= device_bytes:
            return
        each = ", ".join(f"{name} {format_size(n)}" for name, n in parts.items())
        raise CapacityError(
            f"device_memory: {format_size(device_bytes)} ({device_bytes} bytes) are allowed; "
            f"{each} need {format_size(needed)} ({needed} bytes); raise device_memory, or take a "
            "smaller batch or shorter texts"
            + ("" if self.activations == "recompute" else ', or activations="recompute"')
            + (f"; {note}" if note else "")
        )

    # --- the workload -----------------------------------------------------------------------------

    @contextmanager
    def shortened_to(self, periods: Mapping[Repeat, int]) -> Iterator[Footprint]:
        """Yield the footprint of the model with so many periods of its repeated layers, which it
        has only while the block runs.
        """
        with shortened(periods):
            yield _footprint(self, periods)

    def workload(self, optimizer: str, machine: Profile, use: str = PREPARE) -> Workload:
        """Make the workload for one of `OPTIMIZERS` on a machine. Each use computes there as long
        as its matrix products take at the profile's FLOP/s and, on the CPU, the rest at the speed
        of memory. On a device the rest is left out: memory there is so much faster that the
        published speeds leave room for it.
        """
        kept, flops_per_s = enclosing(self.units), flops_of(machine, self.dtype)
        moved_per_s = None if self.on_device else machine.memory_bytes_per_s

        def seconds_of(cost: Cost) -> float:
            seconds = cost.flops / flops_per_s if flops_per_s else 0.0
            return seconds + (cost.moved_bytes / moved_per_s if moved_per_s else 0.0)

        params = tuple(ParamFact.of(spec) for spec in self._specs(optimizer) if spec.fields)
        seconds = [seconds_of(cost) for cost in self.uses]
        whole = Workload(
            units=tuple(
                UnitFact(u.name, u.nbytes, u.needs, u.number in kept, self._is_in_files(u))
                for u in self.units
            ),
            params=params,
            uses=tuple(
                WorkloadUse(cost.phase, cost.unit, s)
                for cost, s in zip(self.uses, seconds, strict=True)
            ),
            between_s=0.0,
            activation_bytes=self.activation_bytes,
            logits_bytes=self.logits_bytes,
            tokens=self.tokens,
            dtype=self.dtype,
            device="device" if self.on_device else "cpu",
        )
        if use == PREPARE:
            return whole
        there = tuple(replace(p, unit=None, is_on_device=self.on_device) for p in params)
        return replace(whole, units=(), params=there, uses=(), between_s=sum(seconds))

    def _is_in_files(self, unit: Unit) -> bool:
        """Return whether the unit's block is never written."""
        is_trained = any(member.param.requires_grad for member in unit.members)
        return not unit.nbytes or (self.reads_files and not is_trained)

    def _specs(self, optimizer: str) -> list[ParamSpec]:
        made = make_optimizer(optimizer, self.model)
        records = make_records(made, choose_recipe(made, elementwise=False), made.state)
        unit_of = {m.param: unit.number for unit in self.units for m in unit.members}
        for record in records:
            record.unit = unit_of[record.param]  # type: ignore[index]
        return list(map(spec_of, records))


def make_on_meta(source: ModelSource, dtype: str | None = None) -> nn.Module:
    """Make the model without its values. dtype: of its parameters and buffers; None: its own."""
    with torch.device("meta"), without_initial_values():
        model = source.make_model().train()
    refuse_lazy(model)
    # A module that names a device has its tensors there; their values are not needed here.
    model = model.to("meta")
    return model if dtype is None else model.to(getattr(torch, dtype))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Make one of `OPTIMIZERS` for the parameters that are trained."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ConfigError("model: has no parameter that is trained; there is nothing to plan")
    if name not in OPTIMIZERS:
        raise ConfigError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {name!r}")
    if name == "sgd":
        return torch.optim.SGD(params, momentum=_MOMENTUM)
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]]
    kinds = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "lion": Lion}
    return kinds[name](params)


def measure(
    source: ModelSource,
    batch: int,
    sequence: int,
    dtype: str | None = None,
    activations: str = "keep",
    unit_bytes: int | None = None,
    on_device: bool = False,
    counts_all: bool = False,
    lora: int | None = None,
) -> Footprint:
    """Measure the footprint of the model in training.

    activations: keep, recompute or offload; offloaded ones are counted as if they were kept.
    unit_bytes: as in the tuner's `Tuning`. on_device: the model runs on a GPU. counts_all: run
    every layer; otherwise, of many that are alike, a few run, and the others cost as much. lora:
    the rank of adapters that are trained beside the frozen model. Raises `ConfigError` if the model
    cannot run on shapes alone.
    """
    model, inputs = _made(source, batch, sequence, dtype)
    if lora is not None:
        add_adapters(model, lora)
    units = find_units(model, unit_bytes=unit_bytes)
    layers = layers_of(model, units, is_chosen=False) if activations == "recompute" else {}
    size = f"{batch} {source.item}s of {sequence} tokens"
    run = ShapeRun(source, model, inputs, size, units, layers, on_device)
    count = run.count(counts_all)
    return _footprint(
        Footprint(
            name=source.name,
            model=model,
            units=(),
            uses=(),
            activation_bytes=0,
            logits_bytes=0,
            layer_bytes=count.layer_bytes,
            buffer_bytes=buffer_bytes(model),
            recomputed_layers=len(layers),
            tokens=batch * source.tokens_of(sequence),
            item=source.item,
            activations=activations,
            on_device=on_device,
            count=count,
            unit_bytes=unit_bytes,
            reads_files=lora is not None,
        ),
        count.whole,
    )


def _footprint(like: Footprint, periods: Mapping[Repeat, int]) -> Footprint:
    """Return the footprint of the model as it is now, with so many periods of its repeated
    layers.
    """
    units = find_units(like.model, unit_bytes=like.unit_bytes)
    unit_of = {module: unit.number for unit in units for module in unit.modules}
    count = like.count.lengthened(periods)
    return replace(
        like,
        units=tuple(units),
        uses=tuple(replace(use, unit=unit_of[count.parts[use.unit]]) for use in count.uses),
        activation_bytes=count.kept_bytes,
        logits_bytes=max(0, count.peak_bytes - count.kept_bytes),
    )


def _made(
    source: ModelSource, batch: int, sequence: int, dtype: str | None
) -> tuple[nn.Module, Any]:
    try:
        model = make_on_meta(source, dtype)
        with torch.device("meta"):
            return model, source.make_batch(batch, sequence)
    except (OverflowError, RuntimeError, TypeError) as error:
        if isinstance(error, OffloadError):
            raise
        raise ConfigError(
            f"{source.name}: cannot be made, not even without memory, with {batch} texts of "
            f"{sequence} tokens: {first_line(error)}; give numbers that some machine could hold"
        ) from error
