"""torch's own inputs of its optimizer tests, through the wrapper.

`optim_db` is what torch tests each of its optimizers with. Where torch has a fused CPU kernel the
bits are its bits; amsgrad, for which we run torch's code slice by slice, is close. What cannot be
offloaded is refused with a `ConfigError`, before anything has changed.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_state, bits
from support.integration import tight
from torch import Tensor, nn
from torch.optim import Optimizer

import offload
from offload import ConfigError
from offload.planning import planner

common_utils = pytest.importorskip("torch.testing._internal.common_utils")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_optimizers import optim_db

NAMES = ("AdamW", "Adam", "SGD", "Adagrad")
INFOS = {info.optim_cls.__name__: info for info in optim_db if info.optim_cls.__name__ in NAMES}
CASES = [
    pytest.param(INFOS[name], given.kwargs, id=f"{name}-{given.desc}")
    for name in NAMES
    for given in INFOS[name].optim_inputs_func(device="cpu", dtype=torch.float32)
]
HALVES = (torch.bfloat16, torch.float16)


def make_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(), (1,), (7,), (3, 5), (33, 130), (4, 3, 3, 3), (0, 2), (64, 65)]
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def set_grads(params: list[nn.Parameter], step: int) -> None:
    """Set gradients that are equal for equal parameters; parameter 2 has none every other time."""
    generator = torch.Generator().manual_seed(step)
    for number, param in enumerate(params):
        grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        param.grad = None if number == 2 and step % 2 else grad


def is_fused(kwargs: dict[str, Any]) -> bool:
    return not kwargs.get("amsgrad", False)


def test_all_four_have_inputs() -> None:
    assert set(INFOS) == set(NAMES)
    for name in NAMES:
        assert "fused" in INFOS[name].supported_impls and "cpu" in INFOS[name].supports_fused_on
    assert len(CASES) >= 20


@pytest.mark.parametrize(("info", "kwargs"), CASES)
@pytest.mark.parametrize("where", ["memory", "disk"])
def test_inputs_of_torch_give_its_bits(
    info: Any,
    kwargs: dict[str, Any],
    where: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 1024)
    impl = {"fused": True} if is_fused(kwargs) else {"foreach": False}
    params = make_params(), make_params()
    plain, wrapped = (info.optim_cls(p, **copy.deepcopy(kwargs), **impl) for p in params)
    offload.wrap(wrapped, **(tight(wrapped, tmp_path) if where == "disk" else {}))
    for step in range(8):
        if step == 4:  # each goes on with the other's state
            states = copy.deepcopy(plain.state_dict()), copy.deepcopy(wrapped.state_dict())
            plain.load_state_dict(states[1])
            wrapped.load_state_dict(states[0])
        for own, optimizer in zip(params, (plain, wrapped), strict=True):
            set_grads(own, step)
            optimizer.step()
    for a, b in zip(*params, strict=True):
        if is_fused(kwargs):
            assert torch.equal(bits(a), bits(b))
        else:  # torch's vector and scalar loops round differently: where a slice is cut matters
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    if is_fused(kwargs):
        assert_same_state(plain.state_dict(), wrapped.state_dict())
    if where == "disk" and offload.report(wrapped).plan.state_bytes:
        assert offload.report(wrapped).plan.disk_bytes
    wrapped.close()
    assert type(wrapped) is info.optim_cls


@pytest.mark.parametrize("flag", ["none", "foreach", "fused"])
@pytest.mark.parametrize("name", NAMES)
def test_whatever_way_was_asked_for_the_bits_are_those_of_fused(name: str, flag: str) -> None:
    kind = INFOS[name].optim_cls
    params = make_params(), make_params()
    plain = kind(params[0], lr=1e-2, weight_decay=0.1, fused=True)
    impl = {} if flag == "none" else {flag: True}
    wrapped = offload.wrap(kind(params[1], lr=1e-2, weight_decay=0.1, **impl))
    for step in range(4):
        for own, optimizer in zip(params, (plain, wrapped), strict=True):
            set_grads(own, step)
            optimizer.step()
    for a, b in zip(*params, strict=True):
        assert torch.equal(bits(a), bits(b))
    wrapped.close()


@pytest.mark.parametrize(("info", "kwargs"), CASES)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_inputs_follow_the_fp32_optimizer(
    info: Any, kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    """The exact master: a 16-bit parameter is the rounding of torch's own fp32 run. State that is
    there from the beginning has been rounded by torch.
    """
    params = make_params(dtype)
    masters = [nn.Parameter(param.detach().float()) for param in params]
    impl = {"fused": True} if is_fused(kwargs) else {"foreach": False}
    plain = info.optim_cls(masters, **copy.deepcopy(kwargs), **impl)
    wrapped = info.optim_cls(params, **copy.deepcopy(kwargs), **impl)
    plain.load_state_dict(wrapped.state_dict())
    offload.wrap(wrapped)
    for step in range(6):
        set_grads(params, step)
        for master, param in zip(masters, params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        plain.step()
        wrapped.step()
    for master, param in zip(masters, params, strict=True):
        if is_fused(kwargs):
            assert torch.equal(bits(param), bits(master.to(dtype)))
        else:
            torch.testing.assert_close(param.float(), master, rtol=1e-2, atol=1e-3)
    wrapped.close()


# --- what is refused ------------------------------------------------------------------------------


def assert_refused(optimizer: Optimizer, match: str) -> None:
    kind, values = type(optimizer), [p.detach().clone() for p in _params(optimizer)]
    with pytest.raises(ConfigError, match=match):
        offload.wrap(optimizer)
    assert type(optimizer) is kind
    for param, value in zip(_params(optimizer), values, strict=True):
        assert torch.equal(param, value)


def _params(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128], ids=str)
def test_other_dtypes_are_refused(name: str, dtype: torch.dtype) -> None:
    params = [nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(3, dtype=dtype))]
    assert_refused(INFOS[name].optim_cls(params, lr=0.1), f"float16, got {dtype}")


@pytest.mark.parametrize("name", NAMES)
def test_differentiable_is_refused(name: str) -> None:
    optimizer = INFOS[name].optim_cls([nn.Parameter(torch.ones(4))], lr=0.1, differentiable=True)
    assert_refused(optimizer, "differentiable=True cannot be offloaded")


@pytest.mark.parametrize("name", NAMES)
def test_sparse_gradients_are_refused_and_nothing_has_changed(name: str) -> None:
    """torch's own SGD and Adagrad take them; the wrapped ones refuse them instead of doing
    otherwise.
    """
    params = [nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(6, 4))]
    optimizer = offload.wrap(INFOS[name].optim_cls(params, lr=0.1))
    before = copy.deepcopy(optimizer.state_dict())
    params[0].grad = torch.ones(6, 4)
    params[1].grad = torch.eye(6, 4).to_sparse()
    with pytest.raises(ConfigError, match=r"gradient is sparse .*\.to_dense"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones(6, 4)) for p in params)
    assert_same_state(before, optimizer.state_dict())
    params[1].grad = torch.eye(6, 4)
    optimizer.step()
    optimizer.close()


@pytest.mark.parametrize("name", NAMES)
def test_errors_of_torch_stay_those_of_torch(name: str) -> None:
    """Wrong settings never reach the wrapper: torch refuses them when the optimizer is made."""
    for given in INFOS[name].optim_error_inputs_func(device="cpu", dtype=torch.float32):
        params = given.optimizer_error_input.params
        params = [nn.Parameter(torch.ones(2))] if params is None else params
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(given.error_type, match=given.error_regex):
                offload.wrap(INFOS[name].optim_cls(params, **given.optimizer_error_input.kwargs))
