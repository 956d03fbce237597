"""The table and the picture of the store benchmark."""

from __future__ import annotations

import datetime
import re
import statistics
from dataclasses import dataclass
from pathlib import Path

from disk_contest import DiskContestant
from results import HERE, machine_header

from offload.core import host_facts


@dataclass
class StoreRow:
    """The row of one contestant; `ratio` is the median over the rounds of our speed / this one's,
    and between `low` and `high` lies the middle half of the rounds.
    """

    what: str
    chunk_mi: int
    name: str
    gb_per_s: float
    cores: float
    cpu_s_per_gb: float
    ratio: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(
        cls, what: str, chunk_mi: int, one: DiskContestant, ours: DiskContestant | None
    ) -> StoreRow:
        low = ratio = high = None
        if ours is not None:
            low, ratio, high = statistics.quantiles(ours.ratios(one), n=4, method="inclusive")
        return cls(
            what, chunk_mi, one.name, one.gb_per_s, one.cores, one.cpu_s_per_gb, ratio, low, high
        )


def write_store(command: str, rows: list[StoreRow]) -> Path:
    """Write `results/store_<machine>_<yyyymm>.md` and the picture beside it."""
    HERE.mkdir(exist_ok=True)
    cpu = re.sub(r"\W+", "-", host_facts.read_cpu_model() or "unknown").strip("-").lower()
    path = HERE / f"store_{cpu}_{datetime.date.today():%Y%m}.md"
    lines = [
        "# store",
        "",
        *machine_header(),
        f"- command: `{command}`",
        "- GB/s: median of interleaved runs of 1.1 GB each (others than us and fio: 0.54 GB); "
        "cores: CPU seconds / seconds, of the "
        "whole process (for fio as it reports)",
        "- offload / this: median over the rounds of our speed / this one's in the same round, and "
        "the middle half of the rounds",
        "- who would only fill the page cache syncs after writing and reads with an empty cache",
        "",
        "| what | MiB | who | GB/s | cores | CPU s/GB | offload / this | middle half |",
        "|---|--:|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        ratio = "" if r.ratio is None else f"{r.ratio:.2f}"
        middle = "" if r.low is None else f"{r.low:.2f}-{r.high:.2f}"
        lines.append(
            f"| {r.what} | {r.chunk_mi} | {r.name} | {r.gb_per_s:.2f} | {r.cores:.2f} "
            f"| {r.cpu_s_per_gb:.3f} | {ratio} | {middle} |"
        )
    path.write_text("\n".join(lines) + "\n")
    draw_store(rows, path.with_suffix(".png"))
    return path


def draw_store(rows: list[StoreRow], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in ("write", "read", "mixed") if any(r.what == kind for r in rows)]
    figure, axes = pyplot.subplots(1, max(1, len(kinds)), figsize=(11, 4.2), squeeze=False)
    for axis, kind in zip(axes[0], kinds, strict=False):
        mine = [row for row in rows if row.what == kind]
        for name in dict.fromkeys(row.name for row in mine):
            line = [row for row in mine if row.name == name]
            style = {"linestyle": "--"} if name.startswith("fio") else {"marker": "o"}
            axis.plot([r.chunk_mi for r in line], [r.gb_per_s for r in line], label=name, **style)
        sizes = sorted({row.chunk_mi for row in mine})
        axis.set(xscale="log", title=kind, xlabel="MiB a request", ylim=(0, None))
        axis.set_xticks(sizes, labels=sizes)
    axes[0][0].set_ylabel("GB/s")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
