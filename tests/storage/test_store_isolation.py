"""Many processes with disk stores in one directory: none sees another's bytes, and a process that
is killed leaves nothing behind.

The processes run this file. Each has a pattern of its own and checks every read against a model.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from offload import _native
from offload.storage.disk import DiskStore

MIB = 1 << 20
PROCESSES = 8
ROUNDS = 3
CAPACITY = 16 * MIB
HANG_S = 120


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline_s, f"never came: {what}"
        time.sleep(0.02)


# --- one process ----------------------------------------------------------------------------------


def pattern(owner: int, generation: int, nbytes: int) -> np.ndarray:
    """Make bytes that only `owner` writes: every word has its number and the write's."""
    words = np.arange(-(-nbytes // 8), dtype=np.uint64)
    words += np.uint64((owner << 48) | (generation << 24))
    return words.view(np.uint8)[:nbytes]


def work(directory: Path, owner: int, seed: int, stop: int, report: int) -> None:
    """Write, read, check, until pipe `stop` ends; tell pipe `report` how many reads were right."""
    rng = random.Random(seed)
    model: dict[str, tuple[int, int]] = {}  # generation and size
    reads = 0
    with DiskStore(directory, CAPACITY, engine=rng.choice([None, "threads", "aiofiles"])) as store:
        os.write(report, b"ready\n")
        while not select.select([stop], [], [], 0)[0]:
            for _ in range(20):
                reads += step(store, model, owner, rng)
    os.write(report, f"{reads}\n".encode())


def step(
    store: DiskStore, model: dict[str, tuple[int, int]], owner: int, rng: random.Random
) -> int:
    """Do one random act; return how many reads were checked."""
    name = f"chunk {rng.randrange(6)}"
    if name not in model or rng.random() < 0.4:
        nbytes = rng.choice([0, 1, 4095, 4097, rng.randrange(2 * MIB)])
        generation = rng.randrange(1 << 20)
        store.write(name, pattern(owner, generation, nbytes)).wait(HANG_S)
        model[name] = (generation, nbytes)
        return 0
    if rng.random() < 0.05:
        store.free(name)
        del model[name]
        return 0
    generation, nbytes = model[name]
    target = np.full(nbytes, 0xEE, dtype=np.uint8)
    store.read(name, target).wait(HANG_S)
    if not np.array_equal(target, pattern(owner, generation, nbytes)):
        words = target[: nbytes // 8 * 8].view(np.uint64)
        found = set((words >> np.uint64(48)).tolist())
        raise AssertionError(f"read of {name}: words of owners {found}, not of {owner}")
    return 1


# --- many of them -----------------------------------------------------------------------------


class Worker:
    """A forked child of a process without threads: importing everything anew would take long."""

    def __init__(self, directory: Path, owner: int, seed: int) -> None:
        self.owner = owner
        stop, self._stop = os.pipe()
        self._report, report = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._stop)
                work(directory, owner, seed, stop, report)
                code = 0
            except BaseException as error:
                print(f"owner {owner}: {error!r}", file=sys.stderr, flush=True)
            finally:
                os._exit(code)
        os.close(stop)
        os.close(report)

    def _line(self) -> str:
        found = b""
        while not found.endswith(b"\n") and (more := os.read(self._report, 1)):
            found += more
        return found.decode()

    def wait_until_ready(self) -> None:
        assert self._line() == "ready\n", f"owner {self.owner} did not start"

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self._end() == -signal.SIGKILL, f"owner {self.owner} ended by itself"
        assert not os.path.exists(f"/proc/{self.pid}/fd")

    def finish(self) -> int:
        """End it kindly; return how many reads it has checked."""
        os.write(self._stop, b"x")
        found = self._line()
        assert self._end() == 0, f"owner {self.owner}: wrong bytes, see standard error"
        return int(found)

    def _end(self) -> int:
        _, status = os.waitpid(self.pid, 0)
        os.close(self._stop)
        os.close(self._report)
        return os.waitstatus_to_exitcode(status)


def disturb(directory: Path, seed: int) -> int:
    """Run workers in one directory, kill and replace random ones, and end the rest kindly; return
    how many reads were checked.
    """
    rng = random.Random(seed)
    workers = [Worker(directory, owner, seed + owner) for owner in range(1, PROCESSES + 1)]
    for worker in workers:
        worker.wait_until_ready()
    for round_number in range(1, ROUNDS + 1):
        time.sleep(rng.uniform(0.1, 0.5))
        assert os.listdir(directory) == [], "a swap file has a name"
        victims = rng.sample(workers, 3)
        for victim in victims:
            victim.kill()
            workers.remove(victim)
        for victim in victims:  # their room is free again, and taken by others
            owner = victim.owner + PROCESSES * round_number
            workers.append(Worker(directory, owner, seed + owner))
        for worker in workers[-len(victims) :]:
            worker.wait_until_ready()
    time.sleep(0.2)
    workers.pop().kill()
    return sum(worker.finish() for worker in workers)


def free_bytes(directory: Path) -> int:
    found = os.statvfs(directory)
    return found.f_frsize * found.f_bavail


def disturb_alone(directory: Path, seed: int, is_alone: bool) -> None:
    """Disturb, and look for what is left. is_alone: no other process uses the file system, so every
    byte must come back.
    """
    before = free_bytes(directory)
    print("reads", disturb(directory, seed), flush=True)
    assert os.listdir(directory) == []
    if is_alone:
        subprocess.run(["sync", "-f", directory], check=True, timeout=HANG_S)
        wait_for(lambda: free_bytes(directory) == before, "free bytes as before")


def test_killed_processes_leave_no_byte(tmp_path: Path, seed: int) -> None:
    """Also the process of a later round has only its own bytes, where others' bytes were before.

    On a file system of our own, in mounts of our own: a small ext4, or else memory. Without the
    right to mount there is no number for the drive as a whole, but everything else.
    """
    point, image = tmp_path / "point", tmp_path / "image"
    point.mkdir()
    size = (PROCESSES + 8) * CAPACITY // MIB
    script = f"""
      {{ truncate -s {size}M {image} && mkfs.ext4 -q -F {image} && mount -o loop {image} {point} &&
        rmdir {point}/lost+found; }} || mount -t tmpfs -o size={size}m tmpfs {point} || exit 77
      df -T {point} >&2
      exec "$@" alone
    """
    separate = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh"]
    command = [sys.executable, __file__, str(point), str(seed)]
    done = run([*separate, *command]) if shutil.which("unshare") else None
    if done is None or done.returncode == 77 or "unshare failed" in done.stderr:
        print("free bytes are not compared: no right to mount, or no unshare")
        done = run([*command, "shared"])
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) > 100


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * HANG_S)
    print(done.stdout, done.stderr)
    return done


# --- the file itself ----------------------------------------------------------------------------


def swap_fds(directory: Path) -> list[int]:
    """List files that this process has open in `directory`, which have no name."""
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{directory}/"):
                found.append(fd)
    return found


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_the_file_has_no_name_and_one_reader(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        store = DiskStore(tmp_path, MIB)
    finally:
        os.umask(before)
    with store:
        (fd,) = swap_fds(tmp_path)
        facts = os.fstat(fd)
        assert stat.S_IMODE(facts.st_mode) == 0o600 and stat.S_ISREG(facts.st_mode)
        assert facts.st_nlink == 0 and facts.st_size == MIB and facts.st_blocks * 512 >= MIB
        assert os.listdir(tmp_path) == []
        assert not os.get_inheritable(fd)
    assert swap_fds(tmp_path) == []


@pytest.mark.parametrize("engine", ["io_uring", "threads", "aiofiles"])
def test_a_started_program_has_none_of_our_files(tmp_path: Path, engine: str) -> None:
    """Neither the swap file nor a ring nor a bell, even when it is started with all files open."""
    if engine == "io_uring" and (refused := _native.probe_uring()):
        pytest.skip(f"the kernel refuses rings: {os.strerror(refused)}")
    listing = "import os; print([os.path.realpath(f'/proc/self/fd/{n}') for n in range(1000)])"
    with DiskStore(tmp_path, MIB, engine=engine) as store:
        store.write("a", bytes(100_000)).wait(HANG_S)
        assert swap_fds(tmp_path)
        seen = subprocess.run(
            [sys.executable, "-c", listing], close_fds=False, capture_output=True, timeout=HANG_S
        ).stdout.decode()
    assert seen
    for ours in (str(tmp_path), "io_uring", "eventfd", "eventpoll", "deleted"):
        assert ours not in seen, seen


if __name__ == "__main__":
    disturb_alone(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "alone")
