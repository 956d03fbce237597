"""Bad input to a kernel is a ConfigError that names the argument, and not a byte has changed."""

from __future__ import annotations

import mmap
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offload import kernels
from offload.core.errors import ConfigError, OffloadError
from offload.kernels import rules

pytestmark = pytest.mark.kernels

N = 40
ADAM = rules.Adam.at(1, lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, decoupled=True)


@pytest.fixture(params=kernels.available_isas()[:: max(1, len(kernels.available_isas()) - 1)])
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Force the best native set, or plain torch: the same checks, but other consequences."""
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
    """Make a tensor on a read-only map of a file: writing to it would kill the process."""
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
        ({"scale": torch.ones(1, device="meta")}, "scale: expected a number, got a Tensor that"),
        ({"threads": 2**40}, f"threads: expected a whole number up to 4096, got {2**40}"),
        ({"threads": True}, "threads: expected a whole number from 1 on, got True"),
        ({"threads": torch.tensor(2)}, "threads: expected a whole number from 1 on, got a Tensor"),
        ({"offset": 2**70}, f"offset: expected a whole number up to {2**62}, got {2**70}"),
        ({"numel": 2**70}, f"numel: expected a whole number up to {2**62}, got {2**70}"),
        ({"maximize": 1}, "maximize: expected True or False, got 1"),
        ({"maximize": None}, "maximize: expected True or False, got None"),
        ({"maximize": np.bool_(True)}, "maximize: expected True or False, got "),
        ({"maximize": torch.tensor(True)}, "maximize: expected True or False, got a Tensor"),
    ],
)
def test_bad_slices_and_threads_are_refused(
    isa: str, options: dict[str, Any], message: str
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
        (1, {"eps": -1e-8}, "eps: expected zero or more, got -1e-08"),
        (1, {"weight_decay": -0.1}, "weight_decay: expected zero or more, got -0.1"),
        (1, {"lr": torch.ones((), device="meta")}, "lr: expected a number, got a Tensor that has"),
        (10**400, {}, "step: expected a number, got 1000"),
        (1, {"decoupled": 1}, "decoupled: expected True or False, got 1"),
        (1, {"decoupled": None}, "decoupled: expected True or False, got None"),
        (1, {"decoupled": np.bool_(True)}, "decoupled: expected True or False, got "),
        (1, {"decoupled": torch.tensor(True)}, "decoupled: expected True or False, got a Tensor"),
    ],
)
def test_bad_hyper_parameters_are_refused(
    step: float, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        rules.Adam.at(step, **{**OK, **change})


SGD = {
    "lr": 0.1,
    "momentum": 0.9,
    "dampening": 0.0,
    "weight_decay": 0.0,
    "nesterov": False,
    "first": True,
}
ADAGRAD = {"step": 2, "lr": 0.1, "lr_decay": 0.1, "eps": 1e-10, "weight_decay": 0.0}
LION = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0}
NOT_FLAGS = (1, 0, None, "no", np.bool_(True), torch.tensor(True))


@pytest.mark.parametrize(
    "make,settings,name,value",
    [
        *((rules.Sgd.at, SGD, name, -0.5) for name in ("momentum", "weight_decay")),
        *((rules.Adagrad.at, ADAGRAD, name, -0.5) for name in ADAGRAD if name != "lr"),
        *((rules.LionRule.at, LION, name, -0.5) for name in LION if name != "lr"),
        *((rules.Sgd.at, SGD, name, float("nan")) for name in SGD),
        *((rules.Adagrad.at, ADAGRAD, name, float("nan")) for name in ADAGRAD),
        *((rules.LionRule.at, LION, name, float("nan")) for name in LION),
        *((rules.Sgd.at, SGD, name, flag) for name in ("nesterov", "first") for flag in NOT_FLAGS),
    ],
)
def test_the_other_rules_refuse_them_too(
    make: Callable[..., rules.Rule], settings: dict[str, Any], name: str, value: Any
) -> None:
    make(**settings)
    with pytest.raises(ConfigError, match=f"^{name}: expected "):
        make(**{**settings, name: value})


@pytest.mark.parametrize(
    "rule",
    [None, "adam", rules.Adam, 1, torch.ones(1), object()],
    ids=["None", "name", "class", "int", "tensor", "object"],
)
def test_only_a_rule_is_a_rule(isa: str, rule: Any) -> None:
    a = good()
    expected = r"^rule: expected one made by offload\.kernels\.rules, got "
    with pytest.raises(ConfigError, match=expected):
        kernels.update(rule, a["param"], a["grad"], a["exp_avg"], a["exp_avg_sq"])
    assert (a["param"] == 1).all()


class Hostile(Tensor):
    """A tensor that raises for every operation of torch, its own repr included."""

    @classmethod
    def __torch_function__(cls, *_: object) -> object:
        raise ValueError("not with me")


def hostile(value: Tensor) -> Tensor:
    return value.as_subclass(Hostile)


def test_numbers_in_a_tensor_that_refuses_everything() -> None:
    """One element counts as its number; all else is a ConfigError, even when its repr raises."""
    one = rules.Adam.at(1, **{**OK, "lr": hostile(torch.tensor(0.1, dtype=torch.float64))})
    assert one == rules.Adam.at(1, **OK)
    for change in ({"lr": hostile(torch.ones(2))}, {"decoupled": hostile(torch.tensor(True))}):
        with pytest.raises(ConfigError):
            rules.Adam.at(1, **{**OK, **change})
    arguments = good()
    call(arguments, scale=hostile(torch.tensor(0.5)))
    for options in ({"scale": hostile(torch.ones(2))}, {"threads": hostile(torch.tensor(2))}):
        with pytest.raises(ConfigError):
            call(arguments, **options)
    with pytest.raises(ConfigError, match=r"^rule: "):
        kernels.update(hostile(torch.ones(1)), arguments["param"], arguments["grad"])  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(isa: str, layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([torch.ones(N // 2)] * 2, layout=layout)
    for name in (*STATES, "grad"):
        with pytest.raises(ConfigError, match=f"^{name}: expected a dense tensor, got a nested"):
            call({**good(), name: nested})
    with pytest.raises(ConfigError, match=r"^lr: expected "):
        rules.Adam.at(1, **{**OK, "lr": nested})
    with pytest.raises(ConfigError, match=r"^grad: expected a dense tensor"):
        kernels.grad_stats(nested)


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


def test_statistics_casts_and_the_setting_refuse_bad_numbers_of_threads(isa: str) -> None:
    wide, half = torch.ones(N), torch.zeros(N, dtype=torch.bfloat16)
    for count in (0, -1, 1.5, "2", True, 2**40, np.int64(2)):
        for attempt in (
            lambda count=count: kernels.grad_stats(wide, threads=count),
            lambda count=count: kernels.cast(wide, half, threads=count),
            lambda count=count: kernels.set_num_threads(count),
        ):
            with pytest.raises(ConfigError, match=r"^(threads|count): expected a whole number"):
                attempt()
    assert (half == 0).all()


def test_the_instruction_set_comes_back_after_an_exception() -> None:
    before = kernels.isa()
    for name in kernels.available_isas():
        with pytest.raises(ZeroDivisionError), kernels.forced_isa(name):
            assert kernels.isa() == name
            raise ZeroDivisionError
        assert kernels.isa() == before
