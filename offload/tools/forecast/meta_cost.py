"""The cost of a run on the meta device: what it would compute, move and hold, counted operation by
operation.

Nothing is allocated: tensors there have shapes and no memory. A storage counts from the operation
that makes it until its last reference is gone, as an allocator would see it, without the rounding.
One thread.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
# GPUs have a kernel for values of another width than queries (DeepSeek's); CPUs have none.
_UNEQUAL_ATTENTION = _ATEN._scaled_dot_product_efficient_attention

_attention_flops: Callable[..., int] = flop_counter.sdpa_flop_count
_attention_backward_flops: Callable[..., int] = flop_counter.sdpa_backward_flop_count
_LOOK_UPS = (_ATEN.embedding, _ATEN.index, _ATEN.index_select, _ATEN.gather)


@dataclass(frozen=True)
class Cost:
    """The cost of one use of a unit, until the next use. moved_bytes: read and written in memory by
    operations that are not matrix products.
    """

    phase: int
    unit: int
    flops: int
    moved_bytes: int


class Meter(TorchDispatchMode):
    """A dispatch mode that counts operations while it is in force; `metered` enters it.

    live_bytes, peak_bytes: of storages that operations have made and that are still referenced.
    moved_bytes: read and written by operations that are not matrix products, which memory
    bandwidth limits. ignored: tensors whose storages do not count.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0
        self.moved_bytes = 0
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        for tensor in ignored:
            self._known.add(tensor.untyped_storage())
        self._verdicts: dict[int, bool] = {}  # results of checks, by the tensor's `id`

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would import its compiler to skip it

    def take_peak(self) -> int:
        """Return the peak, and begin a new one."""
        peak_bytes, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        if func is _ATEN._local_scalar_dense.default and id(args[0]) in self._verdicts:
            return self._verdicts[id(args[0])]
        output = _run(func, args, named)
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        if func.overloadpacket in (_ATEN.all, _ATEN.any):
            self._judge(made[0], func.overloadpacket is _ATEN.all)
        self._count(func, args, named, output, made)
        for tensor in made:
            self._take_in(tensor.untyped_storage())
        return output

    def _judge(self, tensor: Tensor, verdict: bool) -> None:
        """Note the result of a check, true for `all` and false for `any`. Models check their input
        by `if mask.all()` and `if x.isnan().any()`; there are no values here to look at, so the
        checks give what they give for ordinary ones.
        """
        self._verdicts[id(tensor)] = verdict
        weakref.finalize(tensor, self._verdicts.pop, id(tensor), None)

    def _count(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], output: Any, made: list[Tensor]
    ) -> None:
        packet = func.overloadpacket
        if packet is _ATTENTION:
            self.flops += _attention_flops(*_whole_heads(*args[:3]))
        elif packet is _ATTENTION_BACKWARD:
            shapes = _whole_heads(*args[1:4])
            self.flops += _attention_backward_flops(args[0].shape, *shapes)
        elif packet is _ATEN._grouped_mm:
            left, right = args[:2]
            if left.dim() == right.dim() == 2:  # gradients of several matrices, from some rows each
                self.flops += 2 * left.numel() * right.size(-1)
            else:  # each row times one matrix of several
                self.flops += 2 * output.numel() * left.size(-1)
        elif packet in flop_registry:
            self.flops += flop_registry[packet](*args, **kwargs, out_val=output)
        elif not func.is_view:
            read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            if packet in _LOOK_UPS:
                read = made  # of the table only the rows that are returned
            self.moved_bytes += sum(tensor.numel() * tensor.itemsize for tensor in (*read, *made))

    def _take_in(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        nbytes = storage.nbytes()
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._let_go, nbytes)

    def _let_go(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


def _run(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run the operation on shapes. Torch knows the shapes of experts' matrix products
    (`_grouped_mm`) in bfloat16 only; here they are computed for the other dtypes.
    """
    if func.overloadpacket is not _ATEN._grouped_mm or args[0].dtype == torch.bfloat16:
        return func(*args, **kwargs)
    left, right, *rest = args
    ends: Any = rest[0] if rest else kwargs.get("offs")
    shape = [*left.shape[-2:-1], right.size(-1)]
    if left.dim() == right.dim():
        shape.insert(0, left.size(0) if left.dim() == 3 else ends.size(0))
    return left.new_empty(shape)


class _AttentionCost(TorchFunctionMode):
    """A function mode that runs attention as CPUs or, `on_device`, GPUs compute it: by a fused
    kernel, without the matrix of all pairs, if there is one. On the meta device torch itself would
    always compute that matrix.
    """

    def __init__(self, on_device: bool) -> None:
        super().__init__()
        self._on_device = on_device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            return _attend(self._on_device, *args, **named)
        return func(*args, **named)


def _attend(
    on_device: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_equal = value.size(-1) == query.size(-1)
    # CPUs have no kernel for unequal widths or dropout, GPUs none for unequal widths with shared
    # heads.
    is_known = (is_equal or query.shape[:-2] == key.shape[:-2]) if on_device else is_equal
    is_known = is_known and (on_device or dropout_p == 0.0)
    if not is_known or not _is_fusible(query, key, value, attn_mask, enable_gqa):
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None:
        attn_mask = attn_mask.to(query.dtype)
    output: Tensor
    if is_equal:
        output = _ATTENTION(
            query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]
    else:
        needs_sums = any(tensor.requires_grad for tensor in (query, key, value))
        output = _UNEQUAL_ATTENTION(
            query, key, value, attn_mask, needs_sums, dropout_p, is_causal, scale=scale
        )[0]
    return output


def _is_fusible(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_grouped: bool
) -> bool:
    """Return whether a fused kernel takes these tensors. Otherwise, also if their shapes do not fit
    together at all, torch itself computes or refuses them. A mask that is learned (T5's position
    bias) needs the matrix anyway.
    """
    if not query.dim() == key.dim() == value.dim() == 4:
        return False
    if mask is not None and (mask.requires_grad or mask.dim() not in (2, 4)):
        return False
    heads, shared = query.size(1), key.size(1)
    is_same = heads == shared or (is_grouped and shared > 0 and heads % shared == 0)
    return (
        is_same
        and key.shape[:3] == value.shape[:3]
        and query.size(0) == key.size(0)
        and query.size(-1) == key.size(-1)
        and min(query.size(2), key.size(2)) > 0
    )


def _whole_heads(query: Tensor, key: Tensor, value: Tensor) -> list[torch.Size]:
    """Return the shapes as if each query head had its own keys and values."""
    heads = query.size(1)
    shared = [torch.Size((t.size(0), heads, *t.shape[2:])) for t in (key, value)]
    return [query.shape, *shared]


@contextmanager
def metered(meter: Meter, on_device: bool = False) -> Iterator[None]:
    """Count the operations of the block, whose new tensors are on the meta device. on_device: as a
    GPU computes them, otherwise as a CPU does.
    """
    with torch.device("meta"), _AttentionCost(on_device), meter:
        yield


_DRAWS = frozenset(
    [getattr(Tensor, f"{name}_") for name in ("normal", "uniform", "random", "bernoulli", "erfinv")]
    + [getattr(torch.nn.init, f"{name}_") for name in ("normal", "uniform", "trunc_normal")]
)


class _NoDraws(TorchFunctionMode):
    """A function mode that leaves out random initial values: on the meta device there are none, and
    torch takes a second to find that out.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        target = args[0] if args else named.get("tensor")
        if func in _DRAWS and isinstance(target, Tensor) and target.is_meta:
            return target
        return func(*args, **named)


def without_initial_values() -> TorchFunctionMode:
    """Make a mode in which parameters on the meta device get no random values."""
    return _NoDraws()
