"""Exact comparison of tensors, awkward numbers, unaligned memory between guard bytes; and torch's
fused optimizers on the CPU, whose bits ours must have, with the rules that match them.
"""

from __future__ import annotations

import itertools
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.kernels import rules
from offload.tools.selftest.check import CheckFailed, NotRun, require

GUARD = 0xA5  # the byte that surrounds every copy that `unaligned` makes
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
_GUARD_NUMEL = 64
_WIDE = ("AVX2", "AVX512")

# Infinity, NaN, zeros, the smallest and largest denormals and normals, numbers whose squares over-
# and underflow.
_MAGNITUDES = "inf nan 0 1e-45 1.1754942e-38 1.1754944e-38 3.4028235e38 1e-30 2e19 65504 65520 6e-8"
SPECIAL = tuple(sign * float(word) for word in _MAGNITUDES.split() for sign in (1, -1))


def require_same_bits(got: Tensor, expected: Tensor, what: str) -> int:
    """Raise `CheckFailed` unless the tensors are equal bit by bit; any NaN matches any NaN. Returns
    the number of elements compared.
    """
    got, expected = got.detach().cpu(), expected.detach().cpu()
    require(
        got.dtype == expected.dtype and got.shape == expected.shape,
        what,
        got=f"{tuple(got.shape)} {got.dtype}",
        expected=f"{tuple(expected.shape)} {expected.dtype}",
    )
    ours, theirs = got.contiguous().view(-1), expected.contiguous().view(-1)
    word = _WORDS[got.element_size()]
    if torch.equal(ours.view(word), theirs.view(word)):
        return got.numel()
    wrong = ours.view(word) != theirs.view(word)
    if got.is_floating_point():
        wrong &= ~(torch.isnan(ours) & torch.isnan(theirs))
    if bool(wrong.any()):
        index = int(wrong.nonzero()[0])
        raise CheckFailed(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} elements differ, first {index}",
            got=repr(ours[index].item()),
            expected=repr(theirs[index].item()),
        )
    return got.numel()


def require_same(got: Iterable[Any], expected: Iterable[Any], what: str) -> int:
    """Compare two lists of tensors as `require_same_bits` does; other values, such as None, by type
    and `==`. Returns the number of entries.
    """
    pairs = list(itertools.zip_longest(got, expected, fillvalue="nothing"))
    for number, (ours, theirs) in enumerate(pairs):
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            require_same_bits(ours, theirs, f"{what} {number}")
        else:
            is_same = type(ours) is type(theirs) and ours == theirs
            require(is_same, f"{what} {number}", got=_shown(ours), expected=_shown(theirs))
    return len(pairs)


def require_same_states(got: Mapping[int, Any], expected: Mapping[int, Any], what: str) -> int:
    """Compare `state_dict()["state"]` of two optimizers as `require_same` does; return the number
    of entries.
    """
    require(got.keys() == expected.keys(), what, got=list(got), expected=list(expected))
    count = 0
    for number, state in expected.items():
        ours, each = got[number], f"{what} {number}"
        require(ours.keys() == state.keys(), each, got=list(ours), expected=list(state))
        names = sorted(state)
        count += require_same(map(ours.get, names), map(state.get, names), each)
    return count


def _shown(value: object) -> str:
    return f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def zeros(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(size, dtype=dtype, device="cpu")


def normal(*size: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw ordinary numbers."""
    return torch.randn(size, generator=generator, dtype=torch.float32, device="cpu")


def awkward(numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Draw ordinary numbers, with a special one at every seventh place and at the last seven
    places, where torch's kernels run other code.
    """
    values, special = normal(numel), torch.tensor(SPECIAL, dtype=torch.float32, device="cpu")
    places = sorted({*range(0, numel, 7), *range(max(0, numel - 7), numel)})
    values[places] = special[torch.randint(len(special), (len(places),), device="cpu")]
    return values.to(dtype)


def unaligned(tensor: Tensor, shift: int) -> Tensor:
    """Copy a tensor to memory that starts `shift` elements after a 64-byte boundary, with guard
    bytes on both sides that `require_untouched_around` checks.
    """
    memory = zeros(tensor.numel() + 2 * _GUARD_NUMEL + shift, dtype=tensor.dtype)
    memory.view(torch.uint8).fill_(GUARD)
    start = _GUARD_NUMEL + (-memory.data_ptr() % 64) // tensor.element_size() + shift
    copy = memory[start : start + tensor.numel()]
    return copy.copy_(tensor)


def require_untouched_around(copy: Tensor, what: str) -> None:
    """Raise `CheckFailed` if a guard byte around `copy`, a tensor from `unaligned`, has changed."""
    memory = zeros(0, dtype=torch.uint8).set_(copy.untyped_storage())
    begin = copy.storage_offset() * copy.element_size()
    outside = torch.cat([memory[:begin], memory[begin + copy.nbytes :]])
    wrong = outside != GUARD
    require(
        not bool(wrong.any()),
        f"{what}: bytes outside of its memory",
        got=f"{int(wrong.sum())} written",
        expected="none",
    )


def cuts(numel: int, pieces: int) -> list[tuple[int, int]]:
    """Cut [0, numel) at random places into at most `pieces` slices."""
    inner = torch.randint(0, numel + 1, (pieces - 1,), device="cpu").tolist()
    return list(itertools.pairwise(sorted({0, numel, *inner})))


# --- torch's own optimizers -----------------------------------------------------------------------


def without_promise() -> str | None:
    """Return why torch's fused kernels may differ from ours in the last bits on this CPU; None:
    they do not.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        return f"torch's fused kernels have other last bits on {platform.machine()}"
    capability = torch.backends.cpu.get_cpu_capability()
    if not capability.startswith(_WIDE):
        return f"torch runs with {capability} here; its last bits are ours from AVX2 on"
    return None


def require_promise() -> None:
    """Raise `NotRun` if torch's fused kernels may differ from ours in the last bits."""
    why = without_promise()
    if why is not None:
        raise NotRun(why)


@dataclass(frozen=True)
class OptimizerCase:
    """An optimizer with settings. optimizer: makes torch's own; None: torch has none like it. rule:
    makes our rule of a step. states: the names of its state tensors.
    """

    name: str
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None
    rule: Callable[[int], rules.Rule]
    states: tuple[str, ...]
    maximize: bool = False


def adam_case(name: str, decoupled: bool, maximize: bool = False, **options: Any) -> OptimizerCase:
    """Make a case of AdamW if the decay is decoupled, else of Adam."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    values = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options}
    beta1, beta2 = values["betas"]
    named = {key: values[key] for key in ("lr", "eps", "weight_decay")}
    return OptimizerCase(
        f"{kind.__name__} {name}",
        lambda params: kind(params, **values, maximize=maximize, fused=True),
        lambda step: rules.Adam.at(step, beta1=beta1, beta2=beta2, decoupled=decoupled, **named),
        ("exp_avg", "exp_avg_sq"),
        maximize,
    )


def sgd_case(name: str, maximize: bool = False, **options: Any) -> OptimizerCase:
    plain = dict.fromkeys(("momentum", "dampening", "weight_decay"), 0.0)
    values: dict[str, Any] = {"lr": 0.03, "nesterov": False, **plain, **options}
    return OptimizerCase(
        f"SGD {name}",
        lambda params: torch.optim.SGD(params, **values, maximize=maximize, fused=True),
        lambda step: rules.Sgd.at(first=step == 1, **values),
        ("momentum_buffer",) if values["momentum"] else (),
        maximize,
    )


def adagrad_case(name: str, maximize: bool = False, **options: Any) -> OptimizerCase:
    values = {"lr": 0.02, "lr_decay": 0.0, "eps": 1e-10, "weight_decay": 0.0, **options}
    return OptimizerCase(
        f"Adagrad {name}",
        lambda params: torch.optim.Adagrad(params, **values, maximize=maximize, fused=True),
        lambda step: rules.Adagrad.at(step, **values),
        ("sum",),
        maximize,
    )


LION = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
LION_CASE = OptimizerCase("Lion", None, lambda step: rules.LionRule.at(**LION), ("exp_avg",))


CASES = (
    adam_case("with decay", True, weight_decay=0.1),
    adam_case("plain", True),
    adam_case("beta1=0.5", True, betas=(0.5, 0.95), eps=1e-3),
    adam_case("beta1=0", True, betas=(0.0, 0.99), eps=0.0),
    adam_case("with decay", False, weight_decay=0.1),
    adam_case("beta1=0.3", False, betas=(0.3, 0.9), weight_decay=0.1, maximize=True),
    sgd_case("plain", weight_decay=0.1, maximize=True),
    sgd_case("with dampening", momentum=0.7, dampening=0.3),
    sgd_case("nesterov", momentum=0.9, nesterov=True, weight_decay=0.1),
    adagrad_case("with decay", lr_decay=0.01, weight_decay=0.1, eps=1e-6),
    LION_CASE,
)


def train_torch(case: OptimizerCase, start: Tensor, grads: list[Tensor]) -> list[Tensor]:
    """Train with torch's own fused optimizer; return the parameter and the states."""
    assert case.optimizer is not None
    param = torch.nn.Parameter(start.clone())
    optimizer = case.optimizer([param])
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    state = optimizer.state[param]
    # torch has no momentum buffer for an empty parameter; ours is empty, as `start` is.
    return [param.detach(), *(state.get(name, start.clone()) for name in case.states)]
