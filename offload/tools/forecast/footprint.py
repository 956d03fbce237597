"""The footprint of a model in one iteration of training, found by a run on shapes alone.

The model is made on the meta device and its forward and backward pass run there, with the hooks
that the engine itself uses: so the units, the order in which they are used, the activations that
autograd keeps, and the cost of a recomputed layer are those of a real run. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError, OffloadError
from offload.core.metrics import Metrics
from offload.optim import Lion
from offload.optim.choose import choose_recipe
from offload.optim.records import make_records, spec_of
from offload.params.hooks import call_in_backward, follow
from offload.params.model_methods import buffer_bytes
from offload.params.recompute import Recompute, layers_of
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
from offload.tools.forecast.forecast import OPTIMIZERS
from offload.tools.forecast.machines import flops_of
from offload.tools.forecast.meta_cost import Meter, metered
from offload.tools.forecast.model_source import ModelSource
from offload.tools.forecast.workload import BACKWARD, FORWARD, Workload, WorkloadUse

_LAYERS_HERE = 2  # whose activations are on the device while the others are offloaded
_MOMENTUM = 0.9  # with momentum SGD has state; models of this kind are trained with it


@dataclass(frozen=True)
class Cost:
    """The cost of one use of a unit, until the next use. moved_bytes: read and written in memory by
    operations that are not matrix products.
    """

    phase: int
    unit: int
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Footprint:
    """The footprint of a model in one iteration of training.

    activation_bytes: what autograd keeps of the layers until backward. logits_bytes: the most that
    is held beside them: the output, the loss, their gradients, and the temporaries of one layer.
    layer_bytes: the most that one use adds to activations. recomputed_layers: how many run twice.
    on_device: the model runs on a device.
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
    activations: str
    on_device: bool

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

    @property
    def device_parts(self) -> dict[str, int]:
        """The least bytes that must be on the device at once, by what they are for."""
        return {
            "one unit at a time": UnitSizes.of(self.units).least_device_bytes,
            "buffers": on_device_bytes(self.buffer_bytes) + DEVICE_SPARE_BYTES,
            "activations": self.activations_here_bytes,
            "logits and what passes": self.logits_bytes,
        }

    def check_device(self, device_bytes: int) -> None:
        """Raise `CapacityError` if not even one unit at a time works within the budget."""
        parts, note = self.device_parts, self.recompute_note
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

    def workload(self, optimizer: str, machine: Profile) -> Workload:
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

        return Workload(
            units=tuple(
                UnitFact(u.name, u.nbytes, u.needs, u.number in kept, not u.nbytes)
                for u in self.units
            ),
            params=tuple(ParamFact.of(spec) for spec in self._specs(optimizer) if spec.fields),
            uses=tuple(WorkloadUse(use.phase, use.unit, seconds_of(use)) for use in self.uses),
            between_s=0.0,
            activation_bytes=self.activation_bytes,
            logits_bytes=self.logits_bytes,
            tokens=self.tokens,
            dtype=self.dtype,
            device="device" if self.on_device else "cpu",
        )

    def _specs(self, optimizer: str) -> list[ParamSpec]:
        made = make_optimizer(optimizer, self.model)
        records = make_records(made, choose_recipe(made, elementwise=False), made.state)
        unit_of = {m.param: unit.number for unit in self.units for m in unit.members}
        for record in records:
            record.unit = unit_of[record.param]  # type: ignore[index]
        return list(map(spec_of, records))


def make_on_meta(source: ModelSource, dtype: str | None = None) -> nn.Module:
    """Make the model without its values. dtype: of its parameters and buffers; None: its own."""
    with torch.device("meta"):
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
) -> Footprint:
    """Measure the footprint of the model in training.

    activations: keep, recompute or offload; offloaded ones are counted as if they were kept.
    unit_bytes: as in the tuner's `Tuning`. on_device: the model runs on a GPU. Raises `ConfigError`
    if the model cannot run on shapes alone.
    """
    model, inputs = _made(source, batch, sequence, dtype)
    units = find_units(model, unit_bytes=unit_bytes)
    known = [*model.parameters(), *model.buffers(), *_tensors(inputs)]
    recorder = _Recorder(Meter(known))
    layers = layers_of(model, units, is_chosen=False) if activations == "recompute" else {}
    recompute = Recompute(layers, lambda unit: (), Metrics(), compares=False)
    with closing(recompute), _followed(model, units, recorder):
        try:
            with metered(recorder.meter, on_device):
                loss = source.loss(model, inputs)
                recorder.end_forward()
                _run_backward(loss)
        except OffloadError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise ConfigError(
                f"{source.name}: cannot be run on shapes alone with {batch} texts of {sequence} "
                f"tokens: {type(error).__name__}: {_first_line(error)}; {source.remedy}"
            ) from error
    return Footprint(
        name=source.name,
        model=model,
        units=tuple(units),
        uses=tuple(recorder.costs()),
        activation_bytes=recorder.kept_bytes,
        logits_bytes=max(0, recorder.meter.peak_bytes - recorder.kept_bytes),
        layer_bytes=recorder.layer_bytes,
        buffer_bytes=buffer_bytes(model),
        recomputed_layers=len(layers),
        tokens=batch * sequence,
        activations=activations,
        on_device=on_device,
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
            f"{sequence} tokens: {_first_line(error)}; give numbers that some machine could hold"
        ) from error


class _Recorder:
    """A recorder that the hooks call before and after each run, as they would call the engine."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.kept_bytes = 0  # activations of the layers, without the last unit's output
        self.layer_bytes = 0
        self._live_bytes = 0  # when the last use began
        # Phase, unit, and the flops and moved bytes that were counted before the use.
        self._uses: list[tuple[int, int, int, int]] = []
        self._last: Unit | None = None

    def before_forward(self, unit: Unit) -> None:
        self._note(BACKWARD if _in_backward() else FORWARD, unit)

    def after_forward(self, unit: Unit, outputs: list[Tensor]) -> None:
        if unit is self._last and not _in_backward():
            made = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in outputs}
            self.kept_bytes = max(0, self.meter.live_bytes - sum(made.values()))
        made_here = [tensor for tensor in outputs if tensor.grad_fn is not None]
        if torch.is_grad_enabled() and made_here:
            call_in_backward(made_here, lambda: self._note(BACKWARD, unit))

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def end_forward(self) -> None:
        """Note that autograd now holds all it keeps. If no unit has run, the output counts, too."""
        if self._last is None:
            self.kept_bytes = self.meter.live_bytes

    def _note(self, phase: int, unit: Unit) -> None:
        self._last = unit
        self.layer_bytes = max(self.layer_bytes, self.meter.live_bytes - self._live_bytes)
        self._live_bytes = self.meter.live_bytes
        self._uses.append((phase, unit.number, self.meter.flops, self.meter.moved_bytes))

    def costs(self) -> Iterator[Cost]:
        """Yield the cost of each use. The first also has what was counted before it."""
        end = (0, 0, self.meter.flops, self.meter.moved_bytes)
        flops = moved = 0
        for (phase, unit, *_), after in zip(self._uses, [*self._uses[1:], end], strict=True):
            yield Cost(phase, unit, after[2] - flops, after[3] - moved)
            flops, moved = after[2], after[3]


@contextmanager
def _followed(model: nn.Module, units: Sequence[Unit], recorder: _Recorder) -> Iterator[None]:
    """Report the runs of units to the recorder while the block runs. Each gradient is dropped as
    soon as autograd has accumulated it, as the engine takes it away.
    """
    handles = [*follow(model, units, recorder)]
    handles += [
        param.register_post_accumulate_grad_hook(_drop_grad)  # type: ignore[no-untyped-call]
        for param in model.parameters()
        if param.requires_grad
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _run_backward(loss: Tensor) -> None:
    """Do what `loss.backward()` does, but keep function modes in force: `loss.backward()` would
    suspend them, and a layer that is recomputed would take another path.
    """
    torch.autograd.Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]


def _drop_grad(param: Tensor) -> None:
    param.grad = None


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def _tensors(inputs: object) -> list[Tensor]:
    leaves = torch.utils._pytree.tree_leaves(inputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
