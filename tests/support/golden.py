"""The contents of the golden checkpoints, made by formulas: every machine knows every value."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import offload

GOLDEN = Path(__file__).parent.with_name("golden")
SEED = 5
LR = 0.03125


class Model(nn.Module):
    """A model with two dtypes, tied weights, a frozen parameter, and buffers of other types, one of
    them without elements.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.inner = nn.Linear(5, 5).to(torch.bfloat16)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(11, dtype=torch.bool))
        self.register_buffer("none", torch.zeros(0, 4))


def values(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Make the values of a tensor by its name: numbers with few bits, exact in each type."""
    begin = sum(name.encode()) % 31
    numel = math.prod(shape)
    numbers = (torch.arange(numel) * 7 + begin) % 61 - 30
    if dtype.is_floating_point:
        found = numbers.to(torch.float64) / 8
        if name.endswith(("exp_avg_sq", "max_exp_avg_sq")):
            found = found.abs()
        return found.to(dtype).view(shape)
    return (numbers % 2 == 0).view(shape) if dtype == torch.bool else numbers.to(dtype).view(shape)


def fields(model: nn.Module) -> dict[int, dict[str, Tensor]]:
    """Make the optimizer's state; masters have bits that their parameters do not."""
    found: dict[int, dict[str, Tensor]] = {}
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    for number, (name, param) in enumerate(trained):
        shape = tuple(param.shape)
        state = {
            field: values(f"{name}/{field}", shape, torch.float32)
            for field in ("exp_avg", "exp_avg_sq")
        }
        state["step"] = torch.tensor(float(number + 3))
        if param.dtype == torch.bfloat16:
            state["master"] = values(name, shape, torch.float32) * (1 + 2.0**-12)
        found[number] = state
    return found


def extra() -> dict[str, Any]:
    """Make a value for `extra` of every kind that a checkpoint can hold."""
    return {
        "none": None,
        "truth": [True, False],
        "numbers": (0, -1, 2**70, 0.1, -0.0, float("inf"), float("-inf"), float("nan")),
        "text": "größer als \u2192 \U0001f600 \x00",
        "bytes": bytes(range(256)),
        "keys": {1: "int", 2.5: "float", False: "bool", "s": {}},
        "empty": [[], (), {}, ""],
        "tensors": {
            str(dtype): values(str(dtype), (2, 3), dtype)
            for dtype in (torch.float64, torch.float16, torch.uint8, torch.int16, torch.bool)
        },
    }


def build() -> tuple[Model, Any, Any]:
    """Build the model, an optimizer with two groups, and a scheduler: all without values yet."""
    torch.manual_seed(0)
    model = Model()
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.25}]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.75, 0.9375), fused=True)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def fill(model: Model, optimizer: Any, scheduler: Any) -> None:
    """Give everything its value. The optimizer must be wrapped: a plain one has no masters."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            name = name.replace("head.weight", "embedding.weight")
            tensor.data.copy_(values(name, tuple(tensor.shape), tensor.dtype))
    state = optimizer.state_dict()
    state["state"] = fields(model)
    for group in state["param_groups"]:
        group["lr"] = LR
    optimizer.load_state_dict(state)
    scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 9, "_last_lr": [LR, LR]})
    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


def draws() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def make(path: Path) -> None:
    model, optimizer, scheduler = build()
    offload.wrap(optimizer, host_memory="1MiB")
    fill(model, optimizer, scheduler)
    offload.save(path, model, optimizer, scheduler=scheduler, extra=extra())
    optimizer.close()
