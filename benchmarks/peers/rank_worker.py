"""One rank of a contestant: rank_worker.py KIND OPTIONS, with torchrun's variables. Trains a few
steps and prints one line of JSON about each of them and about memory.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from task import HYPER, MAX_NORM, Task
from torch import Tensor, nn
from worker import memory_bytes


def received_bytes() -> int:
    """Return the bytes received over all connections of this process so far, as the kernel counts
    them.
    """
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # gone by now
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found += _received_by(int(name))
    return found


def _received_by(number: int) -> int:
    with socket.socket(fileno=os.dup(number)) as one:
        if one.family not in (socket.AF_INET, socket.AF_INET6) or one.type != socket.SOCK_STREAM:
            return 0
        info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        return int.from_bytes(info[128:136], "little")  # tcpi_bytes_received


class WithLoss(nn.Module):
    """A model whose output is its loss: wrappers such as DDP hook into calls of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        return self.model.loss(batch)  # type: ignore[operator,no-any-return]


class Loop:
    """A training loop with torch's DDP, with `fully_shard`, or with our stages; the same lines for
    all.
    """

    def __init__(self, kind: str, model: nn.Module, options: dict[str, Any]) -> None:
        outside: nn.Module = WithLoss(model)
        if kind.startswith("fsdp"):
            from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

            for layer in [*model.blocks, model]:  # type: ignore[misc]
                fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=False))
        self.params = list(model.parameters())
        self.optimizer: Any = torch.optim.AdamW(self.params, fused=True, **HYPER)
        if kind in ("ddp", "stage 1"):
            outside = nn.parallel.DistributedDataParallel(outside)
        if kind not in ("ddp", "fsdp"):
            import offload

            options = {**options, "max_grad_norm": MAX_NORM}
            if kind == "stage 3":
                offload.prepare(model, self.optimizer, **options)
            else:
                offload.wrap(self.optimizer, release_grads=kind == "stage 2", **options)
        self.is_plain = kind in ("ddp", "fsdp")
        self.outside = outside

    def train(self, batch: Tensor) -> float:
        loss = self.outside(batch)
        loss.backward()
        if self.is_plain:
            nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state_bytes(self) -> int:
        if not self.is_plain:
            import offload

            return int(offload.report(self.optimizer).plan.state_bytes)
        tensors = [t for s in self.optimizer.state.values() for t in s.values() if t.dim()]
        return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors)


class DeepSpeed:
    def __init__(self, kind: str, model: nn.Module, options: dict[str, Any]) -> None:
        import deepspeed

        deepspeed.init_distributed(dist_backend="gloo")
        zero = {"stage": int(kind.split()[-1]), "offload_optimizer": {"device": "cpu"}}
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": MAX_NORM,
            "optimizer": {"type": "AdamW", "params": {**HYPER, "betas": list(HYPER["betas"])}},
            "zero_optimization": zero,
        }
        self.engine, *_ = deepspeed.initialize(
            model=WithLoss(model), model_parameters=model.parameters(), config=config
        )

    def train(self, batch: Tensor) -> float:
        loss = self.engine(batch)
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.detach())

    def state_bytes(self) -> int | None:
        return None


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    kind, options = sys.argv[1], json.loads(sys.argv[2])
    steps = options.pop("steps")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    task = Task(**options.pop("task"))
    model = task.make_model()
    make: Any = DeepSpeed if kind.startswith("deepspeed") else Loop
    trainer = make(kind, model, options)
    batches = task.batches()
    for _ in range(dist.get_rank()):
        next(batches)  # every rank has its own
    found = []
    for step in range(steps):
        before, begin = received_bytes(), time.perf_counter()
        loss = trainer.train(next(batches))
        whole_s = time.perf_counter() - begin
        found.append({"s": whole_s, "received": received_bytes() - before, "loss": loss})
        if step == 0:
            dist.barrier()
    facts = {"memory": memory_bytes(), "state": trainer.state_bytes(), "numel": task.numel}
    print(json.dumps({"steps": found, **facts}), file=answers, flush=True)
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
