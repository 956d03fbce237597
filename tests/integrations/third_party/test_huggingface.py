"""Hugging Face: `Trainer` and `accelerate` with a wrapped optimizer, on a small random Llama.

The state is larger than the host budget and lies on the drive. Each run is compared with the same
run of the plain optimizer: losses, gradient norms, parameters and state, bit for bit.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_model, assert_same_state
from support.integration import adamw, batch, llama, moved_bytes, texts, tight
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import offload
from offload import ConfigError

pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

STEPS, SAVE_AT = 6, 3


def warm_up(optimizer: Any) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))


# --- Trainer --------------------------------------------------------------------------------------


class Run:
    """A `Trainer` with everything that it computes."""

    def __init__(self, directory: Path, nvme: Path | None, **settings: Any) -> None:
        self.model = llama()
        self.optimizer = adamw(self.model.parameters(), nvme)
        losses: list[Tensor] = []

        class Recorded(transformers.Trainer):  # type: ignore[misc, name-defined]
            def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
                loss: Tensor = super().training_step(*args, **kwargs)
                losses.append(loss.clone())
                return loss

        arguments = transformers.TrainingArguments(
            output_dir=str(directory),
            max_steps=STEPS,
            save_steps=SAVE_AT,
            per_device_train_batch_size=2,
            logging_steps=1,
            max_grad_norm=0.5,
            seed=17,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        self.losses = losses
        self.trainer = Recorded(
            model=self.model,
            args=arguments,
            train_dataset=texts(64),
            optimizers=(self.optimizer, warm_up(self.optimizer)),
        )

    def train(self, **how: Any) -> Run:
        self.trainer.train(**how)
        return self

    @property
    def told(self) -> list[tuple[int, float, float]]:
        """Step, gradient norm and learning rate."""
        history = self.trainer.state.log_history
        return [(h["step"], h["grad_norm"], h["learning_rate"]) for h in history if "loss" in h]


def assert_same_run(left: Run, right: Run) -> None:
    assert left.told == right.told and len(left.told) == STEPS
    assert_same_model(left.model, right.model)
    assert_same_state(left.optimizer.state_dict(), right.optimizer.state_dict())


@pytest.mark.parametrize(
    "settings",
    [{"gradient_accumulation_steps": 2}, {"bf16": True, "gradient_checkpointing": True}],
    ids=["accumulation", "bf16 and checkpointing"],
)
def test_a_trainer_starts_saves_and_resumes(settings: dict[str, Any], tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", None, **settings).train()
    wrapped = Run(tmp_path / "wrapped", tmp_path, **settings).train()
    assert_same_run(plain, wrapped)
    assert torch.equal(torch.stack(plain.losses), torch.stack(wrapped.losses))
    assert offload.report(wrapped.optimizer).counts["steps"] == STEPS
    assert moved_bytes(wrapped.optimizer) > 0
    wrapped.optimizer.close()

    saved = {name: tmp_path / name / f"checkpoint-{SAVE_AT}" for name in ("plain", "wrapped")}
    for name, checkpoint in saved.items():  # a checkpoint of the plain run, too
        resumed = Run(tmp_path / f"resumed from {name}", tmp_path, **settings)
        resumed.train(resume_from_checkpoint=str(checkpoint))
        assert_same_run(plain, resumed)
        half = len(plain.losses) // 2
        assert torch.equal(torch.stack(plain.losses[half:]), torch.stack(resumed.losses))
        resumed.optimizer.close()
    back = Run(tmp_path / "back", None, **settings)
    back.train(resume_from_checkpoint=str(saved["wrapped"]))
    assert_same_run(plain, back)


def test_the_optimizer_that_a_trainer_makes_is_wrapped_in_one_line(tmp_path: Path) -> None:
    """As in docs/wrap.md: the trainer's weight-decay groups and `args.optim` stay."""
    trainers = []
    for nvme in (None, tmp_path):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=3,
            optim="adamw_torch_fused",
            weight_decay=0.1,
            adam_beta2=0.95,
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=llama(), args=arguments, train_dataset=texts(32))
        trainer.create_optimizer()
        made = trainer.optimizer
        assert sorted(group["weight_decay"] for group in made.param_groups) == [0.0, 0.1]
        if nvme is not None:
            offload.wrap(trainer.optimizer, **tight(made, nvme))
            assert trainer.optimizer is made and made.defaults["betas"] == (0.9, 0.95)
        trainer.train()
        trainers.append(trainer)
    plain, wrapped = trainers
    assert_same_model(plain.model, wrapped.model)
    states = [unwrapped(trainer.optimizer).state_dict() for trainer in trainers]
    assert_same_state(*states)
    assert moved_bytes(unwrapped(wrapped.optimizer)) > 0
    unwrapped(wrapped.optimizer).close()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer without accelerate's wrapper, which a trainer leaves around it."""
    return getattr(optimizer, "optimizer", optimizer)


def test_a_trainer_makes_its_own_scheduler_and_nobody_closes(tmp_path: Path) -> None:
    """The usual call: no scheduler given. What the optimizer holds is released with the trainer."""
    models = []
    for nvme in (None, tmp_path):
        model = llama()
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=3,
            warmup_steps=1,
            lr_scheduler_type="cosine",
            save_strategy="no",
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        )
        transformers.Trainer(
            model=model,
            args=arguments,
            train_dataset=texts(32),
            optimizers=(adamw(model.parameters(), nvme), None),
        ).train()
        models.append(model)
    assert_same_model(*models)


# --- accelerate -----------------------------------------------------------------------------------


@pytest.fixture
def accelerator(tmp_path: Path) -> Any:
    return make_accelerator(tmp_path)


def make_accelerator(directory: Path, **settings: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, project_dir=str(directory), **settings)


class Loop:
    """The loop of accelerate's documentation."""

    def __init__(self, accelerator: Any, nvme: Path | None) -> None:
        self.accelerator = accelerator
        model = llama()
        self.bare = adamw(model.parameters(), nvme)
        self.model, self.optimizer, self.scheduler = accelerator.prepare(
            model, self.bare, warm_up(self.bare)
        )
        self.losses: list[Tensor] = []

    def run(self, begin: int, end: int) -> Loop:
        for number in range(begin, end):
            with self.accelerator.accumulate(self.model):
                loss = self.model(**batch(number)).loss
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.detach().clone())
        return self


def assert_same_loop(left: Loop, right: Loop) -> None:
    assert torch.equal(torch.stack(left.losses), torch.stack(right.losses))
    assert_same_model(left.model, right.model)
    assert_same_state(left.optimizer.state_dict(), right.optimizer.state_dict())


@pytest.mark.parametrize(("precision", "accumulate"), [("no", 2), ("bf16", 1)])
def test_accelerate_trains_saves_and_resumes(
    precision: str, accumulate: int, tmp_path: Path
) -> None:
    settings = {"mixed_precision": precision, "gradient_accumulation_steps": accumulate}

    def loop(nvme: Path | None) -> Loop:
        torch.manual_seed(29)
        return Loop(make_accelerator(tmp_path, **settings), nvme)

    plain = loop(None).run(0, 8)
    wrapped = loop(tmp_path).run(0, 4)
    wrapped.accelerator.save_state(str(tmp_path / "saved"))
    wrapped.run(4, 8)
    assert_same_loop(plain, wrapped)
    steps = offload.report(wrapped.bare).counts["steps"]
    assert steps == 8 // accumulate
    wrapped.bare.close()
    resumed = loop(tmp_path)
    resumed.losses = plain.losses[:4]
    resumed.accelerator.load_state(str(tmp_path / "saved"))
    resumed.run(4, 8)
    assert_same_loop(plain, resumed)
    resumed.bare.close()


def test_a_signal_saves_accelerates_optimizer(accelerator: Any, tmp_path: Path) -> None:
    """Accelerate's wrapper of an optimizer has no hooks of its own."""
    model: Any = nn.Linear(3, 3)
    bare: Any = offload.wrap(torch.optim.AdamW(model.parameters()), host_memory="1MiB")
    model, optimizer = accelerator.prepare(model, bare)
    with offload.save_on_signal(tmp_path / "saved", model, optimizer):
        os.kill(os.getpid(), signal.SIGUSR1)
        accelerator.backward(model(torch.ones(3)).sum())
        optimizer.step()
    assert offload.load(tmp_path / "saved", model, optimizer) is None
    bare.close()


def test_the_state_round_trip_of_prepare_moves_nothing(accelerator: Any, tmp_path: Path) -> None:
    """`prepare` puts the state on accelerate's device by `state_dict` and `load_state_dict`."""
    model = llama()
    optimizer = adamw(model.parameters(), tmp_path)
    prepared = accelerator.prepare(optimizer)
    assert prepared.optimizer is optimizer
    assert moved_bytes(optimizer) == 0
    assert len(prepared.state) == len(optimizer.state) == 0
    model(**batch(0)).loss.backward()
    prepared.step()
    assert offload.report(optimizer).counts["steps"] == 1
    optimizer.close()


def test_prepare_keeps_a_state_that_is_there(accelerator: Any, tmp_path: Path) -> None:
    model = llama()
    optimizer = adamw(model.parameters(), tmp_path)
    model(**batch(0)).loss.backward()
    optimizer.step()
    before, counted = optimizer.state_dict(), offload.report(optimizer)
    accelerator.prepare(optimizer)
    after = offload.report(optimizer)
    assert 0 < after.disk_read_bytes - counted.disk_read_bytes <= after.plan.disk_bytes
    written_bytes = after.disk_written_bytes - counted.disk_written_bytes
    assert 0 < written_bytes <= after.plan.disk_bytes
    assert_same_state(before, optimizer.state_dict())
    assert offload.report(accelerator._optimizers[0]).counts["steps"] == 1  # it looks inside
    optimizer.close()


def test_accelerates_optimizer_with_a_scaler(accelerator: Any, tmp_path: Path) -> None:
    """The wrapper that `mixed_precision="fp16"` makes, which accelerate itself refuses on a CPU. It
    replaces `step` of the instance for each call, to see whether the scaler has skipped it.
    """
    from accelerate.optimizer import AcceleratedOptimizer

    models, runs = [llama(), llama()], []  # a plain fused step skips in its kernel, unseen
    for model, nvme in zip(models, (None, tmp_path), strict=True):
        torch.manual_seed(5)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2)
        bare = adamw(model.parameters(), nvme)
        optimizer = AcceleratedOptimizer(bare, scaler=scaler)
        skipped = []
        for number in range(6):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(**batch(number)).loss
            scaler.scale(loss).backward()
            if number == 2:
                model.lm_head.weight.grad[0, 0] = float("inf")
            optimizer.step()
            optimizer.zero_grad()
            skipped.append(optimizer.step_was_skipped)
        assert skipped == [nvme is not None and number == 2 for number in range(6)]
        runs.append((scaler.get_scale(), bare))
    assert runs[0][0] == runs[1][0]
    assert_same_model(*models)
    assert_same_state(runs[0][1].state_dict(), runs[1][1].state_dict())
    runs[1][1].close()


def test_a_prepared_optimizer_is_not_the_one_to_wrap(accelerator: Any) -> None:
    model = llama()
    prepared = accelerator.prepare(adamw(model.parameters(), None))
    for elementwise in (False, True):
        with pytest.raises(
            ConfigError, match="AcceleratedOptimizer holds another one, AdamW; give that"
        ):
            offload.wrap(prepared, elementwise=elementwise)
