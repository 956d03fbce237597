"""What has happened, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from offload.config import format_size
from offload.planner import Plan


class Writer(Protocol):
    """What TensorBoard's SummaryWriter has."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any: ...


@dataclass(frozen=True)
class Report:
    """A snapshot. `str()` is for people, `to_dict()` for machines. Bytes are (read, written)."""

    plan: Plan
    counts: dict[str, int]
    seconds: dict[str, float]  # by what was done or waited for, over all steps
    last_seconds: dict[str, float]  # of the last step
    fallbacks: dict[str, str]
    disk_engine: str | None
    disk_bytes: tuple[int, int]
    last_disk_bytes: tuple[int, int]
    host_peak_bytes: int

    @property
    def disk_read_bytes(self) -> int:
        return self.disk_bytes[0]

    @property
    def disk_written_bytes(self) -> int:
        return self.disk_bytes[1]

    def to_dict(self) -> dict[str, Any]:
        """Flat numbers and texts, ready for a logger."""
        return {
            **{f"count/{name}": value for name, value in self.counts.items()},
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
            **{f"last_step/seconds/{name}": value for name, value in self.last_seconds.items()},
            **{f"fallback/{name}": why for name, why in self.fallbacks.items()},
            "state_bytes": self.plan.state_bytes,
            "state_bytes_in_host_memory": self.plan.resident_bytes,
            "state_bytes_on_disk": self.plan.disk_bytes,
            "disk_read_bytes": self.disk_read_bytes,
            "disk_written_bytes": self.disk_written_bytes,
            "last_step/disk_read_bytes": self.last_disk_bytes[0],
            "last_step/disk_written_bytes": self.last_disk_bytes[1],
            "host_peak_bytes": self.host_peak_bytes,
        }

    def log_to(self, writer: Writer, step: int) -> None:
        """Write all numbers to TensorBoard, or to whatever has its `add_scalar`."""
        for name, value in self.to_dict().items():
            if isinstance(value, int | float):
                writer.add_scalar(f"offload/{name}", value, step)

    def __str__(self) -> str:
        size = format_size
        rows = [
            ("steps", str(self.counts.get("steps", 0)), ""),
            ("state in host memory", size(self.plan.resident_bytes), ""),
            ("state on disk", size(self.plan.disk_bytes), ""),
            ("disk read", size(self.disk_bytes[0]), size(self.last_disk_bytes[0])),
            ("disk written", size(self.disk_bytes[1]), size(self.last_disk_bytes[1])),
            ("host memory, peak", size(self.host_peak_bytes), ""),
        ]
        if self.disk_engine:
            rows.append(("disk engine", self.disk_engine, ""))
        for cause, seconds in sorted(self.seconds.items()):
            last = f"{self.last_seconds.get(cause, 0.0):.3f} s"
            rows.append((f"time: {cause}", f"{seconds:.3f} s", last))
        rows += [(f"fall-back: {what}", why, "") for what, why in self.fallbacks.items()]
        rows.insert(0, ("", "in all", "last step"))
        wide = [max(len(row[i]) for row in rows if row[2] or i == 0) for i in range(2)]
        return "\n".join(
            f"{name:<{wide[0]}}  {total:<{wide[1]}}  {last}".rstrip() for name, total, last in rows
        )
