"""The facts about the machine that a bug report must have, as rows of a name and a text."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from offload import kernels
from offload.core.drive_facts import read_directory
from offload.core.errors import OffloadError
from offload.core.host_facts import HostFacts, free_memory_bytes, read_machine, usable_cores
from offload.core.metrics import Metrics
from offload.core.torch_versions import describe
from offload.storage.choose import open_engine
from offload.tools.output import show_size
from offload.tools.selftest.check import Setting

_CHOICES = ("OFFLOAD_ISA", "OFFLOAD_IO")  # environment variables that force a choice


def about_machine(setting: Setting, directory: Path) -> dict[str, str]:
    """Return the rows, in order. directory: the one in which the checks' directories are made."""
    machine = read_machine()
    cpu, memory = machine.cpu, machine.memory
    total, free = memory.total_bytes, free_memory_bytes(memory)
    limit = memory.cgroup_limit_bytes
    rows = {
        "cpu": cpu.model or platform.processor() or platform.machine(),
        "cores": f"{usable_cores(cpu) or 'unknown'} usable of {cpu.logical or 'unknown'}",
        "memory": f"{show_size(free)} free of {show_size(total)}"
        + (f", limited to {show_size(limit)}" if limit else ""),
        "kernel": f"{machine.system} {machine.kernel}",
        "python": platform.python_version(),
        "torch": _torch(machine),
        "instruction set": _instruction_set(),
        "I/O engine": _io_engine(),
        "device": _device(setting, machine),
        "directory": _directory(directory),
    }
    forced = [f"{name}={os.environ[name]}" for name in _CHOICES if os.environ.get(name)]
    if forced:
        rows["environment"] = ", ".join(forced)
    return rows


def _torch(machine: HostFacts) -> str:
    version = machine.torch.version
    return f"broken: {machine.torch.error}" if version is None else describe(version)


def _instruction_set() -> str:
    error = kernels.native_error()
    text = f"{kernels.isa()} of {', '.join(kernels.available_isas())}"
    text += f", {kernels.num_threads()} threads"
    return text if error is None else f"{text} ({error})"


def _io_engine() -> str:
    metrics = Metrics()
    try:
        engine = open_engine([], metrics=metrics)
    except OffloadError as error:
        return f"none: {error}"
    engine.close()
    lesser = metrics.snapshot().fallbacks
    return engine.name + "".join(f"; {what}: {why}" for what, why in lesser.items())


def _device(setting: Setting, machine: HostFacts) -> str:
    found = machine.accelerator
    if setting.is_on_cpu or found is None:
        return setting.device
    memory = f", {show_size(found.total_bytes)}" if found.total_bytes else ""
    return f"{setting.device}: {found.count} x {found.name or found.kind}{memory}"


def _directory(path: Path) -> str:
    """Describe the directory's file system and drive. Leaves out the path, which may be private."""
    facts = read_directory(path)
    mount, drive, direct = facts.mount, facts.drive, facts.direct_io
    words = [mount.fs_type if mount else "unknown file system"]
    words += [drive.model or drive.name] if drive else []
    words += ["in memory"] if facts.ram_backed else []
    words += ["O_DIRECT" if direct.works else "no O_DIRECT"]
    words += ["O_TMPFILE" if facts.o_tmpfile else "no O_TMPFILE"]
    return ", ".join([*words, f"{show_size(facts.free_bytes)} free"])
