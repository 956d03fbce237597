"""The plan for a prepared model: what will be where, and what a step moves."""

from __future__ import annotations

from dataclasses import dataclass

from offload.core.config import format_size
from offload.planning.planner import Plan
from offload.planning.sharding import Sharding
from offload.planning.shares import Shares


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a prepared model; `str()` is a table for people. file_bytes: of frozen parameters
    that stay in their weight files. device_bytes: for everything on the device; 0 on the CPU.
    sharding: over ranks, each of which has such a plan for its shards.
    """

    units: int
    param_bytes: int
    file_bytes: int
    shares: Shares
    state: Plan
    disk_room_bytes: int
    device_bytes: int
    sharding: Sharding | None = None
    tuned: str | None = None  # the profile's tuning and its file; None: all is derived

    @property
    def away_bytes(self) -> int:
        """The bytes of parameters that host memory has no room for: each pass fetches them."""
        return 0 if self.shares.holds_all_params else max(0, self.param_bytes - self.shares.params)

    @property
    def tiers(self) -> dict[str, dict[str, int]]:
        """The bytes of each kind on each tier, while the model trains."""
        in_memory = min(self.shares.params, self.param_bytes)
        return {
            "parameters": {"host": in_memory, "disk": self.param_bytes - in_memory},
            "gradients": {
                "host": self.shares.gradients,
                "disk": self.shares.gradients_on_disk,
            },
            "optimizer state": {
                "host": self.state.resident_bytes,
                "disk": self.state.disk_bytes,
            },
        }

    @property
    def step_read_bytes(self) -> int:
        """The bytes read in a step, about: parameters for forward, backward and update, spilled
        gradients, state.
        """
        gradients = self.shares.gradients_on_disk
        return 3 * self.away_bytes + gradients + self.state.step_read_bytes

    @property
    def step_written_bytes(self) -> int:
        """The bytes written in a step, about: parameters that the update changes, where not all
        stay in memory, spilled gradients (once more for each further pass whose gradients are
        added), and state.
        """
        changed = self.param_bytes - self.file_bytes if self.state.chunks else 0
        gradients = self.shares.gradients_on_disk
        return (changed if self.away_bytes else 0) + gradients + self.state.step_written_bytes

    def __str__(self) -> str:
        size, shares, state = format_size, self.shares, self.state
        rows = [
            (
                "parameters",
                f"{size(self.param_bytes)} in {self.units} units, "
                f"{size(min(shares.params, self.param_bytes))} of them in host memory",
            )
        ]
        if self.file_bytes:
            rows.append(("  frozen", f"{size(self.file_bytes)} are read from their own files"))
        if self.sharding is not None:
            rows.append(("ranks", str(self.sharding)))
        rows.append(("gradients", self._gradients()))
        where = f"{size(state.resident_bytes)} in host memory, {size(state.disk_bytes)} on disk"
        rows.append(("optimizer state", f"{size(state.state_bytes)}: {where}"))
        if shares.activations:
            rows.append(("activations", f"{size(shares.activations)} of host memory"))
        rows.append(("host memory taken", size(shares.total)))
        if self.device_bytes:
            rows.append(("device memory", f"at most {size(self.device_bytes)}, with all else"))
        if self.disk_room_bytes:
            moved = f"{size(self.step_read_bytes)} read, {size(self.step_written_bytes)} written"
            rows += [
                ("disk space taken", size(self.disk_room_bytes)),
                ("moved each step", f"about {moved}"),
            ]
        if self.tuned is not None:
            rows.append(("tuned", self.tuned))
        rows.append(("verdict", self._verdict()))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def _gradients(self) -> str:
        text = f"{format_size(self.shares.gradients)} in host memory"
        if self.shares.spilled:
            text += (
                f", {format_size(self.shares.gradients_on_disk)} on disk for want of it: "
                f"{len(self.shares.spilled)} of them"
            )
        return text

    def _verdict(self) -> str:
        if self.away_bytes or self.state.disk_bytes or self.shares.spilled:
            return "not all fits in host memory: the rest comes from disk when it is needed"
        return "all of it fits in host memory"
