"""Recomputation: layers that run again in backward, so that their activations need not be kept.

Puts torch's own checkpointing around each layer of a prepared model without touching the model;
only the inputs of a layer are kept. The second run gives the bits of the first: it draws the random
numbers of the first (`draws`), and buffers that the layer itself changes (batch norm's statistics)
have the values from before the first run; they change once, not twice. Some runs are compared with
their second run. A layer is left alone if it recomputes already: by itself, in a module inside it,
or by a checkpoint around it.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from offload.core.errors import StateError
from offload.core.metrics import Metrics
from offload.params.draws import Draw, draw_from, drawing_again, draws_of, is_default
from offload.params.hooks import Interception
from offload.params.model_methods import buffers_of
from offload.params.units import large_layers
from offload.planning.unit import Unit, enclosing

# Before each run all buffers are copied. The copy of a larger buffer is kept only if its version
# shows that the run has changed it; smaller ones always, since batch norm changes its buffers
# without a new version.
COPIED_BYTES = 64 << 10
# The first runs of a layer, and later one in so many, are compared with their second run.
CHECKED_FIRST, CHECKED_EVERY = 2, 32

GenerationsOf = Callable[[Unit], tuple[int, ...]]
Saving = Callable[[], AbstractContextManager[None]]
Layers = Mapping[nn.Module, tuple[Unit, ...]]  # each layer, and the units with its parameters
_CHECKPOINTS = "torch.utils.checkpoint"  # its frames are on the stack of a checkpointed function


@dataclass(eq=False)
class _RecomputedLayer:
    units: tuple[Unit, ...]
    is_probed: bool = False  # has run once under `_Probe`
    runs: int = 0
    generators: list[object] = field(default_factory=list)  # seen by the probe
    is_let_alone: bool = False  # it recomputes itself

    @property
    def name(self) -> str:
        return self.units[0].name

    def is_due(self) -> bool:
        """Count a run; return whether it is one of those that are compared."""
        self.runs += 1
        return self.runs <= CHECKED_FIRST or self.runs % CHECKED_EVERY == 0


class Recompute:
    """The recomputation of these layers: a checkpoint around each of them until `close`.

    generations_of: returns the generations of the blocks that a unit needs; they tell whether its
    parameters have changed since the forward pass. compares: whether some runs are compared with
    their second run. saving: makes a context manager that is entered around each run of a
    checkpointed layer, the first and the second.
    """

    def __init__(
        self,
        layers: Layers,
        generations_of: GenerationsOf,
        metrics: Metrics,
        compares: bool = True,
        saving: Saving = nullcontext,
    ) -> None:
        self.compares, self.saving = compares, saving
        self.generations_of, self.metrics = generations_of, metrics
        self._interceptions = [
            Interception(module, "forward", partial(self._forward, _RecomputedLayer(units)))
            for module, units in layers.items()
        ]

    def _forward(
        self,
        layer: _RecomputedLayer,
        module: nn.Module,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not torch.is_grad_enabled() or layer.is_let_alone or _is_within_checkpoint():
            return original(*args, **kwargs)
        values = (*args, *kwargs.values())
        if any(map(_is_cache, values)):
            self.metrics.fall_back(
                "recomputation of activations",
                f"{layer.name} is given a cache, which a second run would fill twice; what it "
                "makes is kept; set model.config.use_cache = False for training",
            )
            return original(*args, **kwargs)
        run = _LayerRun(self, layer, module, original, tuple(kwargs))
        run.is_compared = self.compares and layer.is_due()
        # Keyword arguments are passed as positional ones, so that torch handles the tensors among
        # them. A second run that is compared must reach its output: no early stop.
        return checkpoint(run, *values, use_reentrant=False, early_stop=not run.is_compared)

    def close(self) -> None:
        for interception in self._interceptions:
            interception.remove()
        self._interceptions = []


@dataclass(eq=False)
class _LayerRun:
    """A run of a layer in forward, which each backward pass repeats."""

    owner: Recompute
    layer: _RecomputedLayer
    module: nn.Module
    original: Callable[..., Any]
    keywords: tuple[str, ...]
    generations: tuple[int, ...] | None = None  # None: has not run yet
    buffers: list[_ModuleBuffer] = field(default_factory=list)
    draws: list[Draw] = field(default_factory=list)
    is_compared: bool = False
    crc: int | None = None  # checksum of the output of the first run

    def __call__(self, *values: Any) -> Any:
        number = len(values) - len(self.keywords)
        named = dict(zip(self.keywords, values[number:], strict=True))
        call = partial(self.original, *values[:number], **named)
        with self.owner.saving():
            return self._first(call) if self.generations is None else self._again(call)

    def _first(self, call: Callable[[], Any]) -> Any:
        self.generations = self._generations()
        self.buffers = [_ModuleBuffer.of(*found) for found in buffers_of(self.module)]
        self.draws = draws_of(self.module, self.layer.generators)
        output = call() if self.layer.is_probed else self._probe(call)
        self.draws = [draw for draw in self.draws if draw.is_used]
        for buffer in self.buffers:
            buffer.note_change()
        if self.is_compared:
            self.crc = _crc_of(output)
        return output

    def _generations(self) -> tuple[int, ...]:
        return tuple(number for u in self.layer.units for number in self.owner.generations_of(u))

    def _probe(self, call: Callable[[], Any]) -> Any:
        with _Probe(type(self)._probe.__code__) as probe:
            output = call()
        self.layer.is_probed = True
        self.layer.generators = [draw.owner for draw in probe.draws]
        known = {id(draw.owner) for draw in self.draws}
        self.draws += [draw for draw in probe.draws if id(draw.owner) not in known]
        if probe.has_found:
            self.layer.is_let_alone = True
            self.owner.metrics.count("layers_that_recompute_themselves")
        return output

    def _again(self, call: Callable[[], Any]) -> Any:
        name = self.layer.name
        if self.generations != self._generations():
            raise StateError(
                f"{name}: its parameters have changed since the forward pass whose backward needs "
                "them; run the forward pass again"
            )
        with _as_they_were(self.buffers, name), drawing_again(self.draws):
            output = call()
        if self.is_compared and self.crc != _crc_of(output):
            self._tell_of_difference(output)
        return output

    def _tell_of_difference(self, output: Any) -> None:
        """Report that the two runs differ: raise `StateError` if all outputs are on the CPU, where
        the same work gives the same bits; otherwise note a fallback, since some device kernels are
        not deterministic.
        """
        told = (
            f"{self.layer.name}: run again in backward it gave other values than in forward, so "
            "that its gradients would be those of another run; it draws random numbers from a "
            "source that is not watched, or keeps state from one run to the next: make its "
            "generator an "
            'attribute of the module, or prepare with activations="keep" or "offload"'
        )
        if all(tensor.is_cpu for tensor in _tensors(output)):
            raise StateError(told)
        self.owner.metrics.fall_back("recomputation of activations", told)


@dataclass(eq=False)
class _ModuleBuffer:
    """A module's buffer before a run of the module. copy: its values then; None: the buffer itself
    still has them.
    """

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None

    @classmethod
    def of(cls, module: nn.Module, name: str, tensor: Tensor) -> _ModuleBuffer:
        return cls(module, name, tensor, tensor._version, tensor.detach().clone())

    def note_change(self) -> None:
        """Drop the copy of a large buffer that the run has not changed. Call it after the run."""
        if self.tensor.nbytes > COPIED_BYTES and self.is_same():
            self.copy = None

    def is_same(self) -> bool:
        now = self.module._buffers.get(self.name)
        return now is self.tensor and now._version == self.version


@contextmanager
def _as_they_were(buffers: Sequence[_ModuleBuffer], layer: str) -> Iterator[None]:
    """Give buffers the values from before the first run while the block runs; discard what the
    second run makes of them. Raises `RuntimeError` as autograd does where a buffer without a copy
    has changed since the forward pass.
    """
    copied = [buffer for buffer in buffers if buffer.copy is not None]
    for buffer in buffers:
        if buffer.copy is None and not buffer.is_same():
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: buffer {buffer.name} of {layer}, which the forward pass has "
                "used; run the forward pass again"
            )
    now = [buffer.module._buffers.get(buffer.name) for buffer in copied]
    try:
        for buffer in copied:
            assert buffer.copy is not None
            buffer.module._buffers[buffer.name] = buffer.copy.clone()
        yield
    finally:
        for buffer, tensor in zip(copied, now, strict=True):
            buffer.module._buffers[buffer.name] = tensor


class _Probe(TorchFunctionMode):
    """A torch function mode that finds out whether a checkpoint runs inside the function with the
    code object `outermost`, and which generators are passed to torch.
    """

    def __init__(self, outermost: CodeType) -> None:
        super().__init__()
        self._outermost = outermost
        self.has_found = False
        self.draws: list[Draw] = []  # generators passed to torch, as before their first draw

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.has_found = self.has_found or _is_within_checkpoint(self._outermost)
        owner = kwargs.get("generator") if kwargs else None
        is_known = owner is None or is_default(owner)
        if not is_known and all(draw.owner is not owner for draw in self.draws):
            draw = draw_from(owner)
            self.draws += [] if draw is None else [draw]
        return func(*args, **(kwargs or {}))


def layers_of(
    model: nn.Module, units: Sequence[Unit], is_chosen: bool
) -> dict[nn.Module, tuple[Unit, ...]]:
    """Return the layers to recompute, each with the units that hold its parameters.

    is_chosen: the user has chosen the units; then these are the layers. Otherwise the layers are
    the modules in lists of layers. Units put together from left-over modules are not layers. A
    layer may be one unit, one of several modules in a unit, or, if it is very large, several units.
    """
    lists = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
    listed = {child for m in model.modules() if isinstance(m, lists) for child in m.children()}
    around_others = enclosing(units)
    found: dict[nn.Module, tuple[Unit, ...]] = {
        module: (unit,)
        for unit in units
        for module in unit.modules
        if unit.number not in around_others
        and any(True for _ in module.children())
        and (module in listed or (is_chosen and len(unit.modules) == 1))
    }
    if is_chosen:
        return found
    unit_of = {module: unit for unit in units for module in unit.modules}
    for layer in large_layers(model):
        within = [unit_of[inner] for inner in layer.modules() if inner in unit_of]
        found[layer] = tuple({unit.number: unit for unit in within}.values())
    return found


def _is_within_checkpoint(outermost: CodeType | None = None) -> bool:
    """Return whether the caller runs inside a checkpointed function or its recomputation, looking
    up the call stack as far as the function with the code object `outermost`. The stack shows both
    kinds of checkpoint (reentrant or not), through any hooks in between.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not outermost:
        if frame.f_globals.get("__name__") == _CHECKPOINTS:
            return True
        frame = frame.f_back
    return False


def _crc_of(output: Any) -> int:
    """Return a checksum of the bytes of all tensors in `output`."""
    crc = 0
    for tensor in _tensors(output):
        values: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(values, crc)
    return crc


def _tensors(output: Any) -> list[Tensor]:
    leaves = tree_leaves(output)
    return [t for t in leaves if type(t) is Tensor and t.layout == torch.strided and t.numel()]


def _is_cache(value: object) -> bool:
    """Return whether `value` is a cache that a layer adds to: keys and values of earlier tokens,
    as transformers keeps them.
    """
    return hasattr(value, "update") and hasattr(value, "get_seq_length")
