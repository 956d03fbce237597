"""Hugging Face's `Trainer` with a prepared model: prepare it, then hand it over as ever.

The trainer clips, schedules, logs and saves; it does not notice that most of the model is on disk.

    python examples/llama_trainer.py [steps]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from telling import NVME, tell
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import offload

VOCABULARY, LENGTH = 1024, 32


class Counting(torch.utils.data.Dataset):
    """A dataset of sentences that count upwards from a random word."""

    def __init__(self, size: int) -> None:
        self.starts = torch.randint(VOCABULARY // 8, (size,)).tolist()

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words = self.starts[index] + torch.arange(LENGTH)
        return {"input_ids": words, "labels": words}


def main(steps: int = 20) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    model, optimizer = offload.prepare(model, optimizer, host_memory="48MiB", nvme=NVME)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            logging_steps=1,
            save_steps=steps,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = Trainer(
            model, arguments, train_dataset=Counting(512), optimizers=(optimizer, None)
        )
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        tell(model, losses)
        offload.close(model)

        saved = LlamaForCausalLM.from_pretrained(f"{folder}/checkpoint-{steps}")
        same = all(map(torch.equal, saved.state_dict().values(), model.state_dict().values()))
        print(f"the checkpoint has the model's values: {same}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
