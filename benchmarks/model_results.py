"""Tables and pictures of the benchmarks of prepared models, and the demands on them."""

from __future__ import annotations

import datetime
import re
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from results import HERE, machine_header
from wrap_contest import Runner, Sitting, Step
from wrap_results import GI, HOST, TORCH, TUNED_NVME, Demand, Middle, bytes_a_param

from offload.core import host_facts
from offload.core.timeline import COMPUTING, OTHER

RESIDENT, DISK = "prepared, all in memory", "prepared, everything on NVMe"
MANY, FEW = "2,048 tokens", "128 tokens"
HEADINGS = (
    ("sitting", "---"),
    ("who", "---"),
    ("whole step, s", "--:"),
    ("step(), s", "--:"),
    ("tokens/s", "--:"),
    ("stalls", "--:"),
    ("of them parameters", "--:"),
    ("ahead of time", "--:"),
    ("bytes/parameter", "--:"),
    ("peak RSS, GiB", "--:"),
)


def stall_share(runner: Runner, only_parameters: bool = False) -> float:
    """Return the share of a step in which its thread waited for a drive; the median over steps."""
    return statistics.median(
        _stalled_s(step, only_parameters) / step.whole_s for step in runner.steps
    )


def _stalled_s(step: Step, only_parameters: bool) -> float:
    waits = {cause: s for cause, s in step.seconds.items() if cause not in COMPUTING | {OTHER}}
    return sum(s for cause, s in waits.items() if not only_parameters or "parameter" in cause)


def hit_share(runner: Runner) -> float | None:
    """Return the share of fetched blocks that were asked for before they were needed; None: no
    block was fetched.
    """
    hits, misses = (
        sum(step.counts.get(f"parameter_{what}", 0) for step in runner.steps)
        for what in ("hits", "misses")
    )
    return hits / (hits + misses) if hits + misses else None


def find_demands(sitting: Sitting) -> Iterator[Demand]:
    """Yield the figures that a sitting must reach, of the contestants that took part."""
    disk, resident = sitting.find(DISK), sitting.find(RESIDENT)
    torch, host, tuned = sitting.find(TORCH), sitting.find(HOST), sitting.find(TUNED_NVME)
    if resident and host:
        ratio = Middle.of(resident.ratios(host))
        what = f"whole step, {RESIDENT} / {HOST} (wrapped)"
        yield Demand(sitting.what, what, "at most 1.03", str(ratio), ratio.median <= 1.03)
    if disk and sitting.what == MANY:
        if torch:
            ratio = Middle.of(disk.ratios(torch))
            what = f"whole step, {DISK} / {TORCH}"
            yield Demand(sitting.what, what, "at most 1.30", str(ratio), ratio.median <= 1.3)
        share = stall_share(disk, only_parameters=True)
        what = "share of the step that waits for parameters"
        yield Demand(sitting.what, what, "below 5 %", f"{share:.1%}", share < 0.05)
    if disk and tuned and sitting.what == FEW:
        ratio = Middle.of(tuned.ratios(disk))
        what = f"whole step of {TUNED_NVME} / ours, {DISK} (aim: 1.50)"
        yield Demand(sitting.what, what, "at least 1.00", str(ratio), ratio.median >= 1.0)
        peak = disk.facts["now"]["peak_rss"] / tuned.facts["now"]["peak_rss"]
        what = f"peak RSS / that of {TUNED_NVME}"
        yield Demand(sitting.what, what, "at most 0.50", f"{peak:.2f}", peak <= 0.5)


def write_model(name: str, command: str, sittings: Sequence[Sitting]) -> Path:
    """Write `results/<name>_<machine>_<yyyymm>.md` and the picture beside it."""
    HERE.mkdir(exist_ok=True)
    path = result_path(name)
    numel = sittings[0].runners[0].numel
    demands = [str(demand) for sitting in sittings for demand in find_demands(sitting)]
    lines = [
        f"# {name}",
        "",
        *machine_header(),
        f"- command: `{command}`",
        f"- a GPT of {numel / 1e6:.0f} M bf16 parameters, clipped by `clip_grad_norm_`; each "
        "contestant is a process of its own and runs two steps in turn",
        "- figures are medians over the turns, in brackets the middle half",
        "- stalls: share of the whole step in which its thread waited for the drive, and the part "
        "of that for parameters (the rest is optimizer state)",
        "- ahead of time: of the blocks of parameters that had to come, those that were fetched "
        "before they were needed",
        *_budget_lines(sittings),
        "",
        "| " + " | ".join(heading for heading, _ in HEADINGS) + " |",
        "|" + "|".join(side for _, side in HEADINGS) + "|",
        *(line for sitting in sittings for line in _rows(sitting)),
    ]
    if demands:
        lines += ["", "| sitting | what must be shown | asked | measured | met |"]
        lines += ["|---|---|--:|--:|---|", *demands]
    path.write_text("\n".join(lines) + "\n")
    draw_model(sittings, path.with_suffix(".png"))
    return path


def result_path(name: str) -> Path:
    cpu = re.sub(r"\W+", "-", host_facts.read_cpu_model() or "unknown").strip("-").lower()
    return HERE / f"{name}_{cpu}_{datetime.date.today():%Y%m}.md"


def _budget_lines(sittings: Sequence[Sitting]) -> list[str]:
    """Return a line for each prepared model: how its host memory was divided."""
    found = {}
    for runner in (runner for sitting in sittings for runner in sitting.runners):
        if shares := runner.facts.get("shares"):
            each = ", ".join(f"{what} {nbytes / GI:.2f}" for what, nbytes in shares.items())
            on_disk = runner.facts["on_disk"] / GI
            found[runner.name] = f"- {runner.name}: GiB of memory for {each}; on disk {on_disk:.2f}"
    return list(found.values())


def _rows(sitting: Sitting) -> Iterator[str]:
    for runner in sitting.runners:
        yield _row(sitting, runner)
    for who, why in sitting.absent.items():
        yield f"| {sitting.what} | {who} | {why} |" + " |" * (len(HEADINGS) - 3)
    if sitting.fio_bytes_per_s:
        rate = Middle.of([rate / 1e9 for rate in sitting.fio_bytes_per_s])
        text = f"fio, half reads, half writes: {rate} GB/s"
        yield f"| {sitting.what} | {text} |" + " |" * (len(HEADINGS) - 2)


def _row(sitting: Sitting, runner: Runner) -> str:
    whole, update = (Middle.of(runner.turn_s(what)) for what in ("whole_s", "optimizer_s"))
    tokens = runner.entry.options["task"].get("tokens", 128)
    stalls, hits = ["", ""], ""
    if runner.steps[0].seconds:
        stalls = [f"{stall_share(runner, only):.1%}" for only in (False, True)]
    if (share := hit_share(runner)) is not None:
        hits = f"{share:.0%}"
    cells = [
        sitting.what,
        runner.name,
        str(whole),
        str(update),
        f"{tokens / whole.median:.0f}",
        *stalls,
        hits,
        f"{bytes_a_param(runner):.2f}",
        f"{runner.facts['now']['peak_rss'] / GI:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def draw_model(sittings: Sequence[Sitting], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(sittings), 2, figsize=(13, 4 * len(sittings)), squeeze=False)
    for (left, right), sitting in zip(axes, sittings, strict=True):
        names = [runner.name for runner in sitting.runners]
        wholes = [Middle.of(runner.turn_s("whole_s")).median for runner in sitting.runners]
        waits = [stall_share(r) * whole for r, whole in zip(sitting.runners, wholes, strict=True)]
        left.barh(names, wholes, label="the rest")
        left.barh(names, waits, label="waits for the drive (ours)")
        left.set(xlabel="seconds a step", title=sitting.what)
        left.legend(fontsize=8)
        right.barh(names, [r.facts["now"]["peak_rss"] / GI for r in sitting.runners])
        right.set(xlabel="GiB", title="peak of resident memory")
        for axis in (left, right):
            axis.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
