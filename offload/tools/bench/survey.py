"""Runs the measurements one after the other, collects their results, and makes a profile of this
machine from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from offload.core.host_facts import Accelerator, Memory
from offload.device.accelerator import find_device
from offload.device.device import DeviceTransfer
from offload.device.host import Transfer, open_transfer
from offload.optim.traffic import Traffic
from offload.planning.profile import DriveProfile, Profile, this_machine
from offload.planning.state_plan import Plan
from offload.tools.bench.device import DTYPES, Product, measure_copies, measure_product
from offload.tools.bench.drives import (
    DiskFigures,
    fill,
    measure_beside,
    measure_disk,
    measure_sustained,
)
from offload.tools.bench.figure import BenchProgress, Figure, FigureUnit, SurveyPart
from offload.tools.bench.host import measure_memory, measure_update, update_run
from offload.tools.bench.sizes import DEFAULT, Bench, BenchSizes
from offload.tools.bench.training import StepFigures, measure_training

ALL = "all directories"
SOURCE = "offload bench"


@dataclass(frozen=True)
class BenchRequest:
    """A request for measurements. directories: absolute, no duplicates, with enough free space."""

    parts: frozenset[SurveyPart]
    directories: tuple[Path, ...]
    sizes: BenchSizes = DEFAULT

    def __contains__(self, part: SurveyPart) -> bool:
        return part in self.parts

    @property
    def needs_traffic(self) -> bool:
        """Whether traffic other than that of training must be generated on the drives."""
        return bool(
            self.directories
            and self.parts & {SurveyPart.DISK, SurveyPart.UPDATE, SurveyPart.COMPUTE}
        )

    @property
    def most_written_bytes(self) -> int:
        """The most bytes that are written to all drives together."""
        count, sizes, nbytes = len(self.directories), self.sizes, 0
        if not count:
            return 0
        if self.needs_traffic:
            nbytes += sizes.burst_written_bytes(count)
        if SurveyPart.DISK in self:
            each = sizes.burst_written_bytes(1) if count > 1 else 0
            nbytes += count * (each + sizes.sustained_written_bytes())
        besides = len(self.parts & {SurveyPart.UPDATE, SurveyPart.COMPUTE})
        nbytes += besides * sizes.beside_written_bytes()
        return nbytes + (sizes.training_written_bytes() if SurveyPart.STEP in self else 0)


@dataclass
class SurveyResult:
    """The results of a survey; None: not measured. Those that a profile has are named as there.
    notes: why a figure is missing, and which fallbacks were taken.
    """

    memory_bytes_per_s: Figure | None = None
    update_bytes_per_s: Figure | None = None
    update_ceiling: Figure | None = None
    products: dict[str, Figure] = field(default_factory=dict)  # by dtype
    disks: list[DiskFigures] = field(default_factory=list)  # of one directory each
    together: DiskFigures | None = None
    to_device_bytes_per_s: Figure | None = None
    to_host_bytes_per_s: Figure | None = None
    compute_beside_disk: Figure | None = None
    update_beside_disk: Figure | None = None
    step: StepFigures | None = None
    notes: list[str] = field(default_factory=list)
    written_bytes: int = 0

    @property
    def figures(self) -> list[Figure]:
        """All figures that were measured, in the order of the table."""
        disks = [figure for disk in self.disks for figure in disk.all]
        if self.together is not None and len(self.disks) > 1:
            disks += self.together.all
        found = [
            self.memory_bytes_per_s,
            self.update_bytes_per_s,
            self.update_ceiling,
            *self.products.values(),
            self.to_device_bytes_per_s,
            self.to_host_bytes_per_s,
            *disks,
            self.update_beside_disk,
            self.compute_beside_disk,
            *([self.step.seconds, self.step.tokens_per_s] if self.step else []),
        ]
        return [figure for figure in found if figure is not None]


def survey(wanted: BenchRequest, progress: BenchProgress) -> SurveyResult:
    """Run the wanted measurements one after the other. Blocks for a while. Leaves nothing
    behind, however it ends.
    """
    device = find_device("auto")
    transfer = open_transfer(device)
    making = _Survey(wanted, Bench(wanted.sizes, progress), transfer)
    found = making.found
    try:
        making.measure_alone()
        if wanted.needs_traffic:
            making.measure_drives()
    finally:
        transfer.close()
    if SurveyPart.STEP in wanted:
        found.step = measure_training(making.bench, list(map(str, wanted.directories)), device)
        found.written_bytes += found.step.written_bytes
    if SurveyPart.DISK in wanted and wanted.sizes.sustained_bytes:
        making.measure_sustained()  # last: drives stay slower for a while after it
    if not wanted.directories:
        found.notes.append("no directory was named: no drive was measured")
    return found


@dataclass
class _Survey:
    """A survey that goes on."""

    wanted: BenchRequest
    bench: Bench
    transfer: Transfer
    found: SurveyResult = field(default_factory=SurveyResult)

    def measure_alone(self) -> None:
        """Measure what needs no drive."""
        found, bench, wanted = self.found, self.bench, self.wanted
        if SurveyPart.MEMORY in wanted:
            found.memory_bytes_per_s = measure_memory(bench)
        if SurveyPart.UPDATE in wanted:
            with update_run(bench) as update:
                figures = measure_update(bench, update)
            found.update_bytes_per_s, found.update_ceiling = figures
        if SurveyPart.COMPUTE in wanted:
            for dtype in DTYPES:
                found.products[dtype] = measure_product(bench, dtype, self.transfer)
        if SurveyPart.COPIES in wanted:
            if isinstance(self.transfer, DeviceTransfer):
                figures = measure_copies(bench, self.transfer)
                found.to_device_bytes_per_s, found.to_host_bytes_per_s = figures
            else:
                found.notes.append("torch sees no accelerator: no copies were measured")

    def measure_drives(self) -> None:
        """Measure each directory, then all of them together, then computations beside them."""
        found, paths, sizes = self.found, self.wanted.directories, self.wanted.sizes
        is_wanted = SurveyPart.DISK in self.wanted
        if is_wanted and len(paths) > 1:
            for path in paths:
                with self._traffic(sizes.traffic(1), [path]) as traffic:
                    disk = measure_disk(self.bench, traffic, [path], str(path))
                found.disks.append(disk)
        label = str(paths[0]) if len(paths) == 1 else ALL
        with self._traffic(sizes.traffic(len(paths)), paths) as traffic:
            if is_wanted:
                found.together = measure_disk(self.bench, traffic, paths, label)
                found.disks = found.disks or [found.together]
            else:
                fill(self.bench, traffic, label)
            self._measure_beside(traffic)

    def _measure_beside(self, traffic: Traffic) -> None:
        found, bench, seconds = self.found, self.bench, self.bench.sizes.seconds / 100
        if SurveyPart.UPDATE in self.wanted:
            with update_run(bench) as update:
                found.update_beside_disk = self._beside(
                    SurveyPart.UPDATE, "AdamW", update.run_s, traffic
                )
        if SurveyPart.COMPUTE in self.wanted:
            fastest = max(found.products, key=lambda name: found.products[name].median)
            product = Product(fastest, self.transfer, bench.sizes.product_width, seconds)
            found.compute_beside_disk = self._beside(
                SurveyPart.COMPUTE, f"products {fastest}", product.seconds, traffic
            )

    def _beside(
        self, part: SurveyPart, what: str, seconds_of: Callable[[], float], traffic: Traffic
    ) -> Figure | None:
        figure = measure_beside(self.bench, f"{what} beside busy drives", seconds_of, traffic)
        if figure is None:
            self.found.notes.append(
                f"{part}: the drives were done before one run beside them was; its speed "
                "beside them is not known"
            )
        return figure

    def measure_sustained(self) -> None:
        disks = self.found.disks
        for number, path in enumerate(self.wanted.directories):
            with self._traffic(self.wanted.sizes.sustained_traffic, [path]) as traffic:
                first, last = measure_sustained(self.bench, traffic, str(path))
            disks[number] = replace(disks[number], first=first, last=last)

    @contextmanager
    def _traffic(self, plan: Plan, directories: Sequence[Path]) -> Iterator[Traffic]:
        """Open a traffic generator while the block runs; note its written bytes and fallbacks."""
        found = self.found
        with Traffic(plan, directories) as traffic:
            yield traffic
            found.written_bytes += traffic.written_bytes
        told = [f"{what}: {why}" for what, why in traffic.metrics.snapshot().fallbacks.items()]
        found.notes += [note for note in told if note not in found.notes]


# --- the profile ----------------------------------------------------------------------------------


def make_profile(
    found: SurveyResult,
    before: Profile | None,
    memory: Memory,
    accelerator: Accelerator | None,
    date: str,
) -> Profile:
    """Make a profile from the results. before: the profile so far; of this machine's own, the
    tunings stay, and all figures that were measured then and not now. date: as 2026-11-17.
    """
    cpu, cores = this_machine()
    name = f"{cpu}, {cores} cores"
    if accelerator is not None:
        name += f", {accelerator.name or accelerator.kind}"
    known = _measured(before)
    if accelerator is None or known.device != accelerator.kind:
        known = replace(known, to_device_bytes_per_s=None, to_host_bytes_per_s=None)
    if known.device != (accelerator and accelerator.kind):  # those figures are of another device
        known = replace(known, flops=None, compute_beside_disk=None)
    limits = (memory.total_bytes, memory.cgroup_limit_bytes)
    return replace(
        known,
        name=name,
        is_measured=True,
        sources=(SOURCE,),
        date=date,
        cpu=cpu,
        cores=cores,
        memory_bytes=min((nbytes for nbytes in limits if nbytes is not None), default=None),
        device=accelerator.kind if accelerator else None,
        device_memory_bytes=accelerator.total_bytes if accelerator else None,
        **_changes(found, known),
    )


def _measured(before: Profile | None) -> Profile:
    """Return the part of the old profile that stays: nothing of another machine, and only the
    tunings if its figures were not measured, since measured figures replace published ones of like
    machines.
    """
    cpu, cores = this_machine()
    empty = Profile(name="", is_measured=True, sources=(), date="", cpu=cpu, cores=cores)
    if before is None or not before.is_of_this_machine:
        return empty
    return before if before.is_measured else replace(empty, tuned=before.tuned)


def _changes(found: SurveyResult, known: Profile) -> dict[str, Any]:
    """Return the profile fields that were measured, with their values."""
    figures = {field.name: getattr(found, field.name, None) for field in fields(Profile)}
    if found.together is not None:
        for kind in ("read", "write", "mixed"):
            figures[f"disk_{kind}_bytes_per_s"] = getattr(found.together, kind)
    # No computation is faster beside busy drives than alone; a share above 1 is noise.
    changes: dict[str, Any] = {
        name: min(1.0, figure.median) if figure.unit is FigureUnit.SHARE else figure.median
        for name, figure in figures.items()
        if isinstance(figure, Figure)
    }
    if found.disks:
        changes["disks"] = tuple(_disk(disk, known) for disk in found.disks)
    if found.products:
        changes["flops"] = {name: figure.median for name, figure in found.products.items()}
    return changes


def _disk(disk: DiskFigures, known: Profile) -> DriveProfile:
    (directory,) = disk.directories
    sustained = [old.sustained_bytes_per_s for old in known.disks if old.directory == directory]
    return DriveProfile(
        directory,
        disk.read.median,
        disk.write.median,
        disk.mixed.median,
        disk.last.median if disk.last is not None else next(iter(sustained), None),
    )
