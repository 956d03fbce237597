"""What a model needs for one iteration of training: found by running it on shapes alone.

The model is made on the meta device and its forward and backward pass run there, with the hooks
that the engine itself uses: so units, the order in which they are used, what autograd keeps, and
what the second run of a layer costs are those of the real thing. Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError, OffloadError
from offload.core.metrics import Metrics
from offload.optim import Lion
from offload.params.hooks import call_in_backward, follow
from offload.params.model_buffers import buffer_bytes
from offload.params.recompute import Layers, Recompute, layers_of
from offload.params.units import find_units, refuse_lazy
from offload.planning.unit import Unit
from offload.tools.forecast.forecast_request import OPTIMIZERS
from offload.tools.forecast.meta_cost import Meter, metered
from offload.tools.forecast.model_source import ModelSource
from offload.tools.forecast.workload import BACKWARD, FORWARD

_MOMENTUM = 0.9  # with momentum SGD has state, as it has where it is used for such models


@dataclass(frozen=True)
class Cost:
    """Of one use of a unit, until the next one. moved_bytes: in memory, by what is no product."""

    phase: int
    unit: int
    flops: int
    moved_bytes: int


@dataclass(frozen=True)
class Footprint:
    """activation_bytes: that autograd keeps of the layers until backward. logits_bytes: at most,
    beside them: of the output, the loss, their gradients, and what one layer needs for a moment.
    layer_bytes: the most that one use adds to activations. recomputed_layers: that run twice.
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
    batch: int
    sequence: int
    activations: str

    @property
    def tokens(self) -> int:
        return self.batch * self.sequence

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
        """Of most of its values."""
        counts: dict[str, int] = {}
        for param in self.model.parameters():
            name = str(param.dtype).removeprefix("torch.")
            counts[name] = counts.get(name, 0) + param.numel()
        return max(counts, key=lambda name: counts[name], default="float32")


def make_on_meta(source: ModelSource, dtype: str | None = None) -> nn.Module:
    """The model without its values. dtype: of its parameters and buffers; None: its own."""
    with torch.device("meta"):
        model = source.make_model().train()
    refuse_lazy(model)
    # Whoever names a device in a module gets what was asked for; its values are of no use here.
    model = model.to("meta")
    return model if dtype is None else model.to(getattr(torch, dtype))


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """One of `OPTIMIZERS`, of what is trained."""
    params = [param for param in model.parameters() if param.requires_grad]
    if not params:
        raise ConfigError("model: has no parameter that is trained; there is nothing to plan")
    if name == "adamw":
        return torch.optim.AdamW(params)
    if name == "adam":
        return torch.optim.Adam(params)
    if name == "sgd":
        return torch.optim.SGD(params, momentum=_MOMENTUM)
    if name == "lion":
        return Lion(params)
    raise ConfigError(f"optimizer: expected one of {', '.join(OPTIMIZERS)}, got {name!r}")


def measure(
    source: ModelSource,
    batch: int,
    sequence: int,
    dtype: str | None = None,
    activations: str = "keep",
    unit_bytes: int | None = None,
    on_device: bool = False,
) -> Footprint:
    """Of the model in training. activations: keep, recompute or offload; the last are counted as if
    they were kept. unit_bytes: as the tuner has it. on_device: it runs on a GPU. Raises
    `ConfigError` where the model cannot run on shapes alone.
    """
    model, inputs = _made(source, batch, sequence, dtype)
    units = find_units(model, unit_bytes=unit_bytes)
    known = [*model.parameters(), *model.buffers(), *_tensors(inputs)]
    recorder = _Recorder(Meter(known))
    layers = layers_of(model, units, is_chosen=False) if activations == "recompute" else {}
    with _recomputing(layers), _followed(model, units, recorder):
        try:
            with metered(recorder.meter, on_device):
                loss = source.loss(model, inputs)
                recorder.end_forward()
                _run_backward(loss)
        except OffloadError:
            raise
        except Exception as error:  # somebody else's code
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
        batch=batch,
        sequence=sequence,
        activations=activations,
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
    """Is told by the hooks what runs, as the engine would be."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.kept_bytes = 0  # of layers, before the output counts
        self.layer_bytes = 0
        self._live_bytes = 0  # when the last use began
        self._uses: list[tuple[int, int, int, int]] = []  # with what was counted before
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

    def expect(self, numel: int) -> None: ...

    def end_forward(self) -> None:
        """All that autograd keeps is there. Where no unit is the last, its output is among it."""
        if self._last is None:
            self.kept_bytes = self.meter.live_bytes

    def _note(self, phase: int, unit: Unit) -> None:
        self._last = unit
        self.layer_bytes = max(self.layer_bytes, self.meter.live_bytes - self._live_bytes)
        self._live_bytes = self.meter.live_bytes
        self._uses.append((phase, unit.number, self.meter.flops, self.meter.moved_bytes))

    def costs(self) -> Iterator[Cost]:
        """What came before the first use is its own."""
        end = (0, 0, self.meter.flops, self.meter.moved_bytes)
        flops = moved = 0
        for (phase, unit, *_), after in zip(self._uses, [*self._uses[1:], end], strict=True):
            yield Cost(phase, unit, after[2] - flops, after[3] - moved)
            flops, moved = after[2], after[3]


@contextmanager
def _followed(model: nn.Module, units: Sequence[Unit], recorder: _Recorder) -> Iterator[None]:
    """Gradients go as soon as they have come, as the engine takes them away."""
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


@contextmanager
def _recomputing(layers: Layers) -> Iterator[None]:
    recompute = Recompute(layers, lambda unit: (), Metrics(), compares=False)
    try:
        yield
    finally:
        recompute.close()


def _run_backward(loss: Tensor) -> None:
    """What `loss.backward()` does, with function modes in force: that would suspend them, and a
    layer that is run again would run in another way.
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
