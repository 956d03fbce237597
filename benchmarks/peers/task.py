"""What every contestant trains: a GPT of 168 M parameters, on a few random tokens a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from gpt import GPT
from torch import Tensor

HYPER = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_NORM = 1.0


@dataclass
class Task:
    dtype: str = "bfloat16"
    tokens: int = 128
    layers: int = 12
    width: int = 1024
    heads: int = 16
    vocabulary: int = 16384
    seed: int = 20261116
    is_one_batch: bool = False  # every step sees the same tokens, and learns them
    is_meta: bool = False  # `prepare` fills it, so that it never is in memory as a whole

    def __post_init__(self) -> None:
        self.numel = 0

    def make_model(self) -> GPT:
        """Make the model in its dtype from the start, so that no contestant's peak of memory is an
        fp32 model.
        """
        torch.manual_seed(self.seed)
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, self.dtype))
        try:
            with torch.device("meta" if self.is_meta else "cpu"):
                model = GPT(self.layers, self.width, self.heads, self.tokens, self.vocabulary)
        finally:
            torch.set_default_dtype(before)
        self.numel = sum(param.numel() for param in model.parameters())
        return model

    def batches(self) -> Iterator[Tensor]:
        """Yield batches of one sequence each; the same for every contestant."""
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            if self.is_one_batch:
                generator.manual_seed(self.seed)
            yield torch.randint(self.vocabulary, (1, self.tokens + 1), generator=generator)

    def run_without_optimizer(self, model: GPT) -> None:
        """Run forward and backward twice, so that the memory that any training takes is taken."""
        for _, batch in zip(range(2), self.batches(), strict=False):
            model.loss(batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            model.zero_grad()
