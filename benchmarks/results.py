"""The results of a benchmark: a Markdown table with the machine above it, and a picture."""

from __future__ import annotations

import datetime
import platform
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from contest import Contestant

from offload import kernels
from offload.core import host_facts

HERE = Path(__file__).parent / "results"


@dataclass
class Row:
    """The row of a contestant at one size; ratios are of medians in the same interleaved run."""

    what: str
    numel_mi: int
    threads: int
    name: str
    median_ms: float
    spread: float
    gb_per_s: float
    of_ceiling: float | None
    against_offload: float  # time of this one / time of offload

    @classmethod
    def of(
        cls,
        what: str,
        numel_mi: int,
        threads: int,
        one: Contestant,
        contestants: list[Contestant],
        nbytes: int,
    ) -> Row:
        by_name = {c.name: c.median_s for c in contestants}
        ceiling_s = by_name.get("ceiling")
        return cls(
            what=what,
            numel_mi=numel_mi,
            threads=threads,
            name=one.name,
            median_ms=one.median_s * 1e3,
            spread=one.spread,
            gb_per_s=nbytes / one.median_s / 1e9,
            of_ceiling=ceiling_s / one.median_s if ceiling_s else None,
            against_offload=one.median_s / by_name["offload"],
        )


def machine_header() -> list[str]:
    facts = host_facts.read_machine()
    return [
        f"- machine: {facts.cpu.model}, {host_facts.usable_cores(facts.cpu)} cores, "
        f"kernel {facts.kernel}",
        f"- huge pages: {facts.huge_pages.transparent}; instruction set: {kernels.isa()}; "
        f"torch {torch.__version__}, Python {platform.python_version()}",
        f"- date: {datetime.date.today().isoformat()}",
    ]


def write(name: str, command: str, rows: list[Row]) -> Path:
    """Write `results/<name>_<machine>_<yyyymm>.md` and the picture beside it."""
    HERE.mkdir(exist_ok=True)
    cpu = re.sub(r"\W+", "-", host_facts.read_cpu_model() or "unknown").strip("-").lower()
    path = HERE / f"{name}_{cpu}_{datetime.date.today():%Y%m}.md"
    lines = [
        f"# {name}",
        "",
        *machine_header(),
        f"- command: `{command}`",
        "- medians of runs on the same memory, interleaved in parts of 16 Mi elements; "
        "the spread is half the distance between the quartiles",
        "- of ceiling: time of a math-free pass over fp32 buffers of that size (4 reads, 3 writes) "
        "/ time of this one",
        "- x offload: time of this one / time of offload, in the same run",
        "",
        "| what | Mi elements | threads | who | ms | spread | GB/s | of ceiling | x offload |",
        "|---|--:|--:|---|--:|--:|--:|--:|--:|",
    ]
    for r in rows:
        share = "" if r.of_ceiling is None else f"{r.of_ceiling:.1%}"
        lines.append(
            f"| {r.what} | {r.numel_mi} | {r.threads} | {r.name} | {r.median_ms:.2f} "
            f"| ±{r.spread:.1%} | {r.gb_per_s:.1f} | {share} | {r.against_offload:.2f} |"
        )
    path.write_text("\n".join(lines) + "\n")
    draw(rows, path.with_suffix(".png"))
    return path


def draw(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    most = max(row.threads for row in rows)
    adam = [row for row in rows if row.what == "AdamW fp32" and row.threads == most]
    chain = [
        row
        for row in rows
        if row.what == "mixed chain" and row.threads == most and row.numel_mi == 64
    ]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2))
    for name in dict.fromkeys(row.name for row in adam):
        mine = [row for row in adam if row.name == name]
        style = {"linestyle": "--", "color": "black"} if name == "ceiling" else {"marker": "o"}
        left.plot(
            [row.numel_mi for row in mine], [row.gb_per_s for row in mine], label=name, **style
        )
    left.set(
        xscale="log", xlabel="Mi elements", ylabel="GB/s at 28 bytes an element", ylim=(0, None)
    )
    left.set_xticks(
        sorted({row.numel_mi for row in adam}), labels=sorted({row.numel_mi for row in adam})
    )
    left.set_title(f"AdamW fp32, {most} threads")
    left.legend()
    right.barh([row.name for row in chain], [row.median_ms for row in chain])
    right.set(xlabel="ms (64 Mi elements)", title="norm, clip, AdamW from bf16, bf16 out")
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
