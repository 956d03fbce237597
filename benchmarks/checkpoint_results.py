"""The tables of the checkpoint benchmark."""

from __future__ import annotations

import datetime
import re
import statistics
from dataclasses import dataclass, field
from pathlib import Path

from disk_contest import DiskContestant
from results import HERE, machine_header

from offload.core import host_facts

MI = 1 << 20


@dataclass
class SaveRow:
    """A contestant's row. of_fio: median over the rounds of its GB/s / fio's in the same round."""

    name: str
    seconds: float
    gb_per_s: float
    cores: float
    of_fio: float
    extra_bytes: int | None

    @classmethod
    def of(cls, one: DiskContestant, fio: DiskContestant, extra_bytes: list[int]) -> SaveRow:
        return cls(
            one.name,
            statistics.median(run.seconds for run in one.runs),
            one.gb_per_s,
            one.cores,
            statistics.median(one.ratios(fio)),
            max(extra_bytes) if extra_bytes else None,
        )


@dataclass
class BackgroundRow:
    """The row of one background save, and of the steps it overlapped. held_s: until the call
    returned. foreground_s: of the same save with nothing beside it. by_bytes: what the drive moved
    during those steps / what it moves for as many steps alone.
    """

    alone_s: float
    with_save_s: float
    steps: int
    held_s: float
    save_s: float
    foreground_s: float
    by_bytes: float

    @property
    def slowdown(self) -> float:
        return self.with_save_s / self.alone_s

    @property
    def by_time(self) -> float:
        """The ratio if the drive had done one after the other."""
        alone_s = self.steps * self.alone_s
        return (alone_s + self.foreground_s) / alone_s


@dataclass
class CheckpointResults:
    saves: list[SaveRow] = field(default_factory=list)
    background: list[BackgroundRow] = field(default_factory=list)


def write_checkpoint(command: str, results: CheckpointResults) -> Path:
    """Write `results/checkpoint_<machine>_<yyyymm>.md`."""
    HERE.mkdir(exist_ok=True)
    cpu = re.sub(r"\W+", "-", host_facts.read_cpu_model() or "unknown").strip("-").lower()
    path = HERE / f"checkpoint_{cpu}_{datetime.date.today():%Y%m}.md"
    lines = ["# checkpoint", "", *machine_header(), f"- command: `{command}`", *_saves(results)]
    path.write_text("\n".join([*lines, *_background(results)]) + "\n")
    return path


def _saves(results: CheckpointResults) -> list[str]:
    lines = [
        "- GB/s: bytes read and written / seconds, median of the rounds; fio reads and writes as "
        "many at the same time; torch.save and torch.distributed.checkpoint have everything in "
        "memory and only write; all contestants sync",
        "- extra MiB: the most resident memory during a save, less that before it",
        "",
        "| who | s | GB/s | cores | of fio | extra MiB |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in results.saves:
        extra = "" if row.extra_bytes is None else f"{row.extra_bytes / MI:.0f}"
        lines.append(
            f"| {row.name} | {row.seconds:.2f} | {row.gb_per_s:.2f} | {row.cores:.2f} "
            f"| {row.of_fio:.2f} | {extra} |"
        )
    return lines


def _background(results: CheckpointResults) -> list[str]:
    if not results.background:
        return []
    lines = [
        "",
        "Background saves. Slower: time of a step that one overlapped / of a step alone. Its share "
        "of the drive by time: (steps alone + the same save in the foreground) / steps alone; by "
        "bytes: all that the drive moved meanwhile / that of as many steps alone. The two differ "
        "because a step writes over blocks that a file has, a save writes new ones: the drive and "
        "its file system take longer for those (see LOG).",
        "",
        "| call s | save s | in the foreground s | steps | step alone s | step with it s | slower "
        "| by time | by bytes |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in results.background:
        lines.append(
            f"| {row.held_s:.2f} | {row.save_s:.2f} | {row.foreground_s:.2f} | {row.steps} "
            f"| {row.alone_s:.2f} | {row.with_save_s:.2f} | {row.slowdown:.2f} "
            f"| {row.by_time:.2f} | {row.by_bytes:.2f} |"
        )
    rows = results.background
    by_time = statistics.median(row.slowdown / row.by_time for row in rows)
    by_bytes = statistics.median(row.slowdown / row.by_bytes for row in rows)
    lines += ["", f"Slower / share, medians: {by_time:.2f} by time, {by_bytes:.2f} by bytes."]
    return lines
