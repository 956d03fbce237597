"""Typed calls of the kernels: updates, gradient statistics, casts.

All work on host memory, in one pass, with the GIL released and on one team of threads for the whole
process. Results do not depend on the instruction set, the number of threads, the alignment, or how
a parameter is cut into slices. Without the native core the same functions run in plain torch
(`offload.kernels.reference`), with the same bits, slowly; `native_error()` says why and
`offload doctor` shows it.

An update gets a slice of a parameter. `offset` is the number of the parameter's elements before the
slice and `numel` those of the whole parameter (None: the slice reaches its end): torch treats the
last `numel % 8` elements of a parameter in another way, and so must the kernels.

Environment, read once: `OFFLOAD_ISA` forces an instruction set (`avx512`, `avx2`, `neon`, `scalar`,
or `reference` for plain torch).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from offload.core.errors import ConfigError
from offload.kernels import reference
from offload.kernels.arguments import (
    Argument,
    check_access,
    check_pages,
    check_sizes,
    check_tensor,
)
from offload.kernels.rules import Number, Rule, check_flags, shown, to_float

TORCH_WIDTH = 8  # lanes of torch's fused kernels, under AVX2 and AVX-512 alike
STATS_BLOCK = reference.STATS_BLOCK
SUM_BYTES = 128 << 10  # of one checksum of an update; as in checksum.h
MOST_THREADS = 4096

_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, None: 3}  # DType in kernels.h
_FULL = (torch.float32,)
_GRADS = (torch.float32, torch.bfloat16, torch.float16)
_HALVES = (torch.bfloat16, torch.float16)


# --- which core runs ---------------------------------------------------------------------------


@cache
def _load() -> tuple[ModuleType | None, str | None]:
    try:
        from offload import _native
    except ImportError as error:
        return (
            None,
            f"the native core is missing ({error}); install with a C++ compiler, or from a wheel",
        )
    # Begin with torch's number: it follows OMP_NUM_THREADS and the physical cores, and a team of
    # another size than torch's would be made anew each time the two take turns.
    _native.set_threads(torch.get_num_threads())
    if _is_forked_worker():
        _native.assume_forked()
    return _native, None


def _is_forked_worker() -> bool:
    """Return whether this process is a worker that `multiprocessing` has forked.

    It matters when the worker itself imports offload first: torch's threads may have died at the
    fork, and a wait for a team of them would never end. (A plain `os.fork` before the first import
    of offload cannot be detected; then use no more than one thread, as for torch itself.)
    """
    spawned = multiprocessing.get_start_method(allow_none=True) in ("spawn", "forkserver")
    return multiprocessing.parent_process() is not None and not spawned


_load()  # now, not at the first call: a fork must find the native core's handler in place


@dataclass
class _Choice:
    """The instruction set in use, and the native core unless it is `reference`; `None` until the
    first query, then fixed unless a test changes it.
    """

    isa: str | None = None
    native: ModuleType | None = None


_choice = _Choice()


def available_isas() -> list[str]:
    """List the instruction sets that can be forced on this machine, fastest first; `reference`
    (plain torch) is always among them.
    """
    native, _ = _load()
    return [*(native.isas() if native else ()), "reference"]


def isa() -> str:
    """Return the instruction set in use."""
    if _choice.isa is None:
        _set_isa(os.environ.get("OFFLOAD_ISA") or available_isas()[0], origin="OFFLOAD_ISA")
    assert _choice.isa is not None
    return _choice.isa


def native_error() -> str | None:
    """Return why the native core is not in use, or None if it is."""
    if isa() != "reference":
        return None
    _, error = _load()
    return error or "OFFLOAD_ISA=reference asks for plain torch"


def _set_isa(name: str, origin: str) -> None:
    if name not in available_isas():
        _, error = _load()
        raise ConfigError(
            f"{origin}: instruction set {name!r} is not available here, only "
            f"{', '.join(available_isas())}" + (f" ({error})" if error else "")
        )
    native, _ = _load()
    if native and name != "reference":
        native.set_isa(name)
    _choice.isa, _choice.native = name, native if name != "reference" else None


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Run with another instruction set inside the `with`, for tests and benchmarks. It holds for
    the whole process, so no other thread may compute meanwhile.
    """
    before = isa()
    _set_isa(name, origin="forced_isa")
    try:
        yield
    finally:
        _set_isa(before, origin="forced_isa")


def _native() -> ModuleType | None:
    return _choice.native if _choice.isa is not None or isa() else None


def num_threads() -> int:
    """Return the most threads that kernels run on at once, over all calls of this process."""
    native = _native()
    return native.threads() if native else torch.get_num_threads()


def set_num_threads(count: int) -> None:
    """Change `num_threads()`; at first it is `torch.get_num_threads()`."""
    _whole("count", count, least=1, most=MOST_THREADS)
    native = _native()
    if native:
        native.set_threads(count)
    else:
        torch.set_num_threads(count)


# --- updates -----------------------------------------------------------------------------------


def update(
    rule: Rule,
    param: Tensor,
    grad: Tensor,
    *states: Tensor,
    out: Tensor | None = None,
    scale: Number = 1.0,
    maximize: bool = False,
    adopt: bool = False,
    offset: int = 0,
    numel: int | None = None,
    threads: int | None = None,
    sums: Sequence[NDArray[np.uint64] | None] = (),
) -> None:
    """Do one optimizer step on a slice of a parameter, in place, with the bits of torch's fused CPU
    optimizers.

    rule: made by `offload.kernels.rules` for this step.
    param and states: fp32; `param` is the parameter itself or the exact master of a 16-bit one, the
    states are those that `rule.states` names.
    grad: fp32, bf16 or fp16; not changed.
    out: bf16 or fp16, receives the updated `param` rounded to nearest even.
    scale: multiplies the gradient in fp32 before anything else (1 / loss scale x clip coefficient).
    adopt: wherever `out` is not the rounding of `param` before the step, `out` is an external edit,
    and `param` takes its value first.
    offset, numel: the slice's place in its parameter.
    sums: for `param` and each state None, or an array with one number for each whole `SUM_BYTES` of
    it. The numbers become the checksums of the new values, as `checksum` computes them; in plain
    torch they are not written.
    """
    if not isinstance(rule, Rule):
        raise ConfigError(f"rule: expected one made by offload.kernels.rules, got {shown(rule)}")
    check_flags(maximize=maximize, adopt=adopt)
    if len(states) != len(rule.states):
        expected = ", ".join(rule.states) or "none"
        raise ConfigError(
            f"states: {type(rule).__name__} expects {expected}, got {len(states)} tensors"
        )
    with torch._C.DisableTorchFunction():
        written = [check_tensor("param", param, _FULL)]
        for name, state in zip(rule.states, states, strict=True):
            written.append(check_tensor(name, state, _FULL))
        if out is not None:
            written.append(check_tensor("out", out, _HALVES))
        read = check_tensor("grad", grad, _GRADS)
        every = [*written, read]
        tail_begin = _tail_begin(offset, check_sizes(every), numel)
        lanes = 0 if threads is None else _whole("threads", threads, least=1, most=MOST_THREADS)
        signed_scale = to_float("scale", scale) * (-1.0 if maximize else 1.0)
        rooms = _check_sums(sums, written[: 1 + len(states)])
        check_access(every, read, rooms)
        state0, state1, *_ = [*states, None, None]
        tensors = (param, grad, state0, state1, out)
        if native := _native():
            _update_natively(native, rule, tensors, signed_scale, tail_begin, lanes, adopt, rooms)
        else:
            with _disable_current_modes():  # a mode that fakes or redirects torch's operations
                buffers = reference.Buffers.of(tensors, signed_scale, tail_begin, adopt)
                getattr(reference, rule.kernel)(buffers, rule)
        # Tell autograd, as torch's own in-place operations do. Inference tensors count no versions.
        torch.autograd.graph.increment_version([argument.tensor for argument in written])


def _update_natively(
    native: ModuleType,
    rule: Rule,
    tensors: reference.Tensors,
    scale: float,
    tail_begin: int,
    lanes: int,
    adopt: bool,
    rooms: Sequence[Argument],
) -> None:
    param, grad, _, _, out = tensors
    call = native.Update(
        *[0 if tensor is None else tensor.data_ptr() for tensor in tensors],
        _CODES[grad.dtype],
        _CODES[None if out is None else out.dtype],
        scale,
        param.numel(),
        tail_begin,
        lanes,
        adopt and out is not None,
        *(room.begin for room in rooms),
    )
    getattr(native, rule.kernel)(call, *vars(rule).values())


def _check_sums(sums: object, of: Sequence[Argument]) -> list[Argument]:
    """Return the memory for the checksums, tensor by tensor, with address 0 and no bytes for one
    that gets none.
    """
    if not isinstance(sums, list | tuple):
        raise ConfigError(f"sums: expected a list, got {shown(sums)}")
    if sums and len(sums) != len(of):
        names = ", ".join(argument.name for argument in of)
        raise ConfigError(f"sums: expected one entry for each of {names}, got {len(sums)}")
    rooms = []
    for room, argument in zip(sums, of, strict=False):
        name, count = f"sums of {argument.name}", (argument.end - argument.begin) // SUM_BYTES
        if room is None:
            rooms.append(Argument(name, argument.tensor, 0, 0, 0))
            continue
        if not isinstance(room, np.ndarray) or room.dtype != np.uint64:
            got = room.dtype if isinstance(room, np.ndarray) else type(room).__name__
            raise ConfigError(f"{name}: expected an array of uint64, got {got}")
        if room.shape != (count,) or not room.flags.carray:
            raise ConfigError(
                f"{name}: expected {count} in one writable array, one for each whole {SUM_BYTES} "
                f"bytes, got shape {room.shape}, strides {room.strides}"
            )
        begin = room.ctypes.data if count else 0
        rooms.append(Argument(name, argument.tensor, count, begin, begin + room.nbytes))
    return rooms


def _tail_begin(offset: int, count: int, numel: int | None) -> int:
    """Return the position in a slice of `count` elements at `offset` at which the parameter's last
    `numel % 8` elements begin.
    """
    end = _whole("offset", offset, least=0) + count
    if numel is None:
        numel = end
    elif end > _whole("numel", numel, least=0):
        raise ConfigError(
            f"numel: the slice [{offset}, {end}) ends behind the parameter's {numel} elements"
        )
    return min(max(numel - numel % TORCH_WIDTH - offset, 0), count)


def _whole(name: str, value: object, least: int, most: int = 2**62) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name}: expected a whole number from {least} on, got {shown(value)}")
    if value > most:
        raise ConfigError(f"{name}: expected a whole number up to {most}, got {value!r}")
    return value


# --- gradient statistics -----------------------------------------------------------------------


@dataclass(frozen=True)
class GradStats:
    """The sum of squares of a gradient, and whether every element of it is finite.

    `block_sums` has one partial sum for each STATS_BLOCK elements. Their total is exact before its
    one rounding, so it does not depend on the order in which slices are combined with `+`, nor on
    where a gradient was cut, as long as the cuts are multiples of STATS_BLOCK.
    """

    block_sums: tuple[float, ...] = field(repr=False)
    finite: bool
    sum_squares: float

    @classmethod
    def of(cls, block_sums: Iterable[float]) -> GradStats:
        sums = tuple(block_sums)
        # Squares of fp32 numbers cannot overflow in double: a sum is finite exactly when all its
        # elements are.
        finite = all(map(math.isfinite, sums))
        return cls(sums, finite, math.fsum(sums) if finite else sum(sums))

    def __add__(self, other: GradStats) -> GradStats:
        return GradStats.of(self.block_sums + other.block_sums)

    @property
    def norm(self) -> float:
        return math.sqrt(self.sum_squares)


def grad_stats(grad: Tensor, *, threads: int | None = None) -> GradStats:
    """Compute the statistics of `grad` (fp32, bf16 or fp16) in one pass. They do not depend on the
    number of threads or the instruction set.
    """
    with torch._C.DisableTorchFunction():
        read = check_tensor("grad", grad, _GRADS)
        check_pages(read.name, read.begin, read.end, writable=False)
        count = read.numel
        sums = np.empty(-(-count // STATS_BLOCK), dtype=np.float64)
        lanes = 0 if threads is None else _whole("threads", threads, least=1, most=MOST_THREADS)
        native = _native()
        if native:
            code = _CODES[grad.dtype]
            native.block_sums(grad.data_ptr(), code, count, sums.ctypes.data, lanes)
        else:
            with _disable_current_modes():  # a mode that fakes or redirects torch's operations
                reference.block_sums(reference.flat(grad), torch.from_numpy(sums))
    return GradStats.of(sums.tolist())


# --- casts -------------------------------------------------------------------------------------


def cast(source: Tensor, target: Tensor, *, threads: int | None = None) -> None:
    """Copy `source` to `target`, between fp32 and bf16 or fp16, to nearest even; NaN stays NaN."""
    with torch._C.DisableTorchFunction():
        read = check_tensor("source", source, _GRADS)
        targets = _HALVES if source.dtype == torch.float32 else _FULL
        written = check_tensor("target", target, targets)
        count = check_sizes([read, written])
        lanes = 0 if threads is None else _whole("threads", threads, least=1, most=MOST_THREADS)
        check_access([read, written], read)
        native = _native()
        if native:
            codes = _CODES[source.dtype], _CODES[target.dtype]
            native.cast(source.data_ptr(), codes[0], target.data_ptr(), codes[1], count, lanes)
        else:
            with _disable_current_modes():  # a mode that fakes or redirects torch's operations
                reference.cast(reference.flat(source), reference.flat(target))
        torch.autograd.graph.increment_version([target])


def checksum(memory: Tensor) -> int:
    """Compute a checksum of the bytes of a contiguous host tensor. Never write it to a file: the
    function may change with any version.
    """
    argument = check_tensor("memory", memory)
    native = _native()
    if native is not None:
        return int(native.checksum(argument.begin, argument.end - argument.begin))
    return zlib.crc32(memory.view(-1).view(torch.uint8).numpy().data)
