"""Placeholders: parameters whose values are in another tier. Their shape is here, their values are
not.

A placeholder keeps the parameter's identity, shape, type and gradient. Its values are a single NaN
(the least integer; False), expanded to the shape, and its class intercepts every operation on them:
either the owner fetches the values (within a forward or backward pass of the model, where the owner
can tell how long they are needed), or the operation raises an error that says what to do. So no
code computes with a parameter that is not resident, and what evades every check computes NaN, not a
plausible number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.core.errors import StateError
from offload.core.tensors import RefusingTensor, found_in, harmless, name_of_function

_OWNER = "_offload_owner"
_VALUES = "_offload_values_class"  # the parameter's class while its values are resident

# The attributes and methods, beside those of any tensor that is elsewhere, that do not touch a
# parameter's values.
_ATTRIBUTES = (
    "_backward_hooks",
    "_grad_fn",
    "_post_accumulate_grad_hooks",
    "grad_dtype",
    "name",
    "names",
    "output_nr",
    "retains_grad",
    "volatile",
)
_METHODS = (
    "is_inference",
    "ndimension",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "requires_grad_",
    "retain_grad",
)


class Owner(Protocol):
    """An object that knows where the values of placeholders are and can fetch them."""

    device: torch.device  # where the values are used

    def name_of(self, param: Tensor) -> str:
        """Return the parameter's name in the model."""

    def bring(self, params: Sequence[Tensor]) -> bool:
        """Fetch the values of all these parameters, if they may be fetched now; return whether they
        were.
        """


class OffloadedParameter(RefusingTensor, nn.Parameter):
    """A parameter whose values are in another tier."""

    @staticmethod
    @cache
    def _harmless() -> frozenset[Any]:
        setters = [
            getattr(getattr(Tensor, name), change)
            for name in ("grad", "requires_grad", "_backward_hooks")
            for change in ("__set__", "__delete__")
        ]
        return harmless(_ATTRIBUTES, _METHODS) | frozenset(setters)

    @classmethod
    def _decide(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        if func in _answers():
            return _answers()[func](*args, **kwargs)
        wanted = _offloaded_in((args, kwargs))
        _bring_all(wanted, func)
        gone = _offloaded_in((args, kwargs))
        if gone:  # evicted to make room for the others: fetch all at once
            _bring_all(wanted | gone, func)
        # Each has its ordinary class again.
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> Any:
        raise StateError(_refusal(self, "copied"))

    def __reduce_ex__(self, protocol: object) -> Any:
        raise StateError(_refusal(self, "pickled"))


class OffloadedDeviceParameter(OffloadedParameter):
    """A placeholder whose values are used on a device, while its gradient is in host memory.

    torch requires a parameter and its gradient on one device, so `grad` asks the owner.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        answer = _of_gradients().get(func)
        if answer is not None and isinstance(args[0], OffloadedDeviceParameter):
            return answer(*args)
        return super().__torch_function__(func, types, args, kwargs)


class GradientKeeper(Protocol):
    """An object that holds the gradients of parameters that are used on a device."""

    def of(self, param: Tensor) -> Tensor | None: ...

    def put(self, param: Tensor, grad: Tensor | None) -> None: ...


def make_placeholder(param: Tensor, owner: Owner, on_device: Tensor | None = None) -> None:
    """Make a parameter a placeholder: drop its reference to its values, whose memory is freed
    unless other code holds it. A parameter that is a placeholder already gets the new owner.

    on_device: one value on the device that the parameter is used on, so that torch sees the
    parameter on the same device at all times. Otherwise autograd would give it another node of the
    graph, and the sum of the gradients that arrive there would be rounded differently. The owner's
    `gradients` is a `GradientKeeper` then. None: the parameter is used on the CPU.
    """
    kind = OffloadedParameter if on_device is None else OffloadedDeviceParameter
    if on_device is not None and type(param) is OffloadedParameter:  # of the CPU until now
        restore(param, torch.zeros((), dtype=param.dtype, device="cpu").expand(param.shape))
    if isinstance(param, kind):
        setattr(param, _OWNER, owner)
        return
    value = placeholder_storage(param.dtype) if on_device is None else on_device
    setattr(param, _VALUES, type(param))
    setattr(param, _OWNER, owner)
    param.data = value.expand(param.shape)
    param.__class__ = kind


def restore(param: Tensor, values: Tensor) -> None:
    """Give a parameter values of the same shape and type, and its ordinary class again."""
    if isinstance(param, OffloadedParameter):
        kind = getattr(param, _VALUES)
        param.__class__ = kind
        delattr(param, _VALUES)
        delattr(param, _OWNER)
    param.data = values


def own_grad(param: Tensor) -> Tensor | None:
    """Return the gradient that autograd has left at the parameter itself."""
    with torch._C.DisableTorchFunctionSubclass():
        return param.grad


def set_own_grad(param: Tensor, grad: Tensor | None) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        param.grad = grad


def is_offloaded(param: object) -> bool:
    return isinstance(param, OffloadedParameter)


def _bring_all(owners: Mapping[Tensor, Owner], func: Callable[..., Any]) -> None:
    found: dict[int, list[Tensor]] = {}
    for param, owner in owners.items():
        found.setdefault(id(owner), []).append(param)
    for params in found.values():
        if not owners[params[0]].bring(params):
            raise StateError(_refusal(params[0], f"used by {name_of_function(func)}"))


def _refusal(param: Tensor, what: str) -> str:
    return (
        f"{_owner(param).name_of(param)}: cannot be {what}, its values are not in memory; use it "
        "inside `with offload.resident(module):`, where module is one that has it"
    )


def _offloaded_in(values: object) -> dict[Tensor, Owner]:
    return {param: _owner(param) for param in found_in(OffloadedParameter, values)}


def _owner(param: Tensor) -> Owner:
    owner: Owner = getattr(param, _OWNER)
    return owner


@cache
def _of_gradients() -> dict[Any, Callable[..., Any]]:
    def keeper(param: Tensor) -> GradientKeeper:
        found: GradientKeeper = _owner(param).gradients  # type: ignore[attr-defined]
        return found

    grad: Any = Tensor.grad
    return {
        grad.__get__: lambda param, *_: keeper(param).of(param),
        grad.__set__: lambda param, value: keeper(param).put(param, value),
        grad.__delete__: lambda param: keeper(param).put(param, None),
    }


@cache
def _answers() -> dict[Any, Callable[..., Any]]:
    """Return the methods that the owner answers, since the placeholder's own answer would
    be wrong.
    """
    answers: dict[Any, Callable[..., Any]] = {
        Tensor.device.__get__: lambda param, _=None: _owner(param).device,
        Tensor.stride: _stride,
        Tensor.is_contiguous: lambda param, **_: True,
        Tensor.get_device: _device_index,
        Tensor.__repr__: _describe,
        Tensor.__str__: _describe,
        Tensor.__format__: _describe,
    }
    for kind in ("cpu", "cuda", "meta", "mps", "mtia", "xla", "xpu"):
        answers[getattr(Tensor, f"is_{kind}").__get__] = partial(_is_on, kind)
    return answers


def _stride(param: Tensor, dim: int | None = None) -> Any:
    """Return the strides that the values have where they are resident: those of a contiguous
    tensor.
    """
    strides = torch.empty(param.shape, device="meta").stride()
    return strides if dim is None else strides[dim]


def _is_on(kind: str, param: Tensor, _: object = None) -> bool:
    return _owner(param).device.type == kind


def _device_index(param: Tensor) -> int:
    device = _owner(param).device
    return -1 if device.type == "cpu" else (device.index or 0)


def placeholder_storage(dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Make the one value of a placeholder: NaN, the least integer, or False."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), torch.nan, dtype=dtype, device=device)
    if dtype == torch.bool:
        return torch.zeros((), dtype=dtype, device=device)
    return torch.full((), torch.iinfo(dtype).min, dtype=dtype, device=device)


def _describe(param: Tensor, *_: object, **__: object) -> str:
    name, shape = _owner(param).name_of(param), tuple(param.shape)
    return f"Parameter {name} {shape} {param.dtype}, not in memory"
