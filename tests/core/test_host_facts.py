"""Facts about machine and directory, read from made-up /proc and /sys trees with known answers.

What depends on the machine that runs the tests is only checked for what must hold everywhere:
nothing raises, nothing is left behind.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
import resource
import stat
import struct
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from offload.core import drive_facts, host_facts
from offload.core.drive_facts import DirectIo, Drive, Mount
from offload.core.host_facts import UNLIMITED_BYTES, Cpu, HugePages, IoUring, Memlock, Memory

GIB = 2**30
V1_NO_LIMIT = 9223372036854771712  # what memory.limit_in_bytes holds when no limit is set

Tree = Callable[[dict[str, str]], Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Return a function that makes a root directory with the given files."""

    def plant(files: dict[str, str]) -> Path:
        root = tmp_path / "root"
        root.mkdir(exist_ok=True)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        return root

    return plant


def next_fd() -> int:
    """Return the number that the next opened file gets: the same before and after when nothing
    leaks.
    """
    fd = os.open(os.devnull, os.O_RDONLY)
    os.close(fd)
    return fd


# --- everything at once ------------------------------------------------------------------------


def test_this_machine_can_be_read() -> None:
    fd = next_fd()
    facts = host_facts.read_machine()
    assert next_fd() == fd
    assert facts.torch.version == torch.__version__
    assert facts.cpu.logical == os.cpu_count()
    assert facts.memory.total_bytes == psutil.virtual_memory().total
    assert facts.kernel == os.uname().release


def test_without_any_file_facts_are_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        raise FileNotFoundError("/proc/meminfo")

    for name in ("virtual_memory", "swap_memory", "cpu_count"):
        monkeypatch.setattr(psutil, name, refuse)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)  # macOS has none
    facts = host_facts.read_machine(tmp_path)
    assert facts.memory == Memory(*[None] * len(fields(Memory)))
    assert facts.cpu.physical is facts.cpu.affinity is facts.cpu.quota_cores is None
    assert facts.cpu.numa_nodes is None
    assert facts.huge_pages == HugePages(None, None)
    assert facts.io_uring.disabled is None
    assert not facts.memlock.exempt


def test_a_warning_library_still_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn() -> SimpleNamespace:
        warnings.warn("sin and sout could not be determined", RuntimeWarning, stacklevel=1)
        return SimpleNamespace(total=5, free=3)

    monkeypatch.setattr(psutil, "swap_memory", warn)
    facts = host_facts.read_memory(tmp_path)
    assert (facts.swap_total_bytes, facts.swap_free_bytes) == (5, 3)


# --- cgroup memory -----------------------------------------------------------------------------


def cgroup_memory(root: Path) -> tuple[int | None, int | None, int | None]:
    facts = host_facts.read_memory(root)
    return facts.cgroup_limit_bytes, facts.cgroup_usage_bytes, facts.cgroup_room_bytes


def test_v2_takes_the_smallest_limit_up_to_the_top(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "0::/user.slice/job/step\n",
            "sys/fs/cgroup/user.slice/job/step/memory.max": "max\n",
            "sys/fs/cgroup/user.slice/job/step/memory.current": "1000\n",
            "sys/fs/cgroup/user.slice/job/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/user.slice/job/memory.current": f"{2 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.max": f"{16 * GIB}\n",
            "sys/fs/cgroup/user.slice/memory.current": f"{15 * GIB}\n",
        }
    )
    # The limit is the job's, the room that of its parent, whose other jobs use nearly all.
    assert cgroup_memory(root) == (8 * GIB, 2 * GIB, 1 * GIB)


def test_v2_page_cache_counts_as_room(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": "1000",
            "sys/fs/cgroup/memory.current": "950",
            "sys/fs/cgroup/memory.stat": "anon 100\nfile 800\ninactive_file 700\nodd\n",
        }
    )
    assert cgroup_memory(root) == (1000, 950, 750)


def test_v2_without_a_limit(tree: Tree) -> None:
    root = tree({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "max\n"})
    assert cgroup_memory(root) == (None, None, None)


def test_v2_group_outside_of_the_namespace(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "0::/../other\n",
            "sys/fs/cgroup/other/memory.max": "7",  # another group that happens to have the name
            "sys/fs/other/memory.max": "8",  # not a group at all
            "sys/fs/cgroup/memory.max": "4096",
        }
    )
    assert cgroup_memory(root) == (4096, None, None)


def test_v1_nested(tree: Tree) -> None:
    base = "sys/fs/cgroup/memory"
    root = tree(
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a/b\n1:name=systemd:/\n0::/\n",
            f"{base}/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
            f"{base}/a/memory.limit_in_bytes": f"{6 * GIB}\n",
            f"{base}/a/memory.usage_in_bytes": f"{4 * GIB}\n",
            f"{base}/a/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
            f"{base}/a/b/memory.limit_in_bytes": f"{V1_NO_LIMIT}\n",
        }
    )
    assert cgroup_memory(root) == (6 * GIB, 4 * GIB, 3 * GIB)


@pytest.mark.parametrize("number", [V1_NO_LIMIT, 9223372036854710272, 2**63 - 1])
def test_v1_huge_number_is_no_limit(tree: Tree, number: int) -> None:
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(number),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "17",
        }
    )
    assert cgroup_memory(root) == (None, None, None)


def test_v1_container_that_sees_the_hosts_path(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/docker/0123abcd\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "5000",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000",
        }
    )
    assert cgroup_memory(root) == (5000, 1000, 4000)


def test_hybrid_reads_v1_beside_unified(tree: Tree) -> None:
    root = tree(
        {
            "proc/self/cgroup": "4:memory:/a\n0::/b\n",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "9000",
            "sys/fs/cgroup/unified/b/memory.max": "8000",
        }
    )
    assert cgroup_memory(root)[0] == 8000


def test_usage_above_the_limit_leaves_no_room(tree: Tree) -> None:
    root = tree({"sys/fs/cgroup/memory.max": "10", "sys/fs/cgroup/memory.current": "12"})
    assert cgroup_memory(root) == (10, 12, 0)


@pytest.mark.parametrize("text", ["", "garbage", "::::\n\n:", "0::"])
def test_damaged_cgroup_files(tree: Tree, text: str) -> None:
    root = tree({"proc/self/cgroup": text, "sys/fs/cgroup/memory.max": "not a number"})
    assert cgroup_memory(root) == (None, None, None)


# --- cores -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "0 0\n"}, None),
        ({"sys/fs/cgroup/cpu.max": ""}, None),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/a\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "3:cpuset:/\n", "sys/fs/cgroup/cpu.max": "1 1"}, None),
        ({}, None),
    ],
)
def test_cpu_quota(tree: Tree, files: dict[str, str], cores: float | None) -> None:
    assert host_facts.read_cpu_quota(tree(files)) == cores


def test_cpu_model(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tree({"proc/cpuinfo": "processor\t: 0\nmodel\t\t: 1\nmodel name\t: Fast CPU @ 2 GHz\n"})
    assert host_facts.read_cpu_model(root) == "Fast CPU @ 2 GHz"
    monkeypatch.setattr("platform.processor", lambda: "")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    root = tree({"proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd40\n"})
    assert host_facts.read_cpu_model(root) == "aarch64"


def test_numa_nodes(tree: Tree) -> None:
    nodes = "sys/devices/system/node"
    root = tree({f"{nodes}/{name}": "" for name in ("node0", "node1", "node12", "online", "nodes")})
    assert host_facts.count_numa_nodes(root) == 3


@pytest.mark.parametrize(
    ("affinity", "quota_cores", "usable"),
    [(8, None, 8), (8, 2.5, 2), (8, 0.5, 1), (4, 16.0, 4), (None, None, 16), (None, 3.0, 3)],
)
def test_usable_cores(affinity: int | None, quota_cores: float | None, usable: int) -> None:
    assert host_facts.usable_cores(Cpu(None, 16, 8, affinity, quota_cores, 1)) == usable


def test_usable_cores_of_an_unknown_machine() -> None:
    assert host_facts.usable_cores(Cpu(None, None, None, None, 2.0, None)) is None


@pytest.mark.parametrize(
    ("available", "room", "free"), [(10, None, 10), (10, 4, 4), (3, 4, 3), (None, 4, 4)]
)
def test_free_memory(available: int | None, room: int | None, free: int) -> None:
    memory = Memory(100, available, 0, 0, None, None, room)
    assert host_facts.free_memory_bytes(memory) == free
    assert host_facts.free_memory_bytes(Memory(*[None] * 7)) is None


# --- pages and limits --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("[always] madvise never\n", "always"),
        ("always [madvise] never\n", "madvise"),
        ("always madvise [never]\n", "never"),
        ("", None),
        ("odd", None),
    ],
)
def test_transparent_huge_pages(tree: Tree, text: str, setting: str | None) -> None:
    root = tree({"sys/kernel/mm/transparent_hugepage/enabled": text})
    assert host_facts.read_huge_pages(root).transparent == setting


def test_explicit_huge_pages_of_all_sizes(tree: Tree) -> None:
    pools = "sys/kernel/mm/hugepages"
    root = tree(
        {
            f"{pools}/hugepages-2048kB/free_hugepages": "3\n",
            f"{pools}/hugepages-1048576kB/free_hugepages": "2\n",
            f"{pools}/other/free_hugepages": "5\n",
        }
    )
    assert host_facts.read_huge_pages(root).explicit_free_bytes == 6 * 2**20 + 2 * GIB


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((65536, 131072), (65536, 131072)),
        ((65536, resource.RLIM_INFINITY), (65536, UNLIMITED_BYTES)),
        ((resource.RLIM_INFINITY,) * 2, (UNLIMITED_BYTES, UNLIMITED_BYTES)),
    ],
)
def test_memlock(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limits: tuple[int, int],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    assert host_facts.read_memlock(tmp_path) == Memlock(*expected, exempt=False)


@pytest.mark.parametrize(
    ("capabilities", "uid_map", "exempt"),
    [
        ("0000000000004000", "0 0 4294967295", True),
        ("000001ffffffffff", "         0          0 4294967295\n", True),
        ("00000000a80425fb", "0 0 4294967295", False),  # Docker's default set lacks it
        ("000001ffffffffff", "0 1000 1", False),  # root only in a user namespace
    ],
)
def test_memlock_exemption(tree: Tree, capabilities: str, uid_map: str, exempt: bool) -> None:
    status = f"Name:\tpython\nCapPrm:\t000001ffffffffff\nCapEff:\t{capabilities}\n"
    root = tree({"proc/self/status": status, "proc/self/uid_map": uid_map})
    assert host_facts.read_memlock(root).exempt is exempt


# --- io_uring ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "usable", "name"),
    [
        (0, True, None),
        (errno.EPERM, False, "EPERM"),
        (errno.ENOSYS, False, "ENOSYS"),
        (9999, False, "errno 9999"),
    ],
)
def test_io_uring(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, code: int, usable: bool, name: str | None
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    root = tree({"proc/sys/kernel/io_uring_disabled": "2\n"})
    assert host_facts.read_io_uring(root, setup=lambda: code) == IoUring(usable, name, 2)


def test_io_uring_that_cannot_be_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise OSError("no libc")

    assert host_facts.read_io_uring(tmp_path, setup=fail) == IoUring(None, None, None)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert host_facts.read_io_uring(tmp_path, setup=lambda: 0) == IoUring(None, None, None)


def test_the_real_ring_is_given_back() -> None:
    fd = next_fd()
    code = host_facts.setup_ring()
    assert code == 0 or code in errno.errorcode
    assert next_fd() == fd


# --- torch -------------------------------------------------------------------------------------


def test_torch_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts = host_facts.read_torch()
    assert facts.version is None
    assert facts.error is not None
    assert "ModuleNotFoundError" in facts.error
    assert host_facts.read_accelerator() is None


def pretend_accelerator(monkeypatch: pytest.MonkeyPatch, **functions: Callable[..., Any]) -> None:
    usual: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "current_accelerator": lambda: torch.device("cuda"),
        "device_count": lambda: 2,
        "get_memory_info": lambda index: (GIB, 80 * GIB),
    }
    for name, function in {**usual, **functions}.items():
        monkeypatch.setattr(torch.accelerator, name, function)


def test_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_accelerator(monkeypatch)
    module = SimpleNamespace(get_device_name=lambda index: "Fast GPU")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert host_facts.read_accelerator() == host_facts.Accelerator("cuda", 2, "Fast GPU", 80 * GIB)


def test_accelerator_that_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> object:
        raise RuntimeError("driver too old")

    pretend_accelerator(monkeypatch, get_memory_info=fail)
    monkeypatch.setattr(torch, "get_device_module", fail)
    assert host_facts.read_accelerator() == host_facts.Accelerator("cuda", 2, None, None)
    pretend_accelerator(monkeypatch, device_count=fail)
    assert host_facts.read_accelerator() is None


@pytest.mark.parametrize(
    ("name", "answer"),
    [("is_available", False), ("current_accelerator", None), ("device_count", 0)],
)
def test_no_accelerator(monkeypatch: pytest.MonkeyPatch, name: str, answer: object) -> None:
    pretend_accelerator(monkeypatch, **{name: lambda: answer})
    assert host_facts.read_accelerator() is None


# --- mounts and drives -------------------------------------------------------------------------

MOUNTINFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
30 27 0:40 / /mnt/nvme ro - tmpfs hidden rw
31 27 259:3 / /mnt/nvme rw,relatime shared:9 master:1 - xfs /dev/nvme1n1 rw
32 27 8:1 / /mnt/a\040b\134c rw - ext4 /dev/disk\040one rw
33 27 0:50 / /mnt/bad
half a line
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", Mount("/", "ext4", "/dev/nvme0n1p2", "259:2")),
        ("/home/me", Mount("/", "ext4", "/dev/nvme0n1p2", "259:2")),
        ("/mnt/nvme", Mount("/mnt/nvme", "xfs", "/dev/nvme1n1", "259:3")),
        ("/mnt/nvme/swap", Mount("/mnt/nvme", "xfs", "/dev/nvme1n1", "259:3")),
        ("/mnt/nvme2", Mount("/", "ext4", "/dev/nvme0n1p2", "259:2")),
        ("/mnt/a b\\c/d", Mount("/mnt/a b\\c", "ext4", "/dev/disk one", "8:1")),
        ("/mnt/bad/x", Mount("/", "ext4", "/dev/nvme0n1p2", "259:2")),
    ],
)
def test_mount_is_the_longest_prefix(tree: Tree, path: str, expected: Mount) -> None:
    assert drive_facts.find_mount(Path(path), tree({"proc/self/mountinfo": MOUNTINFO})) == expected


def test_mount_without_mountinfo(tmp_path: Path) -> None:
    assert drive_facts.find_mount(Path("/home"), tmp_path) is None


@pytest.fixture
def sysfs(tree: Tree) -> Path:
    """Plant an NVMe drive with a partition, a spinning drive, and LVM over both."""
    block = "sys/devices/pci/block"
    root = tree(
        {
            f"{block}/nvme0n1/queue/rotational": "0\n",
            f"{block}/nvme0n1/device/model": "Quick 990  \n",
            f"{block}/nvme0n1/nvme0n1p2/partition": "2\n",
            f"{block}/sda/queue/rotational": "1\n",
            f"{block}/sda/device/model": "Slow 7200\n",
            f"{block}/dm-0/queue/rotational": "1\n",
            f"{block}/bare/size": "0\n",
            "dev/dm-0": "",
        }
    )
    links = {
        "sys/dev/block/259:2": "../../devices/pci/block/nvme0n1/nvme0n1p2",
        "sys/dev/block/8:0": "../../devices/pci/block/sda",
        "sys/dev/block/7:7": "../../devices/pci/block/bare",
        "sys/class/block/dm-0": "../../devices/pci/block/dm-0",
        f"{block}/dm-0/slaves/nvme0n1p2": "../../nvme0n1/nvme0n1p2",
        f"{block}/dm-0/slaves/sda": "../../sda",
        "dev/mapper/data": "../dm-0",
    }
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target)
    return root


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        (Mount("/", "ext4", "/dev/nvme0n1p2", "259:2"), Drive("nvme0n1", False, "Quick 990")),
        (Mount("/", "ext4", "/dev/root", "8:0"), Drive("sda", True, "Slow 7200")),
        (Mount("/", "ext4", "/dev/x", "7:7"), Drive("bare", None, None)),
        # btrfs: the number is made up, the source leads to the device
        (
            Mount("/", "btrfs", "/dev/mapper/data", "0:33"),
            Drive("dm-0", True, "Quick 990 + Slow 7200"),
        ),
        (Mount("/", "overlay", "overlay", "0:44"), None),
        (Mount("/", "nfs4", "server:/export", "0:45"), None),
        (Mount("/", "ext4", "/dev/gone", "1:1"), None),
    ],
)
def test_drive(sysfs: Path, mount: Mount, expected: Drive | None) -> None:
    assert drive_facts.find_drive(mount, sysfs) == expected


# --- a directory -------------------------------------------------------------------------------


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[Path]:
    """Make an empty directory that must be empty again at the end, without a leaked file."""
    directory = tmp_path / "swap"
    directory.mkdir()
    fd = next_fd()
    yield directory
    assert os.listdir(directory) == []
    assert next_fd() == fd


def fake_mount(tree: Tree, path: Path, rest: str, device: str = "0:9") -> Path:
    return tree({"proc/self/mountinfo": f"31 27 {device} / {path} rw - {rest} rw\n"})


def test_usable_directory(swap: Path, tree: Tree) -> None:
    root = fake_mount(tree, swap, "xfs /dev/nvme0n1")
    facts = drive_facts.read_directory(swap, root)
    assert (facts.exists, facts.is_directory, facts.writable) == (True, True, True)
    assert facts.error is None
    assert facts.path == swap
    assert facts.mount == Mount(str(swap), "xfs", "/dev/nvme0n1", "0:9")
    assert facts.drive is None
    assert facts.ram_backed is False
    assert facts.total_bytes is not None
    assert facts.total_bytes > 0
    assert facts.o_tmpfile is not None
    assert facts.direct_io.works is not None


def test_directory_through_a_link(swap: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(swap)
    assert drive_facts.read_directory(tmp_path / "link").path == swap


def test_unknown_surroundings_of_a_usable_directory(swap: Path, tmp_path: Path) -> None:
    facts = drive_facts.read_directory(swap, tmp_path / "nothing")
    assert facts.writable
    assert (facts.mount, facts.drive, facts.ram_backed) == (None, None, None)


def test_free_bytes_are_those_of_ordinary_users(
    swap: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(f_frsize=512, f_bsize=4096, f_blocks=1000, f_bfree=300, f_bavail=200)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    facts = drive_facts.read_directory(swap)
    assert (facts.total_bytes, facts.free_bytes) == (512_000, 102_400)


def test_missing_directory_is_not_created(tmp_path: Path) -> None:
    facts = drive_facts.read_directory(tmp_path / "a" / "b")
    assert (facts.exists, facts.is_directory, facts.writable) == (False, False, False)
    assert facts.error == "ENOENT"
    assert os.listdir(tmp_path) == []


def test_file_instead_of_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    facts = drive_facts.read_directory(tmp_path / "file")
    assert (facts.exists, facts.is_directory, facts.writable) == (True, False, False)
    assert (tmp_path / "file").read_text() == "mine"
    assert not drive_facts.read_directory(tmp_path / "file" / "below").exists


def test_loop_of_links(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    facts = drive_facts.read_directory(tmp_path / "loop")
    assert not facts.writable
    assert facts.error == "ELOOP"


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_directory_that_refuses_files(
    swap: Path, tree: Tree, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def refuse(path: object, flags: int, mode: int = 0o777) -> int:
        raise OSError(code, os.strerror(code))

    root = fake_mount(tree, swap, "ext4 /dev/sda")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        facts = drive_facts.read_directory(swap, root)
    assert (facts.is_directory, facts.writable) == (True, False)
    assert facts.error == errno.errorcode[code]
    assert facts.mount is not None
    assert facts.o_tmpfile is facts.direct_io.works is None


def refuse_o_tmpfile(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real_open = os.open

    def open_without(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(code, os.strerror(code))
        return real_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_without)


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
def test_without_o_tmpfile_a_file_is_unlinked_at_once(
    swap: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_o_tmpfile(monkeypatch, code)
    facts = drive_facts.read_directory(swap)
    assert facts.writable
    assert facts.o_tmpfile is False


def test_system_that_knows_neither_flag(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "O_TMPFILE")
    monkeypatch.delattr(os, "O_DIRECT")
    facts = drive_facts.read_directory(swap)
    assert facts.writable
    assert facts.o_tmpfile is False
    assert facts.direct_io == DirectIo(False)


@pytest.mark.parametrize("with_o_tmpfile", [True, False])
def test_probe_file_is_private_and_nameless(
    swap: Path, monkeypatch: pytest.MonkeyPatch, with_o_tmpfile: bool
) -> None:
    if not with_o_tmpfile:
        refuse_o_tmpfile(monkeypatch, errno.EOPNOTSUPP)
    before = os.umask(0)
    try:
        fd, _ = drive_facts.open_unnamed(swap)
    finally:
        os.umask(before)
    try:
        found = os.fstat(fd)
        assert stat.S_IMODE(found.st_mode) == 0o600
        assert found.st_nlink == 0
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)


def test_dev_shm_is_memory() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        facts = drive_facts.read_directory(Path(name))
        assert os.listdir(name) == []
    assert facts.writable
    assert facts.ram_backed is True


@pytest.mark.parametrize(
    ("fs_type", "drive", "expected"),
    [
        ("tmpfs", None, True),
        ("ext4", Drive("zram0", False, None), True),
        ("ext4", Drive("ram3", False, None), True),
        ("ext4", Drive("nvme0n1", False, None), False),
        ("overlay", None, False),
    ],
)
def test_ram_backed(
    swap: Path,
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
    fs_type: str,
    drive: Drive | None,
    expected: bool,
) -> None:
    monkeypatch.setattr(drive_facts, "find_drive", lambda mount, root: drive)
    root = fake_mount(tree, swap, f"{fs_type} source")
    assert drive_facts.read_directory(swap, root).ram_backed is expected


# --- O_DIRECT ----------------------------------------------------------------------------------


class FakeFile:
    """A file that takes direct writes of some alignment only, or fails in another way."""

    def __init__(self, offset_align: int, code: int = errno.EINVAL) -> None:
        self.offset_align = offset_align
        self.code = code
        self.addresses: list[int] = []

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        self.addresses.append(ctypes.addressof((ctypes.c_char * len(data)).from_buffer(data)))
        if len(data) % self.offset_align or offset % self.offset_align:
            raise OSError(self.code, os.strerror(self.code))
        return len(data)


@pytest.mark.parametrize(
    ("declared", "file", "expected"),
    [
        (None, FakeFile(512), DirectIo(True, 512, 512)),
        (None, FakeFile(4096), DirectIo(True, 4096, 4096)),
        (None, FakeFile(8192), DirectIo(False)),
        (None, FakeFile(8192, errno.ENOSPC), DirectIo(None)),
        ((4, 512), FakeFile(512), DirectIo(True, 4, 512)),
        ((4, 16384), FakeFile(16384), DirectIo(True, 4, 16384)),
        ((1 << 16, 512), FakeFile(512), DirectIo(True, 1 << 16, 512)),  # more than a page
        ((4, 512), FakeFile(4096), DirectIo(True, 4096, 4096)),  # declared, and not true
        ((0, 0), FakeFile(1), DirectIo(False)),
    ],
)
def test_direct_io_alignment(
    monkeypatch: pytest.MonkeyPatch,
    declared: tuple[int, int] | None,
    file: FakeFile,
    expected: DirectIo,
) -> None:
    monkeypatch.setattr(fcntl, "fcntl", lambda fd, command, flags=0: 0)
    monkeypatch.setattr(drive_facts, "read_dio_alignment", lambda fd: declared)
    monkeypatch.setattr(os, "pwrite", file.pwrite)
    assert drive_facts.probe_direct_io(0) == expected
    if expected.works:
        # Memory that is better aligned than claimed would prove nothing.
        mem_align = expected.mem_align_bytes or 0
        assert file.addresses[-1] % (2 * mem_align) == mem_align


def test_direct_io_sets_the_flag(swap: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def record(fd: int, *args: int) -> int:
        calls.append(args)
        return os.O_RDWR

    monkeypatch.setattr(fcntl, "fcntl", record)
    monkeypatch.setattr(drive_facts, "read_dio_alignment", lambda fd: (0, 0))
    drive_facts.probe_direct_io(0)
    assert calls == [(fcntl.F_GETFL,), (fcntl.F_SETFL, os.O_RDWR | os.O_DIRECT)]


def test_direct_io_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, command: int, flags: int = 0) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    assert drive_facts.probe_direct_io(0) == DirectIo(False)


def fake_statx(monkeypatch: pytest.MonkeyPatch, mask: int, code: int = 0) -> None:
    """Put in a libc whose statx fills the fields at the places of <linux/stat.h>."""

    def statx(fd: int, path: bytes, flags: int, wanted: Any, buffer: Any) -> int:
        assert (path, flags, wanted.value) == (b"", 0x1000, 0x2000)
        assert len(buffer) == 256
        head = struct.pack("=IIQIIIHHQQQQ", mask, 4096, 0, 1, 0, 0, 0o600, 0, 7, 0, 0, 0)
        times, device = b"\xff" * 64, struct.pack("=IIII", 1, 2, 3, 4)
        struct.pack_into("=64s64s16sQII", buffer, 0, head, times, device, 99, 4, 512)
        return code

    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace(statx=statx))


def test_statx_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_statx(monkeypatch, mask=0x2000 | 0x7FF)
    assert drive_facts.read_dio_alignment(0) == (4, 512)


def test_statx_that_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_statx(monkeypatch, mask=0x7FF)
    assert drive_facts.read_dio_alignment(0) is None
    fake_statx(monkeypatch, mask=0x2000, code=-1)
    assert drive_facts.read_dio_alignment(0) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name, use_errno: SimpleNamespace())
    assert drive_facts.read_dio_alignment(0) is None


def test_statx_of_this_machine(swap: Path) -> None:
    fd, _ = drive_facts.open_unnamed(swap)
    try:
        found = drive_facts.read_dio_alignment(fd)
    finally:
        os.close(fd)
    for nbytes in found or ():
        assert nbytes & (nbytes - 1) == 0
        assert nbytes <= 2**20


# --- the shape of facts ------------------------------------------------------------------------


def test_facts_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        host_facts.IoUring(True, None, 0).usable = False  # type: ignore[misc]


def test_every_reader_can_be_pointed_elsewhere() -> None:
    """No path of /proc or /sys is written out in full: then a fake tree would not be read."""
    for module in (host_facts, drive_facts):
        source = Path(str(module.__file__)).read_text()
        assert not re.findall(r"""["']/(?:proc|sys)/""", source)
