"""`offload.save_on_signal`, with real signals to real processes."""

from __future__ import annotations

import ctypes
import functools
import os
import random
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support import children
from support.loops import chosen, tally
from support.models import Gpt
from torch import nn

import offload
from offload.checkpoint.format.directory import find_newest
from offload.checkpoint.format.verify import verify
from offload.core.errors import ConfigError, StateError
from offload.tools.selftest.kill_loop import digest

ENDS = chosen(test=5, torture=100)


@contextmanager
def loop(folder: Path, how: str) -> Iterator[subprocess.Popen[str]]:
    for name in ("swap", "saves"):
        (folder / name).mkdir(parents=True)
    child = children.Popen(
        children.program("support.signal_loop", folder, how),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def wait_for(child: subprocess.Popen[str], word: str, count: int = 1) -> list[list[str]]:
    """Read lines up to the `count`-th that begins with `word`; return all of them."""
    found: list[list[str]] = []
    assert child.stdout is not None
    for line in child.stdout:
        found.append(line.rstrip("\n").split("\t"))
        count -= found[-1][0] == word
        if count == 0:
            return found
    assert child.stderr is not None
    raise AssertionError(f"ended without {word}: {child.stderr.read()[-2000:]}")


def end(child: subprocess.Popen[str], number: int, within_s: float) -> list[list[str]]:
    """Send the last signal; return the lines that come until the process has ended."""
    begin = time.monotonic()
    child.send_signal(number)
    assert child.stdout is not None and child.stderr is not None
    out = child.stdout.read()  # not communicate(), which misses what is buffered here
    err = child.stderr.read()
    assert child.wait(60) == 128 + number, err[-2000:]
    assert time.monotonic() - begin < within_s
    return [line.split("\t") for line in out.splitlines()]


def loaded(path: Path) -> tuple[Any, str]:
    model = Gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    extra = offload.load(path, model, optimizer)
    return extra, digest(model, optimizer)


def hidden_in(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder / "saves") if name.startswith(".")]


def test_a_training_saves_goes_on_and_ends(tmp_path: Path, seed: int) -> None:
    """SIGUSR1 at moments that are drawn, then SIGTERM: each save has the bits of its step."""
    rng = random.Random(seed)
    for number, how in enumerate(["plain", "background"]):
        folder = tmp_path / how
        with loop(folder, how) as child:
            lines = wait_for(child, "step", 2)
            for _ in range(3):
                child.send_signal(signal.SIGUSR1)
                time.sleep(rng.uniform(0.0, 0.1))
                lines += wait_for(child, "step", 3)
            lines += end(child, signal.SIGTERM, 11.0)
        digests = {int(line[1]): line[2] for line in lines if line[0] == "step"}
        last = find_newest(folder / "saves")
        assert last.name.startswith("at"), number
        extra, found = loaded(last)
        # The last save is at the end of a step that the child has not told of any more.
        assert extra["step"] == max(digests) + 1
        assert not hidden_in(folder)
        for each in (folder / "saves").iterdir():
            assert verify(each).is_whole
            if each.name.startswith("at") and each != last:
                extra, found = loaded(each)
                assert found == digests[extra["step"]]


@pytest.mark.timeout(max(300, 15 * ENDS))
def test_many_ends_at_any_moment(tmp_path: Path, seed: int) -> None:
    """Each training ends within the limit, its last step saved; nothing is left on the disk."""
    done = children.run(
        children.program("support.signal_loop", tmp_path, "many", seed, ENDS),
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout == f"ended\t{ENDS}\n", done.stderr[-3000:]
    tally("kills", ENDS)


def test_a_scheduler_is_saved_at_the_point(tmp_path: Path) -> None:
    with loop(tmp_path, "point") as child:
        lines = wait_for(child, "step", 4)
        lines += end(child, signal.SIGTERM, 11.0)
    steps = [int(line[1]) for line in lines if line[0] == "step"]
    model = Gpt(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    extra = offload.load(tmp_path / "saves", model, optimizer, scheduler=scheduler)
    assert extra["step"] == steps[-1] == scheduler.last_epoch
    assert digest(model, optimizer) == lines[-1][2]


def test_a_loop_that_forgets_the_point_is_told_at_once(tmp_path: Path) -> None:
    with loop(tmp_path, "forgotten") as child:
        _, err = child.communicate(timeout=60)
        assert child.returncode == 1
        assert "scheduler must be saved after its own step: call point()" in err


@pytest.mark.parametrize("how", ["idle", "slow", "slow background"])
def test_the_limit_holds_and_nothing_is_left(how: str, tmp_path: Path) -> None:
    """No step ends; the save takes too long; a background save of the user's own takes too long."""
    with loop(tmp_path, how) as child:
        wait_for(child, "ready" if how == "idle" else "step", 1 if how == "idle" else 2)
        if how == "slow background":
            wait_for(child, "stuck")
        # The save sleeps for a minute; the process has ended long before, and the next save
        # removes what it has left.
        end(child, signal.SIGTERM, 30.0)
    assert not [name for name in os.listdir(tmp_path / "saves") if not name.startswith(".")]
    model = nn.Linear(2, 2)
    offload.save(tmp_path / "saves" / "next", model)
    assert os.listdir(tmp_path / "saves") == ["next"]


def test_a_save_is_cancelled_in_time_and_removed(tmp_path: Path) -> None:
    """Another thread cancels it at each point before the rename; older checkpoints stay."""
    from offload.checkpoint import saves, writer
    from offload.checkpoint.disk import POINTS, CheckpointDisk

    model = nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(200)).sum().backward()
    optimizer.step()
    offload.save(tmp_path / "first", model, optimizer)
    cancelled = SystemExit(143)
    before = writer.CheckpointDisk
    try:
        for number, point in enumerate(POINTS[: POINTS.index("renamed")]):

            class Cancels(CheckpointDisk):
                def hook(self, name: str, at: str = point) -> None:
                    if name == at:
                        thread = threading.Thread(target=saves.cancel_all, args=(cancelled,))
                        thread.start()
                        thread.join()

            writer.CheckpointDisk = Cancels  # type: ignore[misc]
            with pytest.raises(SystemExit):
                offload.save(tmp_path / f"{number}", model, optimizer, keep=1)
            assert os.listdir(tmp_path) == ["first"], point
    finally:
        writer.CheckpointDisk = before  # type: ignore[misc]
    assert verify(tmp_path / "first").is_whole


def test_handlers_are_as_before_and_mistakes_are_told(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    saver = offload.save_on_signal(tmp_path / "a", model, optimizer)
    assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGUSR1)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    assert (tmp_path / "a").is_dir()
    saver.close()
    saver.close()
    assert before == {number: signal.getsignal(number) for number in before}
    assert signal.set_wakeup_fd(-1) == -1
    optimizer.step()
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            offload.save_on_signal(tmp_path / "b", model, optimizer)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert isinstance(errors[0], StateError) and "main thread" in str(errors[0])
    for wrong in ({"limit_s": 0}, {"limit_s": True}, {"signals": ()}, {"signals": (9,)}):
        with pytest.raises(ConfigError, match=r"expected"):
            offload.save_on_signal(tmp_path / "b", model, optimizer, **wrong)  # type: ignore[arg-type]
    # What every save would refuse is refused before the signal that a save must not miss.
    for given in ({"keep": 0}, {"extra": {"s": {1, 2}}}, {"scheduler": 5}):
        with pytest.raises(ConfigError, match=next(iter(given))):
            offload.save_on_signal(tmp_path / "b", model, optimizer, **given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="hidden"):
        offload.save_on_signal(tmp_path / ".b", model, optimizer)
    assert before == {number: signal.getsignal(number) for number in before}
    assert os.listdir(tmp_path) == ["a"]


# --- one process, forked for each case ------------------------------------------------------------


def in_child(work: Callable[[], None]) -> tuple[int, str]:
    """Run `work` in a forked process; return its exit code and stderr."""
    out, into = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.dup2(into, 2)
            work()
            code = 0
        except SystemExit as end:
            code = int(str(end.code))
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        finally:
            os._exit(code)
    os.close(into)
    told = b""
    while some := os.read(out, 4096):
        told += some
    os.close(out)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), told.decode()


def small() -> tuple[nn.Module, Any]:
    model = nn.Linear(2, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(2)).sum().backward()
    optimizer.step()


def test_a_signal_to_a_forked_child_is_not_the_trainings(tmp_path: Path) -> None:
    def train(fork: Callable[[], int], code: int) -> None:
        model, optimizer = small()
        with offload.save_on_signal(tmp_path / "a", model, optimizer, limit_s=0.3):
            pid = fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
            time.sleep(0.6)
            step(model, optimizer)

    # The second fork bypasses Python, as one by a library may: none of our hooks has run in it.
    for fork, code in ((os.fork, -signal.SIGTERM), (ctypes.PyDLL(None).fork, 143)):
        assert in_child(functools.partial(train, fork, code)) == (0, "")
    assert not os.listdir(tmp_path)


def test_a_live_child_does_not_keep_close_waiting(tmp_path: Path) -> None:
    def train() -> None:
        ready, begun = os.pipe()
        with offload.save_on_signal(tmp_path / "a", *small()):
            pid = os.fork()
            if pid == 0:
                os.write(begun, b"1")
                time.sleep(60)
        os.read(ready, 1)  # a signal in the middle of the fork would be lost
        os.kill(pid, signal.SIGTERM)
        assert os.waitpid(pid, 0)[1] == signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    assert in_child(train) == (0, "")


def test_what_goes_wrong_is_told_on_stderr(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def fails() -> None:
        model, optimizer = small()
        with offload.save_on_signal(tmp_path / "file" / "a", model, optimizer):
            os.kill(os.getpid(), signal.SIGTERM)
            step(model, optimizer)

    def never_steps() -> None:
        with offload.save_on_signal(tmp_path / "a", *small(), limit_s=0.3):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)

    code, told = in_child(fails)
    assert code == 143 and told.startswith("offload: SIGTERM: nothing was saved: "), told
    code, told = in_child(never_steps)
    assert code == 143 and "SIGTERM: no safe point or no save within 0.3 s" in told
    assert told.count("\n") == 1


def test_a_signal_after_the_last_step_is_answered_where_with_ends(tmp_path: Path) -> None:
    def after_the_step() -> None:
        model, optimizer = small()
        with offload.save_on_signal(tmp_path / "a", model, optimizer):
            step(model, optimizer)
            os.kill(os.getpid(), signal.SIGTERM)

    def in_an_iteration() -> None:
        model, optimizer = small()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        saver = offload.save_on_signal(tmp_path / "b", model, optimizer, scheduler=scheduler)
        with saver:
            step(model, optimizer)
            scheduler.step()
            saver.point()
            os.kill(os.getpid(), signal.SIGTERM)
            step(model, optimizer)  # and no scheduler.step()

    def with_an_error() -> None:
        with offload.save_on_signal(tmp_path / "c", *small()):
            os.kill(os.getpid(), signal.SIGTERM)
            raise SystemExit(7)

    assert in_child(after_the_step) == (143, "")
    assert verify(tmp_path / "a").is_whole
    code, told = in_child(in_an_iteration)
    assert code == 143 and "a step came after the last point()" in told
    assert in_child(with_an_error) == (7, "")
    assert os.listdir(tmp_path) == ["a"]


def test_one_saver_at_a_time(tmp_path: Path) -> None:
    with offload.save_on_signal(tmp_path / "a", *small()):
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(StateError, match=r"there is one already.*by name"):
            offload.save_on_signal(tmp_path / "b", *small())
        assert signal.getsignal(signal.SIGTERM) == before
    offload.save_on_signal(tmp_path / "b", *small()).close()


@pytest.mark.usefixtures("own_budget")
def test_training_goes_on_after_a_save_that_it_did_not_need(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The save on SIGUSR1 fails, as on a full disk."""
    model, optimizer = small()
    offload.wrap(optimizer, host_memory="1MiB")
    (tmp_path / "file").touch()
    paths = iter([tmp_path / "file" / "a", tmp_path / "b"])
    with offload.save_on_signal(lambda: next(paths), model, optimizer):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGUSR1)
            step(model, optimizer)
    assert capfd.readouterr().err.startswith("offload: SIGUSR1: nothing was saved: ")
    assert "save on SIGUSR1" in str(offload.report(optimizer))
    assert verify(tmp_path / "b").is_whole
    optimizer.close()


@pytest.mark.usefixtures("own_budget")
def test_a_save_on_signal_is_made_though_an_earlier_one_failed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = small()
    offload.wrap(optimizer, host_memory="1MiB")
    with offload.save_on_signal(tmp_path / "a", model, optimizer):
        with monkeypatch.context() as patched:

            def refuse(self: object) -> None:
                raise OSError(28, "No space left on device")

            patched.setattr("offload.checkpoint.writer.CheckpointWriter.commit", refuse)
            ticket = offload.save(tmp_path / "own", model, optimizer, background=True)
            while not ticket.done:
                time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)
        step(model, optimizer)
    assert "background save" in capfd.readouterr().err
    assert verify(tmp_path / "a").is_whole
    optimizer.close()
