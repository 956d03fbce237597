"""Makes a profile of this machine from the results of a survey."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from offload.core.host_facts import Accelerator, Memory
from offload.planning.profile import DriveProfile, Profile, this_machine
from offload.tools.bench.disk import DiskFigures
from offload.tools.bench.figure import Figure
from offload.tools.bench.survey import SurveyResult

SOURCE = "offload bench"


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
    figures: dict[str, Figure | None] = {
        "memory_bytes_per_s": found.memory,
        "update_bytes_per_s": found.update,
        "to_device_bytes_per_s": found.to_device,
        "to_host_bytes_per_s": found.to_host,
    }
    if found.together is not None:
        figures |= {
            "disk_read_bytes_per_s": found.together.read,
            "disk_write_bytes_per_s": found.together.write,
            "disk_mixed_bytes_per_s": found.together.mixed,
        }
    changes: dict[str, Any] = {n: f.median for n, f in figures.items() if f is not None}
    shares = {
        "compute_beside_disk": found.compute_beside,
        "update_beside_disk": found.update_beside,
    }
    # No computation is faster beside busy drives than alone; a share above 1 is noise.
    changes |= {n: min(1.0, f.median) for n, f in shares.items() if f is not None}
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
