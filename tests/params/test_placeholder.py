"""Placeholders: the shape and type of a parameter are known, its values are out of reach."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from offload.core.errors import StateError
from offload.params.placeholder import OffloadedParameter, is_offloaded, make_placeholder, restore

pytestmark = pytest.mark.quick


class Keeper:
    """The owner of one parameter's values, which restores them at a use when it may."""

    device = torch.device("cpu")

    def __init__(self, param: nn.Parameter, may_bring: bool = False) -> None:
        self.param, self.values, self.may_bring = param, param.detach().clone(), may_bring
        self.brought = 0
        make_placeholder(param, self)

    def name_of(self, param: Tensor) -> str:
        assert param is self.param
        return "layer.weight"

    def bring(self, params: Sequence[Tensor]) -> bool:
        if self.may_bring:
            self.brought += 1
            restore(params[0], self.values)
        return self.may_bring


def weight() -> nn.Parameter:
    torch.manual_seed(1)
    return nn.Parameter(torch.randn(3, 4))


def test_what_it_is_stays_known() -> None:
    param = weight()
    Keeper(param)
    assert isinstance(param, nn.Parameter) and is_offloaded(param)
    assert param.shape == (3, 4) and param.size(1) == 4 and len(param) == 3
    assert param.numel() == 12 and param.dim() == param.ndim == 2 and param.nbytes == 48
    assert param.dtype == torch.float32 and param.is_floating_point() and param.element_size() == 4
    assert param.device == torch.device("cpu") and param.is_cpu and not param.is_cuda
    assert param.stride() == (4, 1) and param.stride(0) == 4 and param.is_contiguous()
    assert param.requires_grad and param.is_leaf and param.grad is None
    assert {param: 1}[param] == 1
    assert "layer.weight (3, 4) torch.float32, not in memory" in f"{param} {param!r}"
    param.grad = torch.ones(3, 4)
    assert param.grad.sum() == 12
    param.grad = None
    param.requires_grad_(False)
    assert not param.requires_grad
    param.requires_grad = True
    torch.optim.SGD([param], 0.1).zero_grad()
    assert nn.utils.clip_grad_norm_([param], 1.0) == 0


USES: list[Callable[[nn.Parameter], Any]] = [
    lambda p: p.norm(),
    lambda p: p.data,
    lambda p: p.detach(),
    lambda p: p.tolist(),
    lambda p: p.numpy(),
    lambda p: p[0],
    lambda p: list(p),
    lambda p: p == p,
    lambda p: bool(p.T.sum()),
    lambda p: p + 1,
    lambda p: 1 + p,
    lambda p: p.data_ptr(),
    lambda p: p.untyped_storage(),
    lambda p: p.to(torch.float64),
    lambda p: p.cpu(),
    lambda p: p.clone(),
    lambda p: p.copy_(torch.zeros(3, 4)),
    lambda p: p.data.zero_(),
    lambda p: torch.zeros(3, 4).copy_(p),
    lambda p: torch.cat([torch.zeros(1, 4), p]),
    lambda p: torch.stack([p, p]),
    lambda p: functional.linear(torch.ones(1, 4), p),
    lambda p: functional.embedding(torch.tensor([1]), p),
    lambda p: torch.einsum("ij,kj->ik", p, p),
    lambda p: torch._foreach_add([p], 1.0),
    lambda p: nn.init.zeros_(p),
    lambda p: torch.equal(p, p),
    lambda p: torch.from_dlpack(p),
    lambda p: nn.utils.parameters_to_vector([p]),
    lambda p: torch.autograd.grad((p * 2).sum(), p),
    lambda p: setattr(p, "data", torch.zeros(3, 4)),
]


@pytest.mark.parametrize("number", range(len(USES)))
def test_what_it_holds_is_out_of_reach(number: int) -> None:
    param = weight()
    Keeper(param)
    with pytest.raises(StateError, match=r"layer\.weight: cannot be .* `with offload\.resident"):
        USES[number](param)
    assert is_offloaded(param)


@pytest.mark.parametrize("number", range(len(USES)))
def test_or_it_comes(number: int) -> None:
    param, plain = weight(), weight()
    keeper = Keeper(param, may_bring=True)
    try:
        theirs = USES[number](plain)
    except (RuntimeError, BufferError) as error:  # torch refuses it of any parameter
        with pytest.raises(type(error)):
            USES[number](param)
        return
    ours = USES[number](param)
    assert keeper.brought == 1 and type(param) is nn.Parameter
    if isinstance(ours, Tensor) and ours.dtype != torch.bool:
        assert torch.equal(ours, theirs)
    assert torch.equal(param.detach(), plain.detach())


def test_copies_and_pickles_are_refused() -> None:
    param = weight()
    Keeper(param)
    with pytest.raises(StateError, match="cannot be copied"):
        copy.deepcopy(param)
    with pytest.raises(StateError, match="cannot be pickled"):
        pickle.dumps(param)
    model = nn.Linear(4, 3)
    model.weight = param
    for use in (model.state_dict, lambda: model.to(torch.float16), lambda: copy.deepcopy(model)):
        with pytest.raises(StateError, match=r"layer\.weight"):
            use()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_every_type(dtype: torch.dtype) -> None:
    values = torch.arange(6).view(2, 3).to(dtype)
    param = nn.Parameter(values.clone(), requires_grad=False)
    keeper = Keeper(param)
    assert param.dtype == dtype
    with torch._C.DisableTorchFunctionSubclass():  # bypasses the checks
        lost = Tensor.sum(param)
    is_number = not (dtype.is_floating_point or dtype.is_complex)
    assert lost == 6 * torch.iinfo(dtype).min if is_number else lost.isnan()
    restore(param, keeper.values)
    assert torch.equal(param, values)


def test_gradients_flow_as_ever() -> None:
    """A forward pass fetches the values; backward gives the parameter its gradient."""
    param, plain = weight(), weight()
    Keeper(param, may_bring=True)
    for one in (param, plain):
        functional.linear(torch.ones(2, 4), one).square().sum().backward()
    assert torch.equal(param.grad, plain.grad)


def test_identity_and_class_come_back() -> None:
    class Special(nn.Parameter):
        pass

    param = Special(torch.ones(2))
    before = id(param)
    keeper = Keeper(param)
    assert type(param) is OffloadedParameter
    make_placeholder(param, keeper)  # a second time: no change
    restore(param, keeper.values)
    assert type(param) is Special and id(param) == before and vars(param) == {}
