"""FSDP2 models for tests, and comparisons of their runs. Runs in the processes of the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn import functional

import offload
from support.loops import chosen
from support.models import Layer

WORDS, WIDTH = 1001, 96  # no number of ranks divides it evenly
LEAST_BYTES = 400 << 10  # a budget of host memory with which most of the state is on the drive


class Model(nn.Module):
    """A GPT with tied embeddings, and awkward parameters: with fewer rows than ranks, frozen, and
    unused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(WIDTH) for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(3, 5)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        x = x + self.frozen(x)
        return self.head(self.norm(x) * torch.sigmoid(self.gate(x)))


@dataclass(frozen=True)
class Case:
    """One way to train."""

    name: str
    shard: dict[str, Any] = field(default_factory=dict)  # for `fully_shard`
    dtype: torch.dtype = torch.float32
    clip: bool = False
    passes: int = 1  # before a step
    columns: bool = False  # matrices are cut by columns
    copies: bool = False  # two replicas of two ranks (HSDP)
    parallel: bool = False  # tensor parallel: two ranks share each matrix of the MLPs
    all_used: bool = False  # of those that are trained
    turns: int = chosen(test=3, torture=5)
    fields: tuple[dict[str, Any], ...] = ({},)  # for `wrap`, one run each

    def build(self) -> nn.Module:
        torch.manual_seed(1)
        model = Model().to(self.dtype)
        model.unused.requires_grad_(not self.all_used)
        return self.shard_all(model)

    def shard_all(self, model: nn.Module) -> nn.Module:
        settings = dict(self.shard)
        if self.copies:
            settings["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copy", "shard"))
        if self.parallel:
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
            for layer in model.layers:
                halves = {"up": ColwiseParallel(), "down": RowwiseParallel()}
                parallelize_module(layer, mesh["tensor"], halves)
            settings["mesh"] = mesh["shard"]
        if self.columns:
            settings["shard_placement_fn"] = _by_columns
        for layer in model.layers:
            fully_shard(layer, **settings)
        return fully_shard(model, **settings)


def _by_columns(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.dim() == 2 and param.shape[1] % 4 == 0 else None


def cases(count: int) -> list[Case]:
    disk = {"host_memory": LEAST_BYTES}
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offloaded = CPUOffloadPolicy(pin_memory=False)
    found = [
        Case("plain", fields=({}, disk), turns=chosen(test=5, torture=20)),
        Case("clipped", clip=True, fields=({**disk, "self_check": 3},)),
        Case("passes", {"reshard_after_forward": False}, passes=3),
        Case("offloaded", {"offload_policy": offloaded, "mp_policy": mixed}),
        Case("columns", columns=True, clip=True),
    ]
    if count == 4:
        found = [
            found[0],
            Case("copies", copies=True, clip=True, fields=(disk,)),
            Case("parallel", parallel=True, fields=({"max_grad_norm": 1e9},)),  # never reached
        ]
    return found


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, with settings of their own; the frozen parameters are in both."""
    params = list(model.parameters())
    matrices = [p for p in params if p.dim() == 2]
    rest = [p for p in params if p.dim() != 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]


def adamw(model: nn.Module, **settings: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(groups(model), **{"lr": 1e-2, "fused": True, **settings})


def batch(rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + turn)
    return torch.randint(0, WORDS, (2, 9), generator=generator)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module, optimizer: Any, rank: int, case: Case, turns: Sequence[int] | None = None
) -> list[float]:
    """Train, and return the loss of each pass."""
    losses = []
    for turn in range(case.turns) if turns is None else turns:
        for index in range(case.passes):
            if case.passes > 1:
                model.set_requires_gradient_sync(index == case.passes - 1)
            # Ranks that share the matrices of one model get the same batch.
            tokens = batch(rank // 2 if case.parallel else rank, turn * 10 + index)
            loss = loss_of(model, tokens)
            loss.backward()
            losses.append(loss.item())
        if case.clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same(got: Any, expected: Any, what: str) -> None:
    """Compare two tensors; DTensors must be placed alike and have equal shards on this rank."""
    assert type(got) is type(expected), (what, type(got), type(expected))
    if isinstance(expected, DTensor):
        assert got._spec == expected._spec, (what, got._spec, expected._spec)
        got, expected = got.to_local(), expected.to_local()
    assert got.dtype == expected.dtype and got.shape == expected.shape, what
    assert torch.equal(got, expected), what


def assert_same_run(got: tuple[nn.Module, Any], expected: tuple[nn.Module, Any]) -> None:
    """Compare the parameters and the states of two models and their optimizers."""
    with torch.no_grad():
        for (name, param), other in zip(
            got[0].named_parameters(), expected[0].parameters(), strict=True
        ):
            assert_same(param, other, name)
        ours, theirs = (optimizer.state_dict() for _, optimizer in (got, expected))
        assert listed(ours["param_groups"]) == listed(theirs["param_groups"])
        assert ours["state"].keys() == theirs["state"].keys()
        for number, state in theirs["state"].items():
            assert ours["state"][number].keys() == state.keys()
            for name, value in state.items():
                assert_same(ours["state"][number][name], value, f"{name} of {number}")


def listed(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make lists of tuples, as torch does when it passes a state_dict between ranks."""
    return [
        {key: list(value) if isinstance(value, tuple) else value for key, value in group.items()}
        for group in groups
    ]


def whole_state(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """Gather the state of the model and the optimizer as plain tensors, the same on all ranks."""
    options = StateDictOptions(full_state_dict=True)
    parts = get_state_dict(model, optimizer, options=options)
    found = {f"model.{name}": value for name, value in parts[0].items()}
    for name, state in parts[1]["state"].items():
        found |= {f"{name}.{key}": value for key, value in state.items()}
    return {name: value.clone() for name, value in found.items()}


def refused(function: Callable[[], object], kind: type[Exception]) -> str:
    """Return the text of the error that the function raises."""
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"expected {kind.__name__}")


def wrap(optimizer: Any, folder: str, **fields: Any) -> Any:
    """Wrap an optimizer; if `host_memory` is given, with some of its state on the drive."""
    if "host_memory" not in fields:
        return offload.wrap(optimizer, **fields)
    directory = Path(folder)
    wrapped = offload.wrap(optimizer, nvme=directory, **fields)
    assert offload.report(wrapped).plan.disk_bytes > 0
    return wrapped
