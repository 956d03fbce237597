"""A gradient whose values are not in memory as a whole, presented as an ordinary tensor.

A source has the values: in the store, or shared out over the ranks. What training loops do with
every gradient between backward and step needs no values: a stored gradient's norm is known, since
torch computed it when the gradient arrived, and it is scaled when it is used; ranks reduce the
norms of their shards. For every other operation the values are loaded into memory, whole, until the
operation ends or the last view of them is released; changes are written back. So every operation
has the bits that torch gives it. Where no rank has all of the values, the source refuses to load
them.

Autograd accumulates into a stored gradient as into any: the source adds to its values, part by
part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload.core.errors import ConfigError
from offload.core.tensors import RefusingTensor, found_in, harmless, holders, in_order_of
from offload.distributed.placing import local_of, placing_of
from offload.optim.gradient_source import Gradient, GradientEdit, GradientSource
from offload.optim.recipe import Record

_aten = torch.ops.aten
# Calls that hand out the memory: for how long it is used is not known.
_GIVING_AWAY = frozenset(
    {"data_ptr", "storage", "_typed_storage", "untyped_storage", "__dlpack__", "share_memory_"}
)
_FACTORS = frozenset({"other", "scalar", "scalars", "tensor"})  # torch's names of the argument
_ATTRIBUTES = ("device", "is_cpu", "is_cuda", "is_meta", "is_xpu")
_METHODS = ("is_contiguous", "stride")

_GRADS = (torch.float32, torch.bfloat16, torch.float16)  # of gradients on the CPU

Answers = Mapping[Any, Callable[..., Any]]


class GradientHandle(RefusingTensor):
    """A handle of a gradient. Only the owner of its source makes one. It is used by one thread at a
    time.
    """

    source: GradientSource
    here: Tensor | None  # the values, while they are in memory
    is_exposed: bool  # another tensor may have changed them there
    stays: bool  # in memory

    @staticmethod
    def of(
        param: Tensor, source: GradientSource, device: torch.device | str = "cpu"
    ) -> GradientHandle:
        """Make the handle of a parameter's gradient. device: the one that torch sees. The handle
        holds no reference to the parameter, which may hold it as its `.grad`.
        """
        made: GradientHandle = Tensor._make_wrapper_subclass(
            GradientHandle, param.shape, dtype=param.dtype, device=torch.device(device)
        )
        made.source, made.here, made.is_exposed, made.stays = source, None, False, False
        return made

    @property
    def input(self) -> Gradient:
        """The values for the update: in memory only if another tensor holds them there."""
        away = self.put_away()
        return self.bring(Tensor.view).view(-1) if away is None else away.input

    def bring(self, func: Callable[..., Any]) -> Tensor:
        """Load the values into memory for `func`, unless they are there."""
        if self.here is None:
            self.here = self.source.load(func)
        return self.here

    def put_away(self) -> GradientSource | None:
        """Release the memory of the values, unless another tensor holds it, and write back what may
        have been changed there. Return the source if it has all values now.
        """
        if self.here is None:
            return self.source
        if self.stays or holders(self.here) > 1:
            self.is_exposed = True  # a change through another tensor is not seen
            return None
        if self.is_exposed:
            self.source.store(self.here)
        self.here, self.is_exposed = None, False
        return self.source

    def keep_in(self, keep: Callable[[Tensor], Tensor]) -> Tensor:
        """Detach from the source, which ends: from now on the values are where `keep` puts them, or
        where they are in memory already. Returns them.
        """
        if self.here is None:
            self.here = keep(self.source.load(Tensor.clone))
        self.stays = True
        return self.here

    @staticmethod
    @cache
    def _harmless() -> frozenset[Any]:
        return harmless(_ATTRIBUTES, _METHODS)

    @classmethod
    def _decide(
        cls, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        answer = _answers_of(args, kwargs).get(func)
        if answer is not None:
            with torch.no_grad():
                return answer(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if args and "_foreach_" in name and isinstance(args[0], (list, tuple)):
            return _one_by_one(func, args[0], args[1:], kwargs)
        return on_values(func, args, kwargs)

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
        answer = _answers_of(args, kwargs or {}).get(func)
        if answer is not None:
            return answer(*args, **(kwargs or {}))
        return on_values(func, args, kwargs or {})

    def __deepcopy__(self, memo: object) -> Any:
        return on_values(Tensor.clone, (self,), {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        return on_values(Tensor.clone, (self,), {}).__reduce_ex__(protocol)


def _answers_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Answers:
    """Return the answers of the first gradient among the arguments."""
    first = next(found_in(GradientHandle, (args, kwargs)), None)
    return first.source.answers if first is not None else {}


def gradient_of(record: Record) -> Gradient:
    """Return a parameter's gradient, flat, in the order of the parameter's memory; refuse one that
    no update can use. The parameter must have one. For a DTensor it is this rank's part. For a
    gradient that is not in memory it is the handle of its values (`SpilledGradientInput`).
    """
    given = record.param.grad
    assert given is not None
    if isinstance(given, GradientHandle):
        return given.input  # has the parameter's own shape and dtype
    placing, grad = placing_of(given), local_of(given)
    if placing != record.placing:
        raise ConfigError(
            f"{record.name}: expected a gradient that is {record.placing or 'an ordinary tensor'}, "
            f"got {placing or 'an ordinary tensor'}; give it the parameter's own, by "
            "p.grad = p.grad.redistribute(placements=p.placements), say"
        )
    if grad.layout != torch.strided:
        raise ConfigError(
            f"{record.name}: its gradient is sparse ({grad.layout}), which is not supported; make "
            "it dense: nn.Embedding(..., sparse=False), or p.grad = p.grad.to_dense()"
        )
    if grad.shape != record.shape:  # torch refuses to set such a one, but may exchange its data
        raise ConfigError(
            f"{record.name}: expected a gradient whose part here has the shape "
            f"{tuple(record.shape)}, got {tuple(grad.shape)}"
        )
    place = record.local.device if record.original_device is None else torch.device("cpu")
    allowed = _GRADS if place.type == "cpu" else (record.dtype,)
    if grad.device != place or grad.dtype not in allowed:
        raise ConfigError(
            f"{record.name}: expected a gradient of {' or '.join(map(str, allowed))} on "
            f"{place}, got {grad.dtype} on {grad.device}"
        )
    return in_order_of(grad.resolve_neg(), record.local)


# --- values in memory, while they are in use ------------------------------------------------------


def on_values(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `func` with the values in memory, and write back what it has changed."""
    handles = {id(one): one for one in found_in(GradientHandle, (args, kwargs))}
    values = {key: one.bring(func) for key, one in handles.items()}
    versions = {key: one._version for key, one in values.items()}
    try:
        result = func(*_exchanged(args, values), **_exchanged(kwargs, values))
        # A function that works in place returns its argument.
        return _exchanged(result, {id(one): handles[key] for key, one in values.items()})
    finally:
        for key, one in handles.items():
            if values[key]._version != versions[key] or _changes(func):
                one.is_exposed = True
            if getattr(func, "__name__", "") in _GIVING_AWAY:
                one.stays = True
            one.put_away()


def _changes(func: Any) -> bool:
    """Return whether `func` works in place, by its schema or its name: not every such function
    advances the version counter.
    """
    schema, name = getattr(func, "_schema", None), getattr(func, "__name__", "")
    if schema is not None:
        return bool(schema.is_mutable)
    return name.endswith("_") and not name.endswith("__")


def _exchanged(value: Any, others: Mapping[int, Tensor]) -> Any:
    """Return arguments or a result with other tensors in the place of some, by their id."""
    if isinstance(value, Tensor):
        return others.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_exchanged(one, others) for one in value)
    if isinstance(value, Mapping):
        return {key: _exchanged(one, others) for key, one in value.items()}
    return value


def _one_by_one(
    func: Callable[..., Any], tensors: Sequence[Any], rest: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Apply a function of lists to one tensor after the other, since memory has room for one
    gradient.
    """
    lengths = {len(one) for one in (*rest, *kwargs.values()) if _is_list(one)}
    if lengths - {len(tensors)}:  # torch reports the error
        return on_values(func, (tensors, *rest), kwargs)
    results: list[Any] = []
    for number, one in enumerate(tensors):
        lists = [each[number : number + 1] if _is_list(each) else each for each in rest]
        named = {k: v[number : number + 1] if _is_list(v) else v for k, v in kwargs.items()}
        found = on_values(func, ([one], *lists), named)
        results += found if isinstance(found, (tuple, list)) else []
    return results or None


def _is_list(value: Any) -> bool:
    """Return whether the argument has an entry for each tensor; a 1-d tensor of numbers counts as a
    list.
    """
    return isinstance(value, (tuple, list)) or (isinstance(value, Tensor) and value.dim() == 1)


# --- without the values ---------------------------------------------------------------------------


def answers_for(edits: Iterable[str]) -> dict[Any, Callable[..., Any]]:
    """Return what a handle answers for any source: itself, since it has no graph and no other
    place, and edits. edits: the methods of `Tensor` that the source carries out part by part.
    """
    answers: dict[Any, Callable[..., Any]] = {
        one: lambda gradient, *_, **__: gradient
        for one in (
            Tensor.detach,
            Tensor.detach_,
            Tensor.requires_grad_,
            Tensor.contiguous,
            Tensor.data.__get__,  # type: ignore[attr-defined]
            _aten.detach.default,
        )
    }
    for name in edits:
        answers[getattr(Tensor, name)] = _in_place(name)
        if hasattr(torch, f"_foreach_{name}"):
            answers[getattr(torch, f"_foreach_{name}")] = _foreach(name)
    answers[Tensor.__imul__] = _in_place("mul_")
    answers[Tensor.__itruediv__] = _in_place("div_")
    return answers


def _in_place(name: str) -> Callable[..., Any]:
    def act(gradient: Any, *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        is_here = not isinstance(gradient, GradientHandle) or gradient.here is not None
        if is_here or not _is_plain(given) or any(found_in(GradientHandle, given)):
            return on_values(getattr(Tensor, name), (gradient, *args), kwargs)
        edit = GradientEdit.of(name, args, kwargs)
        edit.check(gradient)
        gradient.source.edit(edit)
        return gradient

    return act


def _is_plain(values: Iterable[Any]) -> bool:
    """Return whether every value is a number or a tensor without dimensions."""
    return all(not isinstance(one, Tensor) or one.dim() == 0 for one in values)


def _foreach(name: str) -> Callable[..., Any]:
    whole, each = getattr(torch, f"_foreach_{name}"), _in_place(name)

    def act(*args: Any, **kwargs: Any) -> None:
        named = dict(kwargs)
        gradients, *factors = [named.pop("self"), *args] if "self" in named else args
        factors += [named.pop(key) for key in list(named) if key in _FACTORS]
        lengths = {-1 if isinstance(f, Tensor) else len(f) for f in factors if _is_list(f)}
        if named or len(factors) != (name != "zero_") or lengths - {len(gradients)}:
            on_values(whole, args, kwargs)  # torch reports the error
            return
        for number, one in enumerate(gradients):
            given = [f[number : number + 1] if _is_list(f) else f for f in factors]
            if isinstance(one, GradientHandle):
                each(one, *(f[0] if _is_list(f) else f for f in given))
            else:
                on_values(whole, ([one], *given), {})

    return act


@cache
def answers_of_stored() -> Answers:
    """Return what a handle answers whose source knows its norm, and adds and scales stored
    values.
    """
    answers = answers_for(["mul_", "div_", "zero_"])
    answers[Tensor.contiguous] = _contiguous
    answers[Tensor.data.__set__] = _set_data  # type: ignore[attr-defined]
    for each in (torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm):
        answers[each] = _below(each)
    answers[torch._foreach_norm] = lambda gradients, *args, **kwargs: [
        _below(torch._foreach_norm)([one], *args, **kwargs)[0] for one in gradients
    ]
    answers[_aten.linalg_vector_norm.default] = _norm
    answers[_aten._foreach_norm.Scalar] = _foreach_norm
    answers[_aten.add_.Tensor] = _add
    answers[torch._amp_foreach_non_finite_check_and_unscale_] = _unscale
    return answers


def _contiguous(gradient: Any, memory_format: torch.memory_format | None = None) -> Any:
    if memory_format in (None, torch.contiguous_format):
        return gradient
    return on_values(Tensor.contiguous, (gradient,), {"memory_format": memory_format})


def _set_data(gradient: Any, values: Tensor) -> None:
    if values is not gradient:
        on_values(Tensor.copy_, (gradient, values), {})


def _below(func: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `func` as torch makes it of simpler functions, among which the
    norm is answered.
    """

    def ask(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    return ask


def _norm(*args: Any, **kwargs: Any) -> Any:
    known = None if kwargs else _known_norm(*args)
    return on_values(_aten.linalg_vector_norm.default, args, kwargs) if known is None else known


def _foreach_norm(gradients: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    is_plain = len(gradients) == 1 and len(args) < 2 and not kwargs
    known = _known_norm(gradients[0], *args) if is_plain else None
    if known is not None:
        return [known]
    return on_values(_aten._foreach_norm.Scalar, (gradients, *args), kwargs)


def _known_norm(
    gradient: Any, order: Any = 2, dim: Any = None, keepdim: bool = False
) -> Tensor | None:
    is_whole = dim is None or list(dim) == list(range(gradient.dim()))
    if not is_whole or keepdim or float(order) != 2.0 or gradient.here is not None:
        return None
    return gradient.source.norm()  # type: ignore[no-any-return]


def _add(gradient: Any, values: Any, *rest: Any, **kwargs: Any) -> Any:
    """Add as autograd does, part by part if the values allow it."""
    if rest or kwargs or not _adds_alike(gradient, values):
        return on_values(_aten.add_.Tensor, (gradient, values, *rest), kwargs)
    gradient.source.add(values)
    return gradient


def _adds_alike(gradient: Any, values: Any) -> bool:
    """Return whether the values can be added part by part."""
    return (
        isinstance(gradient, GradientHandle)
        and gradient.put_away() is not None
        and type(values) is Tensor
        and values.layout == torch.strided
        and values.is_cpu
        and values.dtype == gradient.dtype
        and values.shape == gradient.shape
    )


def _unscale(gradients: Sequence[Any], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale as `GradScaler.unscale_` does. Where the norm is finite, all elements are."""
    unscale = torch._amp_foreach_non_finite_check_and_unscale_
    for one in gradients:
        is_away = isinstance(one, GradientHandle) and one.here is None
        norm = one.source.norm() if is_away else None
        if norm is None or not bool(norm.isfinite()):
            on_values(unscale, ([one], found_inf, inv_scale), {})
        else:
            given = found_inf.detach().clone(), inv_scale.detach().clone()
            one.source.edit(GradientEdit(lambda values, *rest: unscale([values], *rest), given))
