"""A model that is shared out over ranks: the same bits as plain training, a part of the bytes.

Processes take longer to start than most cases run, so all cases of as many ranks run in the same
ones, one after the other; each is a test. The first that fails is the last.
"""

from __future__ import annotations

import copy
import gc
import math
import random
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.loops import SEED, chosen
from support.models import WIDTH, WORDS, Branches, Experts, Gpt, Lora, Thrice
from support.ranks.launch import outcomes, run
from support.ranks.stage3 import (
    Mixture,
    Model,
    Odd,
    Wide,
    adamw,
    check_same,
    clip,
    clip_in_double,
    in_ddp,
    loss_of,
    made_of,
    seeded,
    tokens,
    train,
    train_averaged,
)
from torch import Tensor, nn

import offload
from offload.core.budget import HOST
from offload.core.errors import CapacityError, ConfigError, StateError
from offload.params.residency import Residency
from offload.planning.unit import ALIGN_BYTES

pytestmark = pytest.mark.ranks
STEPS = chosen(test=3, torture=20)
FEW_STEPS = chosen(test=2, torture=6)
DRAWS = chosen(test=3, torture=100)


# --- the same bits --------------------------------------------------------------------------------

MODELS: dict[str, tuple[Model, Model]] = {
    "tied": (Gpt, Gpt),
    "adapters": (Lora, Lora),
    "experts": (Mixture, Mixture),
    "thrice": (Thrice, Thrice),
    "odd": (Odd, Odd),
    "branches": (Branches, Branches),
    "recomputed": (lambda: Gpt(inside=False), Gpt),
    "recomputed, reentrant": (lambda: Gpt(inside=True), Gpt),
    "layers recomputed": (lambda: Gpt(around=False), Gpt),
    "layers recomputed, reentrant": (lambda: Gpt(around=True), Gpt),
}
WAYS: dict[str, dict[str, Any]] = {
    "micro-batches, reduced once": {"micro": 3, "syncs": False, "steps": FEW_STEPS},
    "clipped": {"clip": clip, "steps": STEPS},
}


def all_models(rank: int, directory: str) -> None:
    for name, (make, make_plain) in MODELS.items():
        steps = STEPS if name in ("tied", "adapters", "experts") else FEW_STEPS
        plain, model = seeded(make_plain), seeded(make)
        losses = train(in_ddp(plain), adamw(plain), rank, steps)
        model, optimizer = offload.prepare(model, adamw(model))
        assert train(model, optimizer, rank, steps) == losses, name
        check_same(name, model, plain)
        offload.close(model)
        check_same(f"{name}, closed", model, plain)


def all_ways(rank: int, directory: str) -> None:
    for name, way in WAYS.items():
        plain, model = seeded(Gpt), seeded(Gpt)
        expected = way | ({"clip": clip_in_double} if "clip" in way else {})
        losses = train(in_ddp(plain), adamw(plain), rank, **expected)
        model, optimizer = offload.prepare(model, adamw(model))
        assert train(model, optimizer, rank, **way) == losses, name
        check_same(name, model, plain)
        optimizer.close()
    plain, model = seeded(Mixture), seeded(Mixture)
    losses = train_averaged(plain, adamw(plain), rank, steps=FEW_STEPS, micro=3)
    model, optimizer = offload.prepare(model, adamw(model))
    assert train(model, optimizer, rank, steps=FEW_STEPS, micro=3) == losses
    check_same("micro-batches, reduced each", model, plain)
    optimizer.close()


def four(rank: int, directory: str) -> None:
    for make in (Gpt, Mixture, Odd):
        plain, model = seeded(make), seeded(make)
        losses = train_averaged(plain, adamw(plain), rank, steps=FEW_STEPS)
        model, optimizer = offload.prepare(model, adamw(model))
        assert train(model, optimizer, rank, steps=FEW_STEPS) == losses, make.__name__
        check_same(make.__name__, model, plain)
        optimizer.close()


# --- a part of the bytes --------------------------------------------------------------------------


def budget_for(model: nn.Module, directory: str, depth: int) -> int:
    """Find the least budget, within 16 KiB, with which the model works."""
    for nbytes in range(1 << 14, 1 << 24, 1 << 14):
        try:
            offload.plan(
                model, adamw(model), host_memory=nbytes, nvme=directory, prefetch_depth=depth
            )
        except CapacityError:
            continue
        return nbytes
    raise AssertionError("no budget is enough")


def on_disk(rank: int, directory: str) -> None:
    plain, model = seeded(lambda: Wide(32)), seeded(lambda: Wide(32))
    losses = train(in_ddp(plain), adamw(plain), rank, steps=FEW_STEPS, clip=clip_in_double)
    nbytes = budget_for(model, directory, 1)
    plan = offload.plan(model, adamw(model), host_memory=nbytes, nvme=directory, prefetch_depth=1)
    assert plan.away_bytes and plan.state.disk_bytes and plan.shares.spilled, plan
    model, optimizer = offload.prepare(
        model, adamw(model), host_memory=nbytes, nvme=directory, prefetch_depth=1
    )
    assert train(model, optimizer, rank, steps=FEW_STEPS, clip=clip) == losses
    check_same("on disk", model, plain)
    counts = offload.report(optimizer).counts
    state = optimizer.state_dict()["state"]
    optimizer.close()
    check_same("on disk, closed", model, plain)
    assert not list(Path(directory).iterdir())
    assert counts["disk_read_bytes"] > 0 and state


def counted(rank: int, directory: str) -> None:
    model = seeded(Wide)
    model, optimizer = offload.prepare(model, adamw(model))
    made, steps = made_of(model), 4
    params = sum(p.numel() * 4 for p in model.parameters())
    assert made.ranks is not None and made.engine is not None
    made.ranks.sent_bytes.clear()
    train(model, optimizer, rank, steps=steps)
    misses = made.metrics.snapshot().counts["parameter_misses"]
    train(model, optimizer, rank, steps=1)
    misses = made.metrics.snapshot().counts["parameter_misses"] - misses
    steps += 1
    sent = sum(made.ranks.sent_bytes.values())
    use = offload.report(optimizer).model
    assert use is not None and use.shared is not None
    assert 0 < use.shared.whole_peak_bytes <= use.shared.whole_bytes < 0.7 * params
    residency, gradients = made.engine.residency, made.engine.gradients
    state = sum(s.end - s.begin for c in made.session.plan.chunks for s in c.slices) * 4
    count = made.ranks.count
    for what, nbytes in {
        "parameters": sum(block.nbytes for block in residency.blocks),
        "gradients": sum(one.place.nbytes for one in gradients.sums.values()),
        "state": state,
    }.items():
        assert nbytes == pytest.approx(params / count, rel=0.02), what
    theory = 3 * steps * params * (count - 1) / count
    assert 0.7 * theory < sent <= 1.05 * theory
    assert misses == 0  # everything came ahead of its use
    optimizer.close()


def frozen(rank: int, directory: str) -> None:
    model = seeded(Lora)
    optimizer = adamw(model)
    trained = [p.nbytes for p in model.parameters() if p.requires_grad]
    padded = sum(-(-nbytes // ALIGN_BYTES) * ALIGN_BYTES for nbytes in trained)
    model, optimizer = offload.prepare(model, optimizer)
    made = made_of(model)
    assert made.ranks is not None
    train(model, optimizer, rank, steps=3)
    sent = made.ranks.sent_bytes["reduce"]
    optimizer.close()
    assert 3 * sum(trained) / 2 <= sent <= 1.1 * 3 * padded / 2


# --- what the loop may do -------------------------------------------------------------------------


def refused(kind: type[Exception], words: str, act: Callable[[], object]) -> None:
    with pytest.raises(kind, match=words):
        act()


def gradients_seen(rank: int, directory: str) -> None:
    plain, model = seeded(Gpt), seeded(Gpt)
    ddp = in_ddp(plain)
    loss_of(ddp, tokens(rank, 0)).backward()
    model, optimizer = offload.prepare(model, adamw(model))
    loss_of(model, tokens(rank, 0)).backward()
    expected = [p.grad for p in plain.parameters()]
    grads = [p.grad for p in model.parameters()]
    for grad, plain_grad in zip(grads, expected, strict=True):
        assert grad.shape == plain_grad.shape and grad.dtype == plain_grad.dtype
        assert not grad.is_sparse and grad.grad_fn is None and not grad.requires_grad
        for order in (2.0, 1.0, 3.0, math.inf):
            norm = torch.linalg.vector_norm(grad, order)
            assert torch.allclose(norm, torch.linalg.vector_norm(plain_grad, order), rtol=1e-5)
        assert torch.isfinite(grad).all() and not torch.isnan(grad).any()
        assert grad.norm() == torch.norm(grad) == torch._foreach_norm([grad])[0]
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert torch.allclose(total, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    again = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9, foreach=True)
    assert again == pytest.approx(0.1, rel=1e-3)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)
    assert max(float(torch.linalg.vector_norm(g, math.inf)) for g in grads) <= 1.001e-3
    first = grads[0]
    for act in (lambda: first + 1, lambda: first.clone(), lambda: first.numpy(), first.tolist):
        refused(StateError, "max_grad_norm", act)
    refused(StateError, "max_grad_norm", lambda: first.add_(torch.ones_like(expected[0])))
    first.copy_(expected[0])
    assert first.norm() == pytest.approx(float(expected[0].norm()), rel=1e-5)
    optimizer.zero_grad(set_to_none=False)
    assert all(float(p.grad.norm()) == 0.0 for p in model.parameters())
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    refused(StateError, "dropped", first.norm)
    optimizer.close()


def gradients_held(rank: int, directory: str) -> None:
    """A gradient that the user's code still has holds none of the model's memory."""
    before = HOST.used_bytes
    for drops in (False, True):
        model, optimizer = seeded(Gpt), None
        model, optimizer = offload.prepare(model, adamw(model))
        train(model, optimizer, rank, 1)
        loss_of(model, tokens(rank, 0)).backward()
        held, name = model.head.weight.grad, "embedding.weight"  # they are tied
        if drops:
            optimizer.zero_grad()
        optimizer.close()
        del model, optimizer
        gc.collect()
        assert HOST.used_bytes == before
        refused(StateError, f"{name}: this gradient has been dropped", held.norm)


def not_reduced(rank: int, directory: str) -> None:
    model = seeded(Gpt)
    model, optimizer = offload.prepare(model, adamw(model))
    with optimizer.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    refused(StateError, "no_sync", optimizer.step)
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()  # of nothing
    plain = seeded(Gpt)
    assert train(model, optimizer, rank, 2) == train(in_ddp(plain), adamw(plain), rank, 2)
    optimizer.close()


def clipped_inside(rank: int, directory: str) -> None:
    plain, model = seeded(Gpt), seeded(Gpt)
    ddp, optimizer = in_ddp(plain), adamw(plain)
    model, ours = offload.prepare(model, adamw(model), max_grad_norm=0.5)
    norms = []
    for step in range(4):
        loss_of(ddp, tokens(rank, step)).backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step)).backward()
        ours.step()
        ours.zero_grad()
        assert ours.grad_norm == pytest.approx(float(norm), rel=1e-5)
        norms.append(ours.grad_norm)
    ranks = made_of(model).ranks
    assert ranks is not None
    each = ranks.exchange(norms, "norms")
    assert each[0] == each[1]
    ours.close()


def scaled(rank: int, directory: str) -> None:
    model = seeded(Gpt)
    model, optimizer = offload.prepare(model, adamw(model))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, tokens(rank, 0))).backward()
    refused(StateError, "GradScaler", lambda: scaler.step(optimizer))
    optimizer.close()


def exposed(rank: int, directory: str) -> None:
    plain, model = seeded(Gpt), seeded(Gpt)
    model, optimizer = offload.prepare(model, adamw(model))
    refused(StateError, "resident", lambda: model.head.weight.sum())
    with offload.resident(model):
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(param, other)
        with torch.no_grad():
            model.norm.weight.mul_(1.5)
            model.layers[0].up.weight.data = model.layers[0].up.weight.data * 2
    with torch.no_grad():
        plain.norm.weight.mul_(1.5)
        plain.layers[0].up.weight.mul_(2)
    check_same("changed", model, plain)
    with pytest.raises(StateError, match="same changes"), offload.resident(model.norm):
        model.norm.weight.data.fill_(float(rank))
    check_same("not changed", model, plain)
    losses = train(in_ddp(plain), adamw(plain), rank, 3)
    assert train(model, optimizer, rank, 3) == losses
    loss_of(model, tokens(rank, 0)).backward()
    with offload.resident(model.norm):
        assert model.norm.weight.grad is not None
        assert float(model.norm.weight.grad.norm()) > 0
        loss_of(model, tokens(rank, 0)).backward()  # autograd adds to what is there
    optimizer.zero_grad()
    other = {name: values + 1 for name, values in plain.state_dict().items()}
    model.load_state_dict(other)
    found = model.state_dict()
    assert all(torch.equal(found[name], values) for name, values in other.items())
    if rank == 1:
        other["norm.weight"] = other["norm.weight"] + 1
    refused(StateError, "same changes", lambda: model.load_state_dict(other))
    optimizer.close()


def states(rank: int, directory: str) -> None:
    plain, model = seeded(Mixture), seeded(Mixture)
    theirs = adamw(plain)
    train(in_ddp(plain), theirs, rank, 3)
    model, optimizer = offload.prepare(model, adamw(model))
    train(model, optimizer, rank, 3)
    saved, expected = optimizer.state_dict(), theirs.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][number][name]), (number, name)
    optimizer.load_state_dict(expected)
    losses = train(in_ddp(plain), theirs, rank, 3)
    assert train(model, optimizer, rank, 3) == losses
    loss_of(model, tokens(rank, 0)).backward()
    ddp = in_ddp(plain)
    loss_of(ddp, tokens(rank, 0)).backward()
    optimizer.close()
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None)
        assert param.grad is None or torch.equal(param.grad, other.grad)
    saved, expected = optimizer.state_dict(), theirs.state_dict()
    assert saved["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][number][name]), (number, name)


# --- beginnings -----------------------------------------------------------------------------------


def beginnings(rank: int, directory: str) -> None:
    model = seeded(Gpt)
    if rank == 1:
        with torch.no_grad():
            model.layers[2].down.bias[3] += 1
    refused(ConfigError, r"layers\.2\.down\.bias", lambda: offload.prepare(model, adamw(model)))
    refused(ConfigError, "structure", lambda: offload.prepare(Gpt(layers=2 + rank)))
    few = 1 << 20 if rank == 0 else 4096  # the least of all counts
    refused(CapacityError, "host_memory", lambda: offload.prepare(seeded(Gpt), host_memory=few))
    bad = directory if rank == 0 else f"{directory}/none"
    refused(
        ConfigError if rank else StateError,
        "not a directory",
        lambda: offload.prepare(seeded(Gpt), nvme=bad),
    )

    torch.manual_seed(SEED + rank)  # every rank draws what rank 0 draws
    with torch.device("meta"):
        model = Gpt()
    before = torch.get_rng_state()
    model, optimizer = offload.prepare(model, adamw(model))
    if rank:
        assert torch.equal(torch.get_rng_state(), before)
    with offload.resident(model):
        sums = [float(p.double().sum()) for p in model.parameters()]
    ranks = made_of(model).ranks
    assert ranks is not None
    each = ranks.exchange(sums, "sums")
    assert each[0] == each[1]
    losses = train(model, optimizer, rank, 2)
    assert all(map(math.isfinite, losses))
    optimizer.close()


def failed_start(rank: int, directory: str) -> None:
    """Check that a start that fails on one rank is undone on all."""
    plain, model = seeded(Gpt), seeded(Gpt)
    take_in, calls = Residency.take_in, []

    def fail_third(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        if rank == 1 and len(calls) == 3:
            raise OSError("no more")
        take_in(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Residency, "take_in", fail_third)
        kind, words = (OSError, "no more") if rank else (StateError, "rank 1.*no more")
        refused(kind, words, lambda: offload.prepare(model, adamw(model)))
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param, other)
    model, optimizer = offload.prepare(model, adamw(model))
    losses = train(in_ddp(plain), adamw(plain), rank, 2)
    assert train(model, optimizer, rank, 2) == losses
    optimizer.close()


class Mixed(nn.Module):
    """A model with two types of parameters in each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {"norm": nn.LayerNorm(WIDTH), "up": nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)}
            )
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer["up"](layer["norm"](x.float()).bfloat16())
        return self.head(x.float())


def other_kinds(rank: int, directory: str) -> None:
    # All ranks have the same batches here: then one process alone gets the same bits.
    makers: dict[str, tuple[Model, Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
        "two types": (Mixed, adamw, {}),
        "momentum": (Gpt, lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, fused=True), {}),
        "no state": (Odd, lambda m: torch.optim.SGD(m.parameters(), 0.1), {}),
        "generic": (Odd, lambda m: torch.optim.RAdam(m.parameters(), 0.01), {}),
        "recomputed": (Gpt, adamw, {"activations": "recompute"}),
        "offloaded": (Gpt, adamw, {"activations": "offload", "nvme": directory}),
        "room for all": (Gpt, adamw, {"host_memory": "8MiB"}),
        "one after the other": (Gpt, adamw, {"prefetch_depth": 0}),
        "checked": (Gpt, adamw, {"self_check": 3}),
    }
    for name, (make, optimizer_of, fields) in makers.items():
        alone, model = seeded(make), seeded(make)
        alone, theirs = offload.prepare(alone, optimizer_of(alone), process_group=False)
        losses = train(alone, theirs, 0, FEW_STEPS)
        theirs.close()
        model, optimizer = offload.prepare(model, optimizer_of(model), **fields)
        assert train(model, optimizer, 0, FEW_STEPS) == losses, name
        check_same(name, model, alone)
        report = str(offload.report(optimizer))
        assert f"rank {rank} of 2, stage 3" in report and "gathered" in report
        optimizer.close()


def experts_as_layers(rank: int, directory: str) -> None:
    """Train layers of which each rank runs different ones: they must be gathered together."""
    plain, model = seeded(Experts), seeded(Experts)
    losses = train(in_ddp(plain), adamw(plain), rank, FEW_STEPS)
    model, optimizer = offload.prepare(model, adamw(model), units=[Experts])
    assert train(model, optimizer, rank, FEW_STEPS) == losses
    check_same("experts", model, plain)
    optimizer.close()


def evaluated(rank: int, directory: str) -> None:
    plain, model = seeded(Gpt), offload.prepare(seeded(Gpt))
    with torch.no_grad():
        for number in range(3):
            assert torch.equal(model(tokens(rank, number)), plain(tokens(rank, number)))
    refused(ConfigError, "prepared already", lambda: offload.prepare(model))
    offload.close(model)
    check_same("evaluated", model, plain)


def interrupted(rank: int, directory: str) -> None:
    """End passes with an exception, on all ranks, and train after that."""
    plain, model = seeded(Gpt), seeded(Gpt)
    model, optimizer = offload.prepare(model, adamw(model))

    def fail(*_: object) -> None:
        raise KeyError("here")

    handle = model.layers[2].register_forward_hook(fail)
    refused(KeyError, "here", lambda: model(tokens(rank, 0)))
    handle.remove()
    out = model(tokens(rank, 0))
    handle = model.layers[1].output.weight.register_hook(fail)
    refused(KeyError, "here", out.sum().backward)
    handle.remove()
    optimizer.zero_grad()
    losses = train(in_ddp(plain), adamw(plain), rank, 4)
    assert train(model, optimizer, rank, 4) == losses
    optimizer.close()


def follow(
    model: Any, optimizer: torch.optim.Optimizer, rank: int, schedule: list[list[str]]
) -> list[float]:
    """Run the passes that were drawn for each step: passes that are reduced later, forward passes
    without gradients; return the losses.
    """
    losses, number = [], 0
    for step in schedule:
        for act in step:
            batch, number = tokens(rank, number), number + 1
            if act == "look":
                with torch.no_grad():
                    losses.append(loss_of(model, batch).item())
                continue
            with model.no_sync() if act == "later" else nullcontext():
                loss = loss_of(model, batch)
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def drawn(rank: int, directory: str) -> None:
    """Draw budget, depth and order of passes: the bits are always the same."""
    draw = random.Random(SEED)
    for _ in range(DRAWS):
        name = draw.choice(list(MODELS))
        make, make_plain = MODELS[name]
        schedule = [
            [*draw.choices(["look", "later"], k=draw.randrange(3)), "now"] for _ in range(3)
        ]
        plain, model = seeded(make_plain), seeded(make)
        losses = follow(in_ddp(plain), adamw(plain), rank, schedule)
        depth, widths = draw.randrange(4), draw.choice([1.0, 1.2, 2.0])
        room = 4 * sum(p.nbytes for p in model.parameters())  # for whole gradients of no_sync
        nbytes = int(widths * budget_for(model, directory, depth)) + room
        model, optimizer = offload.prepare(
            model, adamw(model), host_memory=nbytes, nvme=directory, prefetch_depth=depth
        )
        case = (name, schedule, depth, widths)
        assert follow(model, optimizer, rank, schedule) == losses, case
        check_same(str(case), model, plain)
        optimizer.close()


# --- when ranks part ways -------------------------------------------------------------------------


def quick(model: nn.Module, **fields: Any) -> Any:
    """Prepare the model with a deadline that a test can wait for."""
    found = offload.prepare(model, adamw(model), **fields)
    ranks = made_of(model).ranks
    assert ranks is not None
    ranks.deadline_s = 5.0
    return found


def differing(rank: int, directory: str) -> None:
    model, optimizer = quick(seeded(Gpt))
    loss_of(model, tokens(rank, 0)).backward()
    optimizer.param_groups[0]["lr"] = 0.1 + rank
    refused(StateError, "hyper-parameters", optimizer.step)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    if rank:
        optimizer.param_groups[0]["betas"] = (0.5, "none")
        refused(Exception, "", optimizer.step)
    else:
        refused(StateError, "rank 1|hyper-parameters", optimizer.step)
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.zero_grad()
    train(model, optimizer, rank, 1)
    # A unit that runs on one rank only.
    refused(StateError, "out of step", lambda: model.layers[2 + rank](torch.zeros(1, 2, WIDTH)))
    refused(StateError, "earlier error", lambda: model(tokens(rank, 0)))
    optimizer.close()
    refused(StateError, "not in memory", lambda: model.head.weight.sum())


def left_alone(rank: int) -> None:
    model, optimizer = quick(seeded(Gpt))
    train(model, optimizer, rank, 1)
    if rank:
        raise KeyError("this rank ends")
    with pytest.raises(StateError):
        for step in range(3):
            loss_of(model, tokens(rank, step)).backward()
    optimizer.close()


def from_weights(rank: int, directory: str) -> None:
    from safetensors.torch import save_file

    torch.manual_seed(SEED)
    plain = Lora()
    file = Path(directory) / "model.safetensors"
    if rank == 0:
        save_file({n: v for n, v in plain.state_dict().items() if n != "head.weight"}, file)
    dist.barrier()
    torch.manual_seed(rank)  # what is in memory does not matter
    model = Lora()
    with torch.device("meta"):
        empty = Lora()
    for start in (model, empty):
        start, optimizer = offload.prepare(start, adamw(start), weights=file)
        reference = copy.deepcopy(plain)
        losses = train(in_ddp(reference), adamw(reference), rank, 3)
        assert train(start, optimizer, rank, 3) == losses
        check_same("weights", start, reference)
        read = offload.report(optimizer).counts["original_read_bytes"]
        assert read < 8 * file.stat().st_size  # slices: half of it for each pass
        optimizer.close()


# --- all of them ----------------------------------------------------------------------------------

Case = Callable[[int, str], None]

OF_TWO: dict[str, Case] = {
    "models train as with DDP": all_models,
    "accumulation and clipping are those of DDP": all_ways,
    "slices, gradients and state may be on disk": on_disk,
    "each rank has half, and sends what theory says": counted,
    "frozen parameters send no gradients": frozen,
    "gradients are seen as whole tensors": gradients_seen,
    "gradients that are held hold no memory": gradients_held,
    "gradients of no_sync must be reduced": not_reduced,
    "max_grad_norm is over all ranks": clipped_inside,
    "a GradScaler is refused": scaled,
    "parameters are whole inside of resident": exposed,
    "optimizer state is whole for others": states,
    "a start is the same on all ranks, or none": beginnings,
    "a start that fails on one rank changes nothing": failed_start,
    "weights are read in slices": from_weights,
    "other types, optimizers and settings": other_kinds,
    "layers that run on some ranks only, in one unit": experts_as_layers,
    "evaluation": evaluated,
    "passes that end with an exception": interrupted,
    "any budget, depth and order of passes": drawn,
    "ranks that do other things are told": differing,
}
OF_FOUR: dict[str, Case] = {
    "four ranks add in their order": four,
    "each rank has a quarter, and sends what theory says": counted,
}


def run_cases(rank: int, count: int, names: list[str], directory: str) -> dict[str, str | None]:
    """Run the cases; return the traceback of each, or None. Those behind the first that raises are
    left out.
    """
    found: dict[str, str | None] = {}
    for name in names:
        case = (OF_TWO if count == 2 else OF_FOUR)[name]
        folder = Path(directory) / name
        folder.mkdir(exist_ok=True)
        try:
            case(rank, str(folder))
            found[name] = None
        except BaseException:
            found[name] = traceback.format_exc()
            break
    return found


def run_those_of(request: pytest.FixtureRequest, count: int) -> list[dict[str, str | None]]:
    """Run the cases of the tests that ask for this fixture."""
    fixture = str(request.fixturename)
    asking = [
        item
        for item in request.session.items
        if item.path == request.path and fixture in getattr(item, "fixturenames", ())
    ]
    names = [item.callspec.params["name"] for item in asking]  # type: ignore[attr-defined]
    folder = request.getfixturevalue("tmp_path_factory").mktemp(fixture)
    deadline_s = chosen(test=240, torture=2000)
    return run(count, run_cases, count, names, str(folder), deadline_s=deadline_s)


@pytest.fixture(scope="module")
def two(request: pytest.FixtureRequest) -> list[dict[str, str | None]]:
    return run_those_of(request, 2)


@pytest.fixture(scope="module")
def fours(request: pytest.FixtureRequest) -> list[dict[str, str | None]]:
    return run_those_of(request, 4)


def check(name: str, found: list[dict[str, str | None]]) -> None:
    for rank, one in enumerate(found):
        assert name in one, f"rank {rank} has not come that far: {list(one)[-1]} failed"
        assert one[name] is None, f"rank {rank}:\n{one[name]}"


QUICK = {"slices, gradients and state may be on disk"}
ALL_OF_TWO = [pytest.param(n, marks=[pytest.mark.quick] if n in QUICK else []) for n in OF_TWO]


@pytest.mark.timeout(chosen(test=300, torture=2100))
@pytest.mark.parametrize("name", ALL_OF_TWO)
def test_two_ranks(name: str, two: list[dict[str, str | None]]) -> None:
    check(name, two)


@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks(name: str, fours: list[dict[str, str | None]]) -> None:
    check(name, fours)


def test_a_rank_that_dies_leaves_no_other_waiting() -> None:
    first, second = outcomes(2, left_alone, deadline_s=40)
    assert first.error is None and first.exit_code == 0, first.error
    assert second.error is not None and "this rank ends" in second.error
