"""The tables and the picture of the wrap benchmark, and whether it shows what it must."""

from __future__ import annotations

import datetime
import json
import re
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from results import HERE, machine_header
from wrap_contest import Runner, Sitting

from offload.core import host_facts

TORCH, HOST, NVME = "torch fused, in memory", "offload, in memory", "offload, NVMe"
DEEPSPEED = {"cpu": "DeepSpeed, CPU", "nvme": "DeepSpeed, NVMe"}
TUNED_NVME = f"{DEEPSPEED['nvme']}, tuned"
ALONE = "alone"
MI, GI = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Middle:
    """A median and the middle half around it."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True)
class Demand:
    """A figure that must be reached, and what was measured."""

    sitting: str
    what: str
    asked: str
    measured: str
    met: bool

    def __str__(self) -> str:
        verdict = "yes" if self.met else "**no**"
        return f"| {self.sitting} | {self.what} | {self.asked} | {self.measured} | {verdict} |"


def find_demands(sitting: Sitting) -> Iterator[Demand]:
    """Yield the figures that a sitting must reach, of the contestants that took part."""
    disk, host = sitting.find(NVME), sitting.find(HOST)
    torch, tuned = sitting.find(TORCH), sitting.find(TUNED_NVME)
    if disk and sitting.what == ALONE:
        yield from _memory_demands(sitting, disk, tuned)
    elif disk:
        yield from _disk_demands(sitting, disk, host)
        if tuned:
            yield from _peer_demands(sitting, disk, tuned)
    if torch and host and sitting.what != ALONE:
        ratio = Middle.of(host.ratios(torch))
        what = "whole step, state in host memory / torch fused in memory"
        yield Demand(sitting.what, what, "at most 1.10", str(ratio), ratio.median <= 1.1)


def _disk_demands(sitting: Sitting, disk: Runner, host: Runner | None) -> Iterator[Demand]:
    planned = disk.facts["planned_read"] + disk.facts["planned_written"]
    most = max(step.moved_bytes for step in disk.steps) / planned
    what = "bytes moved a step / planned, the worst step"
    yield Demand(sitting.what, what, "at most 1.03", f"{most:.4f}", most <= 1.03)
    if host and sitting.fio_bytes_per_s:
        ratio = Middle.of(against_bound(sitting, disk, host))
        what = "step() / the larger of (bytes / fio's mixed rate) and the update in memory"
        yield Demand(sitting.what, what, "at most 1.15", str(ratio), ratio.median <= 1.15)


def against_bound(sitting: Sitting, disk: Runner, host: Runner) -> list[float]:
    """Return the ratio of our `step()` to its lower bound, turn by turn: the bytes at fio's rate,
    or the update with the state in host memory, whichever takes longer.
    """
    ratios = []
    for turn, in_memory, rate in zip(disk.turns, host.turns, sitting.fio_bytes_per_s, strict=True):
        moved_s = statistics.fmean(step.moved_bytes for step in turn) / rate
        update_s = statistics.fmean(step.seconds["update"] for step in in_memory)
        ratios.append(statistics.fmean(s.optimizer_s for s in turn) / max(moved_s, update_s))
    return ratios


def _peer_demands(sitting: Sitting, disk: Runner, tuned: Runner) -> Iterator[Demand]:
    ratio = Middle.of(tuned.ratios(disk))
    what = f"whole step of {TUNED_NVME} / ours"
    yield Demand(sitting.what, what, "at least 1.60", str(ratio), ratio.median >= 1.6)
    mine, others = (bytes_a_param(runner) for runner in (disk, tuned))
    what, text = "bytes a parameter, ours and DeepSpeed's", f"{mine:.2f} and {others:.2f}"
    yield Demand(sitting.what, what, "24 and 32", text, mine <= 24 * 1.03 and others >= 31)


def _memory_demands(sitting: Sitting, disk: Runner, tuned: Runner | None) -> Iterator[Demand]:
    facts = disk.facts
    growth = (facts["now"]["peak_rss"] - facts["base"]["peak_rss"] - facts["pool_peak"]) / MI
    what = "peak RSS less that without an optimizer, less the pool"
    yield Demand(sitting.what, what, "below 100 MiB", f"{growth:.0f} MiB", growth < 100)
    pool, budget = facts["pool_peak"] / MI, facts["budget"] / MI
    what, text = "peak of the pool, MiB", f"{pool:.0f} of {budget:.0f}"
    yield Demand(sitting.what, what, "within host_memory", text, pool <= budget)
    if tuned:
        ratio = facts["now"]["peak_rss"] / tuned.facts["now"]["peak_rss"]
        what = f"peak RSS / that of {TUNED_NVME}"
        yield Demand(sitting.what, what, "at most 0.60", f"{ratio:.2f}", ratio <= 0.6)


def bytes_a_param(runner: Runner) -> float:
    return statistics.median(step.moved_bytes for step in runner.steps) / runner.numel


def write_wrap(command: str, sittings: Sequence[Sitting]) -> Path:
    """Write `results/wrap_<machine>_<yyyymm>.md` and the picture beside it."""
    HERE.mkdir(exist_ok=True)
    cpu = re.sub(r"\W+", "-", host_facts.read_cpu_model() or "unknown").strip("-").lower()
    path = HERE / f"wrap_{cpu}_{datetime.date.today():%Y%m}.md"
    lines = [*_header(command, sittings), *_step_table(sittings), *_demand_table(sittings)]
    path.write_text("\n".join(lines) + "\n")
    draw_wrap(sittings, path.with_suffix(".png"))
    return path


def _header(command: str, sittings: Sequence[Sitting]) -> list[str]:
    numel = sittings[0].runners[0].numel
    return [
        "# wrap",
        "",
        *machine_header(),
        f"- command: `{command}`",
        f"- a GPT of {numel / 1e6:.0f} M parameters, 128 tokens a step, clipped by "
        "`clip_grad_norm_` (DeepSpeed: by its engine); each contestant is a process of its own",
        "- in a session all contestants run two steps in turn; figures are medians over the "
        "turns, in brackets the middle half; alone: one process at a time",
        "- step(): `optimizer.step()`; DeepSpeed's `engine.step()` clips and frees gradients, too, "
        "and its `backward` writes them to the drive",
        "- x ours: whole step / that of offload with its state in the same place, turn by turn",
        "- bytes/parameter: read and written a step, as the kernel counts them for the process",
        "- torch has no fp32 master: in bf16 its state is bf16, 4 bytes a parameter, where all "
        "others have 12; in fp32 ours has torch's bits (losses are compared in every step)",
        *(f"- {who}: `{settings}`" for who, settings in _peer_settings(sittings).items()),
        "",
    ]


def _peer_settings(sittings: Sequence[Sitting]) -> dict[str, str]:
    """Return the settings that DeepSpeed was given beyond the task, by contestant."""
    found = {}
    for runner in (runner for sitting in sittings for runner in sitting.runners):
        if runner.entry.kind == "deepspeed":
            options = {k: v for k, v in runner.entry.options.items() if k != "task"}
            place = {k: v for k, v in options.pop("optimizer").items() if k != "nvme_path"}
            told = {"offload_optimizer": place, **options, **runner.entry.environment}
            found[f"{runner.name} ({runner.facts['version']})"] = json.dumps(told)
    return found


def _step_table(sittings: Sequence[Sitting]) -> list[str]:
    lines = [
        "| sitting | who | whole step, s | step(), s | x ours | bytes/parameter | peak RSS, GiB |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for sitting in sittings:
        lines += [_row(sitting, runner) for runner in sitting.runners]
        lines += [
            f"| {sitting.what} | {who} | {why} | | | | |" for who, why in sitting.absent.items()
        ]
        if sitting.fio_bytes_per_s:
            rate = Middle.of([rate / 1e9 for rate in sitting.fio_bytes_per_s])
            lines.append(
                f"| {sitting.what} | fio, half reads, half writes: {rate} GB/s | | | | | |"
            )
    return lines


def _row(sitting: Sitting, runner: Runner) -> str:
    whole, update = (Middle.of(runner.turn_s(what)) for what in ("whole_s", "optimizer_s"))
    ours = sitting.find(NVME if "NVMe" in runner.name else HOST)
    paired = ours is not None and ours is not runner and sitting.what != ALONE
    ratio = str(Middle.of(runner.ratios(ours))) if ours and paired else ""
    peak = runner.facts["now"]["peak_rss"] / GI
    return (
        f"| {sitting.what} | {runner.name} | {whole} | {update} | {ratio} "
        f"| {bytes_a_param(runner):.2f} | {peak:.2f} |"
    )


def _demand_table(sittings: Sequence[Sitting]) -> list[str]:
    return [
        "",
        "| sitting | what must be shown | asked | measured | met |",
        "|---|---|--:|--:|---|",
        *(str(demand) for sitting in sittings for demand in find_demands(sitting)),
    ]


def draw_wrap(sittings: Sequence[Sitting], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    timed = [(s, runner) for s in sittings if s.what != ALONE for runner in s.runners]
    alone = [runner for s in sittings if s.what == ALONE for runner in s.runners]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    names = [f"{sitting.what}: {runner.name}" for sitting, runner in timed]
    updates = [Middle.of(runner.turn_s("optimizer_s")).median for _, runner in timed]
    wholes = [Middle.of(runner.turn_s("whole_s")).median for _, runner in timed]
    left.barh(names, updates, label="step()")
    rest = [whole - update for whole, update in zip(wholes, updates, strict=True)]
    left.barh(names, rest, left=updates, label="forward, backward, clipping")
    left.set(xlabel="seconds a step", title="a training step")
    left.legend(fontsize=8)
    peaks = [runner.facts["now"]["peak_rss"] / GI for runner in alone]
    right.barh([runner.name for runner in alone], peaks)
    right.set(xlabel="GiB", title="peak of resident memory, bf16")
    for axis in (left, right):
        axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
