"""How a model on the meta device gets its first values: from its modules' own methods.

For each module with tensors to fill, `reset_parameters` is called (or `_reset_parameters`, the name
in torch's attention), then `_init_weights(module)` of the nearest module around it that has one, as
models of Hugging Face and many other libraries do. Children come before their parents, which is the
order in which modules are usually constructed. So after the same `torch.manual_seed` the values are
those of a model that was constructed on the CPU, if three conditions hold: its modules are
constructed in the order in which it registers them, each draws its values in its constructor, and
nothing is drawn again later. They hold for models of torch's own layers. They do not hold where
`_init_weights` runs over a finished model, as with Hugging Face, nor behind a module that drew
values for a parameter that was tied afterwards. A tied parameter gets the values of the first
module that has it. Adapters that peft has put around a layer are filled as peft does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError

_CHECKED_NUMEL = 1 << 20


@dataclass(frozen=True)
class InitTask:
    """A task that fills the tensors of one module by calls of the module's own methods.

    kept: tensors of the module that have values, which the calls must not change; they are
    restored.
    """

    name: str
    module: nn.Module
    calls: tuple[Callable[[], Any], ...]
    kept: tuple[Tensor, ...]

    def run(self) -> None:
        with torch.no_grad():
            saved = [tensor.detach().clone() for tensor in self.kept]
            for call in self.calls:
                call()
            for tensor, values in zip(self.kept, saved, strict=True):
                tensor.copy_(values)


def plan_tasks(model: nn.Module, empty: Mapping[Tensor, str]) -> list[InitTask]:
    """Return the tasks that fill all `empty` tensors, in order. Raise `ConfigError` with the names
    of those that no module would fill. Changes nothing.
    """
    tasks, done, hopeless = [], set[Tensor](), dict[Tensor, str]()
    for name, module, around in _inside_out("", model, (), set()):
        own = list(_own(module))
        fresh = {tensor for tensor in own if tensor in empty and tensor not in done}
        inside = (*module.parameters(), *module.buffers())
        below = [tensor for tensor in inside if tensor in empty]
        calls = _calls(module, around) if fresh else []
        if not fresh and not own and below and len(below) == len(inside):
            calls = _resets(module)  # it fills the tensors of its children itself
        adapters = {t: empty[t] for t in made_by_adapters(module) if t in empty}
        resets = _adapter_resets(module, around) if adapters else []
        calls += resets
        done.update(fresh)
        if calls:
            kept = tuple(t for t in own if t not in fresh)
            tasks.append(InitTask(name or type(module).__name__, module, tuple(calls), kept))
            for tensor in below:
                hopeless.pop(tensor, None)
        else:
            hopeless |= {tensor: empty[tensor] for tensor in fresh}
        if adapters and not resets:  # the reset methods of their layers do not do what peft does
            hopeless |= adapters
    refuse_empty(hopeless.values())
    return tasks


def refuse_empty(names: Any) -> None:
    names = list(names)
    if names:
        raise ConfigError(
            f"model: nothing gives values to {', '.join(names)}: on the meta device, not in the "
            "weights, and no module has a reset_parameters() or _init_weights(module) for it; make "
            "it outside of torch.device('meta'), or give its module such a method"
        )


def is_filled(tensor: Tensor, version: int) -> bool:
    """Return whether a tensor has been filled: no element is NaN any more; or, for a type without
    NaN, it is no longer at `version`.
    """
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return tensor._version != version or not tensor.numel()
    flat = tensor.detach().view(-1)
    parts = range(0, flat.numel(), _CHECKED_NUMEL)  # in parts: a large one is not copied whole
    return not any(bool(flat[n : n + _CHECKED_NUMEL].isnan().any()) for n in parts)


def empty_(tensor: Tensor) -> Tensor:
    """Fill a tensor so that `is_filled` takes it for empty: with NaN, or with zeros if its type has
    none.
    """
    is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.fill_(torch.nan) if is_float else tensor.zero_()


def _inside_out(
    name: str, module: nn.Module, around: tuple[nn.Module, ...], seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, tuple[nn.Module, ...]]]:
    """Yield each module once, after its children, with its name and the modules around it, from the
    model to its parent.
    """
    if module in seen:
        return
    seen.add(module)
    for child_name, child in module.named_children():
        inner = f"{name}.{child_name}" if name else child_name
        yield from _inside_out(inner, child, (*around, module), seen)
    yield name, module, around


def _own(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _calls(module: nn.Module, around: tuple[nn.Module, ...]) -> list[Callable[[], Any]]:
    calls, own = _resets(module), set(_own(module))
    for outer in (module, *reversed(around)):
        if own & made_by_adapters(outer):
            break  # an adapter is not initialised like a layer of the model
        method = getattr(outer, "_init_weights", None)
        if callable(method) and _takes(method, module):
            calls.append(partial(method, module))
            break
    return calls


def _resets(module: nn.Module) -> list[Callable[[], Any]]:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method) and _takes(method):
            return [method]
    return []


def made_by_adapters(module: nn.Module) -> set[Tensor]:
    """Return the parameters that a peft layer can fill itself: all but those of the layer
    it wraps.
    """
    if not callable(getattr(module, "reset_lora_parameters", None)):
        return set()
    inner = getattr(module, "base_layer", None)
    others = set(inner.parameters() if inner is not None else ())
    return {param for param in module.parameters() if param not in others}


def _adapter_resets(module: nn.Module, around: tuple[nn.Module, ...]) -> list[Callable[[], Any]]:
    """Return the calls that reset a layer's adapters whose initial values are random numbers and
    zeros. The initial values of other adapters depend on the wrapped layer.
    """
    configs: Mapping[str, Any] = next(
        (c for m in reversed(around) if isinstance(c := getattr(m, "peft_config", None), dict)), {}
    )
    calls: list[Callable[[], Any]] = []
    reset: Any = getattr(module, "reset_lora_parameters", None)
    for adapter in dict.fromkeys(
        name for part in ("lora_A", "lora_embedding_A") for name in getattr(module, part, ())
    ):
        how = getattr(configs.get(adapter), "init_lora_weights", None)
        if callable(reset) and (isinstance(how, bool) or how == "gaussian"):
            calls.append(partial(reset, adapter, how))
    return calls


def _takes(method: Callable[..., Any], *arguments: object) -> bool:
    try:
        inspect.signature(method).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True
