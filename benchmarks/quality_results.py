"""The table and the picture of the quality benchmark, and whether it shows what it must."""

from __future__ import annotations

import enum
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from model_results import result_path
from results import HERE, machine_header
from wrap_results import MI, Demand


class Precision(enum.Enum):
    FP32 = "fp32"
    MASTER = "bf16, exact fp32 master"
    BF16 = "bf16 alone"


class Tier(enum.Enum):
    TORCH = "torch, in memory"
    WRAPPED = "wrap, in memory"
    STATE_ON_DISK = "wrap, state on NVMe"
    ALL_ON_DISK = "prepare, everything on NVMe"


class Case(NamedTuple):
    precision: Precision
    tier: Tier

    def __str__(self) -> str:
        return f"{self.precision.value}: {self.tier.value}"


# What is bf16 alone has no exact master, and so is torch's only.
CASES = [
    *(Case(precision, tier) for precision in (Precision.FP32, Precision.MASTER) for tier in Tier),
    Case(Precision.BF16, Tier.TORCH),
]
HEADINGS = (
    ("precision", "---"),
    ("tier", "---"),
    ("validation loss", "--:"),
    ("over torch fp32", "--:"),
    ("within noise", "---"),
    ("bits", "---"),
    ("step, s", "--:"),
    ("device, MiB", "--:"),
    ("host, MiB", "--:"),
    ("disk, MiB", "--:"),
    ("process grew, MiB", "--:"),
)


@dataclass(frozen=True)
class Result:
    """The result of one case with one seed. case: its number in CASES. host_bytes: of parameters,
    gradients and state; grown_bytes: of the process's memory at most, activations included.
    """

    case: int
    seed: int
    loss: float
    digest: str
    step_s: float
    device_bytes: int | None
    host_bytes: int
    disk_bytes: int
    grown_bytes: int


@dataclass(frozen=True)
class Row:
    """The row of one case over all seeds. over: loss less that of torch in fp32 with the same seed.
    band: how far apart seeds are in fp32 with torch. is_same: the bits of torch in this precision,
    with every seed.
    """

    case: Case
    results: list[Result]
    over: list[float]
    band: float
    is_same: bool

    @property
    def losses(self) -> list[float]:
        return [result.loss for result in self.results]

    @property
    def is_within(self) -> bool:
        return abs(statistics.mean(self.over)) <= self.band


def make_rows(results: Sequence[Result]) -> list[Row]:
    """Make the rows of the cases that took part, in the order of CASES."""
    by_case = {
        case: sorted((r for r in results if CASES[r.case] == case), key=lambda r: r.seed)
        for case in CASES
    }
    plain = by_case[Case(Precision.FP32, Tier.TORCH)]
    band = max(r.loss for r in plain) - min(r.loss for r in plain)
    rows = []
    for case, mine in by_case.items():
        if mine:
            torchs = by_case[Case(case.precision, Tier.TORCH)]
            over = [r.loss - p.loss for r, p in zip(mine, plain, strict=True)]
            same = [r.digest == t.digest for r, t in zip(mine, torchs, strict=True)]
            rows.append(Row(case, mine, over, band, all(same)))
    return rows


def find_demands(results: Sequence[Result]) -> Iterator[Demand]:
    """Yield the demands: offloading changes no bit, and an exact master costs no quality."""
    for row in make_rows(results):
        name = str(row.case)
        if row.case.tier is not Tier.TORCH:
            what = "parameters after training, beside torch in this precision"
            found = "the same" if row.is_same else "others"
            yield Demand(name, what, "the same bits", found, row.is_same)
        if row.case.precision is Precision.MASTER:
            what = "validation loss, over torch in fp32 with the same seeds"
            mean = f"{statistics.mean(row.over):+.4f}"
            yield Demand(name, what, f"within ±{row.band:.4f}", mean, row.is_within)


def write_quality(
    command: str, results: Sequence[Result], shape: Mapping[str, Any], folder: Path | None = None
) -> Path:
    """Write `results/quality_<machine>_<yyyymm>.md` and the picture beside it. shape: of the model
    and its training.
    """
    rows, folder = make_rows(results), folder or HERE
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / result_path("quality").name
    seeds = len(rows[0].results)
    lines = [
        "# quality",
        "",
        *machine_header(),
        f"- command: `{command}`; {shape['device']}",
        f"- a GPT of {shape['layers']} layers, width {shape['width']}, {shape['steps']} steps of "
        f"{shape['tokens']} tokens (bytes) of examples/text, clipped; {seeds} seeds for the start "
        "and the order of the text, the same for all",
        "- validation loss: mean over the seeds of the loss on text that was held out, computed in "
        "fp32 from the logits; in brackets the lowest and the highest",
        f"- noise: with torch in fp32 alone the seeds are {rows[0].band:.4f} apart; what is over "
        "torch fp32 by less is within it",
        "- bits: of all parameters after training, beside torch in the same precision, with every "
        "seed; torch's own bf16 with a master is AdamW on an fp32 copy, rounded after each step",
        "- host: parameters, gradients and state; the NVMe tiers get 1.25 times the least host "
        "memory that works; process: by how much it grew at most, activations included",
        "",
        "| " + " | ".join(heading for heading, _ in HEADINGS) + " |",
        "|" + "|".join(side for _, side in HEADINGS) + "|",
        *map(_line, rows),
        "",
        "| case | what must be shown | asked | measured | met |",
        "|---|---|--:|--:|---|",
        *map(str, find_demands(results)),
    ]
    path.write_text("\n".join(lines) + "\n")
    draw_quality(rows, path.with_suffix(".png"))
    return path


def _line(row: Row) -> str:
    results = row.results
    on_device = [r.device_bytes for r in results if r.device_bytes is not None]
    cells = [
        row.case.precision.value,
        row.case.tier.value,
        f"{statistics.mean(row.losses):.4f} ({min(row.losses):.4f}-{max(row.losses):.4f})",
        f"{statistics.mean(row.over):+.4f}",
        "yes" if row.is_within else "**no**",
        "torch" if row.case.tier is Tier.TORCH else "the same" if row.is_same else "**others**",
        f"{statistics.median(r.step_s for r in results):.3f}",
        f"{max(on_device) / MI:.1f}" if on_device else "",
        f"{max(r.host_bytes for r in results) / MI:.1f}",
        f"{max(r.disk_bytes for r in results) / MI:.1f}",
        f"{max(r.grown_bytes for r in results) / MI:.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def draw_quality(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = [str(row.case) for row in rows]
    figure, (losses, memory) = pyplot.subplots(1, 2, figsize=(13, 4.5), sharey=True)
    losses.axvspan(min(rows[0].losses), max(rows[0].losses), color="0.9", label="noise of seeds")
    for number, row in enumerate(rows):
        losses.plot(row.losses, [number] * len(row.losses), "o", color="tab:blue")
    losses.set(xlabel="validation loss, each seed", title="quality after equal tokens")
    losses.set_yticks(range(len(names)), labels=names)
    losses.legend(fontsize=8)
    host = [max(r.host_bytes for r in row.results) / MI for row in rows]
    disk = [max(r.disk_bytes for r in row.results) / MI for row in rows]
    memory.barh(range(len(rows)), host, label="host memory")
    memory.barh(range(len(rows)), disk, left=host, label="disk")
    memory.set(xlabel="MiB of parameters, gradients and state", title="where it is")
    memory.legend(fontsize=8)
    memory.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
