"""Bad input to a kernel is a ConfigError that names the argument, and not a byte has changed."""

from __future__ import annotations

import mmap
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from offload import kernels, rules
from offload.errors import ConfigError, OffloadError

pytestmark = pytest.mark.kernels

N = 40
ADAM = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


@pytest.fixture(params=kernels.available_isas()[:: max(1, len(kernels.available_isas()) - 1)])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """The best native set and plain torch: the same checks, but other consequences."""
    with kernels.forced_isa(request.param):
        yield request.param


def good() -> dict[str, Any]:
    return {
        "param": torch.ones(N),
        "grad": torch.ones(N),
        "exp_avg": torch.zeros(N),
        "exp_avg_sq": torch.zeros(N),
        "out": torch.zeros(N, dtype=torch.bfloat16),
    }


def call(arguments: dict[str, Any], **options: Any) -> None:
    a = arguments
    kernels.update(
        ADAM, a["param"], a["grad"], a["exp_avg"], a["exp_avg_sq"], out=a["out"], **options
    )


def read_only() -> Tensor:
    """A tensor on a read-only map of a file: writing to it would kill the process."""
    with tempfile.TemporaryFile() as file:
        file.truncate(4 * N)
        view = mmap.mmap(file.fileno(), 4 * N, access=mmap.ACCESS_READ)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", UserWarning
        )  # torch warns that it cannot protect it; that is the point
        return torch.frombuffer(view, dtype=torch.float32)


def read_only_half() -> Tensor:
    return read_only().view(torch.bfloat16)[:N]


STATES = ("param", "exp_avg", "exp_avg_sq")
FLAWS: list[tuple[str, str, Callable[[], Any], str]] = [
    *(
        (name, "dtype", lambda: torch.ones(N, dtype=torch.float64), "expected torch.float32")
        for name in STATES
    ),
    *(
        (name, "half", lambda: torch.ones(N, dtype=torch.bfloat16), "expected torch.float32")
        for name in STATES
    ),
    (
        "grad",
        "dtype",
        lambda: torch.ones(N, dtype=torch.float64),
        "expected torch.float32 or torch.bfloat16",
    ),
    (
        "grad",
        "integer",
        lambda: torch.ones(N, dtype=torch.int32),
        "expected torch.float32 or torch.bfloat16",
    ),
    ("out", "dtype", lambda: torch.ones(N), "expected torch.bfloat16 or torch.float16"),
    *(
        (name, "device", lambda: torch.ones(N, device="meta"), "host memory")
        for name in (*STATES, "grad", "out")
    ),
    *(
        (name, "strided", lambda: torch.ones(2 * N)[::2], "contiguous")
        for name in (*STATES, "grad")
    ),
    *(
        (name, "transposed", lambda: torch.ones(8, 5).t(), "contiguous")
        for name in (*STATES, "grad")
    ),
    *(
        (name, "expanded", lambda: torch.ones(1).expand(N), "contiguous")
        for name in (*STATES, "grad")
    ),
    *(
        (name, "longer", lambda: torch.ones(N + 1), f"{N}")
        for name in ("grad", "exp_avg", "exp_avg_sq")
    ),
    *(
        (name, "shorter", lambda: torch.ones(N - 1), f"{N}")
        for name in ("grad", "exp_avg", "exp_avg_sq")
    ),
    ("out", "longer", lambda: torch.ones(N + 1, dtype=torch.float16), f"expected {N} elements"),
    *(
        (name, "not a tensor", lambda: [1.0] * N, "expected a torch.Tensor, got list")
        for name in (*STATES, "grad")
    ),
    *(
        (name, "none", lambda: None, "expected a torch.Tensor, got NoneType")
        for name in (*STATES, "grad")
    ),
    *((name, "sparse", lambda: torch.ones(N).to_sparse(), "dense") for name in (*STATES, "grad")),
    (
        "grad",
        "lazily negative",
        lambda: torch.ones(N, dtype=torch.complex64).conj().imag,
        "contiguous",
    ),
    *((name, "read-only", read_only, "read-only") for name in STATES),
    ("out", "read-only", read_only_half, "read-only"),
]


@pytest.mark.parametrize("name,flaw,make,message", FLAWS, ids=[f"{f[0]}-{f[1]}" for f in FLAWS])
def test_bad_tensors_are_refused_before_a_byte_changes(
    isa: str, name: str, flaw: str, make: Callable[[], Any], message: str
) -> None:
    arguments = {**good(), name: make()}
    before = {key: t.clone() for key, t in arguments.items() if isinstance(t, Tensor)}
    with pytest.raises(ConfigError, match=f"^{name}: .*{re.escape(message)}") as caught:
        call(arguments)
    assert isinstance(caught.value, OffloadError)
    for key, tensor in before.items():
        if not tensor.is_meta and not tensor.is_sparse:
            assert torch.equal(arguments[key], tensor), f"{key} has changed"


def test_a_lazily_negated_view_is_refused() -> None:
    negated = torch._neg_view(torch.ones(N))
    with pytest.raises(ConfigError, match=r"^grad: .*resolve_neg"):
        call({**good(), "grad": negated})


@pytest.mark.parametrize("one", ["param", "grad", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("two", ["param", "grad", "exp_avg", "exp_avg_sq"])
def test_shared_memory_is_refused(isa: str, one: str, two: str) -> None:
    if one == two:
        return
    memory = torch.ones(2 * N)
    for shift in (0, 1, N - 1):
        arguments = {**good(), one: memory[:N], two: memory[shift : shift + N]}
        with pytest.raises(ConfigError, match=rf"^({one}|{two}): overlaps ({one}|{two})"):
            call(arguments)
        assert (memory == 1).all()
    call({**good(), one: memory[:N], two: memory[N:]})  # neighbours are fine


def test_out_may_not_be_the_master() -> None:
    memory = torch.ones(N)
    with pytest.raises(ConfigError, match="overlaps"):
        call({**good(), "param": memory, "out": memory.view(torch.bfloat16)[:N]})


@pytest.mark.parametrize(
    "options,message",
    [
        ({"offset": -1}, "offset: expected a whole number from 0 on, got -1"),
        ({"numel": N - 1}, "numel: the slice [0, 40) ends behind the parameter's 39 elements"),
        (
            {"offset": 8, "numel": N},
            "numel: the slice [8, 48) ends behind the parameter's 40 elements",
        ),
        ({"threads": 0}, "threads: expected a whole number from 1 on, got 0"),
        ({"threads": -2}, "threads: expected a whole number from 1 on, got -2"),
        ({"threads": 1.5}, "threads: expected a whole number from 1 on, got 1.5"),
        ({"offset": 8.0}, "offset: expected a whole number from 0 on, got 8.0"),
        ({"numel": "40"}, "numel: expected a whole number from 0 on, got '40'"),
        ({"scale": "big"}, "scale: expected a number, got 'big'"),
        ({"scale": torch.ones(2)}, "scale: expected one number, got a tensor of shape (2,)"),
    ],
)
def test_bad_slices_and_threads_are_refused(
    isa: str, options: dict[str, int], message: str
) -> None:
    arguments = good()
    with pytest.raises(ConfigError, match=re.escape(message)):
        call(arguments, **options)
    assert (arguments["param"] == 1).all()


def test_the_states_are_counted() -> None:
    a = good()
    with pytest.raises(
        ConfigError, match="states: Adam expects exp_avg, exp_avg_sq, got 1 tensors"
    ):
        kernels.update(ADAM, a["param"], a["grad"], a["exp_avg"])
    plain = rules.Sgd.at(
        lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False, first=True
    )
    with pytest.raises(ConfigError, match="states: Sgd expects none, got 1 tensors"):
        kernels.update(plain, a["param"], a["grad"], a["exp_avg"])


OK = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0, "decoupled": True}


@pytest.mark.parametrize(
    "step,change,message",
    [
        (0, {}, "step: expected 1 for the first update or more, got 0"),
        (float("nan"), {}, "step: expected 1"),
        (1, {"lr": float("nan")}, "lr: expected a finite number, got nan"),
        (1, {"lr": float("inf")}, "lr: expected a finite number, got inf"),
        (1, {"lr": torch.ones(2)}, r"lr: expected one number, got a tensor of shape (2,)"),
        (1, {"lr": "fast"}, "lr: expected a number, got 'fast'"),
        (None, {}, "step: expected a number, got None"),
        (1, {"beta1": 1.0}, "beta1: expected a number in [0, 1), got 1.0"),
        (1, {"beta2": -0.1}, "beta2: expected a number in [0, 1), got -0.1"),
        (1, {"eps": float("nan")}, "eps: expected a finite number"),
        (1, {"weight_decay": float("inf")}, "weight_decay: expected a finite number"),
    ],
)
def test_bad_hyper_parameters_are_refused(
    step: float, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        rules.Adam.at(step, **{**OK, **change})


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ConfigError, match="nesterov: needs momentum above 0 and no dampening"):
        rules.Sgd.at(
            lr=0.1, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=True, first=True
        )


def test_statistics_refuse_bad_tensors() -> None:
    for grad in (
        torch.ones(3, dtype=torch.float64),
        torch.ones(4, device="meta"),
        torch.ones(8)[::2],
        [1.0],
    ):
        with pytest.raises(ConfigError, match=r"^grad: "):
            kernels.grad_stats(grad)  # type: ignore[arg-type]
