"""What has happened, for people and for machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offload.config import format_size
from offload.metrics import Snapshot
from offload.planner import Plan

if TYPE_CHECKING:
    from offload.pool import Pool
    from offload.store import DiskStore


@dataclass(frozen=True)
class Report:
    """A snapshot. `str()` is for people, `to_dict()` for machines."""

    plan: Plan
    counts: dict[str, int]
    seconds: dict[str, float]
    fallbacks: dict[str, str]
    disk_engine: str | None
    disk_read_bytes: int
    disk_written_bytes: int
    host_peak_bytes: int

    @classmethod
    def of(
        cls, plan: Plan, snapshot: Snapshot, store: DiskStore | None, pool: Pool | None
    ) -> Report:
        disk = store.stats() if store is not None else None
        return cls(
            plan=plan,
            counts=dict(snapshot.counts),
            seconds=dict(snapshot.seconds),
            fallbacks=dict(snapshot.fallbacks),
            disk_engine=disk.engine if disk else None,
            disk_read_bytes=disk.read_bytes if disk else 0,
            disk_written_bytes=disk.written_bytes if disk else 0,
            host_peak_bytes=pool.stats().peak_bytes if pool is not None else 0,
        )

    def to_dict(self) -> dict[str, Any]:
        """Flat numbers and texts, ready for a logger."""
        return {
            **{f"count/{name}": value for name, value in self.counts.items()},
            **{f"seconds/{name}": value for name, value in self.seconds.items()},
            **{f"fallback/{name}": why for name, why in self.fallbacks.items()},
            "state_bytes": self.plan.state_bytes,
            "state_bytes_in_host_memory": self.plan.resident_bytes,
            "state_bytes_on_disk": self.plan.disk_bytes,
            "disk_read_bytes": self.disk_read_bytes,
            "disk_written_bytes": self.disk_written_bytes,
            "host_peak_bytes": self.host_peak_bytes,
        }

    def __str__(self) -> str:
        size, steps = format_size, self.counts.get("steps", 0)
        rows = [
            ("steps", str(steps)),
            ("state in host memory", size(self.plan.resident_bytes)),
            ("state on disk", size(self.plan.disk_bytes)),
            (
                "disk read / written",
                f"{size(self.disk_read_bytes)} / {size(self.disk_written_bytes)}",
            ),
            ("host memory, peak", size(self.host_peak_bytes)),
            *(
                (f"seconds: {cause}", f"{value:.3f}")
                for cause, value in sorted(self.seconds.items())
            ),
            *((f"fall-back: {what}", why) for what, why in self.fallbacks.items()),
        ]
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)
