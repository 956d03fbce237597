"""`wrap` among ranks: odd parameters, other optimizers, changes in the middle, and misuse.

Beside each optimizer that ranks share there is one that each rank has for itself
(`process_group=False`), with gradients averaged by the same `Ranks`: the bits must be the same.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.bits import same_tensors
from support.loops import chosen
from support.ranks.launch import outcomes, run
from support.ranks.stages import reduce
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import offload
from offload.core.errors import CapacityError, ConfigError, OffloadError, StateError
from offload.distributed.ranks import Ranks, ranks_of
from offload.optim import buckets, sharded_coordinator

pytestmark = pytest.mark.ranks
STEPS = chosen(test=2, torture=4)


class Odd(nn.Module):
    """A model with parameters of all sizes and memory formats, frozen, unused, without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 37)
        self.one = nn.Parameter(torch.tensor(0.3))
        self.none = nn.Parameter(torch.empty(0, 5))
        self.frozen = nn.Parameter(torch.ones(37), requires_grad=False)
        self.conv = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.large = nn.Linear(6 * 35, 64)
        self.unused = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = (self.first(x) * self.frozen).view(-1, 1, 1, 37).expand(-1, 2, 3, 37)
        hidden = self.conv(hidden).flatten(1) * self.one + self.none.sum()
        return self.large(hidden).square().mean()


class Pair:
    """One optimizer that is shared, one that is not; both must do the same."""

    def __init__(
        self,
        ranks: Ranks,
        stage: int,
        make: Callable[[Any], torch.optim.Optimizer],
        dtype: torch.dtype = torch.float32,
        model: Callable[[], nn.Module] = Odd,
        **settings: Any,
    ) -> None:
        self.ranks, self.stage = ranks, stage
        torch.manual_seed(3)
        self.plain = model().to(dtype)
        torch.manual_seed(3)
        self.shared = model().to(dtype)
        self.alone = offload.wrap(make(self.plain.parameters()), process_group=False, **settings)
        self.ours: Any = offload.wrap(
            make(self.shared.parameters()), release_grads=stage == 2, **settings
        )
        self.dtype, self.turn = dtype, 0

    def input(self) -> Tensor:
        generator = torch.Generator().manual_seed(50 * self.ranks.rank + self.turn)
        return torch.randn(3 + self.ranks.rank, 13, generator=generator).to(self.dtype)

    def backward(self) -> None:
        self.turn += 1
        self.plain(self.input()).backward()
        self.shared(self.input()).backward()
        reduce(self.plain, self.ranks)
        if self.stage == 1:
            reduce(self.shared, self.ranks)

    def step(self) -> None:
        self.backward()
        self.alone.step()
        self.ours.step()
        self.zero_grad()
        self.check()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.alone.zero_grad(set_to_none)
        self.ours.zero_grad(set_to_none)

    def check(self) -> None:
        left, right = list(self.plain.parameters()), list(self.shared.parameters())
        assert same_tensors(left, right), [n for n, _ in self.plain.named_parameters()]

    def check_state(self) -> None:
        left, right = self.alone.state_dict(), self.ours.state_dict()
        assert left["param_groups"] == right["param_groups"]
        assert left["state"].keys() == right["state"].keys()
        for number, state in left["state"].items():
            assert state.keys() == right["state"][number].keys()
            for name, value in state.items():
                assert torch.equal(value, right["state"][number][name]), (number, name)

    def close(self) -> None:
        self.alone.close()
        self.ours.close()
        for _ in range(2):  # plain ones
            self.plain.zero_grad()
            self.shared.zero_grad()
            self.turn += 1
            for model, optimizer in ((self.plain, self.alone), (self.shared, self.ours)):
                model(self.input()).backward()
                reduce(model, self.ranks)
                optimizer.step()
            self.check()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1, fused=True)


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    adamw,
    lambda p: torch.optim.SGD(p, lr=1e-2),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    lambda p: torch.optim.NAdam(p, lr=1e-2),
    lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    lambda p: offload.Lion(p, lr=1e-3),
]


def my_ranks() -> Ranks:
    buckets.BUCKET_BYTES = 16 << 10
    found = ranks_of(None, 20)
    assert found is not None
    return found


def optimizers(rank: int, stage: int) -> None:
    ranks = my_ranks()
    for make in OPTIMIZERS:
        pair = Pair(ranks, stage, make)
        for _ in range(STEPS):
            pair.step()
        pair.check_state()
        pair.close()
    pair = Pair(ranks, stage, adamw, torch.bfloat16, max_grad_norm=0.05)
    for _ in range(STEPS):
        pair.step()
        assert pair.ours.grad_norm == pytest.approx(pair.alone.grad_norm, rel=1e-12)
    pair.check_state()


class Wide(nn.Module):
    """A model most of whose elements are in one channels_last parameter: every rank has some."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 8)
        self.conv = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).view(-1, 8, 1, 1).expand(-1, 8, 4, 4)
        out: Tensor = self.conv(hidden).square().mean()
        return out


def orders(rank: int, stage: int) -> None:
    pair = Pair(my_ranks(), stage, adamw, model=Wide)
    pair.step()
    pair.backward()
    pair.shared.conv.to(memory_format=torch.contiguous_format)
    for act in (pair.ours.step, pair.ours.state_dict, pair.ours.close):
        with refused(ConfigError, "param 2 .*order of memory .* change it back"):
            act()
    pair.shared.conv.to(memory_format=torch.channels_last)
    pair.alone.step()
    pair.ours.step()
    pair.zero_grad()
    pair.check()
    pair.check_state()
    pair.ours.close()
    for model in (pair.plain, pair.shared):
        model.conv.to(memory_format=torch.contiguous_format)
    pair.ours = offload.wrap(pair.ours, release_grads=stage == 2)
    pair.step()
    pair.check_state()


@pytest.mark.parametrize("stage", [1, 2])
def test_another_order_of_memory_is_refused_before_anything_changes(stage: int) -> None:
    run(2, orders, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_all_optimizers_and_odd_parameters(stage: int) -> None:
    run(3, optimizers, stage)


def changes(rank: int, stage: int) -> None:
    """Add groups, thaw parameters and load states between steps."""
    pair = Pair(my_ranks(), stage, adamw)
    pair.step()
    for model, optimizer in ((pair.plain, pair.alone), (pair.shared, pair.ours)):
        extra = nn.Linear(64, 64)
        nn.init.constant_(extra.weight, 0.01)
        nn.init.constant_(extra.bias, 0.02)
        model.large = nn.Sequential(model.large, extra)
        optimizer.add_param_group({"params": list(extra.parameters()), "lr": 3e-3})
    pair.step()
    pair.plain.frozen.requires_grad_()
    pair.shared.frozen.requires_grad_()
    for _ in range(2):
        pair.step()
    saved = pair.ours.state_dict()
    values = [p.detach().clone() for p in pair.plain.parameters()]
    pair.step()
    for model, optimizer in ((pair.plain, pair.alone), (pair.shared, pair.ours)):
        with torch.no_grad():
            for param, value in zip(model.parameters(), values, strict=True):
                param.copy_(value)
        optimizer.load_state_dict(saved)
    pair.step()
    pair.check_state()
    pair.ours.step()  # without any gradient
    pair.check()
    for group in (*pair.alone.param_groups, *pair.ours.param_groups):
        group["lr"] *= 0.5
    pair.step()
    pair.close()


def gradients(rank: int, stage: int) -> None:
    """Train with gradients that are zeroed, dropped, or come from a closure."""
    pair = Pair(my_ranks(), stage, adamw)
    pair.step()
    pair.backward()
    pair.zero_grad()  # dropped
    pair.step()
    pair.zero_grad(set_to_none=False)
    if stage == 1:  # torch has None already
        pair.step()
    else:
        pair.ours.zero_grad()
        pair.step()
    pair.zero_grad(set_to_none=False)
    pair.ours.zero_grad()

    def closure() -> Tensor:
        loss = pair.shared(pair.input())
        loss.backward()
        if stage == 1:
            reduce(pair.shared, pair.ranks)
        return loss.detach()

    pair.turn += 1
    pair.plain(pair.input()).backward()
    reduce(pair.plain, pair.ranks)
    pair.alone.step()
    assert isinstance(pair.ours.step(closure), Tensor)
    pair.check()


@pytest.mark.parametrize("stage", [1, 2])
def test_changes_in_the_middle(stage: int) -> None:
    run(2, changes, stage)
    run(2, gradients, stage)


# --- stage 2 --------------------------------------------------------------------------------------


class Stack(nn.Module):
    """A stack of layers that are recomputed in backward, in passes of their own."""

    def __init__(self, reentrant: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(13, 13) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return checkpoint(self.layers[1], x, use_reentrant=self.reentrant).square().mean()


def reducing(rank: int) -> None:
    ranks = my_ranks()
    for reentrant in (True, False):
        pair = Pair(ranks, 2, adamw, model=lambda reentrant=reentrant: Stack(reentrant))
        for _ in range(3):
            pair.turn += 1
            pair.plain(pair.input()).backward()
            reduce(pair.plain, ranks)
            pair.shared(pair.input()).backward()
            pair.alone.step()
            pair.ours.step()
            pair.zero_grad()
            left, right = list(pair.plain.parameters()), list(pair.shared.parameters())
            # A layer used twice, in two passes: its gradients are averaged apart, and added then.
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(left, right, strict=True))
    several_passes(ranks)
    given_by_hand(ranks)
    foreign(ranks)


def several_passes(ranks: Ranks) -> None:
    """Check that without `no_sync` each pass is averaged, and the means are added up."""
    pair = Pair(ranks, 2, adamw)
    sums: dict[int, Tensor] = {}
    for turn in range(3):
        pair.turn = turn
        pair.plain.zero_grad()
        pair.plain(pair.input()).backward()
        pair.shared(pair.input()).backward()
        reduce(pair.plain, ranks)
        for number, param in enumerate(pair.plain.parameters()):
            if param.grad is not None:
                sums[number] = param.grad if number not in sums else sums[number] + param.grad
    for number, param in enumerate(pair.plain.parameters()):
        param.grad = sums.get(number)
    assert all(param.grad is None for param in pair.shared.parameters())
    pair.alone.step()
    pair.ours.step()
    pair.check()
    with pair.ours.no_sync():  # and then none outside: they are averaged at the step
        pair.plain.zero_grad()
        for turn in range(2):
            pair.turn = 10 + turn
            pair.plain(pair.input()).backward()
            pair.shared(pair.input()).backward()
    reduce(pair.plain, ranks)
    pair.alone.step()
    pair.ours.step()
    pair.check()
    pair.zero_grad()
    pair.step()


def given_by_hand(ranks: Ranks) -> None:
    pair = Pair(ranks, 2, adamw)
    for model in (pair.plain, pair.shared):
        model.one.grad = torch.tensor(float(ranks.rank))
        if ranks.rank == 1:
            model.unused.bias.grad = torch.ones(5)
    reduce(pair.plain, ranks)
    pair.alone.step()
    pair.ours.step()
    pair.check()


def foreign(ranks: Ranks) -> None:
    model = nn.Linear(4, 4)
    for param in model.parameters():
        nn.init.constant_(param, 0.5)
    optimizer = offload.wrap(torch.optim.SGD(model.parameters(), lr=1.0), release_grads=True)
    in_ddp = DDP(model)
    in_ddp(torch.ones(2, 4)).sum().backward()
    with pytest.raises(StateError, match="DistributedDataParallel"):
        optimizer.step()


def test_gradients_are_averaged_whatever_way_they_come() -> None:
    run(2, reducing)


def memory(rank: int) -> tuple[float, float]:
    """Check the bytes of gradients that are there at once; return those that stay, and those of the
    state, as shares of all parameters.
    """
    my_ranks()
    buckets.BUCKET_BYTES = 64 << 10
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(120, 120) for _ in range(20)))
    optimizer = offload.wrap(adamw(model.parameters()), release_grads=True)
    whole = sum(param.nbytes for param in model.parameters())
    most = 0

    def count(_: Tensor) -> None:
        nonlocal most
        most = max(most, sum(p.grad.nbytes for p in model.parameters() if p.grad is not None))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    model(torch.ones(3, 120)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    assert most <= (64 << 10) + 120 * 121 * 4  # one bucket, and the first of the next
    share = optimizer._offload_session.plan.ranks
    assert share.buffers * share.buffer_bytes < 2 * 1.6 * (64 << 10)
    return share.grad_bytes / whole, optimizer._offload_session.plan.state_bytes / whole


@pytest.mark.parametrize("count", [2, 4])
def test_gradients_take_their_share_of_memory(count: int) -> None:
    for grads, state in run(count, memory):
        assert abs(grads * count - 1) < 0.02 and abs(state / 2 * count - 1) < 0.02


# --- misuse ---------------------------------------------------------------------------------------


@contextmanager
def refused(kind: type[OffloadError], text: str) -> Any:
    """Expect this error of the block; every rank gets it, and no rank waits for another."""
    with pytest.raises(kind, match=text):
        yield
    gc.collect()


def small(value: float = 0.5) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((40, 10), value)), nn.Parameter(torch.full((3,), value))]


def refusals(rank: int) -> None:
    my_ranks()
    with refused(ConfigError, r"rank 1 and rank 0 differ in the values of group 0 param 0"):
        offload.wrap(adamw(small(0.5 + rank)))
    with refused(ConfigError, "did you mean|no rank continues"):
        offload.wrap(adamw(small()), **({"strickt": True} if rank else {}))
    with refused(CapacityError, "host_memory"):
        offload.wrap(adamw(small()), host_memory=4096 if rank else "1GiB")
    with refused(ConfigError, "the number of parameters|shape, type"):
        offload.wrap(adamw(small()[: 1 + rank]))
    with refused(ConfigError, "stage"):
        offload.wrap(adamw(small()), release_grads=rank == 1)
    alone(offload.wrap(adamw(small(0.5 + rank)), process_group=False))
    steps_that_are_refused(rank)


def alone(optimizer: Any) -> None:
    """Call on rank 1 alone what needs no other rank."""
    if dist.get_rank() == 1:
        assert "ranks" not in str(offload.plan(adamw(small()), process_group=False))
        optimizer.state_dict()
        optimizer.close()


def steps_that_are_refused(rank: int) -> None:
    params = small()
    optimizer = offload.wrap(adamw(params))
    for param in params:
        param.grad = torch.full_like(param, 1.0 + rank)
    with refused(StateError, "differ in the gradient of group 0 param 0.*release_grads"):
        optimizer.step()
    params[0].grad = torch.ones_like(params[0])
    params[1].grad = torch.ones(3) if rank else None
    with refused(StateError, "which of them have gradients"):
        optimizer.step()
    params[1].grad = torch.ones(3)
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + rank)
    with refused(StateError, "hyper-parameters"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = "fast"
    with refused(ConfigError, "lr"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    if rank == 1:
        params[0].grad = torch.ones(40, 10).to_sparse()
    with refused(ConfigError, "sparse"):
        optimizer.step()
    with refused(ConfigError, "add_param_group.*differ"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.full((4,), float(rank)))]})
    wrong = nn.Parameter(torch.ones(4, dtype=torch.float64 if rank else torch.float32))
    with refused(ConfigError, "float64"):
        optimizer.add_param_group({"params": [wrong]})
    assert len(optimizer.param_groups) == 1
    assert all(bool((param == 0.5).all()) for param in params), "nothing has changed"
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1
    optimizer.close()


@pytest.mark.quick
def test_a_refusal_on_one_rank_is_one_on_all() -> None:
    run(2, refusals)


def refused_group(rank: int) -> None:
    """Add a group that is refused, with gradients that are reduced in backward."""
    my_ranks()
    params = small()
    optimizer = offload.wrap(adamw(params), release_grads=True)
    with refused(ConfigError, "add_param_group.*differ"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.full((4,), float(rank)))]})
    sum(param.square().sum() for param in params).backward()
    optimizer.step()
    assert [each["step"] for each in optimizer.state_dict()["state"].values()] == [1] * len(params)
    optimizer.close()


def test_a_step_after_a_refused_group() -> None:
    run(2, refused_group)


def parted(rank: int) -> str:
    """Ask for the whole state on one rank and step on the other."""
    my_ranks()
    params = small()
    optimizer = offload.wrap(adamw(params))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(StateError, match="out of step") as raised:
        optimizer.state_dict() if rank == 0 else optimizer.step()
    optimizer.close()  # at once, and without the state
    assert not optimizer.state and type(optimizer) is torch.optim.AdamW
    return str(raised.value)


def test_ranks_that_part_ways_are_told() -> None:
    run(2, uneven)
    run(2, late)
    first, _ = run(2, parted)
    assert "call them on every rank" in first and "offload.save" in first


def uneven(rank: int) -> None:
    """Run another number of backward passes on each rank: all get an error, and close as ever."""
    my_ranks()
    params = small()
    optimizer = offload.wrap(adamw(params), release_grads=True)
    for _ in range(1 + rank):
        sum(param.sum() for param in params).backward()
    with pytest.raises(StateError, match="out of step"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(StateError, match="earlier error"):
        optimizer.step()
    optimizer.close()


def late(rank: int) -> None:
    """Wait for a rank that does nothing at all: the call gives up after a while."""
    my_ranks()
    sharded_coordinator.RENDEZVOUS_S = 1.0
    params = small()
    optimizer = offload.wrap(adamw(params))
    if rank == 0:
        with pytest.raises(StateError, match=r"call them on every rank, or save with"):
            optimizer.state_dict()
        optimizer.close()
    else:
        time.sleep(3)


def frozen(rank: int, stage: int) -> None:
    """Check that nothing is shared until a parameter is trained; frozen ones cost no byte."""
    ranks = my_ranks()
    params = small()
    for param in params:
        param.requires_grad_(False)
    optimizer = offload.wrap(adamw(params), release_grads=stage == 2)
    optimizer.step()
    told = offload.report(optimizer).to_dict()
    assert "ranks/sent_bytes/gather" not in told and "ranks/sent_bytes/reduce" not in told
    params[1].requires_grad_()
    model = nn.Module()
    model.only = params[1]
    (params[1].sum() * (1 + rank)).backward()
    if stage == 1:
        reduce(model, ranks)
    optimizer.step()
    alone = torch.nn.Parameter(torch.full((3,), 0.5))
    alone.grad = torch.full((3,), 1.5)
    adamw([alone]).step()
    assert torch.equal(params[1], alone)
    told = offload.report(optimizer).to_dict()
    assert told["ranks/sent_bytes/gather"] == 64 and told["ranks/stage"] == stage
    assert f"stage {stage}" in str(offload.report(optimizer))


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_frozen_costs_nothing(stage: int) -> None:
    run(2, frozen, stage)


def broken(rank: int) -> str:
    """Fail in the middle of a step: the other rank fails, too, and no step follows."""
    my_ranks()
    torch.manual_seed(0)
    params = [nn.Parameter(torch.ones(2000)) for _ in range(5)]
    optimizer = offload.wrap(adamw(params))
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    if rank == 1:
        recipe = optimizer._offload_session._recipe
        recipe.update = lambda work: (_ for _ in ()).throw(OSError("no power"))
    with pytest.raises(OSError if rank else StateError, match="no power") as raised:
        optimizer.step()
    with pytest.raises(StateError, match=r"different steps|no rank continues|earlier error"):
        optimizer.step()
    optimizer.close()
    return str(raised.value)


def test_an_error_in_the_middle_reaches_all_ranks() -> None:
    found = run(2, broken)
    assert "rank 1" in found[0]


def gone(rank: int) -> None:
    my_ranks()
    params = small()
    optimizer = offload.wrap(adamw(params), release_grads=True)
    for turn in range(3):
        if rank == 1 and turn == 2:
            raise SystemExit(3)
        sum(param.sum() for param in params).backward()
        optimizer.step()


def test_a_rank_that_ends_is_noticed() -> None:
    found = outcomes(2, gone, deadline_s=30)
    assert "StateError" in (found[0].error or "") and found[0].ended_s < 25


def in_groups(rank: int) -> float:
    """Train in two groups of two ranks: neither depends on the other."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    params = small(1.0 + rank // 2)
    optimizer = offload.wrap(
        torch.optim.SGD(params, lr=1.0), release_grads=True, process_group=groups[rank // 2]
    )
    told = offload.report(optimizer).to_dict()
    assert (told["ranks/rank"], told["ranks/count"]) == (rank % 2, 2)
    sum(param.sum() for param in params).mul(rank).backward()
    optimizer.step()
    assert all(len(param.unique()) == 1 for param in params)
    return float(params[0][0, 0].detach())


def test_a_group_of_some_ranks() -> None:
    assert run(4, in_groups) == [0.5, 0.5, -0.5, -0.5]


# --- beside other things --------------------------------------------------------------------------


def scaled(rank: int) -> None:
    """Stage 1: a scaler skips on all ranks alike. Stage 2: it is refused."""
    pair = Pair(my_ranks(), 1, adamw)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in range(2)]
    for turn in range(3):
        pair.turn += 1
        both = ((pair.plain, pair.alone), (pair.shared, pair.ours))
        for scaler, (model, optimizer) in zip(scalers, both, strict=True):
            scaler.scale(model(pair.input()) * (float("inf") if turn == 1 else 1.0)).backward()
            reduce(model, pair.ranks)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        pair.check()
    assert scalers[1].get_scale() == 2.0**9
    assert pair.ours.state_dict()["state"][0]["step"] == 2
    params = small()
    optimizer = offload.wrap(adamw(params), release_grads=True)
    for unscales in (False, True):
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(sum(param.sum() for param in params)).backward()
        if unscales:
            scaler.unscale_(optimizer)
        with refused(ConfigError, "GradScaler: .*bfloat16"):
            scaler.step(optimizer)
        optimizer.zero_grad()
    sum(param.sum() for param in params).backward()
    optimizer.step()


def overlapping(rank: int, directory: str) -> list[str]:
    """Record the acts of a step in order: new values go out while others are still computed."""
    my_ranks()
    buckets.BUCKET_BYTES = 64 << 10
    model = nn.Sequential(*(nn.Linear(90, 90) for _ in range(12)))
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    optimizer = offload.wrap(adamw(model.parameters()), host_memory="420KiB", nvme=directory)
    done: list[str] = []
    session = optimizer._offload_session
    ranks = session.coordinator.ranks
    update, gather = session._recipe.update, ranks.gather
    session._recipe.update = lambda work: (done.append("update"), update(work))
    ranks.gather = lambda *args, **kwargs: (done.append("gather"), gather(*args))[1]
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return done


def test_new_values_go_out_while_others_are_made(tmp_path: Any) -> None:
    for done in run(2, overlapping, str(tmp_path)):
        assert done.count("gather") > 3 and done.count("update") >= 12
        assert done.index("gather") < len(done) - 1 - done[::-1].index("update")


def checkpoints(rank: int, directory: str) -> None:
    """Load a checkpoint of a single process on each rank, which keeps its part."""
    pair = Pair(my_ranks(), 2, adamw)
    for _ in range(2):
        pair.step()
    if rank == 0:
        offload.save(f"{directory}/2", pair.plain, pair.alone)
    pair.step()
    dist.barrier()
    offload.load(directory, pair.plain, pair.alone)
    offload.load(directory, pair.shared, pair.ours)
    pair.check()
    pair.step()
    pair.check_state()


def test_scalers_and_checkpoints(tmp_path: Any) -> None:
    run(2, scaled)
    run(2, checkpoints, str(tmp_path))
