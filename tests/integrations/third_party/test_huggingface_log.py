"""`offload.TrainerCallback`: what the Trainer logs has the engine's numbers, wherever it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.integration import adamw, llama, texts

import offload

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS = 4


class Board(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
    """A callback like those of W&B and TensorBoard: it is there before ours, and keeps what it
    gets.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.seen.append((state.global_step, dict(logs)))


def train(kind: str, directory: Path) -> tuple[Board, Any, Any]:
    """Train a small Llama; return what was logged, the trainer, and the optimizer. kind: wrap,
    prepare, or plain.
    """
    model = llama()
    optimizer = adamw(model.parameters(), directory if kind == "wrap" else None)
    if kind == "prepare":
        offload.prepare(model, optimizer, device="cpu", host_memory="64MiB", nvme=directory)
    board = Board()
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(directory / "run"),
            max_steps=STEPS,
            save_strategy="no",
            eval_strategy="steps",
            eval_steps=2,
            logging_steps=2,
            per_device_train_batch_size=2,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=texts(16),
        eval_dataset=texts(4),
        optimizers=(optimizer, None),
        callbacks=[board],
    )
    offload.TrainerCallback(trainer)
    trainer.train()
    return board, trainer, optimizer


@pytest.mark.parametrize("kind", ["wrap", "prepare"])
def test_the_log_of_training_has_the_engines_numbers(kind: str, tmp_path: Path) -> None:
    board, trainer, optimizer = train(kind, tmp_path)
    of_training = [(step, logs) for step, logs in board.seen if "loss" in logs]
    assert [step for step, _ in of_training] == [2, 4]
    told = offload.report(optimizer)
    taken = told.plan.arena_bytes if kind == "wrap" else told.model.host_bytes
    for _, logs in of_training:
        assert logs["offload/host_bytes"] == taken > 0
        assert logs["offload/fallbacks"] == 0 and 0 <= logs["offload/stall_share"] <= 1
        assert ("offload/prefetch_depth" in logs) == (kind == "prepare")
        assert {type(value) for name, value in logs.items() if "offload/" in name} <= {int, float}
    since_last = told.live_numbers(steps_before=2)
    assert of_training[-1][1]["offload/step_seconds"] == since_last["step_seconds"]
    history = [each for each in trainer.state.log_history if "loss" in each]
    assert all("offload/disk_bytes" in each for each in history)
    assert json.loads(json.dumps(trainer.state.log_history)) == trainer.state.log_history
    others = [logs for _, logs in board.seen if "loss" not in logs]
    assert len(others) >= 2, "of evaluations"
    assert not any(name.startswith("offload/") for logs in others for name in logs)
    offload.close(trainer.model)
    offload.close(optimizer)


def test_a_plain_run_logs_as_before(tmp_path: Path) -> None:
    board, _, _ = train("plain", tmp_path)
    assert not any(name.startswith("offload/") for _, logs in board.seen for name in logs)
    assert [step for step, logs in board.seen if "loss" in logs] == [2, 4]
