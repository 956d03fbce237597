"""The integration with Hugging Face's `Trainer`: its checkpoints are made by `offload.save` and
loaded by `offload.load`.

The Trainer calls a callback only after a save. So this callback is given the trainer, and replaces
those of its methods that write and read checkpoints: in the object, not in the class. Each
`checkpoint-<step>` then contains one of our checkpoints, `offload/`, beside the files that describe
it (config, tokenizer, trainer_state.json); it contains no optimizer.pt, scheduler.pt, rng_state or
weights, and nothing that is pickled. A checkpoint that is there already stays until the new one in
its place is complete.

The training logs of the Trainer contain the engine's numbers, too: `offload/stall_share` and the
like, in its history and in every service that it reports to.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.api import load, report, save
from offload.checkpoint.draft import free_path
from offload.checkpoint.format.verify import verify
from offload.checkpoint.trees import random_states, set_random_states
from offload.core.errors import ConfigError, OffloadError
from offload.params.prepared import prepared_of
from offload.telemetry.words import below

try:
    import transformers
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise ConfigError(
        "TrainerCallback: is for Hugging Face's Trainer, and transformers is not installed here "
        f"({error}): pip install transformers accelerate"
    ) from error

FOLDER = "offload"  # in each checkpoint-<step>
_NAME = re.compile(rf"{FOLDER}(-[0-9]+)?")
_STATE = "trainer_state.json"
_REPLACED = (
    "train",
    "log",
    "_save_checkpoint",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_scaler",
    "_save_rng_state",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",
    "_load_best_model",
)


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The callback that makes a Trainer save and resume by offload:
    `offload.TrainerCallback(trainer)`, once, before `trainer.train(...)`.

    From then on the Trainer saves by `offload.save` (each checkpoint is read back before an older
    one is removed) and resumes by `offload.load`, bit for bit as if training had never stopped.
    `resume_from_checkpoint=True` takes the newest complete checkpoint; checkpoints that the Trainer
    has made without this callback are resumed as before. `trainer.save_model()` and
    `save_only_model=True` write Hugging Face's own files, as always.
    """

    def __init__(self, trainer: transformers.Trainer) -> None:
        if not isinstance(trainer, transformers.Trainer):
            raise ConfigError(
                f"TrainerCallback: expected the trainer, got {type(trainer).__name__}; make the "
                "Trainer first, then offload.TrainerCallback(trainer)"
            )
        if any(isinstance(each, TrainerCallback) for each in trainer.callback_handler.callbacks):
            raise ConfigError("TrainerCallback: this trainer has one already")
        missing = [name for name in _REPLACED if not callable(getattr(trainer, name, None))]
        if missing:
            raise ConfigError(
                f"TrainerCallback: transformers {transformers.__version__} has no Trainer."
                f"{missing[0]}; this version is not supported"
            )
        self._trainer: Any = trainer
        self._own = {name: getattr(trainer, name) for name in _REPLACED}
        self._is_saving = False
        self._random: Any = None
        self._steps_logged = 0  # optimizer steps at the latest log
        for name in _REPLACED:
            setattr(trainer, name, getattr(self, f"_do_{name.lstrip('_')}"))
        trainer.add_callback(self)

    # --- logging ----------------------------------------------------------------------------------

    def _do_log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add the engine's numbers to a training log. Done here and not in a callback: the Trainer
        calls callbacks in order, and this one is the last.
        """
        if "loss" in logs:  # a log of training, not of an evaluation or of the whole run
            logs.update(self._numbers())
        self._own["log"](logs, *args, **kwargs)

    def _numbers(self) -> dict[str, float]:
        """Return the engine's numbers for a log. The stall share is that since the last log."""
        trainer = self._trainer
        try:
            told = report(trainer.model if prepared_of(trainer.model) else trainer.optimizer)
        except ConfigError:  # neither prepared nor wrapped: only the checkpoints are ours
            return {}
        numbers = told.live_numbers(self._steps_logged)
        self._steps_logged = told.steps
        return below("offload", numbers)

    # --- saving -----------------------------------------------------------------------------------

    def _do_save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        self._is_saving = not self._trainer.args.save_only_model
        try:
            return self._own["_save_checkpoint"](*args, **kwargs)
        finally:
            self._is_saving = False

    def _do_save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the files that describe the model; its values are in our checkpoint."""
        if not self._is_saving or output_dir is None:
            self._own["_save"](output_dir, state_dict)
            return
        os.makedirs(output_dir, exist_ok=True)
        trainer = self._trainer
        model = trainer.accelerator.unwrap_model(trainer.model)
        tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
        configs = (getattr(model, name, None) for name in ("config", "generation_config"))
        for each in (*configs, tokenizer):
            write: Any = getattr(each, "save_pretrained", None)
            if write is not None:
                write(output_dir)

    def _do_save_optimizer_and_scheduler(self, output_dir: str) -> None:
        trainer = self._trainer
        # keep=1 has the checkpoint read back before the Trainer removes older ones, or
        # `_take_place` an earlier one of this step, if the Trainer repeats it.
        path = free_path(Path(output_dir) / FOLDER)
        save(path, trainer.model, trainer.optimizer, keep=1, **self._stateful())
        _take_place(path)

    def _do_save_scaler(self, output_dir: str) -> None:
        """Do nothing: the scaler is in our checkpoint."""

    def _do_save_rng_state(self, output_dir: str) -> None:
        """Do nothing: the random states are in our checkpoint."""

    def _stateful(self) -> dict[str, Any]:
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        found = {"scheduler": self._trainer.lr_scheduler, "scaler": scaler}
        return {name: each for name, each in found.items() if each is not None}

    # --- resuming ---------------------------------------------------------------------------------

    def _do_train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        self._random = None
        if resume_from_checkpoint is True:
            folder = self._trainer.args.output_dir
            last: Any = get_last_checkpoint
            resume_from_checkpoint = _newest(folder) or last(folder) or True
        return self._own["train"](resume_from_checkpoint, *args, **kwargs)

    def _do_load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        if not _has_ours(checkpoint):  # else the model is loaded together with the optimizer
            self._own["_load_from_checkpoint"](checkpoint, model)

    def _do_load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if not _has_ours(checkpoint):
            self._own["_load_optimizer_and_scheduler"](checkpoint)
            return
        trainer = self._trainer
        load(str(checkpoint), trainer.model, trainer.optimizer, **self._stateful())
        # The Trainer skips the batches that were used, and restores the random states after that.
        self._random = random_states()

    def _do_load_scaler(self, checkpoint: str | None) -> None:
        if not _has_ours(checkpoint):
            self._own["_load_scaler"](checkpoint)

    def _do_load_rng_state(self, checkpoint: str | None) -> None:
        if not _has_ours(checkpoint):
            self._own["_load_rng_state"](checkpoint)
        elif self._random is not None:
            set_random_states(self._random)

    def _do_load_best_model(self) -> None:
        best = self._trainer.state.best_model_checkpoint
        if not _has_ours(best):
            self._own["_load_best_model"]()
            return
        states = random_states()
        load(best, self._trainer.model)
        set_random_states(states)


def _ours(checkpoint: Path) -> list[Path]:
    """Return our checkpoints in one of the Trainer's. There are several while another one is
    written in its place, or if the process was killed then.
    """
    return [path for path in checkpoint.glob(f"{FOLDER}*") if _NAME.fullmatch(path.name)]


def _has_ours(checkpoint: str | None) -> bool:
    return checkpoint is not None and any(path.is_dir() for path in _ours(Path(checkpoint)))


def _take_place(path: Path) -> None:
    """Remove the other checkpoints of this step and give the new one their name, as far as the file
    system allows. The new one is complete, has been read back, and takes precedence by its number.
    """
    with suppress(OSError):
        for other in _ours(path.parent):
            if other != path:
                shutil.rmtree(other)
        path.rename(path.with_name(FOLDER))


def _newest(folder: str) -> str | None:
    """Return the last `checkpoint-<step>` that is complete. Training that is killed leaves
    incomplete ones, and drives may corrupt bytes. They are verified here, because the Trainer reads
    its own files from the chosen one before we load ours.
    """
    found = [path for path in Path(folder).glob("checkpoint-*") if _has_ours(str(path))]
    steps = {path: path.name.rpartition("-")[2] for path in found}
    found = [path for path in found if steps[path].isdecimal()]
    for path in sorted(found, key=lambda path: int(steps[path]), reverse=True):
        wrong = _damage(path)
        if wrong is None:
            return str(path)
        warnings.warn(f"{path} is passed over: {wrong}", stacklevel=4)
    return None


def _damage(checkpoint: Path) -> str | None:
    """Return why training cannot resume from any of our checkpoints in one of the Trainer's; None:
    it can.
    """
    wrong = f"{_STATE} is missing, or cut off"
    try:
        json.loads((checkpoint / _STATE).read_text())
        for path in _ours(checkpoint):
            try:
                findings = verify(path)
            except OffloadError as error:
                wrong = str(error)
                continue
            if findings.is_whole:
                return None
            wrong = findings.damage[0]
    except (OSError, ValueError):
        pass
    return wrong
