"""The table of the benchmark of a model larger than memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model_results import result_path
from results import HERE, machine_header
from wrap_contest import Step
from wrap_results import GI, Demand, Middle

from offload.core.timeline import COMPUTING, OTHER

SLACK = 1.3  # over the drive's own seconds


@dataclass(frozen=True)
class LargeRun:
    """The measurements of one run. compute_s: of all layers, forward and backward in memory."""

    numel: int
    tokens: int
    budget_bytes: int
    start_s: float
    compute_s: float
    fio_bytes_per_s: list[float]
    steps: list[Step]
    peak_rss_bytes: int
    on_disk_bytes: int

    def bound_s(self, step: Step) -> float:
        """Return the seconds the step may take: SLACK x its bytes at fio's rate, and compute."""
        return SLACK * step.moved_bytes / Middle.of(self.fio_bytes_per_s).median + self.compute_s


def find_demands(run: LargeRun, most_rss_bytes: int) -> Iterator[Demand]:
    what = f"{run.numel / 1e9:.2f} billion parameters"
    losses = " > ".join(f"{step.loss:.3f}" for step in run.steps)
    falls = all(a.loss > b.loss for a, b in zip(run.steps, run.steps[1:], strict=False))
    yield Demand(what, "the loss", "falls", losses, falls)
    peak, most = run.peak_rss_bytes / GI, most_rss_bytes / GI
    yield Demand(what, "peak RSS", f"below {most:.0f} GiB", f"{peak:.2f} GiB", peak < most)
    worst = max(step.whole_s / run.bound_s(step) for step in run.steps[1:])
    text = (
        f"whole step / ({SLACK} x (bytes / fio's mixed rate) + compute), the worst after the first"
    )
    yield Demand(what, text, "at most 1.00", f"{worst:.2f}", worst <= 1)


def write_large(command: str, run: LargeRun, most_rss_bytes: int = 11 * GI) -> Path:
    """Write `results/larger_than_memory_<machine>_<yyyymm>.md`."""
    HERE.mkdir(exist_ok=True)
    path = result_path("larger_than_memory")
    rate = Middle.of([rate / 1e9 for rate in run.fio_bytes_per_s])
    lines = [
        "# larger_than_memory",
        "",
        *machine_header(),
        f"- command: `{command}`",
        f"- a GPT of {run.numel / 1e9:.2f} billion bf16 parameters, {run.tokens} tokens a step, "
        f"the same ones; host_memory {run.budget_bytes / GI:.1f} GiB, "
        f"{run.on_disk_bytes / GI:.1f} GiB on disk",
        f"- start (model made and prepared): {run.start_s:.0f} s; peak RSS of the process "
        f"{run.peak_rss_bytes / GI:.2f} GiB",
        f"- fio, half reads, half writes, in the same run: {rate} GB/s",
        f"- seconds of the last step by cause: {_causes(run.steps[-1])}",
        f"- compute: forward and backward of all layers in memory take {run.compute_s:.1f} s",
        "",
        "| step | loss | whole, s | step(), s | waits for the drive, s | GB read | GB written "
        "| bound, s |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
        *(_row(number, step, run) for number, step in enumerate(run.steps, start=1)),
        "",
        "| run | what must be shown | asked | measured | met |",
        "|---|---|--:|--:|---|",
        *map(str, find_demands(run, most_rss_bytes)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _causes(step: Step) -> str:
    causes = sorted(step.seconds.items(), key=lambda item: -item[1])
    return ", ".join(f"{cause} {s:.1f}" for cause, s in causes if s >= 0.05) or "none"


def _row(number: int, step: Step, run: LargeRun) -> str:
    waits = sum(s for cause, s in step.seconds.items() if cause not in COMPUTING | {OTHER})
    return (
        f"| {number} | {step.loss:.3f} | {step.whole_s:.1f} | {step.optimizer_s:.1f} | {waits:.1f} "
        f"| {step.read_bytes / 1e9:.1f} | {step.written_bytes / 1e9:.1f} "
        f"| {run.bound_s(step):.1f} |"
    )
