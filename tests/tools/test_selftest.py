"""`offload selftest`: every check can fail, for each fault is planted that it must find; one that
crashes, hangs or is interrupted leaves nothing behind.

A check that finds a planted fault runs in this process. What the supervisor does about processes is
tried with checks that the tests make.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import children

from offload import kernels
from offload.core.errors import ConfigError, OffloadError, StateError, StoreError
from offload.core.extents import Extents
from offload.core.ticket import Ticket
from offload.device.host import HostTransfer
from offload.kernels import calls
from offload.storage.disk import DiskStore
from offload.tools import cli
from offload.tools.cli.selftest import format_table
from offload.tools.selftest import bits, check, checkpoints, kill_loop, supervisor
from offload.tools.selftest.check import CheckResult, CheckStatus, NotRun, PassedCheck, Setting
from offload.tools.selftest.supervisor import supervise
from offload.tools.selftest.worker import run_check

pytestmark = [pytest.mark.timeout(280), pytest.mark.usefixtures("own_budget")]

TESTS = Path(__file__).parents[1]
FOR_PROCESSES = ("kernels.slices", "copies.transfer")  # the shortest


def setting_of(folder: Path) -> Setting:
    return Setting("cpu", folder, is_quick=True, seed=7)


def failure_of(name: str, folder: Path) -> str:
    """Run a check that must find a planted fault and leave no file; return what it says."""
    result = run_check(name, setting_of(folder))
    assert result.status is CheckStatus.FAILED, result
    assert list(folder.iterdir()) == []
    return result.text


def selftest(*arguments: str) -> subprocess.CompletedProcess[str]:
    return children.run(
        [sys.executable, "-m", "offload", "selftest", *arguments],
        nested=True,
        capture_output=True,
        text=True,
        timeout=280,
    )


# --- the whole of it ------------------------------------------------------------------------------


def test_all_checks_pass_here_and_nothing_is_left(tmp_path: Path) -> None:
    """All but `prepare.device`, which needs an accelerator; and containers may forbid io_uring."""
    done = selftest("--quick", "--json", "--device", "cpu", "--nvme", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert [each["name"] for each in told["checks"]] == list(check.CHECKS)
    by_status = {each["name"]: each["status"] for each in told["checks"]}
    apart = {"faults.io_uring"}  # containers may forbid it
    assert by_status.pop("prepare.device") == "not run"
    assert {status for name, status in by_status.items() if name not in apart} == {"passed"}
    assert by_status["faults.io_uring"] in ("passed", "not run")
    assert told["summary"]["exit_code"] == 0 == told["summary"]["failed"]
    assert set(told["about"]) >= {
        "offload",
        "cpu",
        "cores",
        "memory",
        "kernel",
        "python",
        "torch",
        "instruction set",
        "I/O engine",
        "device",
        "directory",
        "seed",
    }
    assert str(tmp_path) not in done.stdout, "whose directories these are is nobody's business"
    assert list(tmp_path.iterdir()) == []
    assert f"[1/{len(check.CHECKS)}]" in done.stderr


@pytest.mark.quick
def test_every_name_is_a_check() -> None:
    for name in check.CHECKS:
        assert callable(check.find(name)), name


# --- faults that must be found --------------------------------------------------------------------


def test_a_kernel_with_one_wrong_bit_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = calls._update_natively

    def wrong(native: Any, rule: Any, tensors: Any, *rest: Any) -> None:
        real(native, rule, tensors, *rest)
        if tensors[0].numel() > 1000:
            tensors[0].view(torch.int32)[999] ^= 1

    monkeypatch.setattr(calls, "_update_natively", wrong)
    assert "elements differ, first 999" in failure_of("kernels.reference", tmp_path)
    assert "beside torch: 1 of 70001 elements" in failure_of("kernels.torch_fused", tmp_path)
    assert "cut into slices" in failure_of("kernels.slices", tmp_path)
    # Not prepare.half: its judge is the same kernel, in memory.
    for name in ("wrap.memory", "wrap.disk", "wrap.half", "prepare.budgets"):
        assert "elements differ" in failure_of(name, tmp_path)


def test_where_torch_has_other_bits_the_judge_is_the_same_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bits.platform, "machine", lambda: "aarch64")
    results = {name: run_check(name, setting_of(tmp_path)) for name in ("wrap.memory", "wrap.disk")}
    assert results["wrap.memory"].status is CheckStatus.NOT_RUN
    assert "other last bits on aarch64" in results["wrap.memory"].text
    assert results["wrap.disk"].status is CheckStatus.PASSED
    assert "beside the same in memory" in results["wrap.disk"].text
    flip_reads(monkeypatch)
    assert "elements differ" in failure_of("wrap.disk", tmp_path)


def test_a_kernel_that_writes_too_far_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calls._update_natively

    def far(native: Any, rule: Any, tensors: Any, *rest: Any) -> None:
        real(native, rule, tensors, *rest)
        memory = torch.empty(0).set_(tensors[0].untyped_storage())
        memory[tensors[0].storage_offset() + tensors[0].numel()] = 1.0

    monkeypatch.setattr(calls, "_update_natively", far)
    text = failure_of("kernels.reference", tmp_path)
    assert "bytes outside of its memory: got 4 written" in text


@pytest.mark.quick
def test_a_sum_and_a_cast_that_are_wrong_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_stats, real_cast = kernels.grad_stats, kernels.cast

    def blind(grad: torch.Tensor, **options: Any) -> Any:
        return real_stats(grad.nan_to_num(), **options)

    def truncated(source: torch.Tensor, target: torch.Tensor) -> None:
        if target.dtype == torch.bfloat16:
            words = source.view(torch.int32) & ~0xFFFF
            source = torch.where(source.isnan(), source, words.view(torch.float32))
        real_cast(source, target)

    monkeypatch.setattr(kernels, "grad_stats", blind)
    monkeypatch.setattr(kernels, "cast", truncated)
    assert "got finite, expected not finite" in failure_of("kernels.statistics", tmp_path)
    assert "fp32 to torch.bfloat16" in failure_of("kernels.casts", tmp_path)


def flip_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a store flip a bit in each read from the 20th on, and say nothing."""
    real, left = DiskStore.read, [20]

    def flipped(self: DiskStore, name: str, target: Any, *rest: Any) -> Any:
        try:
            real(self, name, target, *rest).wait(60)
        except OffloadError as error:
            failed: Ticket[None] = Ticket(name)
            failed.fail(error)
            return failed
        left[0] -= 1
        if left[0] <= 0:
            memory = target if isinstance(target, np.ndarray) else np.asarray(target)
            memory.reshape(-1).view(np.uint8)[-1] ^= 1
        return Ticket.of(None, name)

    monkeypatch.setattr(DiskStore, "read", flipped)


@pytest.mark.parametrize("name", ["faults.threads", "faults.aiofiles"])
def test_a_store_that_returns_a_flipped_byte_fails(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_reads(monkeypatch)
    assert "got wrong bytes" in failure_of(name, tmp_path)


def test_training_on_a_store_that_returns_a_flipped_byte_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_reads(monkeypatch)
    for name in ("wrap.disk", "copies.slow_disk", "prepare.budgets"):
        assert "elements differ" in failure_of(name, tmp_path), name


def test_a_store_that_hides_errors_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DiskStore.write

    def deaf(self: DiskStore, name: str, source: Any, *rest: Any, **named: Any) -> Any:
        with contextlib.suppress(StoreError):
            real(self, name, source, *rest, **named).wait(60)
        return Ticket.of(None, name)

    monkeypatch.setattr(DiskStore, "write", deaf)
    text = failure_of("faults.threads", tmp_path)
    assert "EIO in writes" in text and "errors: got 0" in text


def test_a_step_that_hides_errors_of_the_disk_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.tools.selftest import faults

    real = faults.take_step

    def deaf(*arguments: Any) -> None:
        with contextlib.suppress(StoreError, StateError):
            real(*arguments)

    monkeypatch.setattr(faults, "take_step", deaf)
    assert "three steps without an error" in failure_of("faults.training", tmp_path)


def test_a_transfer_that_does_not_copy_in_time_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU: a write is reported as done, and its bytes are not copied."""
    late: list[Callable[[], None]] = []
    real = HostTransfer.write

    def write(self: HostTransfer, host: Any, target: Any, *rest: Any) -> Any:
        late.append(lambda: real(self, host, target))
        return None

    monkeypatch.setattr(HostTransfer, "write", write)
    assert "written_while_read" in failure_of("copies.transfer", tmp_path)


def test_host_memory_that_is_reused_too_early_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool leases the same memory to two holders."""

    class Careless(Extents):
        def find(self, size: int) -> int:
            return 0

        def take_at(self, begin: int, size: int) -> None: ...

        def give_back(self, begin: int) -> None: ...

    monkeypatch.setattr("offload.core.pool.best_extents", lambda: Careless)
    assert "leases of a full pool" in failure_of("budgets.pool", tmp_path)
    assert "result" in failure_of("copies.transfer", tmp_path)


def test_a_pool_that_exceeds_its_budget_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.core.budget import Budget

    take = Budget.take
    monkeypatch.setattr(Budget, "take", lambda self, nbytes, what: take(Budget(), nbytes, what))
    assert "a second pool beyond the budget" in failure_of("budgets.pool", tmp_path)


def test_a_process_that_grows_by_its_state_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The swapped bytes stay in host memory, as in a store that has no drive."""
    kept: list[bytes] = []
    real = DiskStore.write

    def keep(self: DiskStore, name: str, source: Any, *rest: Any, **named: Any) -> Any:
        kept.extend(np.asarray(source).tobytes() for _ in range(8))  # more than was freed before
        return real(self, name, source, *rest, **named)

    monkeypatch.setattr(DiskStore, "write", keep)
    assert "growth of the process" in failure_of("budgets.memory", tmp_path)


def test_a_budget_that_is_not_refused_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.tools.selftest import budgets

    monkeypatch.setattr(budgets, "prepare", lambda *arguments, **options: None)
    assert "got no error, expected CapacityError" in failure_of("budgets.refusals", tmp_path)


def tear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the last bytes of each save never reach the disk."""
    real = checkpoints.save

    def torn(path: Path, *arguments: Any, **options: Any) -> Any:
        found = real(path, *arguments, **options)
        largest = max(path.rglob("*.safetensors"), key=lambda each: each.stat().st_size)
        os.truncate(largest, largest.stat().st_size - 512)
        return found

    monkeypatch.setattr(checkpoints, "save", torn)


@pytest.mark.quick
def test_a_torn_checkpoint_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tear(monkeypatch)
    assert "expected whole" in failure_of("checkpoints.resume", tmp_path)


def test_a_verify_that_looks_away_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.checkpoint.format.verify import Verdict

    monkeypatch.setattr(checkpoints, "verify", lambda path: Verdict(path))
    assert "got whole, expected damaged" in failure_of("checkpoints.damage", tmp_path)


def test_a_load_that_forgets_something_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = checkpoints.load

    def forgetful(path: Path, model: Any, optimizer: Any) -> Any:
        before = {k: v for k, v in optimizer.state_dict().items() if k == "state"}
        extra = real(path, model, optimizer)
        optimizer.load_state_dict({**optimizer.state_dict(), **before})
        return extra

    monkeypatch.setattr(checkpoints, "load", forgetful)
    assert "resumed" in failure_of("checkpoints.resume", tmp_path)


EARLY = """
import sys
from offload.tools.selftest import kill_loop
real = kill_loop.api.save
def early(path, *arguments, **options):
    if int(path.name) % 2:
        return real(path, *arguments, **options)
kill_loop.api.save = early
sys.exit(kill_loop.main(*sys.argv[1:]))
"""


def test_a_save_that_is_acknowledged_and_not_there_fails(tmp_path: Path) -> None:
    done = children.run(
        [sys.executable, "-c", EARLY, str(tmp_path), "quick", "3"],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1, done.stderr
    assert "or later" in done.stderr


def test_a_loop_that_does_not_end_by_a_kill_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints.sys, "executable", "/bin/false")
    assert "exit code 1, expected nothing lost" in failure_of("checkpoints.kill", tmp_path)


def test_every_point_of_a_save_has_its_kill(seed: int) -> None:
    import random

    from offload.checkpoint.disk import POINTS

    for is_quick, points in ((False, set(POINTS)), (True, set(kill_loop._QUICK_POINTS))):
        kills = kill_loop.plan_kills(is_quick, random.Random(seed))
        found = [kill.point for way in kills.values() for kill in way]
        assert set(found) == {*points, ""}
        assert set(kills) == {"wrap", "prepare"} and all(kills.values())


def test_a_file_that_is_left_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def messy(setting: Setting) -> PassedCheck:
        (setting.directory / "swap.bin").write_bytes(b"x")
        return PassedCheck("things", 1)

    plant(monkeypatch, messy)
    assert failure_of("kernels.slices", tmp_path) == (
        "files after the check: got swap.bin, expected none"
    )


def test_an_open_swap_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offload.tools.selftest import leftovers

    monkeypatch.setattr(leftovers, "_SOON_S", 0.1)
    real, kept = leftovers.close, []

    def leaky(model: Any) -> None:
        real(model)
        (folder,) = tmp_path.iterdir()
        kept.append(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600))

    monkeypatch.setattr(leftovers, "close", leaky)
    try:
        assert "open files: got ['" in failure_of("leftovers.disk", tmp_path)
    finally:
        for fd in kept:
            os.close(fd)


# --- on an accelerator ----------------------------------------------------------------------------

ON_FAKE = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from fake_accelerator import load
load("lazy", 0, 1 << 28)
from offload.tools.selftest import copies
from offload.tools.selftest.check import Setting
from offload.tools.selftest.worker import run_check
from offload.device.buffer import DeviceBuffer
from offload.device.device import DeviceTransfer
from offload.device.device import Mark
import torch
def no_wait(self):
    return self._memory().detach()
def no_mark(self):
    stream = torch.accelerator.current_stream(self.device)
    return Mark(stream, torch.Stream(self.device).record_event())
torch.set_num_threads(1)
copies._BUSY_SIDE, copies._BALLAST_BYTES = 128, 1 << 20  # this device is late whatever it is given
fault, names = sys.argv[2], sys.argv[3].split(",")
if fault == "use":
    DeviceBuffer.use = no_wait
if fault == "join":
    DeviceTransfer.join = lambda self: None
if fault == "mark":
    DeviceTransfer.mark = no_mark
setting = Setting("fake:0", Path(sys.argv[1]), True, 7)
print(json.dumps([asdict(run_check(name, setting)) for name in names]))
"""


def on_fake(folder: Path, fault: str, *names: str) -> list[CheckResult]:
    """Run checks on the fake accelerator, which executes nothing until a thread waits for it."""
    from fake_accelerator.build import library

    library()
    done = children.run(
        [sys.executable, "-c", ON_FAKE, str(folder), fault, ",".join(names)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    assert done.returncode == 0, done.stderr
    return [CheckResult.of_dict(each) for each in json.loads(done.stdout)]


def test_checks_pass_on_a_device_that_is_late(tmp_path: Path) -> None:
    results = on_fake(tmp_path, "none", "copies.transfer", "wrap.disk", "prepare.device")
    for result in results:
        assert result.status is CheckStatus.PASSED, result
    assert "late, on fake:0" in results[0].text


@pytest.mark.parametrize("fault", ["use", "join", "mark"])
def test_a_transfer_that_forgets_a_wait_fails(fault: str, tmp_path: Path) -> None:
    (result,) = on_fake(tmp_path, fault, "copies.transfer")
    assert result.status is CheckStatus.FAILED, result
    assert "elements differ" in result.text


# --- what a check may do --------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, function: Callable[[Setting], PassedCheck]) -> None:
    from offload.tools.selftest import worker

    monkeypatch.setattr(worker, "find", lambda name: function)


@pytest.mark.quick
def test_what_becomes_of_a_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(setting: Setting) -> PassedCheck:
        raise NotRun("no such thing here")

    def broken(setting: Setting) -> PassedCheck:
        raise KeyError("surprise")

    def failed(setting: Setting) -> PassedCheck:
        raise check.CheckFailed("the sum", got=4, expected=5)

    cases: list[tuple[Callable[[Setting], PassedCheck], CheckStatus, str]] = [
        (lambda setting: PassedCheck("sums", 3), CheckStatus.PASSED, "sums"),
        (lambda setting: PassedCheck("sums", 0), CheckStatus.FAILED, "comparisons (sums): got 0"),
        (not_here, CheckStatus.NOT_RUN, "no such thing here"),
        (broken, CheckStatus.FAILED, "KeyError: 'surprise' (test_selftest.py:"),
        (failed, CheckStatus.FAILED, "the sum: got 4, expected 5"),
    ]
    for function, status, text in cases:
        plant(monkeypatch, function)
        result = run_check("kernels.slices", setting_of(tmp_path))
        assert result.status is status and text in result.text
        assert CheckResult.of_dict(json.loads(json.dumps(asdict(result)))) == result


def test_bits_are_compared_as_bits() -> None:
    same, nan = torch.tensor([0.0, 1.0]), float("nan")
    bits.require_same_bits(torch.tensor([nan, 1.0]), torch.tensor([-nan, 1.0]), "nan")
    others: list[tuple[torch.Tensor, torch.Tensor]] = [
        (same, torch.tensor([-0.0, 1.0])),
        (same, torch.tensor([0.0, nan])),
        (same, same.to(torch.bfloat16)),
        (same, same.view(2, 1)),
    ]
    for got, expected in others:
        with pytest.raises(check.CheckFailed):
            bits.require_same_bits(got, expected, "they")
    for lists in (([same], []), ([], [same]), ([None], [same]), ([same], [None])):
        with pytest.raises(check.CheckFailed):
            bits.require_same(*lists, "they")


def test_no_check_needs_torch_to_be_chosen() -> None:
    code = "import sys, offload.tools.cli; assert 'torch' not in sys.modules; print('none')"
    code = code.replace("offload.tools.cli", "offload.tools.cli.selftest")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "none\n", done.stderr


# --- processes ------------------------------------------------------------------------------------

PLANTED = """
import os, sys, time
from offload.tools.selftest import worker
from offload.tools.selftest.check import PassedCheck
def crash(setting):
    print("last words", file=sys.stderr)
    os.kill(os.getpid(), 11)
def leave(setting):
    os._exit(7)
def hang(setting):
    (setting.directory / "pid").write_text(str(os.getpid()))
    if os.fork() == 0:
        (setting.directory / "child").write_text(str(os.getpid()))
        time.sleep(600)
    time.sleep(600)
planted = {"kernels.reference": crash, "kernels.casts": leave, "kernels.statistics": hang}
worker.find = lambda name: planted.get(name, lambda setting: PassedCheck("things", 1))
code = worker.main()
os._exit(code)
"""


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the supervisor start a worker with other checks; return the folder they write to."""
    program = tmp_path / "worker.py"
    program.write_text(PLANTED)
    folder = tmp_path / "folder"
    folder.mkdir()

    def start(command: list[str], **options: Any) -> Any:
        return children.start([sys.executable, str(program), command[-1]], **options)

    monkeypatch.setattr(supervisor.subprocess, "Popen", start)
    return folder


def test_a_check_that_crashes_is_a_failure_and_the_others_run(planted: Path) -> None:
    names = ("kernels.reference", "kernels.slices", "kernels.casts", "wrap.memory")
    begun: list[str] = []

    def begin(name: str, number: int, count: int) -> None:
        begun.append(f"{number}/{count} {name}")

    found = supervise(names, setting_of(planted), begin)
    assert [(result.name, result.status.value) for result in found.results] == [
        ("kernels.reference", "failed"),
        ("kernels.slices", "passed"),
        ("kernels.casts", "failed"),
        ("wrap.memory", "passed"),
    ]
    assert found.results[0].text == "its process ended with SIGSEGV; it said: last words"
    assert found.results[2].text == "its process ended with exit code 7"
    assert begun == [f"{number}/4 {name}" for number, name in enumerate(names, start=1)]
    assert found.has_failed and list(planted.iterdir()) == []


def test_a_check_that_hangs_is_a_failure_and_the_others_run(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "LIMIT_S", 3.0)
    names = ("kernels.statistics", "kernels.slices")
    found = supervise(names, setting_of(planted), lambda *_: None)
    assert [result.status for result in found.results] == [CheckStatus.FAILED, CheckStatus.PASSED]
    assert "its process had not ended after 3 s" in found.results[0].text
    assert list(planted.iterdir()) == []


def is_running(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return text.rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_it_leaves_no_process_and_no_file(number: int, tmp_path: Path) -> None:
    """After SIGKILL of the command itself its processes end, too, but the directory is left."""
    program, folder = tmp_path / "worker.py", tmp_path / "folder"
    program.write_text(PLANTED)
    folder.mkdir()
    code = (
        "import subprocess, sys; from offload.tools.cli import main\n"
        "real = subprocess.Popen\n"
        f"start = lambda command, **o: real([sys.executable, {str(program)!r}, command[-1]], **o)\n"
        "subprocess.Popen = start\n"
        f"sys.exit(main(['selftest', '--only', 'kernels.statistics', '--nvme', {str(folder)!r}]))"
    )
    command = [sys.executable, "-c", code]
    process = children.Popen(command, nested=True, stderr=subprocess.PIPE)
    try:
        pids = [pid_in(folder, name) for name in ("pid", "child")]
        process.send_signal(number)
        assert process.wait(60) == (130 if number != signal.SIGKILL else -signal.SIGKILL)
    finally:
        process.kill()
        process.communicate()
    end_s = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < end_s:
        time.sleep(0.05)
    assert not any(map(is_running, pids))
    if number != signal.SIGKILL:
        assert list(folder.iterdir()) == []


def pid_in(folder: Path, name: str) -> int:
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        for path in folder.rglob(name):
            if text := path.read_text():
                return int(text)
        time.sleep(0.05)
    raise AssertionError(f"no {name}")


def test_a_worker_that_cannot_start_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervisor.sys, "executable", "/bin/false")
    assert cli.main(["selftest", "--quick", "--nvme", str(tmp_path)]) == 2
    assert "the process that runs the checks ended with exit code 1" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


# --- the command ----------------------------------------------------------------------------------


def test_the_table_says_what_was_run(tmp_path: Path) -> None:
    done = selftest("--quick", "--only", "kernels.slices,prepare.device", "--nvme", str(tmp_path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "offload selftest"
    assert any(line.startswith("instruction set  ") for line in lines)
    assert any(line.startswith("seed             20261116") for line in lines)
    assert any(line.startswith("kernels.slices  passed ") for line in lines)
    (device,) = [line for line in lines if line.startswith("prepare.device")]
    assert "not run" in device and "the CPU has no device memory" in device
    assert lines[-1].startswith("1 passed, 0 failed, 1 not run") and "all that ran" in lines[-1]
    assert max(map(len, lines)) <= 100


def test_a_failure_is_exit_code_1_and_the_table_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], planted: Path
) -> None:
    only = ["--only", "kernels.casts,kernels.slices", "--nvme", str(planted)]
    assert cli.main(["selftest", *only]) == 1
    said = capsys.readouterr().out
    assert "kernels.casts   failed" in said and "kernels.slices  passed" in said
    assert "do not trust results here" in said
    assert cli.main(["selftest", "--json", *only]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["summary"] == {"passed": 1, "failed": 1, "not run": 0, "exit_code": 1}


def test_nothing_run_is_not_all_well() -> None:
    results = [CheckResult("faults.io_uring", CheckStatus.NOT_RUN, 0.0, "forbidden")]
    assert format_table({}, results).endswith("nothing was proved.")


def test_the_same_seed_draws_the_same() -> None:
    for only in FOR_PROCESSES:
        assert only in check.CHECKS
    assert check.choose("copies.transfer, kernels.slices") == FOR_PROCESSES
    assert check.choose("faults") == tuple(n for n in check.CHECKS if "faults." in n)
    assert check.choose(None) == check.CHECKS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "kernel"], "did you mean 'kernels'"),
        (["--only", ","], "expected names"),
        (["--nvme", "{folder}/missing"], "is not a directory"),
        (["--nvme", "{folder}/\x1b"], r"/\x1b is not a directory"),
        (["--nvme", "{folder}/file"], "is not a directory"),
        (["--device", "abacus", "--nvme", "{folder}"], "device"),
        (["--device", "cuda", "--nvme", "{folder}"], "device: expected the CPU alone here"),
    ],
)
def test_what_cannot_be_done_is_exit_code_2(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(supervisor.subprocess, "Popen", children.start)
    (tmp_path / "file").touch()
    given = [word.format(folder=tmp_path) for word in arguments]
    assert cli.main(["selftest", "--quick", *given]) == 2
    found = capsys.readouterr()
    assert message in found.err and not found.out
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_directory_that_cannot_be_written_to_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdtemp` itself fails here, for root may write where the mode says otherwise."""

    def refuse(**options: Any) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(supervisor.tempfile, "mkdtemp", refuse)
    with pytest.raises(StoreError, match="cannot be written to: Permission denied"):
        supervise(("kernels.slices",), setting_of(tmp_path), lambda *_: None)


@pytest.mark.parametrize("seed", ["-1", "x", "4294967296", "1.5"])
def test_a_seed_is_a_whole_number(seed: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["selftest", f"--seed={seed}"])
    assert left.value.code == 2
    assert "expected a whole number below 2**32" in capsys.readouterr().err


def test_an_empty_directory_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["selftest", "--nvme", ""])
    assert left.value.code == 2
    assert "expected a directory, got ''" in capsys.readouterr().err


def test_help_ends_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["selftest", "--help"])
    assert left.value.code == 0
    last = capsys.readouterr().out.strip().splitlines()
    assert "example:" in last and last[-1].startswith("  offload selftest --quick")


def test_names_that_are_wrong_are_told_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="groups: kernels, wrap, prepare, copies"):
        check.choose("everything")
