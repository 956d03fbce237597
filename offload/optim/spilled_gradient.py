"""A gradient that host memory has no room for, presented as an ordinary tensor.

A keeper has its values: in the store, or where an update has put them since. What training loops do
with every gradient between backward and step needs no values: the keeper knows the norm, which
torch computed when the gradient arrived, and it scales the values when they are used. For every
other operation the values are loaded into memory, whole, until the operation ends or the last view
of them is released; changes are written back. So every operation has the bits that torch gives it.

Autograd accumulates into it as into any gradient: the keeper adds to the stored values, part by
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from offload.core.holders import holders
from offload.optim.gradient_handle import (
    KEEPER,
    GradientEdit,
    GradientHandle,
    handles_in,
    is_plain,
    itself,
)

_HELD, _IS_EXPOSED, _IS_PINNED = "_offload_held", "_offload_is_exposed", "_offload_is_pinned"
_aten = torch.ops.aten
# Calls that hand out the memory: for how long it is used is not known.
_GIVING_AWAY = frozenset(
    {"data_ptr", "storage", "_typed_storage", "untyped_storage", "__dlpack__", "share_memory_"}
)
_FACTORS = frozenset({"other", "scalar", "scalars", "tensor"})  # torch's names of the argument


class SpilledGradientInput(Protocol):
    """A flat gradient that is not in memory: the update stages it slice by slice."""

    def numel(self) -> int: ...

    def element_size(self) -> int: ...

    def load(self) -> Tensor:
        """Load all values into memory of their own."""

    def block_sums(self) -> Sequence[float]:
        """Return sums of squares, as `kernels.grad_stats` computes them for the whole gradient."""


Gradient: TypeAlias = Tensor | SpilledGradientInput  # as the update gets it


def in_memory(grads: Mapping[int, Gradient]) -> dict[int, Tensor]:
    """Return the gradients of a wrapped optimizer, none of which is spilled."""
    assert all(isinstance(one, Tensor) for one in grads.values()), "only prepare spills gradients"
    return cast("dict[int, Tensor]", grads)


class SpillKeeper(Protocol):
    """The owner of the values of one gradient."""

    def load(self) -> Tensor:
        """Load all values into memory of their own, with the gradient's shape."""

    def store(self, values: Tensor) -> None:
        """Replace the values by these."""

    def edit(self, edit: GradientEdit) -> None:
        """Change the values, now or when they are used."""

    def add(self, values: Tensor) -> None:
        """Add as many values of the same type, as torch adds in place."""

    def norm(self) -> Tensor | None:
        """Return what `torch.linalg.vector_norm` gives for the present values; None: not known."""

    @property
    def cold(self) -> SpilledGradientInput:
        """The values for the update."""


class SpilledGradient(GradientHandle):
    """A handle of a spilled gradient. Only its keeper makes one. It is used by one thread at a
    time.
    """

    @staticmethod
    def of(param: Tensor, keeper: SpillKeeper) -> SpilledGradient:
        made = SpilledGradient.made(param, keeper, torch.device("cpu"))
        setattr(made, _HELD, None)
        setattr(made, _IS_EXPOSED, False)
        setattr(made, _IS_PINNED, False)
        return made

    @property
    def source(self) -> Tensor | SpilledGradientInput:
        """The values for the update: in memory only if another tensor holds them there."""
        return _keeper(self).cold if _settled(self) else _bring(self).view(-1)

    @property
    def away(self) -> SpillKeeper | None:
        """The keeper, which has the values; None: they are in memory, held by another tensor."""
        return _keeper(self) if _settled(self) else None

    @property
    def here(self) -> Tensor | None:
        """The values, if they are in memory."""
        return _held(self)

    def keep_in(self, keep: Callable[[Tensor], Tensor]) -> Tensor:
        """Detach from the keeper, which ends: from now on the values are where `keep` puts them, or
        where they are in memory already. Returns them.
        """
        held = _held(self)
        if held is None:
            held = keep(_keeper(self).load())
            setattr(self, _HELD, held)
        setattr(self, _IS_PINNED, True)
        return held

    @classmethod
    def _answers(cls) -> Mapping[Any, Callable[..., Any]]:
        return _answers()

    @classmethod
    def _otherwise(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        name = getattr(func, "__name__", "")
        if args and "_foreach_" in name and isinstance(args[0], (list, tuple)):
            return _one_by_one(func, args[0], args[1:], kwargs)
        return _on_values(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Handle the operations that C++ calls: autograd's accumulation, and the simpler functions
        that torch's own are made of.
        """
        if func is _aten.detach.default:
            return args[0]
        if func is _aten.add_.Tensor and not kwargs and _adds_alike(*args):
            _keeper(args[0]).add(args[1])
            return args[0]
        if func is _aten.linalg_vector_norm.default and not kwargs:
            known = _known_norm(*args)
            if known is not None:
                return known
        is_plain_norm = func is _aten._foreach_norm.Scalar and not kwargs and len(args) < 3
        if is_plain_norm and len(args[0]) == 1:
            known = _known_norm(args[0][0], *args[1:])
            if known is not None:
                return [known]
        return _on_values(func, args, kwargs or {})

    def __deepcopy__(self, memo: object) -> Any:
        return _on_values(Tensor.clone, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _on_values(Tensor.clone, (self,), {}).__reduce_ex__(protocol)


def _keeper(gradient: Any) -> SpillKeeper:
    found: SpillKeeper = getattr(gradient, KEEPER)
    return found


def _held(gradient: Any) -> Tensor | None:
    """Return the values, where they are in memory."""
    found: Tensor | None = getattr(gradient, _HELD)
    return found


# --- values in memory, while they are in use ------------------------------------------------------


def _on_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the values in memory, and write back what it has changed."""
    handles = {id(one): one for one in handles_in((args, kwargs))}
    values = {key: _bring(one) for key, one in handles.items()}
    versions = {key: one._version for key, one in values.items()}
    try:
        result = func(*_exchanged(args, values), **_exchanged(kwargs, values))
        return _returned(result, {id(one): handles[key] for key, one in values.items()})
    finally:
        for key, one in handles.items():
            if values[key]._version != versions[key] or _changes(func):
                setattr(one, _IS_EXPOSED, True)
            if getattr(func, "__name__", "") in _GIVING_AWAY:
                setattr(one, _IS_PINNED, True)
            _let_go(one)


def _changes(func: Any) -> bool:
    """Return whether `func` works in place, by its schema or its name: not every such function
    advances the version counter.
    """
    schema, name = getattr(func, "_schema", None), getattr(func, "__name__", "")
    if schema is not None:
        return bool(schema.is_mutable)
    return name.endswith("_") and not name.endswith("__")


def _bring(gradient: Any) -> Tensor:
    held = _held(gradient)
    if held is None:
        held = _keeper(gradient).load()
        setattr(gradient, _HELD, held)
    return held


def _let_go(gradient: Any) -> None:
    """Release the memory of the values, unless another tensor holds it. Write back what may have
    been changed there.
    """
    held = _held(gradient)
    if held is None:
        return
    if getattr(gradient, _IS_PINNED) or holders(held) > 1:
        setattr(gradient, _IS_EXPOSED, True)  # a change through another tensor is not seen
        return
    if getattr(gradient, _IS_EXPOSED):
        _keeper(gradient).store(held)
    setattr(gradient, _HELD, None)
    setattr(gradient, _IS_EXPOSED, False)


def _exchanged(value: Any, values: Mapping[int, Tensor]) -> Any:
    """Return the same arguments with values in the place of handles."""
    if isinstance(value, SpilledGradient):
        return values[id(value)]
    if type(value) in (tuple, list):
        return type(value)(_exchanged(one, values) for one in value)
    if isinstance(value, Mapping):
        return {key: _exchanged(one, values) for key, one in value.items()}
    return value


def _returned(result: Any, back: Mapping[int, Any]) -> Any:
    """Put the handles back into the result, since a function that works in place returns its
    argument.
    """
    if isinstance(result, Tensor):
        return back.get(id(result), result)
    if type(result) in (tuple, list):
        return type(result)(_returned(one, back) for one in result)
    return result


def _one_by_one(
    func: Callable[..., Any], tensors: Sequence[Any], rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Apply a function of lists to one tensor after the other, since memory has room for one
    gradient.
    """
    lengths = {len(one) for one in (*rest, *kwargs.values()) if _is_list(one)}
    if lengths - {len(tensors)}:  # torch reports the error
        return _on_values(func, (tensors, *rest), kwargs)
    results: list[Any] = []
    for number, one in enumerate(tensors):
        lists = [each[number : number + 1] if _is_list(each) else each for each in rest]
        named = {k: v[number : number + 1] if _is_list(v) else v for k, v in kwargs.items()}
        found = _on_values(func, ([one], *lists), named)
        results += found if isinstance(found, (tuple, list)) else []
    return results or None


def _is_list(value: Any) -> bool:
    """Return whether the argument has an entry for each tensor; a 1-d tensor of numbers counts as a
    list.
    """
    return isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.dim() == 1)


# --- without the values ---------------------------------------------------------------------------


@cache
def _answers() -> dict[Any, Callable[..., Any]]:
    answers = itself()
    answers[Tensor.contiguous] = _contiguous
    answers[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]
    for each in (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm):
        answers[each] = _below(each)
    answers[torch._foreach_norm] = lambda gradients, *args, **kwargs: [
        _below(torch._foreach_norm)([one], *args, **kwargs)[0] for one in gradients
    ]
    for name in ("mul_", "div_", "zero_"):
        answers[getattr(Tensor, name)] = _in_place(name)
    answers[Tensor.__imul__] = _in_place("mul_")
    answers[Tensor.__itruediv__] = _in_place("div_")
    for name in ("mul", "div", "zero"):
        answers[getattr(torch, f"_foreach_{name}_")] = _foreach(name)
    answers[torch._amp_foreach_non_finite_check_and_unscale_] = _unscale
    return answers


def _contiguous(gradient: Any, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format in (None, torch.contiguous_format):
        return gradient
    return _on_values(Tensor.contiguous, (gradient,), {"memory_format": memory_format})


def _set_data(gradient: Any, values: Tensor) -> None:
    if values is not gradient:
        _on_values(Tensor.copy_, (gradient, values), {})


def _below(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `func` as torch makes it of simpler functions;
    `__torch_dispatch__` answers the norm among those.
    """

    def ask(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return ask


def _known_norm(
    gradient: Any,
    order: Any = 2,
    dim: Any = None,
    keepdim: bool = False,
) -> Tensor | None:
    is_whole = dim is None or list(dim) == list(range(gradient.dim()))
    if not is_whole or keepdim or float(order) != 2.0 or _held(gradient) is not None:
        return None
    return _keeper(gradient).norm()


def _in_place(name: str) -> Callable[..., Any]:
    def act(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_here = not isinstance(gradient, SpilledGradient) or _held(gradient) is not None
        if is_here or not is_plain(given) or any(handles_in(given)):
            return _on_values(getattr(Tensor, name), (gradient, *args), kwargs)
        edit = GradientEdit.of(name, args, kwargs)
        edit.check(gradient)
        _keeper(gradient).edit(edit)
        return gradient

    return act


def _foreach(name: str) -> Callable[..., Any]:
    whole, each = getattr(torch, f"_foreach_{name}_"), _in_place(f"{name}_")

    def act(*args: Any, **kwargs: Any) -> None:
        named = dict(kwargs)
        gradients, *factors = [named.pop("self"), *args] if "self" in named else args
        factors += [named.pop(key) for key in list(named) if key in _FACTORS]
        lengths = {-1 if isinstance(f, Tensor) else len(f) for f in factors if _is_list(f)}
        if named or len(factors) != (name != "zero") or lengths - {len(gradients)}:
            _on_values(whole, args, kwargs)  # torch reports the error
            return
        for number, one in enumerate(gradients):
            given = [f[number : number + 1] if _is_list(f) else f for f in factors]
            if isinstance(one, SpilledGradient):
                each(one, *(f[0] if _is_list(f) else f for f in given))
            else:
                _on_values(whole, ([one], *given), {})

    return act


def _unscale(gradients: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale as `GradScaler.unscale_` does. Where the norm is finite, all elements are."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    for one in gradients:
        is_away = isinstance(one, SpilledGradient) and _held(one) is None
        norm = _keeper(one).norm() if is_away else None
        if norm is None or not bool(norm.isfinite()):
            _on_values(unscale, ([one], found_inf, inv_scale), {})
        else:
            given = found_inf.detach().clone(), inv_scale.detach().clone()
            _keeper(one).edit(GradientEdit(lambda values, *rest: unscale([values], *rest), given))


def _adds_alike(gradient: Any, values: Any, *rest: Any) -> bool:
    """Return whether the values can be added part by part."""
    return (
        isinstance(gradient, SpilledGradient)
        and _settled(gradient)
        and not rest
        and type(values) is Tensor
        and values.layout == torch.strided
        and values.is_cpu
        and values.dtype == gradient.dtype
        and values.shape == gradient.shape
    )


def _settled(gradient: Any) -> bool:
    """Release the values if possible; return whether they are out of memory."""
    _let_go(gradient)
    return _held(gradient) is None
