"""Disk stores in directories of every kind: good, bad, full, read-only, and on other file systems.

What needs a mount runs in a forked child with mounts of its own, so that nothing stays behind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.loops import SEED, chosen
from support.mounts import HANG_S, loop_mount, run_here
from support.stores import KIB, is_direct, nothing_left, sync

from offload.core.drive_facts import DirectIo
from offload.core.errors import CapacityError, ConfigError, StateError, StoreError
from offload.core.metrics import Metrics
from offload.storage.choose import ENGINES
from offload.storage.disk import DiskStore
from offload.storage.engine import PIECE_BYTES
from offload.storage.files import System

MIB = 1 << 20
SIZES = (0, 1, 511, 512, 4095, 4096, 4097, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 2500001)

# Newer Pythons warn of forks in a process with threads; the child does not use those of the parent.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def usable_engines() -> list[str]:
    from offload import _native

    refused = _native.probe_uring()
    if refused:
        print(f"io_uring: not tried: {os.strerror(refused)}")
    return [name for name in ENGINES if name != "io_uring" or not refused]


def some_bytes(nbytes: int, shift: int, seed: int) -> np.ndarray:
    """Return random bytes whose address is `shift` behind the begin of a page."""
    whole = np.empty(nbytes + 8192, dtype=np.uint8)
    begin = -whole.ctypes.data % 4096 + shift
    found = whole[begin : begin + nbytes]
    found[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    return found


def open_fds() -> set[str]:
    """List what is open, without the standard streams and the listing itself."""
    found = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            if int(fd) > 2:
                found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.05)


# --- what every directory that works must do ----------------------------------------------------


def round_trips(directory: Path) -> None:
    """Write and read awkward sizes at awkward addresses, with every engine; the directory stays as
    it was.
    """
    print(f"seed {SEED}")
    before = sorted(os.listdir(directory))
    for engine in usable_engines():
        metrics = Metrics()
        with DiskStore(directory, 16 * MIB, engine=engine, metrics=metrics, timeout_s=60) as store:
            chunks = {
                f"{nbytes} at {shift}": some_bytes(nbytes, shift, SEED + nbytes)
                for nbytes in SIZES
                for shift in (0, 1, 512)
            }
            for name, data in chunks.items():
                store.write(name, data).wait(HANG_S)
                back = some_bytes(data.nbytes, data.ctypes.data % 7, 0)
                store.read(name, back).wait(HANG_S)
                assert np.array_equal(back, data), f"{engine}: {name}"
                store.free(name)
            noted = any("page cache" in why for why in metrics.snapshot().fallbacks.values())
            print(f"{engine}: direct {is_direct(store)}, fall-backs {metrics.snapshot().fallbacks}")
            assert noted == (not is_direct(store))
            sync(store)
            assert sorted(os.listdir(directory)) == before
        if noted:
            with pytest.raises(StateError, match="page cache"):
                DiskStore(directory, MIB, engine=engine, metrics=Metrics(strict=True))
    assert sorted(os.listdir(directory)) == before


def overwrites_in_full_space(directory: Path) -> None:
    """Write all that is reserved again and again, however full the drive is otherwise."""
    free = System().free_bytes(directory)
    capacity = min(free * 3 // 4, chosen(test=32 * MIB, torture=free)) // MIB * MIB
    with DiskStore(directory, capacity, timeout_s=60) as store:
        rest = System().free_bytes(directory)
        with open(directory / "ballast", "wb") as ballast:  # another program takes what is left
            try:
                for _ in range(rest // MIB + 1):
                    ballast.write(bytes(MIB))
                    ballast.flush()
                os.fsync(ballast.fileno())
            except OSError as error:
                assert error.errno == errno.ENOSPC
        half = capacity // 2 - 4096
        for round_number in range(4):
            data = some_bytes(half, 0, SEED + round_number)
            store.write("half", data).wait(HANG_S)
            sync(store)
            back = np.empty_like(data)
            store.read("half", back).wait(HANG_S)
            assert np.array_equal(back, data)


def test_an_ordinary_directory(tmp_path: Path) -> None:
    round_trips(tmp_path)


def test_a_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with DiskStore(tmp_path / "link", MIB) as store:
        assert store._files[0].directory == tmp_path / "real"
    round_trips(tmp_path / "link")


def test_a_path_with_odd_letters(tmp_path: Path) -> None:
    odd = tmp_path / "a b\tc\\ü\n#"
    odd.mkdir()
    round_trips(odd)


# --- directories that do not work ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: None, errno.ENOENT),
        (lambda path: path.write_text("no directory"), errno.ENOTDIR),
        (lambda path: path.symlink_to("nowhere"), errno.ENOENT),
        (lambda path: path.symlink_to(path), errno.ELOOP),
    ],
    ids=["missing", "a file", "a dead link", "a link to itself"],
)
def test_no_directory_is_refused_by_name(
    tmp_path: Path, make: Callable[[Path], None], code: int
) -> None:
    make(tmp_path / "swap")
    before, fds = sorted(os.listdir(tmp_path)), open_fds()
    with pytest.raises(StoreError) as caught:
        DiskStore(tmp_path / "swap", MIB)
    assert caught.value.errno == code
    assert errno.errorcode[code] in str(caught.value) and str(tmp_path) in str(caught.value)
    assert sorted(os.listdir(tmp_path)) == before and open_fds() == fds


def test_a_bad_directory_after_a_good_one_leaves_nothing(tmp_path: Path) -> None:
    fds = open_fds()
    with pytest.raises(StoreError, match="ENOENT"):
        DiskStore([tmp_path, tmp_path / "missing"], 2 * MIB)
    assert os.listdir(tmp_path) == [] and open_fds() == fds


def test_two_names_of_one_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for other in (tmp_path / "link", tmp_path / "real" / ".." / "real", f"{tmp_path}//real/"):
        with pytest.raises(ConfigError, match="each once"):
            DiskStore([tmp_path / "real", other], MIB)


def test_a_file_system_without_files() -> None:
    with pytest.raises(StoreError, match="/proc") as caught:
        DiskStore("/proc", MIB)
    assert caught.value.errno in (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EOPNOTSUPP)


def test_a_directory_of_somebody_else(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    if os.geteuid() != 0:
        with pytest.raises(StoreError, match="EACCES"):
            DiskStore(tmp_path, MIB)
        return
    # Root may write everywhere: be an ordinary user, once everything is imported.
    run_here(as_nobody, Path("/usr"))


def as_nobody(directory: Path) -> None:
    with DiskStore("/tmp", MIB):  # everything that is imported late
        pass
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    with pytest.raises(StoreError, match=r"EACCES.*let your user write there"):
        DiskStore(directory, MIB)


class Watched(System):
    """A system that notes how many bytes are reserved."""

    def __init__(self) -> None:
        self.reserved: list[int] = []

    def reserve(self, fd: int, nbytes: int, begin: int = 0) -> None:
        self.reserved.append(nbytes)
        super().reserve(fd, nbytes, begin)


def test_too_small_is_said_at_once_with_both_numbers(tmp_path: Path) -> None:
    free = System().free_bytes(tmp_path)
    watched, begin_s = Watched(), time.monotonic()
    with pytest.raises(CapacityError) as caught:
        DiskStore(tmp_path, free + 2**40, system=watched)
    assert time.monotonic() - begin_s < 10
    assert f"({free + 2**40} bytes) are needed" in str(caught.value)
    assert "are free" in str(caught.value) and str(tmp_path) in str(caught.value)
    assert watched.reserved == [] and os.listdir(tmp_path) == []


def test_no_direct_io_is_a_fall_back_and_strict_refuses_it(tmp_path: Path) -> None:
    class Cached(System):
        def probe_direct_io(self, fd: int) -> DirectIo:
            return DirectIo(False)

    metrics, fds = Metrics(), open_fds()
    with DiskStore(tmp_path, MIB, metrics=metrics, system=Cached()) as store:
        assert not is_direct(store)
        data = some_bytes(5001, 3, SEED)
        store.write("a", data).wait(HANG_S)
        back = np.empty_like(data)
        store.read("a", back).wait(HANG_S)
        assert np.array_equal(back, data)
    assert "page cache" in metrics.snapshot().fallbacks[f"disk store {tmp_path}"]
    with pytest.raises(StateError, match="page cache"):
        DiskStore(tmp_path, MIB, metrics=Metrics(strict=True), system=Cached())
    assert open_fds() == fds


# --- mounts ------------------------------------------------------------------------------------


def tmpfs(point: Path, options: str) -> str:
    return f"mkdir -p {point}; mount -t tmpfs -o {options} tmpfs {point}"


FILE_SYSTEMS = {
    "ext4": ("mkfs.ext4 -q -F -b 4096", "96M", 4096),
    "xfs": ("mkfs.xfs -q -f -s size=4096", "400M", 4096),
    "btrfs": ("mkfs.btrfs -q -f", "256M", 4096),
    "ext3": ("mkfs.ext3 -q -F -b 1024", "96M", 512),  # no extents: nothing can be reserved by name
}


@pytest.mark.parametrize("kind", FILE_SYSTEMS)
def test_on_a_file_system_of_its_own(tmp_path: Path, kind: str) -> None:
    make, size, sector = FILE_SYSTEMS[kind]
    tools = (make.split()[0], "losetup", "truncate")
    run_here(alone_on_it, tmp_path / "point", loop_mount(tmp_path, make, size, sector), tools)


def alone_on_it(directory: Path) -> None:
    before = System().free_bytes(directory)
    round_trips(directory)
    overwrites_in_full_space(directory)
    os.unlink(directory / "ballast")
    subprocess.run(["sync", "-f", directory], check=True, timeout=HANG_S)
    wait_for(lambda: System().free_bytes(directory) >= before - MIB)  # metadata may stay


def test_on_tmpfs(tmp_path: Path) -> None:
    run_here(round_trips, tmp_path / "point", tmpfs(tmp_path / "point", "size=32m"))


def test_on_an_overlay(tmp_path: Path) -> None:
    parts = [tmp_path / "disk" / name for name in ("lower", "upper", "work")]
    setup = f"""
      {tmpfs(tmp_path / "disk", "size=32m")}
      mkdir {" ".join(map(str, parts))} {tmp_path / "point"}
      mount -t overlay -o lowerdir={parts[0]},upperdir={parts[1]},workdir={parts[2]} overlay \
        {tmp_path / "point"}
    """
    run_here(round_trips, tmp_path / "point", setup)


def test_a_read_only_mount(tmp_path: Path) -> None:
    run_here(read_only, tmp_path / "point", tmpfs(tmp_path / "point", "ro,size=8m"))


def read_only(directory: Path) -> None:
    with pytest.raises(StoreError, match=r"EROFS.*mount it for writing"):
        DiskStore(directory, MIB)


def test_a_full_mount(tmp_path: Path) -> None:
    point = tmp_path / "point"
    setup = f"{tmpfs(point, 'size=8m')}; head -c 7M /dev/zero > {point}/ballast"
    run_here(full, point, setup)


def full(directory: Path) -> None:
    """Open stores where 1 MiB is left of 8."""
    free = System().free_bytes(directory)
    assert free == MIB
    with pytest.raises(CapacityError) as caught:
        DiskStore(directory, 2 * MIB)
    assert f"({2 * MIB} bytes) are needed" in str(caught.value)
    assert f"({MIB} bytes) are free" in str(caught.value)
    assert System().free_bytes(directory) == free and os.listdir(directory) == ["ballast"]
    with DiskStore(directory, MIB) as store:  # to the last byte
        store.write("all", bytes(MIB)).wait(HANG_S)
        with pytest.raises(CapacityError, match="0 bytes"):
            store.write("more", b"x")
        store.free("all")
        store.write("again", b"x").wait(HANG_S)
    assert System().free_bytes(directory) == free
    # Two directories of one file system see the same free bytes; the second one finds them taken.
    for name in ("a", "b"):
        (directory / name).mkdir()
    free = System().free_bytes(directory)
    with pytest.raises(CapacityError, match="must hold"):
        DiskStore([directory / "a", directory / "b"], free + MIB // 2)
    assert System().free_bytes(directory) == free


def test_a_file_system_without_unnamed_files_or_room(tmp_path: Path) -> None:
    """An image of a read-only kind: no byte is free there, but that is not what is wrong."""
    image, point = tmp_path / "image", tmp_path / "point"
    setup = f"""
      mkdir {point} {tmp_path}/empty; mksquashfs {tmp_path}/empty {image} -quiet >/dev/null
      mount -o loop {image} {point}
    """
    run_here(read_only, point, setup, ("mksquashfs",))


def test_one_directory_mounted_twice(tmp_path: Path) -> None:
    """Nothing shows that both are one; the files are apart all the same."""
    setup = f"""
      {tmpfs(tmp_path / "a", "size=32m")}
      mkdir {tmp_path}/b; mount --bind {tmp_path}/a {tmp_path}/b
    """
    run_here(mounted_twice, tmp_path, setup)


def mounted_twice(directory: Path) -> None:
    with DiskStore([directory / "a", directory / "b"], 8 * MIB) as store:
        chunks = {f"{n}": some_bytes(MIB - 1, 0, n) for n in range(7)}
        tickets = [store.write(name, data) for name, data in chunks.items()]
        for ticket in tickets:
            ticket.wait(HANG_S)
        for name, data in chunks.items():
            back = np.empty_like(data)
            store.read(name, back).wait(HANG_S)
            assert np.array_equal(back, data)
        assert all(extents.used for extents in store._space.extents)


def test_no_mount_is_left(tmp_path: Path) -> None:
    """After all of the above: nothing of it is in this process's mounts or on a loop device."""
    mounts = Path("/proc/self/mounts").read_text()
    assert "test_on_a_file_system" not in mounts and "test_on_an_overlay" not in mounts
    # A mount goes with its last process, a moment after it.
    wait_for(lambda: not any(str(tmp_path.parent) in name for name in loop_files()))


def loop_files() -> list[str]:
    found = []
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        with contextlib.suppress(OSError):
            found.append(backing.read_text())
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth: expected 1 to 4096, got 0"),
        ({"depth": 5000}, "depth: expected 1 to 4096, got 5000"),
        ({"depth": 2.0}, r"depth: expected 1 to 4096, got 2\.0"),
        ({"timeout_s": None}, "timeout_s: expected seconds.*got None"),
        ({"timeout_s": 0}, "timeout_s: expected seconds.*got 0"),
        ({"timeout_s": float("nan")}, "timeout_s: expected seconds.*got nan"),
        ({"memory": [(1, 2)]}, "memory: expected a tensor or a buffer, got tuple"),
    ],
)
def test_options_are_checked_before_a_file_is_made(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with nothing_left(), pytest.raises(ConfigError, match=message):
        DiskStore(tmp_path, MIB, engine="threads", **options)


def test_pieces_smaller_than_what_the_drive_asks_for_are_refused(tmp_path: Path) -> None:
    class Large(System):
        def probe_direct_io(self, fd: int) -> DirectIo:
            return DirectIo(True, 16 * KIB, 16 * KIB)

    message = f"piece_bytes: expected a multiple of {16 * KIB}.* got 4096"
    with nothing_left(), pytest.raises(ConfigError, match=message):
        DiskStore(tmp_path, MIB, engine="threads", system=Large(), piece_bytes=4096)
