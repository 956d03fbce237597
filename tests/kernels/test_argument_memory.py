"""Memory that a tensor does not have, may not be written, or shares with autograd and with torch's
modes: refused or handled alike on the native core and in plain torch.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import kernels
from offload.core.errors import ConfigError
from offload.kernels import rules

pytestmark = pytest.mark.kernels

N = 40
ADAM = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)
NAMES = ("param", "grad", "exp_avg", "exp_avg_sq")


@pytest.fixture(params=kernels.available_isas()[:: max(1, len(kernels.available_isas()) - 1)])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force the best native set, or plain torch."""
    with kernels.forced_isa(request.param):
        yield request.param


def fresh(numel: int = N) -> list[Tensor]:
    return [torch.ones(numel), torch.ones(numel), torch.zeros(numel), torch.zeros(numel)]


def adam(*tensors: Tensor, **options: Any) -> list[Tensor]:
    kernels.update(ADAM, *tensors, **options)
    return list(tensors)


# --- memory that is not there ------------------------------------------------------------------


class Wrapper(Tensor):
    """A tensor that, like a DTensor, looks like host memory and has none."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        return Tensor._make_wrapper_subclass(cls, (N,), dtype=torch.float32, device="cpu")

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        raise AssertionError("must not be asked")


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(N)


def resized(nbytes: int, begin: int = 0) -> Callable[[], Tensor]:
    def make() -> Tensor:
        tensor = torch.ones(begin + N)[begin:]
        tensor.untyped_storage().resize_(nbytes)
        return tensor

    return make


WITHOUT: dict[str, tuple[Callable[[], Tensor], str]] = {
    "wrapper": (Wrapper, "a Wrapper without memory of its own"),
    "fake": (fake, "a FakeTensor without memory"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(N)), "without memory"),
    "freed": (resized(0), "reaches to byte 160 of a storage that has 0"),
    "cut to 8 bytes": (resized(8), "reaches to byte 160 of a storage that has 8"),
    "one byte short": (resized(4 * N - 1), "reaches to byte 160 of a storage that has 159"),
    "shifted": (resized(4 * N, begin=8), "reaches to byte 192 of a storage that has 160"),
}


@pytest.mark.parametrize("kind", WITHOUT)
@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_without_all_its_memory_is_refused(isa: str, name: str, kind: str) -> None:
    make, message = WITHOUT[kind]
    tensors = dict(zip(NAMES, fresh(), strict=True))
    tensors[name] = make()
    with pytest.raises(ConfigError, match=f"^{name}: .*{message}"):
        adam(*tensors.values())
    for other in NAMES:
        if other != name:
            assert (tensors[other] == float(other in ("param", "grad"))).all()


@pytest.mark.parametrize("kind", WITHOUT)
def test_statistics_and_casts_refuse_it_too(isa: str, kind: str) -> None:
    make, message = WITHOUT[kind]
    with pytest.raises(ConfigError, match=f"^grad: .*{message}"):
        kernels.grad_stats(make())
    with pytest.raises(ConfigError, match=f"^source: .*{message}"):
        kernels.cast(make(), torch.zeros(N, dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=f"^target: .*{message}"):
        kernels.cast(torch.zeros(N, dtype=torch.bfloat16), make())


def test_tensors_inside_a_function_transform_are_refused(isa: str) -> None:
    """Their data_ptr() raises."""

    def body(x: Tensor) -> Tensor:
        kernels.grad_stats(x)
        return x

    with pytest.raises(ConfigError, match=r"^grad: a Tensor without memory"):
        torch.func.vmap(body)(torch.ones(3, N))


def test_memory_larger_than_the_view_is_fine(isa: str) -> None:
    big = torch.ones(3 * N)
    assert adam(big[N : 2 * N], *fresh()[1:])
    assert (big[:N] == 1).all() and (big[2 * N :] == 1).all() and (big[N : 2 * N] != 1).all()


# --- memory that may not be written ------------------------------------------------------------


def partly_read_only(page: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Four pages of writable memory, of which one is made read-only."""
    memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
    tensor = torch.frombuffer(memory, dtype=dtype)
    tensor.fill_(1)
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(tensor.data_ptr() + page * mmap.PAGESIZE)
    assert libc.mprotect(address, ctypes.c_size_t(mmap.PAGESIZE), mmap.PROT_READ) == 0
    return tensor


@pytest.mark.parametrize("page", [0, 3], ids=["first page", "last page"])
@pytest.mark.parametrize("name", ["param", "exp_avg", "exp_avg_sq"])
def test_a_tensor_that_is_partly_read_only_is_refused(isa: str, name: str, page: int) -> None:
    locked = partly_read_only(page)
    tensors = dict(zip(NAMES, fresh(locked.numel()), strict=True))
    tensors[name] = locked
    with pytest.raises(ConfigError, match=f"^{name}: lies in read-only memory"):
        adam(*tensors.values())
    assert (locked == 1).all() and (tensors["grad"] == 1).all()


@pytest.mark.parametrize("page", [0, 3], ids=["first page", "last page"])
def test_casts_do_not_write_to_read_only_memory(isa: str, page: int) -> None:
    target = partly_read_only(page, torch.bfloat16)
    with pytest.raises(ConfigError, match=r"^target: lies in read-only memory"):
        kernels.cast(torch.zeros(target.numel()), target)
    assert (target == 1).all()
    kernels.cast(target, torch.zeros(target.numel()))  # reading is allowed


def test_casts_refuse_a_target_that_overlaps_the_source(isa: str) -> None:
    memory = torch.ones(N)
    halves = memory.view(torch.bfloat16)
    before = memory.clone()
    for source, target in ((memory[: N // 2], halves[:20]), (halves[20:60], memory)):
        with pytest.raises(ConfigError, match="overlaps"):
            kernels.cast(source, target)
        assert torch.equal(memory, before)
    kernels.cast(memory[: N // 2], halves[N : N + N // 2])  # neighbours are fine


CUT_SHORT = """
import os, sys, tempfile, warnings
import numpy as np, torch
from offload import kernels
from offload.kernels import rules
from offload.core.errors import ConfigError
rule = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0, decoupled=True)
n, name = 1 << 20, sys.argv[1]
with tempfile.NamedTemporaryFile() as file:
    np.ones(n, dtype=np.float32).tofile(file.name)
    mapped = torch.from_numpy(np.memmap(file.name, dtype=np.float32, mode="r+"))
    os.truncate(file.name, 4096)
    tensors = {key: torch.ones(n) for key in ("param", "grad", "exp_avg", "exp_avg_sq")}
    try:
        if name == "target":
            kernels.cast(torch.zeros(n, dtype=torch.bfloat16), mapped)
        elif name == "source":
            kernels.cast(mapped, torch.zeros(n, dtype=torch.bfloat16))
        elif name == "grad of grad_stats":
            kernels.grad_stats(mapped)
        else:
            kernels.update(rule, *{**tensors, name: mapped}.values())
    except ConfigError as error:
        print(error)
"""


@pytest.mark.parametrize(
    "name", ["param", "exp_avg", "exp_avg_sq", "grad", "target", "source", "grad of grad_stats"]
)
def test_a_memory_mapped_file_that_was_cut_short_is_refused(name: str) -> None:
    """In a process of its own: without the check it would die of SIGBUS."""
    done = subprocess.run(
        [sys.executable, "-c", CUT_SHORT, name], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first = name.split()[0]
    assert done.stdout.startswith(f"{first}: lies behind the end of its memory-mapped file")


# --- autograd and torch's modes ----------------------------------------------------------------


def test_autograd_hears_of_every_tensor_that_is_written(isa: str) -> None:
    out = torch.zeros(N, dtype=torch.bfloat16)
    tensors = {**dict(zip(NAMES, fresh(), strict=True)), "out": out}
    before = {name: tensor._version for name, tensor in tensors.items()}
    adam(*(tensors[name] for name in NAMES), out=out)
    for name, tensor in tensors.items():
        changed = tensor._version > before[name]
        assert changed == (name != "grad"), f"{name}: version {before[name]} -> {tensor._version}"


def test_autograd_hears_of_casts(isa: str) -> None:
    source, target = torch.ones(N), torch.zeros(N, dtype=torch.float16)
    before = source._version, target._version
    kernels.cast(source, target)
    assert source._version == before[0]
    assert target._version > before[1]


def test_a_parameter_that_wants_gradients_is_updated(isa: str) -> None:
    param = torch.nn.Parameter(torch.ones(N))
    expected = adam(*fresh())[0]
    adam(param, *fresh()[1:])  # type: ignore[arg-type]
    assert torch.equal(param.detach(), expected)
    assert param.requires_grad and param.is_leaf and param.grad_fn is None


def test_inference_tensors_work_outside_inference_mode(isa: str) -> None:
    expected = adam(*fresh())
    with torch.inference_mode():
        tensors, target = fresh(), torch.zeros(N, dtype=torch.bfloat16)
    got = adam(*tensors)
    for name, ours, theirs in zip(NAMES, got, expected, strict=True):
        assert torch.equal(ours, theirs), name
    kernels.cast(tensors[0], target)
    assert torch.equal(target, expected[0].to(torch.bfloat16))
    assert kernels.grad_stats(tensors[1]).sum_squares == N
    with torch.inference_mode():
        assert torch.equal(adam(*fresh())[0], expected[0])
        assert torch.equal(adam(torch.ones(N), *tensors[1:2], *fresh()[2:])[0], expected[0])


MODES: dict[str, Callable[[], Any]] = {
    "meta device": lambda: torch.device("meta"),
    "fake tensors": lambda: FakeTensorMode(allow_non_fake_inputs=True),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no grad": torch.no_grad,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_torch_change_nothing(isa: str, mode: str) -> None:
    """A mode that fakes or redirects torch's operations must not reach those of plain torch."""
    tensors, target = fresh(), torch.zeros(N, dtype=torch.bfloat16)
    grad, expected = torch.arange(N).float(), adam(*fresh())
    exact = float(sum(i * i for i in range(N)))
    with MODES[mode]():
        kernels.update(ADAM, *tensors)
        stats = kernels.grad_stats(grad)
        kernels.cast(grad, target)
    for name, ours, theirs in zip(NAMES, tensors, expected, strict=True):
        assert torch.equal(ours, theirs), name
    assert stats.finite and stats.sum_squares == exact
    assert torch.equal(target, grad.to(torch.bfloat16))


class Hostile(Tensor):
    """A tensor that raises for every operation of torch that its code could see."""

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        raise ValueError("not with me")


class HostileDispatch(Tensor):
    """The same one level deeper."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, *_: object, **__: object) -> object:
        raise ValueError("not with me")


@pytest.mark.parametrize("kind", [Hostile, HostileDispatch])
@pytest.mark.parametrize("place", range(4), ids=NAMES)
def test_code_of_a_subclass_does_not_run(isa: str, place: int, kind: type[Tensor]) -> None:
    """Its memory is ordinary memory, and that is what a kernel works on."""
    expected, plain = adam(*fresh()), fresh()
    tensors = list(plain)
    tensors[place] = plain[place].as_subclass(kind)
    adam(*tensors)
    for name, ours, theirs in zip(NAMES, plain, expected, strict=True):
        assert torch.equal(ours, theirs), name
    stats = kernels.grad_stats(torch.ones(N).as_subclass(kind))
    assert stats.sum_squares == N
    target = torch.zeros(N, dtype=torch.float16)
    kernels.cast(torch.ones(N).as_subclass(kind), target.as_subclass(kind))
    assert (target == 1).all()
