"""PyTorch Lightning's automatic optimization with a wrapped optimizer, against the plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_model, assert_same_state
from support.integration import adamw, llama, moved_bytes, texts
from torch import Tensor
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader

import offload

lightning = pytest.importorskip("pytorch_lightning")

pytestmark = [
    # Lightning warns of a directory that a resumed run uses again, asks for more workers than a
    # test needs, and calls what torch 2.13 deprecates.
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
]


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, nvme: Path | None) -> None:
        super().__init__()
        self.model = llama()
        self.nvme = nvme
        self.losses: list[Tensor] = []
        self.moved_at_start: int | None = None
        self.made: Any = None

    def training_step(self, items: dict[str, Tensor], number: int) -> Tensor:
        loss: Tensor = self.model(**items).loss
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        self.made = adamw(self.model.parameters(), self.nvme)
        scheduler = CosineAnnealingLR(self.made, T_max=20)
        return [self.made], [{"scheduler": scheduler, "interval": "step"}]

    def on_train_start(self) -> None:
        if self.nvme is not None and self.moved_at_start is None:
            self.moved_at_start = moved_bytes(self.made)


def make_trainer(directory: Path, steps: int, **settings: Any) -> Any:
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        default_root_dir=str(directory),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def fit(
    directory: Path, nvme: Path | None, steps: int, resume: Path | None = None, **settings: Any
) -> Module:
    lightning.seed_everything(23, verbose=False)
    module = Module(nvme)
    saving = lightning.callbacks.ModelCheckpoint(
        dirpath=str(directory), every_n_train_steps=2, save_top_k=-1, filename="{step}"
    )
    trainer = make_trainer(directory, steps, callbacks=[saving], **settings)
    module.model.config.attention_dropout = 0.0  # Lightning does not save generators
    for layer in module.model.model.layers:
        layer.self_attn.attention_dropout = 0.0
    # An epoch of two steps: Lightning resumes in the middle of one only with special loaders.
    count = 2 * 2 * settings.get("accumulate_grad_batches", 1)
    loader = DataLoader(texts(count), batch_size=2)  # type: ignore[arg-type]
    trainer.fit(module, loader, ckpt_path=None if resume is None else str(resume))
    assert trainer.global_step == steps
    return module


@pytest.mark.parametrize(
    "settings",
    [
        {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
    ],
    ids=["accumulation", "bf16-mixed", "bf16-true"],
)
def test_lightning_trains_saves_and_resumes(settings: dict[str, Any], tmp_path: Path) -> None:
    is_half = settings.get("precision") == "bf16-true"
    wrapped = fit(tmp_path / "wrapped", tmp_path, 6, **settings)
    assert wrapped.moved_at_start == 0, "Lightning's move of the state moved bytes"
    assert len(wrapped.made.state) == 0
    assert offload.report(wrapped.made).counts["steps"] == 6
    expected = wrapped.made.state_dict()
    wrapped.made.close()
    if not is_half:  # plain torch keeps no master
        plain = fit(tmp_path / "plain", None, 6, **settings)
        assert torch.equal(torch.stack(plain.losses), torch.stack(wrapped.losses))
        assert_same_model(plain.model, wrapped.model)
        assert_same_state(plain.made.state_dict(), expected)
    names = ["wrapped"] if is_half else ["wrapped", "plain"]
    for name in names:
        saved = tmp_path / name / "step=4.ckpt"
        resumed = fit(saved.parent, tmp_path, 6, resume=saved, **settings)
        tail = wrapped.losses[-len(resumed.losses) :]
        assert len(tail) == 2 * settings.get("accumulate_grad_batches", 1)
        assert torch.equal(torch.stack(tail), torch.stack(resumed.losses))
        assert_same_model(wrapped.model, resumed.model)
        assert_same_state(expected, resumed.made.state_dict())
        resumed.made.close()


class Manual(Module):
    """A module that sees the optimizer as Lightning hands it out: an object that imitates its
    class.
    """

    def __init__(self, nvme: Path | None) -> None:
        super().__init__(nvme)
        self.automatic_optimization = False
        self.seen: Any = None

    def training_step(self, items: dict[str, Tensor], number: int) -> None:
        self.seen = self.optimizers()
        self.seen.zero_grad()
        self.manual_backward(self.model(**items).loss)
        self.seen.step()


def test_lightnings_own_view_of_the_optimizer_can_be_closed(tmp_path: Path) -> None:
    module = Manual(tmp_path)
    trainer = make_trainer(tmp_path, 2, enable_checkpointing=False)
    trainer.fit(module, DataLoader(texts(8), batch_size=2))  # type: ignore[arg-type]
    assert module.seen is not module.made and module.seen.optimizer is module.made
    assert offload.report(module.seen).counts["steps"] == 2
    expected = module.made.state_dict()
    assert_same_state(expected, module.seen.state_dict())
    module.seen.close()
    assert type(module.made) is AdamW
    assert_same_state(expected, module.made.state_dict())
