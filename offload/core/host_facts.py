"""Facts about this machine: cores, memory, limits, io_uring, torch and its accelerator.

Decides nothing and changes nothing; the callers judge what is good enough. A fact is a value, or
None where the system does not report it (another kernel, a container that hides the file); no
function raises for a missing one. Every function that reads `/proc` or `/sys` takes `root`, the
directory that holds them. `offload.core.drive_facts` has the facts about directories.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import resource
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path("/")
UNLIMITED_BYTES: Final = 2**63 - 1  # a known limit of "unlimited"

_IO_URING_SETUP = 425  # the same number on every architecture that torch runs on
_IO_URING_PARAMS_BYTES = 120
_CAP_IPC_LOCK = 14


@dataclass(frozen=True)
class Cpu:
    """The cores of the machine, and those that this process may use."""

    model: str | None
    logical: int | None
    physical: int | None
    affinity: int | None  # logical cores that this process may run on
    quota_cores: float | None  # cgroup: seconds of CPU per second; None: no quota
    numa_nodes: int | None


@dataclass(frozen=True)
class Memory:
    """The RAM and swap of the machine, and the limits of this process's cgroups.

    None: unknown, or no limit.
    """

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None
    cgroup_limit_bytes: int | None  # the smallest from this process's group to the root
    cgroup_usage_bytes: int | None  # of the group with that limit, page cache included
    cgroup_room_bytes: int | None  # least of limit - usage + reclaimable cache over all groups


@dataclass(frozen=True)
class HugePages:
    """The setting of transparent huge pages (`always`, `madvise`, `never`), and the free explicit
    ones.
    """

    transparent: str | None
    explicit_free_bytes: int | None


@dataclass(frozen=True)
class Memlock:
    """The limit of locked memory of this process; UNLIMITED_BYTES when there is no limit."""

    soft_bytes: int | None
    hard_bytes: int | None
    exempt: bool  # has CAP_IPC_LOCK on the host: the kernel ignores the limit


@dataclass(frozen=True)
class IoUring:
    """The result of a trial: whether this process can set up an io_uring."""

    usable: bool | None  # None: could not be tried
    error: str | None  # name of the errno of the refusal
    disabled: int | None  # sysctl kernel.io_uring_disabled: 0 for none, 1 for some, 2 for all


@dataclass(frozen=True)
class Torch:
    """The version of torch that this interpreter imports, or the error of the import."""

    version: str | None
    error: str | None


@dataclass(frozen=True)
class Accelerator:
    """The accelerator that torch would use; name and memory of the first device."""

    kind: str  # "cuda", "xpu", "mps", ...
    count: int
    name: str | None
    total_bytes: int | None


@dataclass(frozen=True)
class HostFacts:
    """The facts about this machine that do not depend on a directory."""

    system: str  # "Linux", "Darwin"
    kernel: str  # release, as `uname -r`
    cpu: Cpu
    memory: Memory
    huge_pages: HugePages
    memlock: Memlock
    io_uring: IoUring
    torch: Torch
    accelerator: Accelerator | None


def read_machine(root: Path = ROOT) -> HostFacts:
    """Read all facts about this machine. Imports torch; all else takes milliseconds."""
    return HostFacts(
        system=platform.system() or "unknown",
        kernel=platform.release() or "unknown",
        cpu=read_cpu(root),
        memory=read_memory(root),
        huge_pages=read_huge_pages(root),
        memlock=read_memlock(root),
        io_uring=read_io_uring(root),
        torch=read_torch(),
        accelerator=read_accelerator(),
    )


# --- small readers -----------------------------------------------------------------------------


def read_text(path: Path) -> str | None:
    """Read a small file as text, stripped of white space; None when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return None


def read_int(path: Path) -> int | None:
    """Read a file that holds one whole number and no more, else None."""
    return _parse_int(read_text(path))


def _parse_int(text: str | None, base: int = 10) -> int | None:
    try:
        return None if text is None else int(text, base)
    except ValueError:
        return None


def _ask(question: Callable[[], Any]) -> Any:
    """Call `question`, which uses a foreign library, and return its answer, or None if it raises.

    Where files are missing, libraries raise errors of any kind, or warn, which raises under
    `-W error`.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return question()
    except Exception:
        return None


def _psutil() -> Any:
    """Import psutil. To be called within `_ask`, because it may be missing or broken."""
    import psutil  # type: ignore[import-untyped,unused-ignore]

    return psutil


# --- cores -------------------------------------------------------------------------------------


def read_cpu(root: Path = ROOT) -> Cpu:
    """Read the cores of the machine, and those that affinity and cgroup leave to this process."""
    return Cpu(
        model=read_cpu_model(root),
        logical=os.cpu_count(),
        physical=_ask(lambda: _psutil().cpu_count(logical=False)),
        affinity=_ask(lambda: len(os.sched_getaffinity(0))),
        quota_cores=read_cpu_quota(root),
        numa_nodes=count_numa_nodes(root),
    )


def read_cpu_model(root: Path = ROOT) -> str | None:
    """Read the name of the processor; on ARM, where the kernel has no name, the architecture."""
    cpuinfo = read_text(root / "proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(\S.*)$", cpuinfo, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine() or None


def read_cpu_quota(root: Path = ROOT) -> float | None:
    """Read the smallest cgroup quota from this process's group to the root, in cores; or None."""
    quotas = (_quota_of(level) for level in cgroup_levels("cpu", root))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(level: Path) -> float | None:
    """Read the quota of one cgroup in cores. v2: one file, "max" for none; v1: two, -1 for none."""
    fields = (read_text(level / "cpu.max") or "").split()
    if len(fields) == 2:
        quota_us, period_us = _parse_int(fields[0]), _parse_int(fields[1])
    else:
        quota_us = read_int(level / "cpu.cfs_quota_us")
        period_us = read_int(level / "cpu.cfs_period_us")
    if quota_us is None or period_us is None or quota_us <= 0 or period_us <= 0:
        return None
    return quota_us / period_us


def count_numa_nodes(root: Path = ROOT) -> int | None:
    """Count the NUMA nodes of the machine; None if the kernel lists none."""
    names = _list_names(root / "sys/devices/system/node")
    return sum(re.fullmatch(r"node\d+", name) is not None for name in names) or None


def _list_names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


# --- memory ------------------------------------------------------------------------------------


def read_memory(root: Path = ROOT) -> Memory:
    """Read RAM, swap, and the limits of the cgroups."""
    ram = _ask(lambda: _psutil().virtual_memory())
    swap = _ask(lambda: _psutil().swap_memory())
    limit_bytes, usage_bytes, room_bytes = _read_cgroup_memory(root)
    return Memory(
        total_bytes=getattr(ram, "total", None),
        available_bytes=getattr(ram, "available", None),
        swap_total_bytes=getattr(swap, "total", None),
        swap_free_bytes=getattr(swap, "free", None),
        cgroup_limit_bytes=limit_bytes,
        cgroup_usage_bytes=usage_bytes,
        cgroup_room_bytes=room_bytes,
    )


def cgroup_levels(controller: str, root: Path = ROOT) -> list[Path]:
    """List the directories that may hold the controller's files, of v1 and v2, from this process's
    group to the root.

    Some may not exist: without a cgroup namespace a container sees the host's path in
    /proc/self/cgroup, and has its own group mounted at the root, where the walk ends.
    """
    base = root / "sys/fs/cgroup"
    levels: list[Path] = []
    for line in (read_text(root / "proc/self/cgroup") or "0::/").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if not names:  # the v2 hierarchy, alone or beside v1
            mounts = [base, base / "unified"]
        elif controller in names.split(","):
            mounts = [base / controller, base / names]
        else:
            continue
        parts = [part for part in path.split("/") if part]
        if ".." in parts:  # the group is outside of the namespace: only its root can be seen
            parts = []
        for mount in mounts:
            levels += [mount.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return list(dict.fromkeys(levels))


def _read_cgroup_memory(root: Path) -> tuple[int | None, int | None, int | None]:
    """Read the smallest limit, the usage of the group with it, and the least room below any limit.

    Room counts reclaimable page cache as free.
    """
    limits: list[tuple[int, int | None]] = []
    rooms: list[int] = []
    for level in cgroup_levels("memory", root):
        limit_bytes = _first_int(level, ("memory.max", "memory.limit_in_bytes"))
        # v1 reports "no limit" as the largest multiple of the page size below 2**63.
        if limit_bytes is None or limit_bytes >= 2**60:
            continue
        usage_bytes = _first_int(level, ("memory.current", "memory.usage_in_bytes"))
        limits.append((limit_bytes, usage_bytes))
        if usage_bytes is not None:
            # Page cache counts as usage, yet the kernel reclaims it before it kills a process.
            rooms.append(max(0, limit_bytes - usage_bytes + _read_reclaimable_bytes(level)))
    limit, usage = min(limits, key=lambda pair: pair[0], default=(None, None))
    return limit, usage, min(rooms, default=None)


def _first_int(level: Path, names: Iterable[str]) -> int | None:
    found = (read_int(level / name) for name in names)
    return next((value for value in found if value is not None), None)


def _read_reclaimable_bytes(level: Path) -> int:
    """Read the inactive page cache of a group and of all groups below it."""
    stat = read_text(level / "memory.stat") or ""
    # The plain name counts only the group itself in v1, and all groups below it, too, in v2.
    for key in ("total_inactive_file", "inactive_file"):
        found = re.search(rf"^{key} (\d+)$", stat, re.MULTILINE)
        if found:
            return int(found[1])
    return 0


def read_huge_pages(root: Path = ROOT) -> HugePages:
    """Read the setting of transparent huge pages, and the free bytes of all explicit pools."""
    setting = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled") or ""
    chosen = re.search(r"\[(\w+)\]", setting)
    pools = root / "sys/kernel/mm/hugepages"
    free_bytes: int | None = None
    for name in _list_names(pools):
        page_kib = re.fullmatch(r"hugepages-(\d+)kB", name)
        free_pages = read_int(pools / name / "free_hugepages")
        if page_kib and free_pages is not None:
            free_bytes = (free_bytes or 0) + int(page_kib[1]) * 1024 * free_pages
    return HugePages(chosen[1] if chosen else None, free_bytes)


def read_memlock(root: Path = ROOT) -> Memlock:
    """Read the limit of locked memory of this process."""
    limits = _ask(lambda: resource.getrlimit(resource.RLIMIT_MEMLOCK)) or (None, None)
    soft, hard = (UNLIMITED_BYTES if x == resource.RLIM_INFINITY else x for x in limits)
    return Memlock(soft, hard, exempt=_holds_ipc_lock(root))


def _holds_ipc_lock(root: Path) -> bool:
    """Return whether the kernel ignores the limit for this process.

    The capability counts only in the host's user namespace, the one that maps all ids to
    themselves: root in a rootless container has it without effect.
    """
    status = read_text(root / "proc/self/status") or ""
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", status, re.MULTILINE)
    on_host = (read_text(root / "proc/self/uid_map") or "").split() == ["0", "0", "4294967295"]
    return bool(on_host and found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


# --- io_uring ----------------------------------------------------------------------------------


def setup_ring() -> int:
    """Set up the smallest io_uring and close it at once. Return 0, or the errno of the refusal."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    params = ctypes.create_string_buffer(_IO_URING_PARAMS_BYTES)
    fd = libc.syscall(ctypes.c_long(_IO_URING_SETUP), ctypes.c_uint(1), params)
    if fd < 0:
        return ctypes.get_errno()
    os.close(fd)
    return 0


def read_io_uring(root: Path = ROOT, setup: Callable[[], int] = setup_ring) -> IoUring:
    """Find out whether io_uring works, by a trial: no file tells what seccomp forbids."""
    disabled = read_int(root / "proc/sys/kernel/io_uring_disabled")
    if sys.platform != "linux":
        return IoUring(None, None, disabled)
    code = _ask(setup)
    if code is None:
        return IoUring(None, None, disabled)
    return IoUring(code == 0, name_errno(code) if code else None, disabled)


def name_errno(code: int) -> str:
    """Return the name of an errno: `EPERM` for 1, and so on."""
    return errno.errorcode.get(code, f"errno {code}")


# --- torch -------------------------------------------------------------------------------------


def read_torch() -> Torch:
    """Read the version of torch, or the reason why it cannot be imported."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import torch
    except Exception as error:  # ImportError; OSError from a library that does not load
        return Torch(None, f"{type(error).__name__}: {error}")
    return Torch(str(torch.__version__), None)


def read_accelerator() -> Accelerator | None:
    """Find the accelerator that torch sees; None also when its driver fails, and without torch."""
    found: Accelerator | None = _ask(_find_accelerator)
    return found


def _find_accelerator() -> Accelerator | None:
    import torch

    if not torch.accelerator.is_available():
        return None
    device = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    if device is None or count < 1:
        return None
    # Backends report different facts; a device without a name is still a device.
    module = _ask(lambda: torch.get_device_module(device))
    name = _ask(lambda: str(module.get_device_name(0)))
    memory = _ask(lambda: torch.accelerator.get_memory_info(0))
    return Accelerator(device.type, count, name, memory[1] if memory else None)


# --- sums that several callers need ------------------------------------------------------------


def usable_cores(cpu: Cpu) -> int | None:
    """Return how many cores this process can use: affinity, cut to the cgroup quota, at least 1."""
    cores = cpu.affinity or cpu.logical
    if cores is None or cpu.quota_cores is None:
        return cores
    return max(1, min(cores, int(cpu.quota_cores)))


def free_memory_bytes(memory: Memory) -> int | None:
    """Return the bytes that this process can still allocate without swapping or being killed."""
    known = (memory.available_bytes, memory.cgroup_room_bytes)
    return min((nbytes for nbytes in known if nbytes is not None), default=None)
