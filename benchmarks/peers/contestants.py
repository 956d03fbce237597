"""The contestants: plain torch, a wrapped optimizer, a prepared model, DeepSpeed's engine. Each
trains as its users would.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from task import HYPER, MAX_NORM, Task
from torch import Tensor, nn


class Trainer(Protocol):
    def train(self, batch: Tensor) -> tuple[float, float]:
        """Train one whole step; return its loss, and the seconds of the optimizer's part."""

    def last_step(self) -> dict[str, Any]:
        """Return the contestant's own statistics of the last step."""

    def facts(self) -> dict[str, Any]:
        """Return the contestant's facts about itself; sizes in bytes."""

    def close(self) -> None: ...


class Torch:
    """A contestant: `torch.optim.AdamW(fused=True)` in memory. For bf16 parameters its state is
    bf16, too: torch has no fp32 master, so it moves half the bytes that the others do and learns
    less from them.
    """

    def __init__(self, task: Task, model: nn.Module) -> None:
        self.model = model
        self.optimizer: Any = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def train(self, batch: Tensor) -> tuple[float, float]:
        loss = self.model.loss(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
        begin = time.perf_counter()
        self.optimizer.step()
        optimizer_s = time.perf_counter() - begin
        self.optimizer.zero_grad()
        return loss.item(), optimizer_s

    def last_step(self) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        return None


class Ours(Torch):
    """The same loop and optimizer, after `offload.wrap`."""

    def __init__(self, task: Task, model: nn.Module, **fields: Any) -> None:
        super().__init__(task, model)
        import offload

        self.report: Callable[[Any], Any] = offload.report
        offload.wrap(self.optimizer, **fields)

    def last_step(self) -> dict[str, Any]:
        return {"seconds": self.report(self.optimizer).last.seconds}

    def facts(self) -> dict[str, Any]:
        told = self.report(self.optimizer)
        plan = told.plan
        return {
            "planned_read": plan.step_read_bytes,
            "planned_written": plan.step_written_bytes,
            "arena": plan.arena_bytes,
            "budget": plan.host_memory_bytes,
            "pool_peak": told.host_peak_bytes,
            "fallbacks": told.fallbacks,
        }

    def close(self) -> None:
        self.optimizer.close()


class Prepared(Torch):
    """The same loop, model and optimizer, after `offload.prepare`."""

    def __init__(self, task: Task, model: nn.Module, **fields: Any) -> None:
        super().__init__(task, model)
        import offload

        self.report: Callable[[Any], Any] = offload.report
        offload.prepare(model, self.optimizer, **fields)
        self.before: dict[str, dict[str, Any]] = {"seconds": {}, "counts": {}}

    def last_step(self) -> dict[str, Any]:
        """Return the seconds of the update by cause, and those that forward and backward waited."""
        told = self.report(self.model)
        waits = {"forward and backward, " + name: s for name, s in told.outside.items()}
        now = {"seconds": {**waits, **told.total.seconds}, "counts": dict(told.counts)}
        before, self.before = self.before, now
        return {
            what: {name: n - before[what].get(name, 0) for name, n in numbers.items()}
            for what, numbers in now.items()
        }

    def facts(self) -> dict[str, Any]:
        told = self.report(self.model)
        return {
            "shares": told.model.shares.parts,
            "pool_peak": told.host_peak_bytes,
            "on_disk": told.model.disk_bytes,
        }

    def close(self) -> None:
        """Do nothing: the process ends, so that the model need not be brought back into memory."""


class WithLoss(nn.Module):
    """A model whose output is its loss, as an engine wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model.loss(batch)  # type: ignore[operator,no-any-return]


class DeepSpeed:
    """A contestant: ZeRO-3 on one rank with `DeepSpeedCPUAdam`, as its documents ask: the engine
    takes over backward, clipping and the step. Parts of the configuration that are not given are
    its defaults.
    """

    def __init__(
        self, task: Task, model: nn.Module, optimizer: dict[str, Any], **rest: Any
    ) -> None:
        os.environ["LOCAL_RANK"] = "0"
        import deepspeed

        store = torch.distributed.HashStore()  # one rank: no address, no port
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        deepspeed.init_distributed(dist_backend="gloo")
        zero = {"stage": 3, "offload_optimizer": optimizer, **rest.pop("zero", {})}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": task.dtype == "bfloat16"},
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": "AdamW", "params": {**HYPER, "betas": list(HYPER["betas"])}},
            "zero_optimization": zero,
            **rest,
        }
        self.engine, *_ = deepspeed.initialize(
            model=WithLoss(model), model_parameters=model.parameters(), config=config
        )

    def train(self, batch: Tensor) -> tuple[float, float]:
        loss = self.engine(batch)
        self.engine.backward(loss)
        begin = time.perf_counter()
        self.engine.step()
        return loss.item(), time.perf_counter() - begin

    def last_step(self) -> dict[str, Any]:
        return {}

    def facts(self) -> dict[str, Any]:
        import deepspeed

        return {"version": deepspeed.__version__}

    def close(self) -> None:
        torch.distributed.destroy_process_group()


KINDS: dict[str, Callable[..., Trainer]] = {
    "torch": Torch,
    "offload": Ours,
    "prepared": Prepared,
    "deepspeed": DeepSpeed,
}
