"""`offload.TrainerCallback`: the Trainer's checkpoints are ours, and resume to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_model, assert_same_state
from support.integration import adamw, llama, texts
from torch import Tensor

import offload
from offload.checkpoint.format.verify import verify
from offload.core.errors import ConfigError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS, SAVE_AT = 6, 3


class Run:
    """A `Trainer` on a small Llama, and its losses. kind: wrap, prepare, or plain."""

    def __init__(self, directory: Path, kind: str, swap: Path, **settings: Any) -> None:
        self.model = llama()
        self.optimizer = adamw(self.model.parameters(), swap if kind == "wrap" else None)
        if kind == "prepare":
            offload.prepare(
                self.model, self.optimizer, device="cpu", host_memory="64MiB", nvme=swap
            )
        losses: list[Tensor] = []

        class Recorded(transformers.Trainer):  # type: ignore[misc, name-defined]
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                loss: Tensor = super().training_step(*args, **kwargs)
                losses.append(loss.clone())
                return loss

        arguments = {
            "output_dir": str(directory),
            "max_steps": STEPS,
            "save_steps": SAVE_AT,
            "per_device_train_batch_size": 2,
            "logging_steps": 1,
            "max_grad_norm": 0.5,
            "seed": 17,
            "use_cpu": True,
            "report_to": "none",
            "disable_tqdm": True,
            "lr_scheduler_type": "cosine",
            **settings,
        }
        self.losses = losses
        self.trainer = Recorded(
            model=self.model,
            args=transformers.TrainingArguments(**arguments),
            train_dataset=texts(64),
            eval_dataset=texts(4),
            optimizers=(self.optimizer, None),
        )

    def close(self) -> None:
        offload.close(self.model)
        offload.close(self.optimizer)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
def test_a_trainer_saves_and_resumes_through_checkpoints(kind: str, tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", "plain", tmp_path)
    plain.trainer.train()
    run = Run(tmp_path / "run", kind, tmp_path)
    offload.TrainerCallback(run.trainer)
    run.trainer.train()
    assert torch.equal(torch.stack(plain.losses), torch.stack(run.losses))
    run.close()
    saved = tmp_path / "run" / f"checkpoint-{SAVE_AT}"
    assert verify(saved / "offload").is_whole
    assert {"config.json", "trainer_state.json", "offload/manifest.json"} <= files_below(saved)
    others = [name for name in files_below(saved) if name.endswith((".pt", ".pth", ".bin"))]
    assert not others and not list(saved.glob("*.safetensors"))

    # The leftovers of a training that was killed while it saved are passed over.
    last = tmp_path / "run" / f"checkpoint-{STEPS}"
    (last / "trainer_state.json").write_text('{"epoch": 0.1, "glo')
    (tmp_path / "run" / "checkpoint-7").mkdir()
    for name in ("wrap", "prepare", "plain"):  # into any kind
        again = Run(tmp_path / "run", name, tmp_path, save_strategy="no")
        offload.TrainerCallback(again.trainer)
        with pytest.warns(UserWarning, match=rf"checkpoint-{STEPS} is passed over"):
            again.trainer.train(resume_from_checkpoint=True)
        assert torch.equal(torch.stack(plain.losses[SAVE_AT:]), torch.stack(again.losses)), name
        assert_same_model(plain.model, again.model)
        assert_same_state(plain.optimizer.state_dict(), again.optimizer.state_dict())
        assert again.trainer.state.global_step == STEPS
        again.close()


def test_one_with_a_changed_byte_is_passed_over(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "plain", tmp_path)
    offload.TrainerCallback(run.trainer)
    run.trainer.train()
    file = tmp_path / "run" / f"checkpoint-{STEPS}" / "offload" / "model-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    again = Run(tmp_path / "run", "plain", tmp_path, save_strategy="no")
    offload.TrainerCallback(again.trainer)
    with pytest.warns(UserWarning, match=rf"checkpoint-{STEPS} is passed over: .*model-00001"):
        again.trainer.train(resume_from_checkpoint=True)
    assert len(again.losses) == STEPS - SAVE_AT, "from the one before it"
    assert_same_model(run.model, again.model)


def test_the_best_one_comes_back_and_older_ones_go(tmp_path: Path) -> None:
    run = Run(
        tmp_path / "run",
        "wrap",
        tmp_path,
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that it is not the last one
        save_total_limit=2,
    )
    offload.TrainerCallback(run.trainer)
    run.trainer.train()
    best = Path(run.trainer.state.best_model_checkpoint)
    kept = {path.name for path in (tmp_path / "run").glob("checkpoint-*")}
    assert kept == {best.name, f"checkpoint-{STEPS}"} and len(kept) == 2
    other = llama()
    offload.load(best / "offload", other)
    assert_same_model(other, run.model)
    run.trainer.save_model(str(tmp_path / "model"))  # Hugging Face's own files
    assert_same_model(type(other).from_pretrained(tmp_path / "model"), run.model)
    run.close()


@pytest.mark.parametrize("state", ["whole", "torn"])
def test_a_step_that_has_a_checkpoint_is_saved_again(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training was resumed from an older checkpoint. The old one of the step stays until the
    new one is whole.
    """
    run = Run(tmp_path / "run", "wrap", tmp_path)
    offload.TrainerCallback(run.trainer)
    run.trainer.train()
    run.close()
    first, last = (tmp_path / "run" / f"checkpoint-{step}" for step in (SAVE_AT, STEPS))
    before = (last / "offload" / "manifest.json").read_bytes()
    if state == "torn":
        os.truncate(last / "offload" / "model-00001.safetensors", 100)

    def resumed() -> Run:
        again = Run(tmp_path / "run", "wrap", tmp_path)
        offload.TrainerCallback(again.trainer)
        try:
            again.trainer.train(resume_from_checkpoint=str(first))
        finally:
            again.close()
        return again

    with monkeypatch.context() as patched:

        def refuse(self: object) -> None:
            raise OSError(5, "Input/output error")

        patched.setattr("offload.checkpoint.writer.CheckpointWriter._verify", refuse)
        with pytest.raises(OSError, match="Input/output"):
            resumed()
    assert (last / "offload" / "manifest.json").read_bytes() == before
    again = resumed()
    assert [path.name for path in last.glob("*offload*")] == ["offload"]
    assert (last / "offload" / "manifest.json").read_bytes() != before
    model = llama()
    offload.load(last, model)
    assert_same_model(model, again.model)


def test_checkpoints_of_the_trainers_own_are_resumed(tmp_path: Path) -> None:
    plain = Run(tmp_path / "run", "plain", tmp_path)
    plain.trainer.train()
    again = Run(tmp_path / "run", "wrap", tmp_path, save_strategy="no")
    offload.TrainerCallback(again.trainer)
    again.trainer.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{SAVE_AT}"))
    assert torch.equal(torch.stack(plain.losses[SAVE_AT:]), torch.stack(again.losses))
    again.close()


def test_mistakes_are_told(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "plain", tmp_path)
    offload.TrainerCallback(run.trainer)
    with pytest.raises(ConfigError, match="has one already"):
        offload.TrainerCallback(run.trainer)
    with pytest.raises(ConfigError, match="make the Trainer first"):
        offload.TrainerCallback(None)  # type: ignore[arg-type]
    program = (
        "import sys; sys.modules['transformers'] = None\n"
        "import offload\n"
        "try: offload.TrainerCallback\n"
        "except offload.ConfigError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ)
    )
    assert "transformers is not installed here" in done.stdout, done.stderr
