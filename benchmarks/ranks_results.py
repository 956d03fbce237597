"""The table of the benchmark over ranks."""

from __future__ import annotations

import datetime
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from results import HERE, machine_header

from offload.core import host_facts

MI = 1 << 20


@dataclass
class RankRow:
    """The row of one contestant with so many ranks; each list has an entry for each round."""

    name: str
    count: int
    numel: int = 0
    step_s: list[float] = field(default_factory=list)  # of the slowest rank, median of its steps
    received_bytes: list[float] = field(default_factory=list)  # a step and rank
    peak_bytes: list[int] = field(default_factory=list)  # of the largest rank
    state_bytes: int | None = None  # of the largest rank
    theory: float | None = None  # received, in sizes of all parameters


def write_ranks(command: str, rows: list[RankRow]) -> Path:
    """Write `results/ranks_<machine>_<yyyymm>.md`."""
    HERE.mkdir(exist_ok=True)
    cpu = re.sub(r"\W+", "-", host_facts.read_cpu_model() or "unknown").strip("-").lower()
    path = HERE / f"ranks_{cpu}_{datetime.date.today():%Y%m}.md"
    lines = [
        "# ranks",
        "",
        *machine_header(),
        f"- command: `{command}`; {rows[0].numel:,} fp32 parameters; all ranks are on this "
        "machine, share its cores, and talk by gloo over its loopback device",
        "- s: a step, of the slowest rank; median of the rounds, their least and most behind it",
        "- P: bytes received by a rank in a step, as the kernel counts them, in sizes of all "
        "parameters; theory: (ranks - 1) / ranks for each time that all parameters or gradients "
        "pass",
        "- state: of the optimizer, a rank; of 1/N: beside an N-th of all; peak: most resident "
        "memory of a rank",
        "",
        "| who | ranks | s | P | theory | state MiB | of 1/N | peak MiB |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    path.write_text("\n".join([*lines, *map(_line, rows)]) + "\n")
    return path


def _line(row: RankRow) -> str:
    whole = 4 * row.numel
    spread = f"{min(row.step_s):.2f}-{max(row.step_s):.2f}"
    passed = statistics.median(row.received_bytes) / whole
    theory = "" if row.theory is None else f"{row.theory:.2f}"
    state = of_all = ""
    if row.state_bytes is not None:
        state = f"{row.state_bytes / MI:.0f}"
        of_all = f"{row.state_bytes * row.count / (2 * whole):.3f}"
    return (
        f"| {row.name} | {row.count} | {statistics.median(row.step_s):.2f} ({spread}) "
        f"| {passed:.2f} | {theory} | {state} | {of_all} | {max(row.peak_bytes) / MI:.0f} |"
    )
