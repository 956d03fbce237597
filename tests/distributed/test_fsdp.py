"""`wrap` with the parameters of FSDP2 models: the bits of torch's own optimizer on their shards.

Processes take seconds to start, so that each launch tries many things.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.bits import assert_same_named
from support.ranks import fsdp as lib
from support.ranks.launch import outcomes, run
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import offload
from offload import kernels

pytestmark = pytest.mark.ranks

# Of the losses of 20 steps, between FSDP2 and DDP, which add gradients up in another order.
DDP_BOUND = 1e-4


# --- training -------------------------------------------------------------------------------------


def train_all_ways(rank: int, count: int, folder: str) -> dict[str, float | None]:
    """Train every case with and without offload and compare the bits; return the norm of a step by
    name of the case.
    """
    done = {}
    for case in lib.cases(count):
        plain = case.build()
        theirs = lib.adamw(plain)
        losses = lib.train(plain, theirs, rank, case)
        assert losses[-1] < losses[0]
        for fields in case.fields:
            model = case.build()
            ours = lib.wrap(lib.adamw(model), folder, **fields)
            assert lib.train(model, ours, rank, case) == losses, case.name
            lib.assert_same_run((model, ours), (plain, theirs))
            done[case.name] = ours.grad_norm
            if "max_grad_norm" in fields:
                done[case.name] = norm_of_a_step(model, ours)
            ours.close()  # a plain one again
            assert type(ours) is optim.AdamW
            if "max_grad_norm" not in fields:
                lib.assert_same_run((model, ours), (plain, theirs))
        if case.name == "plain":
            assert_near_to_ddp(rank, case, losses)
    return done


def norm_of_a_step(model: nn.Module, wrapped: Any) -> float:
    """Check and return the norm of parameters with several meshes; all ranks see the same batch."""
    lib.loss_of(model, lib.batch(0, 0)).backward()
    whole = [p.grad.full_tensor().double() for p in model.parameters() if p.grad is not None]
    expected = math.sqrt(math.fsum(one.square().sum().item() for one in whole))
    wrapped.step()
    assert abs(wrapped.grad_norm - expected) <= 1e-12 * expected
    return float(wrapped.grad_norm)


def assert_near_to_ddp(rank: int, case: lib.Case, losses: list[float]) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(lib.Model(), find_unused_parameters=True)
    others = lib.train(model, lib.adamw(model), rank, case)
    for got, expected in zip(losses, others, strict=True):
        assert abs(got - expected) <= DDP_BOUND * expected


@pytest.mark.parametrize("count", [2, 4])
def test_bits_are_those_of_plain_adamw(count: int, tmp_path: Path) -> None:
    results = run(count, train_all_ways, count, str(tmp_path), deadline_s=240)
    assert list(results[0]) == [case.name for case in lib.cases(count)]
    assert results == results[:1] * count
    assert count == 2 or results[0]["parallel"] is not None


# --- every optimizer, on DTensors without a model -------------------------------------------------

SIZES = ((19, 8), (1,), (3, 5), (), (64,))  # uneven, less than ranks, and without a dimension


def values(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator).to(dtype) for size in SIZES]


def placed(whole: Tensor, mesh: Any, placements: Any = None) -> DTensor:
    default = [Shard(0)] if whole.dim() else [Replicate()]
    return distribute_tensor(whole, mesh, placements or default, src_data_rank=None)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "Adam": (optim.Adam, {"fused": True, "weight_decay": 0.1, "maximize": True}),
    "SGD": (optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True, "lr": 0.1}),
    "SGD without momentum": (optim.SGD, {"fused": True, "lr": 0.1}),
    "Adagrad": (optim.Adagrad, {"fused": True, "initial_accumulator_value": 0.1}),
    "Lion": (offload.Lion, {}),
    "AMSGrad": (optim.AdamW, {"foreach": False, "amsgrad": True}),
    "RMSprop": (optim.RMSprop, {"foreach": False, "momentum": 0.9}),
    "Adadelta": (optim.Adadelta, {"foreach": False}),
    "Adamax": (optim.Adamax, {"foreach": False}),
    "NAdam": (optim.NAdam, {"foreach": False}),
    "RAdam": (optim.RAdam, {"foreach": False}),
    "Rprop": (optim.Rprop, {"foreach": False}),
    "ASGD": (optim.ASGD, {"foreach": False}),
}


def step_all_optimizers(count: int, names: Iterable[str]) -> None:
    mesh = init_device_mesh("cpu", (count,))
    for name in names:
        kind, settings = OPTIMIZERS[name]
        for dtype in (torch.float32, torch.bfloat16):
            # torch has no master of bf16 parameters, and no Lion: then ordinary ones, wrapped too.
            is_plain = dtype == torch.float32 and name != "Lion"
            params = [nn.Parameter(placed(one, mesh)) for one in values(0, dtype)]
            shards = [nn.Parameter(one.detach().to_local().clone()) for one in params]
            ours, theirs = kind(params, **settings), kind(shards, **settings)
            for turn in range(4):
                for param, shard, grad in zip(params, shards, values(turn + 1, dtype), strict=True):
                    param.grad = placed(grad, mesh)
                    shard.grad = param.grad.to_local().clone()
                # Some with the state of a first step; torch cannot step others with DTensors.
                if turn == int(is_plain and kind is optim.AdamW):
                    offload.wrap(ours)
                    if not is_plain:
                        offload.wrap(theirs, process_group=False)
                ours.step()
                theirs.step()
            assert_same_shards(name, ours, theirs, params, shards)
            ours.close()
            assert_same_shards(name, ours, theirs, params, shards, is_plain)


def assert_same_shards(
    name: str, ours: Any, theirs: Any, params: Any, shards: Any, with_state: bool = True
) -> None:
    for param, shard in zip(params, shards, strict=True):
        assert torch.equal(param.to_local(), shard), name
    if with_state:
        mine, others = ours.state_dict()["state"], theirs.state_dict()["state"]
        assert mine.keys() == others.keys(), name
        for number, state in others.items():
            assert mine[number].keys() == state.keys(), name
            for key, value in state.items():
                got = mine[number][key]
                if (value is not None and value.dim()) or key in ("exp_avg", "momentum_buffer"):
                    assert got.placements == params[number].placements
                    assert got.shape == params[number].shape
                    got = got.to_local()
                assert torch.equal(got, value) if value is not None else got is None, (name, key)


# --- the norm, errors, and what is between ranks --------------------------------------------------


def clip_over_the_mesh(rank: int) -> dict[str, float]:
    """Compare clipped steps on several meshes with torch; return the norms by mesh."""
    found = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, where, placements in (
        ("row", mesh["shard"], [Shard(0)]),
        ("rows", mesh, [Replicate(), Shard(0)]),
        ("grid", mesh, [Shard(0), Shard(1)]),
    ):
        wholes = [one for one in values(0) if one.dim() == 2]
        params = [nn.Parameter(placed(one, where, placements)) for one in wholes]
        plain = nn.Parameter(torch.ones(3))  # beside them, alike on all ranks
        wrapped = offload.wrap(optim.AdamW([*params, plain], fused=True), max_grad_norm=0.5)
        shards = [nn.Parameter(one.detach().to_local().clone()) for one in [*params]]
        theirs = optim.AdamW([*shards, nn.Parameter(torch.ones(3))], fused=True)
        grads = [one for one in values(1) if one.dim() == 2]
        for param, grad in zip(params, grads, strict=True):
            param.grad = placed(grad, where, placements)
        plain.grad = torch.full((3,), 2.0)
        squares = [one.double().square().sum().item() for one in [*grads, plain.grad]]
        wrapped.step()
        norm = math.sqrt(math.fsum(squares))
        assert abs(wrapped.grad_norm - norm) <= 1e-14 * norm
        scale = 0.5 / (wrapped.grad_norm + 1e-6)
        for one, param in zip(theirs.param_groups[0]["params"], [*params, plain], strict=True):
            grad = param.grad.to_local() if isinstance(param.grad, DTensor) else param.grad
            one.grad = grad * torch.tensor(scale)
        theirs.step()
        for one, param in zip(shards, params, strict=True):
            assert torch.equal(one, param.to_local())
        found[name] = wrapped.grad_norm
        wrapped.close()
    return found


def refuse(rank: int) -> list[str]:
    """Check what is refused, and that no rank waits for one that refuses; return the messages."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(6, 2)
    param = nn.Parameter(placed(whole, mesh))
    wrapped = offload.wrap(optim.AdamW([param], fused=True))
    said = []

    # Gradients that are placed otherwise.
    for placements in ([Partial()], [Replicate()], [Shard(1)]):
        part = DTensor.from_local(torch.ones(6, 2), mesh, [Replicate()], run_check=False)
        if isinstance(placements[0], Partial):
            part = DTensor.from_local(torch.ones(6, 2), mesh, placements, run_check=False)
        else:
            part = part.redistribute(mesh, placements)
        param.grad = part
        said.append(lib.refused(wrapped.step, offload.ConfigError))
        assert "redistribute" in said[-1] and repr(placements[0]) in said[-1], said[-1]
    assert torch.equal(param.to_local(), placed(whole, mesh).to_local())
    assert wrapped.state_dict()["state"] == {}

    # State that is placed otherwise, or is ordinary and has another shape; one that fits.
    param.grad = placed(torch.ones(6, 2), mesh)
    wrapped.step()
    given = wrapped.state_dict()
    state = given["state"][0]
    before = {key: state[key].to_local().clone() for key in ("exp_avg", "exp_avg_sq")}
    for other in (state["exp_avg"].redistribute(mesh, [Shard(1)]), torch.ones(3, 2)):
        wrong = {**given, "state": {0: {**state, "exp_avg": other}}}
        said.append(lib.refused(lambda w=wrong: wrapped.load_state_dict(w), offload.ConfigError))
        assert "get_optimizer_state_dict" in said[-1]
    full = {key: torch.full((6, 2), 3.0) + whole for key in before}
    wrapped.load_state_dict({**given, "state": {0: {"step": state["step"], **full}}})
    now = wrapped.state_dict()["state"][0]
    for key in before:
        assert torch.equal(now[key].to_local(), placed(full[key], mesh).to_local())

    # A shard that user code has replaced: of the same shape it counts, of another it is refused.
    param._local_tensor = torch.full((3, 2), 7.0)
    param.grad = placed(torch.zeros(6, 2), mesh)
    wrapped.param_groups[0]["lr"] = 0.0
    wrapped.step()
    assert torch.equal(param.to_local(), torch.full((3, 2), 7.0))
    param._local_tensor = torch.zeros(2, 2)
    said.append(lib.refused(wrapped.step, offload.ConfigError))
    assert "does not fit" in said[-1]

    # One that is placed otherwise since.
    param._local_tensor = torch.full((3, 2), 7.0)
    param._spec = placed(torch.zeros(3, 4), mesh, [Shard(1)])._spec
    said.append(lib.refused(wrapped.step, offload.ConfigError))
    assert "as when it was wrapped" in said[-1]

    # A parameter that is still to be added up.
    sums = DTensor.from_local(torch.ones(6, 2), mesh, [Partial()], run_check=False)
    one = optim.AdamW([nn.Parameter(sums)])
    said.append(lib.refused(lambda o=one: offload.wrap(o), offload.ConfigError))
    assert "Partial" in said[-1]

    # No early copies, hence nothing to release.
    one = optim.AdamW([nn.Parameter(placed(whole, mesh))])
    said.append(lib.refused(lambda o=one: offload.wrap(o, release_grads=True), offload.ConfigError))

    # One rank refuses in `wrap`, by its own budget; the other does not wait for it.
    large = nn.Parameter(placed(torch.zeros(2, 1 << 16), mesh))
    budget = 1 << 10 if rank == 0 else 1 << 22
    try:
        offload.wrap(optim.AdamW([large]), host_memory=budget).close()
        assert rank == 1
    except offload.CapacityError:
        assert rank == 0

    # One rank's step is refused: with a norm to agree on, the others' is, too, and all can go on.
    param = nn.Parameter(placed(whole, mesh))
    wrapped = offload.wrap(optim.AdamW([param], fused=True), max_grad_norm=1.0)
    param.grad = placed(torch.ones(6, 2), mesh)
    if rank == 0:
        param.grad = placed(torch.ones(6, 2), mesh, [Shard(1)])
        assert "Shard(dim=1)" in lib.refused(wrapped.step, offload.ConfigError)
    else:
        assert "rank 0" in lib.refused(wrapped.step, offload.StateError)
    assert wrapped.state_dict()["state"] == {}
    param.grad = placed(torch.ones(6, 2), mesh)
    wrapped.step()
    assert abs(wrapped.grad_norm - math.sqrt(12)) < 1e-12
    return said


# --- what changes while it is wrapped -------------------------------------------------------------


def exchange_parameters(rank: int) -> None:
    """Wrap first and shard afterwards: the groups get the shards, as accelerate does it."""
    case, runs = lib.Case("exchanged", turns=3), []
    for is_ours in (True, False):
        torch.manual_seed(1)
        model = lib.Model()
        optimizer = lib.adamw(model)
        names = {param: name for name, param in model.named_parameters()}
        order = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
        if is_ours:
            offload.wrap(optimizer)
        case.shard_all(model)
        shards = dict(model.named_parameters())
        for group, each in zip(optimizer.param_groups, order, strict=True):
            group["params"] = [shards[name] for name in each]
        runs.append((lib.train(model, optimizer, rank, case), model, optimizer))
    assert runs[0][0] == runs[1][0]
    lib.assert_same_run(runs[0][1:], runs[1][1:])
    runs[0][2].close()


def thaw_add_and_overwrite(rank: int) -> None:
    """Train a frozen shard later, add one, and overwrite one from outside of the optimizer."""
    mesh = init_device_mesh("cpu", (2,))
    for dtype in (torch.float32, torch.bfloat16):
        params = [nn.Parameter(placed(one, mesh)) for one in values(0, dtype)]
        shards = [nn.Parameter(one.detach().to_local().clone()) for one in params]
        optimizers = []
        for each in (params, shards):
            each[0].requires_grad_(False)
            plain = optim.AdamW(each[:-1], lr=0.1)
            optimizers.append(offload.wrap(plain, process_group=False))
        for turn in range(4):
            if turn == 1:
                params[0].requires_grad_(True)
                shards[0].requires_grad_(True)
            if turn == 2:
                for optimizer, each in zip(optimizers, (params, shards), strict=True):
                    optimizer.add_param_group({"params": each[-1:], "lr": 0.2})
            if turn == 3:
                with torch.no_grad():
                    params[0].copy_(placed(values(9, dtype)[0], mesh))
                    shards[0].copy_(placed(values(9, dtype)[0], mesh).to_local())
            for param, shard, grad in zip(params, shards, values(turn + 1, dtype), strict=True):
                if param.requires_grad:
                    param.grad = placed(grad, mesh)
                    shard.grad = param.grad.to_local().clone()
            for optimizer in optimizers:
                optimizer.step()
        assert_same_shards("changed", *optimizers, params, shards)
        for optimizer in optimizers:
            optimizer.close()


def break_in_the_middle(rank: int) -> None:
    """Fail in the middle of a step: parameters must be loaded before the state can be."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(placed(torch.ones(6, 2), mesh))
    wrapped = offload.wrap(optim.AdamW([param], fused=True))
    param.grad = placed(torch.ones(6, 2), mesh)
    wrapped.step()
    state, before = wrapped.state_dict(), param.detach().clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "update", fail)
        lib.refused(wrapped.step, RuntimeError)
    lib.refused(wrapped.step, offload.StateError)
    lib.refused(lambda: wrapped.load_state_dict(state), offload.StateError)
    with torch.no_grad():
        param.copy_(before)
    wrapped.load_state_dict(state)
    wrapped.step()
    assert float(wrapped.state_dict()["state"][0]["step"]) == 2.0
    wrapped.close()


def have_nothing(rank: int, folder: str) -> None:
    """Train a parameter of which one rank has no element at all."""
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(placed(torch.ones(1, 3), mesh))
    plain = nn.Parameter(torch.ones(1, 3))
    theirs = optim.AdamW([plain], fused=True)
    ours = offload.wrap(
        optim.AdamW([param], fused=True), host_memory=1 << 20, nvme=folder, max_grad_norm=100.0
    )
    assert param.to_local().numel() == (0 if rank else 3)
    for _ in range(2):
        param.grad, plain.grad = placed(torch.ones(1, 3), mesh), torch.ones(1, 3)
        ours.step()
        theirs.step()
    assert abs(ours.grad_norm - math.sqrt(3)) < 1e-15
    assert torch.equal(param.full_tensor(), plain)
    state = ours.state_dict()["state"][0]
    assert torch.equal(state["exp_avg"].full_tensor(), theirs.state[plain]["exp_avg"])
    ours.load_state_dict(ours.state_dict())
    ours.close()


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("in the middle")


def try_two(rank: int, folder: str) -> list[str]:
    have_nothing(rank, folder)
    step_all_optimizers(2, OPTIMIZERS)
    exchange_parameters(rank)
    thaw_add_and_overwrite(rank)
    break_in_the_middle(rank)
    return refuse(rank)


def test_every_optimizer_every_change_and_every_refusal(tmp_path: Path) -> None:
    assert [len(said) for said in run(2, try_two, str(tmp_path))] == [9, 9]


def try_four(rank: int) -> dict[str, float]:
    step_all_optimizers(4, ["AdamW", "SGD", "NAdam", "ASGD"])
    return clip_over_the_mesh(rank)


def test_the_norm_counts_each_element_once_and_has_the_same_bits_everywhere() -> None:
    norms = run(4, try_four)
    assert len(norms[0]) == 3 and norms == norms[:1] * 4


def go_before_the_norm(rank: int) -> str | None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(placed(torch.ones(6, 2), mesh))
    wrapped = offload.wrap(optim.AdamW([param]), max_grad_norm=1.0)
    param.grad = placed(torch.ones(6, 2), mesh)
    wrapped.step()
    if rank == 1:
        os._exit(3)
    said = lib.refused(wrapped.step, offload.StateError)
    assert float(wrapped.state_dict()["state"][0]["step"]) == 1.0  # nothing has changed
    return said


def test_a_rank_that_has_gone_is_told_of() -> None:
    left, gone = outcomes(2, go_before_the_norm)
    assert gone.exit_code == 3
    assert left.result is not None and "gone" in left.result, left.error


# --- state, to and from torch ---------------------------------------------------------------------

# torch loads no optimizer's state where a trained parameter has none.
HALF = lib.Case("half", dtype=torch.bfloat16, all_used=True)
FULL = lib.Case("full", all_used=True)


def begin(rank: int, folder: str) -> dict[str, dict[str, Any]]:
    """Train with two ranks, and save."""
    found = {}
    for case in (FULL, HALF):
        model = case.build()
        ours = lib.wrap(lib.adamw(model), folder, host_memory=lib.LEAST_BYTES)
        lib.train(model, ours, rank, case, range(2))
        found[case.name] = lib.whole_state(model, ours)
        save(model, ours, f"{folder}/two-{case.name}")
        for state in ours.state_dict()["state"].values():
            moment = state["exp_avg"]  # in fp32 for every type of parameter
            assert moment.dtype == moment._spec.tensor_meta.dtype == torch.float32
        if case is FULL:
            to_plain_and_back(rank, model, ours)
        ours.close()
    return found


def save(model: nn.Module, optimizer: Any, path: str) -> None:
    params, state = get_state_dict(model, optimizer)
    dcp.save({"model": params, "optimizer": state}, checkpoint_id=path)


def load(model: nn.Module, optimizer: Any, path: str) -> None:
    params, state = get_state_dict(model, optimizer)
    dcp.load({"model": params, "optimizer": state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=params, optim_state_dict=state)


def to_plain_and_back(rank: int, model: nn.Module, ours: Any) -> None:
    """Let the plain optimizer continue from our state, and ours from the plain one's."""
    full = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = get_optimizer_state_dict(model, ours)
    assert_unchanged(ours, state, model)
    plain = FULL.build()
    plain.load_state_dict(model.state_dict())
    theirs = lib.adamw(plain)
    set_optimizer_state_dict(plain, theirs, optim_state_dict=state)
    lib.assert_same_run((model, ours), (plain, theirs))
    mine = lib.train(model, ours, rank, FULL, [2])
    assert lib.train(plain, theirs, rank, FULL, [2]) == mine
    lib.assert_same_run((model, ours), (plain, theirs))
    ours.close()

    for options in (StateDictOptions(), full):
        again = FULL.build()
        again.load_state_dict(plain.state_dict())
        wrapped = offload.wrap(lib.adamw(again))
        gathered = StateDictOptions(full_state_dict=options.full_state_dict)
        state = get_optimizer_state_dict(plain, theirs, options=gathered)
        set_optimizer_state_dict(again, wrapped, optim_state_dict=state, options=options)
        lib.assert_same_run((again, wrapped), (plain, theirs))
        wrapped.close()


def assert_unchanged(ours: Any, state: dict[str, Any], model: nn.Module) -> None:
    """Check that asking for the state takes no step, although there are no gradients."""
    again = get_optimizer_state_dict(model, ours)
    assert float(again["state"]["norm.weight"]["step"]) == 2.0
    for name, values_ in state["state"].items():
        for key, value in values_.items():
            lib.assert_same(again["state"][name][key], value, f"{name} {key}")


def go_on(rank: int, folder: str, before: str, after: str) -> dict[str, Any]:
    """Load what other ranks have saved, go on as the plain optimizer would, and save."""
    found: dict[str, Any] = {}
    for case in (FULL, HALF):
        model = case.build()
        ours = offload.wrap(lib.adamw(model))
        load(model, ours, f"{folder}/{before}-{case.name}")
        found[f"{case.name} before"] = lib.whole_state(model, ours)
        mine = lib.train(model, ours, rank, case, [5])
        if case is FULL:
            plain = case.build()
            theirs = lib.adamw(plain)
            load(plain, theirs, f"{folder}/{before}-{case.name}")
            assert lib.train(plain, theirs, rank, case, [5]) == mine
            lib.assert_same_run((model, ours), (plain, theirs))
        save(model, ours, f"{folder}/{after}-{case.name}")
        found[f"{case.name} after"] = lib.whole_state(model, ours)
        ours.close()
    return found


def test_state_goes_to_torch_and_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path)
    two = run(2, begin, folder)[0]
    four = run(4, go_on, folder, "two", "four")[0]
    one = run(1, go_on, folder, "four", "one")[0]
    for name in ("full", "half"):
        assert_same_named(four[f"{name} before"], two[name])
        assert_same_named(one[f"{name} before"], four[f"{name} after"])
    assert any(key.endswith(".master") for key in two["half"])
