"""The plan of a training: what will be where, and what a step moves. A pure function of facts and
budgets, which `wrap`, `prepare`, `offload.plan` and a forecast share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.planning.planner import Budgets, TrainingFacts, most_numel, plan_state
from offload.planning.sharding import Sharding
from offload.planning.shares import Shares, share_out
from offload.planning.state_plan import Plan
from offload.planning.unit import DEVICE_SPARE_BYTES, PAGE, on_device_bytes

_NO_SHARES = Shares(0, 0, 0, True)  # where an optimizer is wrapped, and no model is prepared


def plan_training(facts: TrainingFacts, budgets: Budgets) -> TrainingPlan:
    """Plan a training within the budgets. Raises `CapacityError` with the arithmetic where they
    cannot work.
    """
    if not facts.is_prepared:
        return TrainingPlan(facts, budgets, _NO_SHARES, plan_state(facts, budgets))
    _check_device(facts, budgets)
    shares = share_out(facts, budgets)
    most = most_numel(shares.staging) if shares.spilled else None
    within = replace(budgets, host_bytes=shares.state, most_chunk_numel=most)
    return TrainingPlan(facts, within, shares, plan_state(facts, within))


@dataclass(frozen=True)
class TrainingPlan:
    """The plan of a training; of a prepared model's, `str()` is a table for people.

    budgets: those that the optimizer's state was planned within. tuned: the profile's tuning and
    its file; None: all is derived.
    """

    facts: TrainingFacts
    budgets: Budgets
    shares: Shares
    state: Plan
    tuned: str | None = None

    @property
    def units(self) -> int:
        return len(self.facts.units.nbytes)

    @property
    def param_bytes(self) -> int:
        return sum(self.facts.units.nbytes)

    @property
    def file_bytes(self) -> int:
        """The bytes of frozen parameters that stay in their weight files."""
        sizes = self.facts.units
        return sum(sizes.nbytes[number] for number in sizes.in_files)

    @property
    def sharding(self) -> Sharding | None:
        """The sharding over ranks, each of which has such a plan for its shards."""
        return self.facts.sharding

    def with_sharding(self, sharding: Sharding) -> TrainingPlan:
        """Return the plan with other room for gathered blocks."""
        shares = replace(self.shares, whole=sharding.host_bytes)
        return replace(self, facts=replace(self.facts, sharding=sharding), shares=shares)

    @property
    def host_bytes(self) -> int:
        """The bytes of host memory that are taken."""
        return self.shares.total if self.facts.is_prepared else self.state.arena_bytes

    @property
    def device_bytes(self) -> int:
        """The limit for everything on the device; 0 on the CPU."""
        return self.budgets.device_bytes or 0

    @property
    def device_left_bytes(self) -> int:
        """The bytes of that limit that one unit at a time leaves."""
        return self.device_bytes - _needed_on_device(self.facts)

    @property
    def params_on_host_bytes(self) -> int:
        """The bytes of parameters that host memory has room for."""
        return min(self.shares.params, self.param_bytes)

    @property
    def spill_room_bytes(self) -> int:
        """The bytes of the store for spilled gradients, cut like the chunks of state, and for new
        versions in flight: each part begins at a page.
        """
        if not self.shares.spilled:
            return 0
        pieces = sum(2 * len(chunk.slices) + 1 for chunk in self.state.chunks)  # with their gaps
        return self.shares.gradients_on_disk + PAGE * pieces + 2 * self.shares.staging

    @property
    def disk_room_bytes(self) -> int:
        """The bytes reserved on disk: for the blocks and chunks there, and for new versions in
        flight.
        """
        if not self.budgets.directories:
            return 0
        stored = self.facts.units.stored_bytes
        blocks = stored + min(stored, self.shares.params)
        return blocks + self.state.disk_capacity_bytes + self.spill_room_bytes

    @property
    def away_bytes(self) -> int:
        """The bytes of parameters that host memory has no room for: each pass fetches them."""
        return self.param_bytes - self.params_on_host_bytes

    @property
    def tiers(self) -> dict[str, dict[str, int]]:
        """The bytes of each kind on each tier, while the model trains."""
        return {
            "parameters": {"host": self.params_on_host_bytes, "disk": self.away_bytes},
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
                f"{size(self.params_on_host_bytes)} of them in host memory",
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


def _needed_on_device(facts: TrainingFacts) -> int:
    """Return the least bytes for everything on a device: one unit at a time, gathered if ranks have
    shards, the model's buffers and what other code holds.
    """
    sharding = facts.sharding
    blocks = facts.units.least_device_bytes if sharding is None else sharding.fixed_bytes
    return blocks + on_device_bytes(facts.buffer_bytes) + facts.others_bytes + DEVICE_SPARE_BYTES


def _check_device(facts: TrainingFacts, budgets: Budgets) -> None:
    """Refuse a limit for everything on a device in which not even one unit at a time works."""
    limit, works, sharding = budgets.device_bytes, _needed_on_device(facts), facts.sharding
    if limit is None or works <= limit:
        return
    allowed = f"device_memory: {format_size(limit)} ({limit} bytes)"
    beside = (
        f"the model's buffers {format_size(facts.buffer_bytes)}, other code holds "
        f"{format_size(facts.others_bytes)}; the least that works is about {works} bytes, and what "
        "activations take"
    )
    if sharding is None:
        blocks = format_size(facts.units.least_device_bytes)
        raise CapacityError(
            f"{allowed} are allowed; one unit at a time needs {blocks} for parameters, {beside}"
        )
    raise CapacityError(
        f"{allowed} are allowed on each rank; one unit at a time, gathered from {sharding.count} "
        f"ranks, needs {format_size(sharding.whole_bytes)} with {sharding.depth} more ahead, whole "
        f"gradients on their way {format_size(sharding.gradient_bytes)}, {beside}; raise "
        "device_memory, or lower prefetch_depth"
    )
