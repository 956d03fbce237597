"""A compiled model, automatic mixed precision, gradient accumulation and LoRA, all on one Llama."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.bits import assert_same_model, assert_same_state
from support.integration import VOCABULARY, adamw, batch, llama
from support.loops import chosen
from torch import Tensor, nn

import offload
from offload.planning import planner

pytest.importorskip("transformers")


class Run:
    """A training loop without a trainer; plain (nvme: None) or wrapped."""

    def __init__(
        self,
        nvme: Path | None,
        model: nn.Module | None = None,
        accumulate: int = 1,
        autocast: torch.dtype | None = None,
        scale: float | None = None,
        forward: Callable[..., Any] | None = None,
    ) -> None:
        torch.manual_seed(31)
        self.model: Any = llama() if model is None else model
        self.forward = self.model if forward is None else forward
        self.optimizer = adamw(self.model.parameters(), nvme)
        self.scaler = torch.amp.GradScaler("cpu", scale, growth_interval=3, enabled=bool(scale))
        self.accumulate, self.autocast = accumulate, autocast
        self.losses: list[Tensor] = []

    def steps(self, begin: int, end: int, spoil: int | None = None) -> Run:
        """Train some steps. spoil: the step whose gradients overflow."""
        for step in range(begin, end):
            for part in range(self.accumulate):
                half = self.autocast
                with torch.autocast("cpu", dtype=half) if half else nullcontext():
                    loss = self.forward(**batch(step * self.accumulate + part)).loss
                self.scaler.scale(loss / self.accumulate).backward()
                self.losses.append(loss.detach().clone())
            if step == spoil:
                next(p for p in self.model.parameters() if p.grad is not None).grad[0] = torch.inf
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return self


def assert_same_run(left: Run, right: Run) -> None:
    assert torch.equal(torch.stack(left.losses), torch.stack(right.losses))
    assert_same_model(left.model, right.model)
    assert_same_state(left.optimizer.state_dict(), right.optimizer.state_dict())
    assert left.scaler.get_scale() == right.scaler.get_scale()


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("autocast", "scale"),
    [(None, None), (torch.bfloat16, None), (torch.float16, 2.0**13)],
    ids=["fp32", "bf16", "fp16"],
)
def test_amp_and_accumulation(
    autocast: torch.dtype | None, scale: float | None, accumulate: int, tmp_path: Path
) -> None:
    """fp16 with a scaler whose scale grows, and halves where a step is skipped."""
    settings = {"autocast": autocast, "scale": scale, "accumulate": accumulate}
    spoil = 2 if scale else None
    plain = Run(None, **settings).steps(0, 8, spoil)
    wrapped = Run(tmp_path, **settings).steps(0, 8, spoil)
    assert_same_run(plain, wrapped)
    if scale:
        assert float(wrapped.optimizer.state_dict()["state"][0]["step"]) == 7
    wrapped.optimizer.close()


def test_unscaling_and_clipping_before_a_scaled_step(tmp_path: Path) -> None:
    runs = []
    for nvme in (None, tmp_path):
        run = Run(nvme, autocast=torch.float16, scale=2.0**12)
        for step in range(4):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = run.model(**batch(step)).loss
            run.scaler.scale(loss).backward()
            run.scaler.unscale_(run.optimizer)
            nn.utils.clip_grad_norm_(run.model.parameters(), 0.5)
            run.scaler.step(run.optimizer)
            run.scaler.update()
            run.optimizer.zero_grad()
            run.losses.append(loss.detach())
        runs.append(run)
    assert_same_run(*runs)
    runs[1].optimizer.close()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_in_half_precision_follows_an_fp32_master(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """Plain torch keeps no master, so the judge is its fp32 AdamW on the same gradients."""
    run = Run(tmp_path, model=llama().to(dtype))
    params = list(run.model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    judge = adamw(masters, None)

    def follow(*_: Any) -> None:
        for master, param in zip(masters, params, strict=True):
            master.grad = None if param.grad is None else param.grad.float()
        judge.step()

    run.optimizer.register_step_post_hook(follow)
    run.steps(0, 4)
    for master, param in zip(masters, params, strict=True):
        assert torch.equal(param, master.to(dtype))
    run.optimizer.close()


class Small(nn.Module):
    """A model with as few kernels as possible: each takes the C++ compiler seconds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(VOCABULARY, 64)
        self.up, self.down = nn.Linear(64, 512), nn.Linear(512, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        guess = self.down(nn.functional.gelu(self.up(self.words(input_ids))))
        return SimpleNamespace(
            loss=nn.functional.cross_entropy(guess.flatten(0, 1), labels.view(-1))
        )


@pytest.mark.timeout(200)
@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")  # torch's own
def test_a_compiled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled code reads the parameters in place; the step writes them there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # no pool of processes
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = Small()
    # Without inductor's C++, which takes a minute of a core and proves nothing more here.
    forward = torch.compile(model, backend=chosen(test="aot_eager", torture="inductor"))
    begin, runs = copy.deepcopy(model.state_dict()), []
    for nvme in (None, tmp_path):
        model.load_state_dict(begin)
        run = Run(nvme, model=model, forward=forward).steps(0, 5)
        run.model = copy.deepcopy(model)
        runs.append(run)
    assert_same_run(*runs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 1
    runs[1].optimizer.close()
    torch.compiler.reset()


# --- LoRA -----------------------------------------------------------------------------------------


def lora() -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.1,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
    )
    base = llama()
    torch.manual_seed(41)
    return peft.get_peft_model(base, config)


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "CHUNK_NUMEL", 256)


def test_lora_offloads_the_adapters_alone(tmp_path: Path, tiny_chunks: None) -> None:
    """All parameters are in the optimizer; the frozen ones get no state."""
    plain = Run(None, model=lora()).steps(0, 6)
    wrapped = Run(tmp_path, model=lora()).steps(0, 6)
    assert_same_run(plain, wrapped)
    trained = sum(p.numel() for p in wrapped.model.parameters() if p.requires_grad)
    plan = offload.report(wrapped.optimizer).plan
    assert sum(p.numel for p in plan.params if p.fields) == trained < plan.numel / 20
    wrapped.optimizer.close()


def test_lora_resumes_and_thaws(tmp_path: Path, tiny_chunks: None) -> None:
    """Saved after 3 steps, resumed in a new model; then the base model's head is trained, too."""
    peft = pytest.importorskip("peft")
    whole = Run(None, model=lora()).steps(0, 3)
    first = Run(tmp_path, model=lora()).steps(0, 3)
    adapters = copy.deepcopy(peft.get_peft_model_state_dict(first.model))
    torch.save(first.optimizer.state_dict(), tmp_path / "optimizer.pt")
    generator = torch.get_rng_state()
    first.optimizer.close()

    second = Run(tmp_path, model=lora())
    peft.set_peft_model_state_dict(second.model, adapters)
    second.optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    second.losses = first.losses
    for run in (whole, second):
        torch.set_rng_state(generator)
        run.steps(3, 6)
    assert_same_run(whole, second)
    for run in (whole, second):
        for param in run.model.base_model.model.lm_head.parameters():
            param.requires_grad_(True)
        torch.manual_seed(2)
        run.steps(6, 8)
    assert_same_run(whole, second)
    second.optimizer.close()
