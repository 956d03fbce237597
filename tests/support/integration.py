"""A small random Llama, batches from a seed, and runs to compare, for
`tests/integrations/third_party`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

import offload

VOCABULARY, LENGTH = 256, 12


def llama(layers: int = 2) -> Any:
    """Build the model, always the same one: some 110,000 parameters, an AdamW state of 850 KiB."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attention_dropout=0.1,  # a resumed run gets it wrong without the generator's state
        use_cache=False,
    )
    torch.manual_seed(3)
    return LlamaForCausalLM(config)


def texts(count: int) -> list[dict[str, Tensor]]:
    """Draw random words, as the items of a data set for causal language models."""
    generator = torch.Generator().manual_seed(11)
    words = torch.randint(0, VOCABULARY, (count, LENGTH), generator=generator)
    return [{"input_ids": row, "labels": row} for row in words]


def batch(number: int, size: int = 2) -> dict[str, Tensor]:
    items = texts((number + 1) * size)[-size:]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def tight(optimizer: Optimizer, directory: Path) -> dict[str, Any]:
    """Return a budget of three buffers: nearly all of the state is on the drive."""
    largest = max((chunk.nbytes for chunk in offload.plan(optimizer).chunks), default=4096)
    return {"host_memory": 3 * largest, "nvme": directory}


def adamw(params: Iterable[Any], directory: Path | None, **settings: Any) -> Any:
    """Make a plain AdamW (directory: None), or one that is wrapped, with its state on the drive."""
    optimizer = AdamW(params, **{"lr": 1e-2, "weight_decay": 0.1, "fused": True, **settings})
    if directory is None:
        return optimizer
    wrapped = offload.wrap(optimizer, **tight(optimizer, directory))
    plan = offload.report(wrapped).plan
    assert plan.disk_bytes > plan.host_memory_bytes, "the state was to be larger than the budget"
    return wrapped


def moved_bytes(optimizer: Any) -> int:
    """Return the bytes that a wrapped optimizer has moved to and from the drive so far."""
    told = offload.report(optimizer)
    return int(told.disk_read_bytes + told.disk_written_bytes)
