"""The kernels in plain torch: the standard for the tests, and the fall-back without the native
core.

They have the same bits as the native core on every input. That takes two operations that torch does
not have on the CPU: a fused multiply-add (built here in double with rounding to odd) and a
correctly rounded square root (torch's own may be off by the last bit; a detour through double is
exact). Slow: tens of passes over memory, in blocks that stay in cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from offload.kernels import rules

# Elements at a time, so that temporaries stay a few MiB for a tensor of any size.
BLOCK = 1 << 18
STATS_BLOCK = 16384  # elements of one partial sum of squares; as in kernels.h
STATS_LANES = 32


# The tensors of an update, in the order of `Buffers`.
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def flat(tensor: Tensor) -> Tensor:
    """Return `tensor`'s memory as a plain tensor of one dimension: no subclass, no autograd."""
    plain = torch.empty(0, dtype=tensor.dtype, device="cpu")
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return plain.set_(storage, offset, (tensor.numel(),), (1,))


@dataclass(frozen=True)
class Buffers:
    """The tensors of one update, flat and of equal length; see kernels.h."""

    param: Tensor
    grad: Tensor
    state0: Tensor | None
    state1: Tensor | None
    out: Tensor | None
    scale: float
    tail_begin: int
    adopt: bool = False

    @classmethod
    def of(cls, tensors: Tensors, scale: float, tail_begin: int, adopt: bool = False) -> Buffers:
        param, grad, *others = tensors
        state0, state1, out = (None if other is None else flat(other) for other in others)
        return cls(flat(param), flat(grad), state0, state1, out, scale, tail_begin, adopt)

    def blocks(self) -> Iterator[Buffers]:
        """Yield the same update in blocks that are either all body or all tail."""
        count = self.param.numel()
        edges = sorted({*range(0, count, BLOCK), min(self.tail_begin, count), count})
        for begin, end in pairwise(edges):
            state0, state1, out = (
                None if each is None else each[begin:end]
                for each in (self.state0, self.state1, self.out)
            )
            param, grad = self.param[begin:end], self.grad[begin:end]
            tail_begin = 0 if begin >= self.tail_begin else end - begin
            piece = Buffers(param, grad, state0, state1, out, self.scale, tail_begin, self.adopt)
            if self.adopt and out is not None:
                take_over(param, out)
            yield piece

    @property
    def is_tail(self) -> bool:
        return self.tail_begin == 0

    def scaled_grad(self) -> Tensor:
        return self.grad.float() * rules.to_f32(self.scale)


def take_over(param: Tensor, out: Tensor) -> None:
    """Copy `out` to `param` where `out` is not the rounding of `param`: that is an external edit,
    and it wins.
    """
    other = param.to(out.dtype).view(torch.int16) != out.view(torch.int16)
    param.copy_(torch.where(other, out.float(), param))


def fma(a: Tensor | float, b: Tensor, c: Tensor) -> Tensor:
    """Compute `a*b + c` in fp32, rounded once.

    The product of two fp32 numbers is exact in double. The sum is rounded there to odd: when it is
    inexact, the last bit is made 1, so that the second rounding (to fp32) cannot see a false tie.
    """
    product = a.double() * b.double() if isinstance(a, Tensor) else a * b.double()
    addend = c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)  # exact: total + error == product + addend
    bits = total.view(torch.int64)
    inexact_even = (error != 0) & torch.isfinite(total) & ((bits & 1) == 0)
    toward_error = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(inexact_even, bits + toward_error, bits).view(torch.float64).float()


def sqrt(x: Tensor) -> Tensor:
    return x.double().sqrt().float()


def sign(x: Tensor) -> Tensor:
    """Compute torch.sign, but keep NaN: a broken gradient must not pass for a zero one."""
    return torch.where(torch.isnan(x), x, torch.sign(x))


def adam(buffers: Buffers, rule: rules.Adam) -> None:
    for b in buffers.blocks():
        assert b.state0 is not None and b.state1 is not None
        g, p, m, v = b.scaled_grad(), b.param, b.state0, b.state1
        if rule.decoupled:
            p.mul_(rule.decay)
        elif rule.has_decay:
            g = fma(rule.decay, p, g)
        weight = rule.lerp_weight
        if b.is_tail and rule.lerp_from_grad and weight == 0.0:
            weight = -0.0  # as in torch's tail
        m.copy_(fma(weight, g - m, g if rule.lerp_from_grad else m))
        gg = g * rule.one_minus_beta2
        v.copy_(fma(rule.beta2, v, gg * g) if b.is_tail else fma(gg, g, v * rule.beta2))
        p.add_((m * rule.neg_step_size) / (sqrt(v) / rule.bias2_sqrt + rule.eps))
        _write_out(b)


def sgd(buffers: Buffers, rule: rules.Sgd) -> None:
    for b in buffers.blocks():
        g, p = b.scaled_grad(), b.param
        if rule.has_decay:
            g = fma(rule.decay, p, g)
        if rule.has_momentum:
            buffer = b.state0
            assert buffer is not None
            if rule.first:
                buffer.copy_(g)
            elif b.is_tail:
                buffer.copy_(fma(rule.momentum, buffer, g * rule.one_minus_dampening))
            else:
                buffer.copy_(fma(rule.one_minus_dampening, g, buffer * rule.momentum))
            g = fma(rule.momentum, buffer, g) if rule.nesterov else buffer
        p.copy_(fma(rule.neg_lr, g, p))
        _write_out(b)


def adagrad(buffers: Buffers, rule: rules.Adagrad) -> None:
    for b in buffers.blocks():
        assert b.state0 is not None
        g, p, total = b.scaled_grad(), b.param, b.state0
        if rule.has_decay:
            g = fma(rule.decay, p, g)
        total.copy_(fma(g, g, total))
        p.sub_((g * rule.lr) / (sqrt(total) + rule.eps))
        _write_out(b)


def lion(buffers: Buffers, rule: rules.LionRule) -> None:
    for b in buffers.blocks():
        assert b.state0 is not None
        g, p, m = b.scaled_grad(), b.param, b.state0
        direction = sign(fma(rule.beta1, m, g * rule.one_minus_beta1))
        p.copy_(p * rule.decay + direction * rule.neg_lr)
        m.copy_(fma(rule.beta2, m, g * rule.one_minus_beta2))
        _write_out(b)


def _write_out(b: Buffers) -> None:
    if b.out is not None:
        cast(b.param, b.out)


def block_sums(grad: Tensor, sums: Tensor) -> None:
    """Write the sum of squares of each STATS_BLOCK of `grad` to `sums` (double), in the native
    core's order.

    Element i of a block adds to lane i % 32, one after the other; then the lanes are added
    pairwise.
    """
    rows = STATS_BLOCK // STATS_LANES
    squares = torch.zeros(sums.numel() * STATS_BLOCK, dtype=torch.float64, device="cpu")
    squares[: grad.numel()] = grad.double().square()  # zeros behind the end add nothing
    lanes = torch.zeros(sums.numel(), STATS_LANES, dtype=torch.float64, device="cpu")
    for row in squares.view(-1, rows, STATS_LANES).unbind(1):
        lanes += row
    while lanes.size(1) > 1:
        half = lanes.size(1) // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    sums.copy_(lanes[:, 0])


def cast(source: Tensor, target: Tensor) -> None:
    """Cast between fp32 and bf16 or fp16, to nearest even; NaN stays NaN."""
    target.copy_(source)
