"""Fine-tune a Llama with LoRA, most of its frozen weights on disk.

Frozen weights have neither gradients nor optimizer state: host memory needs room for a layer or two
and the adapters. This Llama is small and random; `LlamaForCausalLM.from_pretrained(...)` takes its
place.

    python examples/llama_lora.py [steps]
"""

from __future__ import annotations

import sys

import torch
from peft import LoraConfig, get_peft_model
from telling import NVME, tell
from transformers import LlamaConfig, LlamaForCausalLM

import offload

VOCABULARY, LENGTH = 1024, 32


def make_model() -> torch.nn.Module:
    llama = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=8,
            num_attention_heads=6,
            num_key_value_heads=6,
            use_cache=False,
        )
    )
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj", "lm_head"], task_type="CAUSAL_LM")
    return get_peft_model(llama, lora)


def sentences(count: int) -> torch.Tensor:
    """Make sentences that count upwards from a random word: easy to learn."""
    starts = torch.randint(VOCABULARY // 8, (count, 1))
    return starts + torch.arange(LENGTH)


def main(steps: int = 30) -> None:
    torch.manual_seed(0)
    model = make_model()
    adapters = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3, fused=True)
    model, optimizer = offload.prepare(model, optimizer, host_memory="24MiB", nvme=NVME)

    losses = []
    for _ in range(steps):
        batch = sentences(8)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    tell(model, losses)
    print(f"trained: {sum(param.numel() for param in adapters) / 1e6:.2f} M parameters")
    offload.close(model)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
