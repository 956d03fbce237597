"""The table of predicted beside measured times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from model_results import result_path
from results import HERE, machine_header

NEAR = 0.15  # of the measured time
NEEDED = 6  # configurations that must be so near
BYTES_NEAR = 0.03


@dataclass
class Prediction:
    """The row of one configuration. Of each round: seconds of an iteration, and bytes read and
    written; as predicted with the speed of that very run's drive, and as measured.
    """

    name: str
    predicted_s: list[float] = field(default_factory=list)
    measured_s: list[float] = field(default_factory=list)
    predicted_bytes: list[int] = field(default_factory=list)
    measured_bytes: list[float] = field(default_factory=list)
    disk_bytes_per_s: list[float] = field(default_factory=list)
    limit: str = ""

    @property
    def ratio(self) -> float:
        """The predicted by the measured time: the median over rounds, each with the speed that its
        drive had.
        """
        pairs = zip(self.predicted_s, self.measured_s, strict=True)
        return statistics.median(predicted / measured for predicted, measured in pairs)

    @property
    def bytes_ratio(self) -> float | None:
        """The predicted by the measured bytes: the median over rounds. None: nothing was to be
        moved.
        """
        pairs = zip(self.predicted_bytes, self.measured_bytes, strict=True)
        ratios = [predicted / measured for predicted, measured in pairs if measured]
        return statistics.median(ratios) if ratios else None

    @property
    def is_near(self) -> bool:
        return abs(self.ratio - 1) <= NEAR


@dataclass(frozen=True)
class Known:
    """The quantities that the predictions stand on, measured in the same session. Medians over
    rounds.
    """

    model: str
    update_bytes_per_s: float
    memory_bytes_per_s: float
    compute_beside_disk: float
    update_beside_disk: float


@dataclass(frozen=True)
class Predictions:
    known: Known
    rows: Sequence[Prediction]


def write_predictions(command: str, results: Predictions) -> Path:
    """Write `results/predict_<machine>_<yyyymm>.md`."""
    known, found = results.known, results.rows
    HERE.mkdir(exist_ok=True)
    path = result_path("predict")
    near = sum(one.is_near for one in found)
    lines = [
        "# predict",
        "",
        *machine_header(),
        f"- command: `{command}`",
        f"- {known.model}",
        "- measured in the same session, and all that a prediction knows: compute of each unit "
        "with everything in memory; the drive's speed from the events of the very run; update "
        f"{known.update_bytes_per_s / 1e9:.1f} GB/s; a copy {known.memory_bytes_per_s / 1e9:.1f} "
        f"GB/s; beside a busy drive the model keeps {known.compute_beside_disk:.0%} of its speed, "
        f"the update {known.update_beside_disk:.0%}",
        "- nothing is fitted to the times of iterations; medians over rounds",
        f"- within {NEAR:.0%}: {near} of {len(found)}",
        "",
        "| configuration | drive, mixed, GB/s | measured, s | predicted, s | ratio | GB moved | "
        "bytes, ratio | what limits |",
        "|---|--:|--:|--:|--:|--:|--:|---|",
        *map(_row, found),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _row(one: Prediction) -> str:
    middle = statistics.median
    drive = f"{middle(one.disk_bytes_per_s) / 1e9:.2f}" if one.disk_bytes_per_s else ""
    share = "" if one.bytes_ratio is None else f"{one.bytes_ratio:.3f}"
    return (
        f"| {one.name} | {drive} | {middle(one.measured_s):.3f} | {middle(one.predicted_s):.3f} "
        f"| {one.ratio:.2f} | {middle(one.measured_bytes) / 1e9:.2f} | {share} | {one.limit} |"
    )
