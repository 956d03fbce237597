"""The judgement of `offload doctor`: the limits, the status of each fact, and the advice.

Facts come from `offload.core.host_facts` and `offload.core.drive_facts`. A row is `ok` when a probe
has worked, `degraded` when training runs but slower or with less room (a fact that the system hides
is degraded, never ok), `missing` when training cannot run at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import wraps
from typing import Final, ParamSpec

from offload.core.drive_facts import DirectoryFacts, Mount
from offload.core.errors import OffloadError
from offload.core.host_facts import (
    UNLIMITED_BYTES,
    Cpu,
    HostFacts,
    HugePages,
    Memlock,
    Memory,
    free_memory_bytes,
    usable_cores,
)
from offload.core.torch_versions import describe, is_known
from offload.tools.output import show_size

GIB: Final = 2**30
LOW_MEMORY_BYTES: Final = 4 * GIB  # with less, little is left for the pool beside torch itself
LOW_DISK_BYTES: Final = 16 * GIB  # fp32 state of a model of about 1.3 billion parameters
NETWORK_FILE_SYSTEMS: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "lustre", "gpfs", "beegfs", "virtiofs"}
)
COPY_ON_WRITE_FILE_SYSTEMS: Final = frozenset({"btrfs", "zfs", "bcachefs"})
_P = ParamSpec("_P")


class Severity(StrEnum):
    """The status of a row: what it means for training on this machine."""

    OK = "ok"  # probed, and works
    DEGRADED = "degraded"  # works in a slower or narrower way, or could not be probed
    MISSING = "missing"  # cannot work


@dataclass(frozen=True)
class Row:
    """A line of the diagnosis. advice: None exactly when the status is OK."""

    name: str
    status: Severity
    value: str
    why: str
    advice: str | None


# The value, the advice (None: it is ok), and whether training cannot run.
_Finding = tuple[str, str | None] | tuple[str, str | None, bool]


def _row(name: str, why: str) -> Callable[[Callable[_P, _Finding]], Callable[_P, Row]]:
    """Make a judgement return the row of this name. why: what the fact means for training."""

    def decorate(judge: Callable[_P, _Finding]) -> Callable[_P, Row]:
        @wraps(judge)
        def judged(*args: _P.args, **named: _P.kwargs) -> Row:
            value, advice, *is_missing = judge(*args, **named)
            status = Severity.OK if advice is None else Severity.DEGRADED
            return Row(name, Severity.MISSING if any(is_missing) else status, value, why, advice)

        return judged

    return decorate


def examine(machine: HostFacts, directory: DirectoryFacts | None = None) -> list[Row]:
    """Make the rows of the diagnosis. An unusable directory has one row instead of six."""
    rows = [
        judge_native_core(),
        judge_cores(machine.cpu),
        judge_memory(machine.memory),
        judge_huge_pages(machine.huge_pages),
        judge_memlock(machine.memlock),
        judge_io_uring(machine),
        judge_accelerator(machine),
        judge_torch(machine),
    ]
    if directory is not None:
        rows.append(judge_directory(directory))
        if directory.writable:
            rows += [
                judge_file_system(directory.mount),
                judge_o_direct(directory),
                judge_o_tmpfile(directory),
                judge_free_space(directory),
                judge_drive(directory),
            ]
    return rows


# --- judgement: the machine --------------------------------------------------------------------


@_row("native core", "the CPU update runs near memory speed only in the native core")
def judge_native_core() -> _Finding:
    """Judge whether updates run in the native core or in plain torch, and its instruction set."""
    try:
        # Imported here: without torch this import fails, and the failure must become a row.
        from offload import kernels

        error, isa = kernels.native_error(), kernels.isa()
        available, threads = kernels.available_isas(), kernels.num_threads()
    except OffloadError as refusal:
        advice = "correct the setting that the message names, or unset OFFLOAD_ISA"
        return str(refusal), advice, True
    except Exception as refusal:  # ImportError; OSError if a library of torch does not load
        advice = (
            "mend torch first if its row is not ok; else: pip install --force-reinstall offload"
        )
        return f"not importable: {type(refusal).__name__}: {refusal}", advice, True
    if error is not None:
        return f"reference: {error}", (
            "the reference path gives the same bits, slowly; install a wheel, or a C++ compiler "
            "(in Docker: apt-get install g++) and then offload again; unset OFFLOAD_ISA if set"
        )
    advice_isa = None
    if available and isa != available[0]:
        advice_isa = f"{available[0]} is faster here with the same bits; unset OFFLOAD_ISA"
    elif isa == "scalar":
        advice_isa = (
            "this CPU shows neither AVX2 nor AVX-512 nor NEON; a virtual machine may hide them: "
            "let it pass the host's CPU through"
        )
    return f"{isa} (of {', '.join(available)}), {threads} threads", advice_isa


@_row("cores", "the update, the copies and the disk share them")
def judge_cores(cpu: Cpu) -> _Finding:
    """Judge how many cores this process may use."""
    usable = usable_cores(cpu)
    if usable is None or cpu.logical is None:
        return "unknown", "the system does not tell; look with nproc"
    value = f"{usable} usable of {cpu.logical} logical"
    value += f", {cpu.physical} physical" if cpu.physical else ""
    value += f", NUMA nodes: {cpu.numa_nodes}" if cpu.numa_nodes else ""
    value += f", cgroup quota {cpu.quota_cores:.2f}" if cpu.quota_cores is not None else ""
    value += f"; {cpu.model}" if cpu.model else ""
    advice = None
    if cpu.quota_cores is not None and cpu.quota_cores < (cpu.affinity or cpu.logical):
        advice = (
            "a quota stops all threads in turns: raise it (Docker --cpus, Kubernetes "
            "limits.cpu), or pin whole cores instead (Docker --cpuset-cpus)"
        )
    elif usable * 2 < cpu.logical:
        advice = (
            "right for one rank of several, else check taskset, Slurm --cpus-per-task, "
            "Docker --cpuset-cpus"
        )
    elif usable == 1:
        advice = "computing and moving bytes take turns on one core; use a machine with more"
    return value, advice


@_row("memory", "optimizer state and blocks in flight live here")
def judge_memory(memory: Memory) -> _Finding:
    """Judge the free RAM, within the limit of the cgroup."""
    unknown = "psutil is missing or cannot tell: pip install psutil; else set host_memory yourself"
    room = free_memory_bytes(memory)
    if room is None:
        return "unknown", unknown
    value = f"{show_size(room)} free of {show_size(memory.total_bytes)}"
    if memory.cgroup_limit_bytes is None:
        value += ", no cgroup limit"
    else:
        value += (
            f", cgroup limit {show_size(memory.cgroup_limit_bytes)}"
            f" ({show_size(memory.cgroup_usage_bytes)} used)"
        )
    value += f", swap {show_size(memory.swap_total_bytes)}" if memory.swap_total_bytes else ""
    advice = unknown if memory.available_bytes is None else None
    if room < LOW_MEMORY_BYTES:
        advice = (
            f"less than {show_size(LOW_MEMORY_BYTES)} is free: end other programs or raise the "
            "limit (Docker --memory, Kubernetes limits.memory); --shm-size is not needed"
        )
    return value, advice


@_row("huge pages", "fewer page faults and TLB misses in the host pool")
def judge_huge_pages(pages: HugePages) -> _Finding:
    """Judge whether the arena can get transparent huge pages."""
    value = f"transparent: {pages.transparent or 'unknown'}"
    if pages.explicit_free_bytes:
        value += f", explicit: {show_size(pages.explicit_free_bytes)} free (not used)"
    advice = None
    if pages.transparent is None:
        advice = "the system does not tell; Linux has them, sandboxes may hide them"
    elif pages.transparent == "never":
        advice = (
            "on the host (containers share its setting): "
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        )
    return value, advice


@_row("memlock", "locked pages and buffers registered with io_uring count against it")
def judge_memlock(memlock: Memlock) -> _Finding:
    """Judge the limit on locked memory. Any limit may be too low: the pool may be most of RAM."""
    if memlock.soft_bytes == UNLIMITED_BYTES:
        return "unlimited", None
    value = show_size(memlock.soft_bytes)
    if memlock.exempt:
        return f"{value}, but CAP_IPC_LOCK lifts it", None
    advice = "in Docker: --ulimit memlock=-1; else LimitMEMLOCK=infinity (systemd) or "
    if memlock.hard_bytes == UNLIMITED_BYTES:
        advice = "ulimit -l unlimited (the hard limit allows it); " + advice
    advice += "memlock unlimited in /etc/security/limits.conf"
    return value, advice


@_row("io_uring", "the fastest way to keep a drive busy")
def judge_io_uring(machine: HostFacts) -> _Finding:
    """Judge whether the kernel allows io_uring."""
    ring = machine.io_uring
    where = f"{machine.system} {machine.kernel}"
    if ring.usable:
        return f"usable, {where}", None
    if ring.usable is None:
        return f"not tried, {where}", "the thread-pool engine will be used; only Linux has io_uring"
    if ring.error == "EPERM" and ring.disabled:
        cause = f"sysctl kernel.io_uring_disabled = {ring.disabled}"
        advice = "on the host, sudo sysctl kernel.io_uring_disabled=0"
    elif ring.error == "EPERM":
        cause = "forbidden, as a rule by seccomp"
        advice = (
            "in Docker, --security-opt seccomp=PROFILE.json with a profile that allows "
            "io_uring_setup, io_uring_enter, io_uring_register (seccomp=unconfined allows all)"
        )
    elif ring.error == "ENOSYS":
        cause = "this kernel has none"
        advice = "Linux 5.1 or newer, outside of sandboxes such as gVisor"
    else:
        cause = "refused"
        advice = "more free memory or a higher memlock limit"
    advice = f"the thread-pool engine will be used; for io_uring: {advice}"
    return f"{ring.error}: {cause}, {where}", advice


@_row("accelerator", "without one the model computes on the CPU")
def judge_accelerator(machine: HostFacts) -> _Finding:
    """Judge the accelerator that torch sees."""
    found = machine.accelerator
    if found is None:
        value = "none" if machine.torch.version else "unknown without torch"
        return value, (
            "install the driver and a torch build for your device (a build +cpu sees none); "
            "in Docker: --gpus all, or --device /dev/kfd --device /dev/dri for ROCm"
        )
    value = f"{found.count} x {found.name or found.kind} ({found.kind})"
    value += f", {show_size(found.total_bytes)} each" if found.total_bytes else ""
    return value, None


@_row("torch", "everything is built on it")
def judge_torch(machine: HostFacts) -> _Finding:
    """Judge whether torch can be imported, and whether its version is a known one."""
    if machine.torch.version is None:
        value = machine.torch.error or "not found"
        advice = "pip install torch"
        if not value.startswith("ModuleNotFoundError"):
            advice = "its files do not fit this system: pip install --force-reinstall torch"
        return value, advice, True
    version = machine.torch.version
    advice_bits = None if is_known(version) else "offload selftest compares them on this machine"
    return describe(version), advice_bits


# --- judgement: the directory ------------------------------------------------------------------


@_row("directory", "cold bytes are swapped to files in it")
def judge_directory(directory: DirectoryFacts) -> _Finding:
    """Judge whether swap files can be made in the directory."""
    value = str(directory.path)
    if directory.writable:
        return f"{value}, writable", None
    if not directory.exists:
        value += ", does not exist"
        advice = "mkdir -p it, or mount the drive; in Docker: -v /mnt/nvme:/mnt/nvme"
    elif not directory.is_directory and directory.error == "ENOTDIR":
        value += ", not a directory"
        advice = "give the directory itself, not a file in it"
    else:
        value += f", not writable: {directory.error}"
        value += f" ({directory.mount.fs_type})" if directory.mount else ""
        advice = {
            "EROFS": "mount it for writing: mount -o remount,rw; in Docker: -v without :ro",
            "ENOSPC": "make room: no space or no inodes are left",
            "EDQUOT": "make room: your quota is used up",
        }.get(str(directory.error), "let your user write there: chown it, or choose another")
    return value, advice, True


@_row("file system", "it decides how directly bytes reach the drive")
def judge_file_system(mount: Mount | None) -> _Finding:
    """Judge the file system: some are slow for swap files."""
    if mount is None:
        return "unknown", "the system does not tell; prefer ext4 or xfs"
    advice = None
    if mount.fs_type == "overlay":
        advice = (
            "a container's own layer is slow and may lack O_DIRECT; mount a directory of the "
            "host: -v /mnt/nvme:/mnt/nvme"
        )
    elif mount.fs_type in NETWORK_FILE_SYSTEMS or mount.fs_type.startswith("fuse"):
        advice = "bytes leave through a network or a daemon; use a local ext4 or xfs drive"
    elif mount.fs_type in COPY_ON_WRITE_FILE_SYSTEMS:
        advice = "copies and sums every write; ext4 or xfs is faster (btrfs: chattr +C DIRECTORY)"
    return f"{mount.fs_type} on {mount.source} at {mount.point}", advice


@_row("O_DIRECT", "without it the page cache takes memory and time")
def judge_o_direct(directory: DirectoryFacts) -> _Finding:
    """Judge whether direct I/O works, which bypasses the page cache."""
    direct = directory.direct_io
    if direct.works:
        aligned = f"{direct.mem_align_bytes} bytes, offsets to {direct.offset_align_bytes}"
        return f"works, memory aligned to {aligned}", None
    value = "could not be tried" if direct.works is None else "refused"
    return value, (
        "swapped bytes pass through the page cache; use ext4 or xfs on a local drive; in Docker "
        "mount it, overlayfs may lack O_DIRECT: -v /mnt/nvme:/mnt/nvme"
    )


@_row("O_TMPFILE", "nothing is left behind, whatever happens")
def judge_o_tmpfile(directory: DirectoryFacts) -> _Finding:
    """Judge whether swap files can be created without a name."""
    if directory.o_tmpfile:
        return "works", None
    return "not on this file system", (
        "files are unlinked right after they are made, which is almost as good; ext4, xfs, btrfs "
        "and tmpfs have it"
    )


@_row("free space", "state takes 8 to 12 bytes a parameter")
def judge_free_space(directory: DirectoryFacts) -> _Finding:
    """Judge the free space for swap files."""
    free = directory.free_bytes
    value = f"{show_size(free)} free of {show_size(directory.total_bytes)}"
    if free is None:
        return value, "the system does not tell; look with df"
    if free == 0:
        return value, "make room, or choose another drive", True
    advice = None
    if free < LOW_DISK_BYTES:
        advice = f"less than {show_size(LOW_DISK_BYTES)}: enough for small models only"
    return value, advice


@_row("drive", "steps wait for it when it is slow")
def judge_drive(directory: DirectoryFacts) -> _Finding:
    """Judge whether the directory is on a drive and not in RAM, and whether the drive is fast."""
    drive = directory.drive
    if directory.ram_backed:
        fs_type = directory.mount.fs_type if directory.mount else "unknown"
        advice = "these bytes stay in memory and free none; choose a directory on a drive"
        return f"RAM ({fs_type})", advice
    if drive is None or drive.rotational is None:
        value = drive.name if drive else "unknown"
        return value, "the system hides the drive (container, network, ZFS); try offload bench DIR"
    value = f"{drive.name}{f', {drive.model}' if drive.model else ''}"
    if not drive.rotational:
        return f"{value}, solid state", None
    return f"{value}, rotational", (
        "a spinning disk is some 20 times slower than NVMe; virtual drives (vd*, xvd*, sd*) often "
        "claim to spin and do not: measure, with offload bench DIR"
    )
