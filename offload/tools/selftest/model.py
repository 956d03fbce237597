"""A small GPT, its batches, a training loop as users write it, which records its results, and the
least budget in which it can be trained.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from offload.api import plan, wrap
from offload.core.errors import CapacityError
from offload.tools.selftest.bits import without_promise
from offload.tools.selftest.check import Setting

WORDS, WIDTH, LAYERS = 256, 96, 4
BATCH, LENGTH = 2, 16
DROPOUT = 0.1
_PAGE_BYTES, _MOST_PAGES = 4096, 1 << 22


class GPTLayer(nn.Module):
    """A transformer layer. again: `use_reentrant` of the checkpoint that recomputes attention;
    None: attention is not recomputed.
    """

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.inputs, self.output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.again = again

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = self.inputs(self.norm1(x)).chunk(3, dim=-1)
        mixed = torch.softmax(query @ key.transpose(-1, -2) / WIDTH**0.5, dim=-1) @ value
        return functional.dropout(self.output(mixed), DROPOUT, self.training)

    def forward(self, x: Tensor) -> Tensor:
        x = x + _run(self.attend, x, self.again)
        x = x + self.down(functional.gelu(self.up(self.norm2(x))))
        return x


def _run(part: Callable[[Tensor], Tensor], x: Tensor, again: bool | None) -> Tensor:
    """Run a part of a model, in a checkpoint unless `again` is None."""
    if again is None or not torch.is_grad_enabled():
        return part(x)
    out: Tensor = checkpoint(part, x, use_reentrant=again)
    return out


class Gpt(nn.Module):
    """A GPT with tied embeddings. inside, around: `use_reentrant` of the checkpoints within layers
    and of whole layers; None: no such checkpoints.
    """

    def __init__(self, inside: bool | None = None, around: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(GPTLayer(inside) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.around = around

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = _run(layer, x, self.around)
        logits: Tensor = self.head(self.norm(x))
        return logits


def make_model(
    seed: int,
    dtype: torch.dtype = torch.float32,
    inside: bool | None = None,
    around: bool | None = None,
) -> Gpt:
    """Make a model on the CPU, the same for the same seed. Seeds torch's default generators."""
    torch.manual_seed(seed)
    return Gpt(inside, around).to(dtype)


def make_optimizer(model: nn.Module) -> Any:
    return adamw(model.parameters())


def adamw(params: Iterable[Tensor]) -> Any:
    return native(torch.optim.AdamW, params, lr=1e-2, weight_decay=0.1)


def native(kind: Callable[..., Any], params: Iterable[Tensor], **options: Any) -> Any:
    """Make an optimizer that has a fused update on the CPU, where that is the reference; elsewhere
    torch may have none, and ours needs none.
    """
    given = list(params)
    return kind(given, fused=True if all(param.is_cpu for param in given) else None, **options)


def make_batch(number: int, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, WORDS, (BATCH, LENGTH), generator=generator, device="cpu").to(device)


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    model: nn.Module,
    optimizer: Any,
    setting: Setting,
    steps: int,
    look: Callable[[], None] = lambda: None,
) -> list[Any]:
    """Train for some steps of one or two batches each; return the losses, norms, gradients and
    evaluations. look: is called between forward and backward, and after backward.
    """
    seen: list[Any] = []
    for step in range(steps):
        torch.manual_seed(setting.seed + step)  # for dropout
        for micro in range(1 + step % 2):
            loss = loss_of(model, make_batch(10 * step + micro, setting.device))
            look()
            loss.backward()  # type: ignore[no-untyped-call]
            look()
            seen.append(loss.detach().cpu())
        if setting.is_on_cpu:  # elsewhere host and device add in different orders
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=False))
        seen += [None if p.grad is None else p.grad.cpu().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            seen.append(model(make_batch(step, setting.device)).cpu())
        model.train()
    return seen


def train_plain(model: nn.Module, setting: Setting, steps: int) -> tuple[list[Any], list[Tensor]]:
    """Train the plain model on the device; return what `train` returns, and the final values.

    The update is torch's own on the CPU, where it has the bits of ours. Elsewhere, and for 16-bit
    parameters, whose exact master weights torch does not keep, it is ours with all state in memory.
    """
    model = model.to(setting.device)
    optimizer = make_optimizer(model)
    is_full = all(param.dtype == torch.float32 for param in model.parameters())
    if not setting.is_on_cpu or without_promise() is not None or not is_full:
        optimizer = wrap(optimizer)
    seen = train(model, optimizer, setting, steps)
    if hasattr(optimizer, "close"):
        optimizer.close()
    return seen, [value.cpu() for value in model.state_dict().values()]


def least_bytes(*subject: Any, **options: Any) -> int:
    """Return the least host memory, in whole pages, for which there is a plan of the subject with
    these options. A plan allocates nothing.
    """

    def fits(pages: int) -> bool:
        try:
            plan(*subject, host_memory=pages * _PAGE_BYTES, **options)
        except CapacityError:
            return False
        return True

    pages = range(1, _MOST_PAGES)
    return (1 + bisect_left(pages, True, key=fits)) * _PAGE_BYTES
