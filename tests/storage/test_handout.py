"""Tensors that leave the engine and have no room in memory: one file for many of them, written by
calls that are checked, and nothing changed where they fail.
"""

from __future__ import annotations

import errno
import gc
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import children
from support.bits import assert_same_state, assert_same_tensors
from support.loops import chosen
from support.mounts import HANG_S, loop_mount, run_here
from support.storage_faults import FaultySystem
from support.wrapping import adamw, parameters, train
from torch import Tensor, nn
from torch.optim import AdamW

import offload
from offload.core.budget import Budget
from offload.core.errors import CorruptionError, StateError, StoreError
from offload.core.metrics import Metrics
from offload.optim import export
from offload.params.prepared import prepared_of
from offload.storage import handout
from offload.storage.engine import Fault, FaultKind
from offload.storage.files import System
from offload.storage.handout import Handout

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
WIDTH = 64
ROW = torch.Size([1000])


def here(directory: Path) -> list[str]:
    """List what this process has open below `directory`, once for each descriptor."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue  # that of the listing
    return [path for path in found if path.startswith(str(directory))]


def maps(directory: Path) -> int:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(directory) in line for line in lines)


def row(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(1000).to(dtype) + value


def rooms(made: Handout, count: int) -> list[Any]:
    found = [made.room(ROW, (1,), torch.float32) for _ in range(count)]
    for number, room in enumerate(found):
        room.write(0, row(number))
    return found


@pytest.fixture(autouse=True)
def small_chunks(own_budget: Budget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make chunks small, so that a little state is more than memory has room for."""
    monkeypatch.setattr("offload.planning.planner.CHUNK_NUMEL", 1024)


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handout, "free_memory_bytes", lambda _: 0)


# --- files and tensors ----------------------------------------------------------------------------


def test_many_tensors_have_one_descriptor_and_their_file_goes_with_the_last(tmp_path: Path) -> None:
    with Handout([tmp_path], Metrics()) as made:
        places = rooms(made, 300)
        assert maps(tmp_path) == 0, "it is mapped when all is written"
        made.finish()
        found = [place.tensor for place in places]
    del made, places
    assert len(here(tmp_path)) == 1 and maps(tmp_path) == 1
    assert all(torch.equal(one, row(number)) for number, one in enumerate(found))
    assert all(one.data_ptr() % 4096 == 0 for one in found)
    last = found.pop()
    last += 1  # an ordinary tensor
    del found
    gc.collect()
    assert torch.equal(last, row(300)) and len(here(tmp_path)) == 1
    saved = io.BytesIO()
    torch.save(last, saved)
    assert len(saved.getvalue()) < 8000, "it alone"
    del last
    gc.collect()
    assert not here(tmp_path) and not maps(tmp_path)


def test_elements_go_where_they_belong(tmp_path: Path) -> None:
    """In the order of memory, rounded to the type, from any piece of them."""
    whole = torch.randn(6, 4, 5)
    stride = whole.permute(1, 2, 0).contiguous().permute(2, 0, 1).stride()
    with Handout([tmp_path], Metrics()) as made:
        strided = made.room(whole.shape, stride, torch.bfloat16)
        filled = made.room(whole.shape, stride, torch.float32)
        empty = made.room(torch.Size([0, 3]), (3, 1), torch.float32)
        flat = torch.empty_strided(whole.shape, stride).copy_(whole).as_strided((120,), (1,))
        for begin in (70, 0, 33):
            strided.write(begin, flat[begin : {70: 120, 0: 33, 33: 70}[begin]])
        strided.write(7, flat.repeat_interleave(2)[14:40:2])  # not contiguous
        filled.fill(whole)
        made.finish()
    assert torch.equal(strided.tensor, whole.bfloat16()) and strided.tensor.stride() == stride
    assert torch.equal(filled.tensor, whole) and filled.tensor.stride() == stride
    assert empty.tensor.shape == (0, 3)


class Shorter(System):
    """A system that writes a few bytes at a time."""

    def write(self, fd: int, data: memoryview, begin: int) -> int:
        return super().write(fd, data[:999], begin)


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handout, "System", Shorter)
    with Handout([tmp_path], Metrics()) as made:
        (place,) = rooms(made, 1)
        made.finish()
    assert torch.equal(place.tensor, row(0))


def test_room_that_is_written_first_is_there(tmp_path: Path) -> None:
    with Handout([tmp_path], Metrics(), is_written_first=True) as made:
        place = made.room(torch.Size([1 << 20]), (1,), torch.float32)
        made.sync()
        (file,) = made._files
        assert os.fstat(file._fd).st_blocks * 512 >= 4 << 20
        assert os.fstat(file._fd).st_mode & 0o777 == 0o600
        assert not place.tensor.any()


def test_tensors_that_are_seen_before_the_last_room_is_made_share_a_file(tmp_path: Path) -> None:
    found = []
    with Handout([tmp_path], Metrics(), expected_bytes=20 * 4096) as made:
        for number in range(20):
            (place,) = rooms(made, 1)
            place.write(0, row(number))
            found.append(place.tensor)
        made.finish()
    assert len(here(tmp_path)) == 1
    assert all(torch.equal(one, row(number)) for number, one in enumerate(found))


class Limited(System):
    """A system where a directory has room for so many reservations; with EFBIG, each file in it."""

    def __init__(self, rooms: dict[Path, int], code: int) -> None:
        self._rooms, self._code, self._where = rooms, code, dict[int, Path]()

    def open_unnamed(self, directory: Path) -> tuple[int, bool]:
        fd, unnamed = super().open_unnamed(directory)
        self._where[fd] = directory
        return fd, unnamed

    def reserve(self, fd: int, nbytes: int, begin: int = 0) -> None:
        place = self._where[fd]
        full = begin // 4096 >= self._rooms[place]
        if full and not (self._code == errno.EFBIG and begin == 0):
            raise OSError(self._code, os.strerror(self._code))
        super().reserve(fd, nbytes, begin)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_what_one_file_has_no_room_for_goes_to_another(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.setattr(handout, "System", lambda: Limited({first: 3, second: 100}, code))
    with Handout([first, second], Metrics()) as made:
        places = rooms(made, 7)
        made.finish()
    is_larger_refused = code == errno.EFBIG
    assert len(here(first)) == (3 if is_larger_refused else 1)
    assert len(here(second)) == (0 if is_larger_refused else 1)
    assert all(torch.equal(one.tensor, row(number)) for number, one in enumerate(places))


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["write", "sync"])
def test_errors_are_typed_and_leave_no_file(
    call: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handout, "System", lambda: FaultySystem(call, code, 1))
    with pytest.raises(StoreError) as caught, Handout([tmp_path], Metrics()) as made:
        rooms(made, 2)
        made.finish()
    error = caught.value
    assert (error.errno, error.operation, error.file) == (code, call, str(tmp_path))
    assert ("no room" in str(error)) is (code != errno.EIO)
    assert not here(tmp_path) and not maps(tmp_path)


def test_errors_wait_where_ranks_would_wait_for_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    for call in ("write", "reserve"):
        faulty = FaultySystem(call, errno.ENOSPC, 2)
        monkeypatch.setattr(handout, "System", lambda faulty=faulty: faulty)
        with Handout([tmp_path], Metrics(), defers=True) as made:
            rooms(made, 4)
            with pytest.raises(StoreError, match="no room"):
                made.finish()


@pytest.mark.usefixtures("no_memory")
def test_too_many_open_files_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = parameters()
    optimizer = adamw(params, tmp_path)
    train(params, optimizer, 0)
    faulty = FaultySystem("open", errno.EMFILE, 1, forever=True)
    with monkeypatch.context() as patch:
        patch.setattr(handout, "System", lambda: faulty)
        with pytest.raises(StoreError, match=r"too many open files; `ulimit -n`") as caught:
            optimizer.state_dict()
        assert "no room" not in str(caught.value) and "make room" not in str(caught.value)
        assert caught.value.errno == errno.EMFILE
        patch.setattr(handout, "free_memory_bytes", lambda _: 1 << 40)
        optimizer.state_dict()
    told = offload.report(optimizer).fallbacks["values that are handed out"]
    assert "too many open files" in told and "host memory instead" in told
    optimizer.close()


# --- an optimizer ---------------------------------------------------------------------------------


def both(directory: Path) -> tuple[list[nn.Parameter], AdamW, list[nn.Parameter], Any]:
    """Make a plain and a wrapped optimizer, after two steps, with most of the state on disk."""
    mine, others = parameters(), parameters()
    plain, wrapped = AdamW(mine, lr=1e-2, fused=True), adamw(others, directory)
    for params, optimizer in ((mine, plain), (others, wrapped)):
        train(params, optimizer, 0, 1)
    return mine, plain, others, wrapped


@pytest.mark.parametrize("call, nth", [("write", 1), ("write", 4), ("sync", 1)])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("act", ["state_dict", "close"])
def test_state_that_cannot_be_written_changes_nothing(
    act: str, code: int, call: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plain, others, wrapped = both(tmp_path)
    faulty = FaultySystem(call, code, nth)
    with monkeypatch.context() as patch:
        patch.setattr(handout, "System", lambda: faulty)
        with pytest.raises(StoreError) as caught:
            getattr(wrapped, act)()
        assert caught.value.errno == code and caught.value.operation == call
        assert not maps(tmp_path) and len(wrapped.state) == 0
        assert_same_state(plain, wrapped)  # the fault is over
    train(mine, plain, 2)
    train(others, wrapped, 2)
    wrapped.close()
    assert_same_tensors(mine, others)
    assert_same_state(plain, wrapped)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_optimizer_has_one_descriptor(dtype: torch.dtype, tmp_path: Path) -> None:
    """Its state is rounded on the way, not in memory afterwards, and no master is on the file."""
    params, others = parameters(dtype), parameters(dtype)
    judge = adamw(others)
    train(others, judge, 0, 1)
    judge.close()
    optimizer = adamw(params, tmp_path)
    train(params, optimizer, 0, 1)
    optimizer.close()
    assert len(here(tmp_path)) == maps(tmp_path) == 1
    ours = {k: v for k, v in optimizer.state_dict()["state"][0].items() if k != "step"}
    for name, value in ours.items():
        assert value.dtype == dtype
        assert torch.equal(value, judge.state_dict()["state"][0][name])
    (line,) = [li for li in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in li]
    begin, end = (int(at, 16) for at in line.split()[0].split("-"))
    fields = [v for state in optimizer.state.values() for k, v in state.items() if k != "step"]
    assert end - begin == sum(-(-v.nbytes // 4096) * 4096 for v in fields)


def flipping(nth: int) -> Callable[..., Any]:
    real = export.DiskStore

    def make(*args: Any, **options: Any) -> Any:
        store = real(*args, **options)
        store.engine.inject(Fault(FaultKind.FLIP, nth))
        return store

    return make


@pytest.mark.parametrize("nth", [1, 3])
def test_a_bit_that_flips_while_the_plan_is_made_anew_is_found(
    nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, plain, others, wrapped = both(tmp_path)
    saved = wrapped.state_dict()
    before = len(here(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(export, "DiskStore", flipping(nth))
        with pytest.raises(CorruptionError):
            wrapped.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
    assert len(wrapped.param_groups) == 1
    with pytest.raises(StateError, match=r"earlier move of the state .* load it again"):
        wrapped.state_dict()
    wrapped.load_state_dict(saved)
    assert len(here(tmp_path)) <= before
    train(mine, plain, 2)
    train(others, wrapped, 2)
    assert_same_tensors(mine, others)
    assert_same_state(plain, wrapped)
    wrapped.close()


@pytest.mark.parametrize("moved", [False, True])
def test_a_plan_that_is_made_anew_keeps_the_state_to_the_bit(moved: bool, tmp_path: Path) -> None:
    """Also where a parameter is in another order of memory since; nothing stays open."""
    mine, plain, others, wrapped = both(tmp_path)
    before = len(here(tmp_path))
    if moved:
        others[0].data = others[0].data.t().contiguous().t()  # values are values in any order
    for params, optimizer in ((mine, plain), (others, wrapped)):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(9))]})
        train(params, optimizer, 2)
    assert len(here(tmp_path)) == before
    assert_same_tensors(mine, others)
    assert_same_state(plain, wrapped)
    wrapped.close()


# --- a model --------------------------------------------------------------------------------------


def trained(directory: Path) -> tuple[nn.Module, Any, list[Tensor]]:
    """Make a prepared model and its optimizer after a step, and what its parameters must be."""
    layers = [
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(24)))
        for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    optimizers = [AdamW(each.parameters(), fused=True) for each in layers]
    made: Any = offload.prepare(layers[1], optimizers[1], host_memory="300KiB", nvme=directory)
    for each, optimizer in zip((layers[0], made[0]), optimizers, strict=True):
        each(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    return made[0], made[1], [param.detach() for param in layers[0].parameters()]


def test_the_state_dict_of_a_model_and_its_parameters_have_a_descriptor_each(
    tmp_path: Path,
) -> None:
    model, optimizer, expected = trained(tmp_path)
    before = len(here(tmp_path))
    saved = model.state_dict()
    assert len(here(tmp_path)) == before + 1
    assert_same_tensors(list(saved.values()), expected)
    model[3].state_dict()
    model.state_dict()
    gc.collect()
    assert len(here(tmp_path)) == before + 1, "only of what somebody has"
    del saved
    optimizer.close()
    assert len(here(tmp_path)) == 3, "state, parameters, and gradients"
    assert_same_tensors(list(model.parameters()), expected)


@pytest.mark.parametrize("call", ["write", "sync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_model_that_cannot_be_written_loses_nothing(
    code: int, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    """In state_dict(), before anything goes back, and in the middle of it."""
    model, optimizer, expected = trained(tmp_path)

    def faulty(nth: int) -> Callable[[], System]:
        double = FaultySystem(call, code, nth)
        return lambda: double

    with monkeypatch.context() as patch:
        patch.setattr(handout, "System", faulty(1))
        with pytest.raises(StoreError) as caught:
            model.state_dict()
        assert caught.value.errno == code
        assert_same_tensors(list(model.state_dict().values()), expected)
    optimizer.close = lambda: prepared_of(model).ended()  # the model alone is closed here
    for nth in (1, 48 + 7 if call == "write" else 5):
        with monkeypatch.context() as patch:
            patch.setattr(handout, "System", faulty(nth))
            with pytest.raises(StoreError) as caught:
                offload.close(model)
        assert caught.value.errno == code
    offload.close(model)
    assert_same_tensors(list(model.parameters()), expected)
    model(torch.ones(2, WIDTH)).sum().backward()


# --- children -------------------------------------------------------------------------------------

FEW_DESCRIPTORS = """
import os, resource, sys
import torch
from torch import nn
import offload
from offload.planning import planner

torch.set_num_threads(1)
planner.CHUNK_NUMEL = 1024
params = [nn.Parameter(torch.full((600,), i, dtype=torch.bfloat16)) for i in range(320)]
plain = torch.optim.AdamW(params, lr=1e-2)
wrapped = offload.wrap(plain, host_memory="200KiB", nvme=sys.argv[1])
layers = (nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(160))
model = nn.Sequential(*layers)
values = [p.detach().clone() for p in model.parameters()]
model = offload.prepare(model, host_memory="400KiB", nvme=sys.argv[1])
for param in params:
    param.grad = torch.ones_like(param)
wrapped.step()
assert offload.report(wrapped).plan.disk_bytes
model(torch.ones(1, 32))
count = len(os.listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (count + 40, count + 40))

def are_on_files(tensors):
    lines = [line for line in open("/proc/self/maps") if sys.argv[1] in line]
    spans = [[int(at, 16) for at in line.split()[0].split("-")] for line in lines]
    places = [tensor.data_ptr() for tensor in tensors]
    assert all(any(a <= at < b for a, b in spans) for at in places), "not in memory instead"

kept = [wrapped.state_dict(), model.state_dict()]
assert all(torch.equal(a, b) for a, b in zip(kept[1].values(), values, strict=True))
are_on_files([state[name] for state in kept[0]["state"].values() for name in ("master", "exp_avg")])
are_on_files(kept[1].values())
wrapped.close()
offload.close(model)
assert len(wrapped.state) == 320 and wrapped.state[params[7]]["exp_avg"].any()
are_on_files([state["exp_avg"] for state in wrapped.state.values()])
are_on_files(model.parameters())
assert all(torch.equal(a, b) for a, b in zip(model.parameters(), values, strict=True))
print("well")
"""

# A process that touches a map of the engine's dies by SIGSEGV, until the map is allowed again.
FORBIDDEN_MAPS = """
import ctypes, mmap, sys
import torch
from torch import nn
import offload
from offload.planning import planner
from offload.storage import handout

torch.set_num_threads(1)
planner.CHUNK_NUMEL = 1024
libc, made, real = ctypes.CDLL(None, use_errno=True), [], mmap.mmap

def protect(memory, how):
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), how) == 0

def forbidden(*args):
    made.append(real(*args))
    protect(made[-1], 0)
    return made[-1]

class Watched:
    mmap = staticmethod(forbidden)

handout.mmap = Watched

layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(24))
model = nn.Sequential(*layers).bfloat16()
values = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
model, optimizer = offload.prepare(model, optimizer, host_memory="120KiB", nvme=sys.argv[1])
model(torch.ones(2, 64, dtype=torch.bfloat16)).sum().backward()
optimizer.step()
kept = [model.state_dict(), optimizer.state_dict()]
optimizer.close()
assert len(made) == 5, made  # two dictionaries, state, parameters, gradients
for memory in made:
    protect(memory, mmap.PROT_READ | mmap.PROT_WRITE)
for found in (kept[0].values(), model.parameters()):
    assert all(torch.equal(a, b) for a, b in zip(found, values, strict=True))
for number, (param, state) in enumerate(optimizer.state.items()):
    exact = kept[1]["state"][number]["momentum_buffer"]
    assert exact.abs().sum() > 0 and torch.equal(state["momentum_buffer"], exact.bfloat16())
print("well")
"""


@pytest.mark.parametrize("script", [FEW_DESCRIPTORS, FORBIDDEN_MAPS], ids=["few", "forbidden"])
def test_in_a_child(script: str, tmp_path: Path) -> None:
    """With 40 descriptors for 640 tensors; and with maps that no code may touch."""
    done = children.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "well" in done.stdout, done.stderr


FULL_DRIVE = """
import contextlib, os, sys
from pathlib import Path
import torch
from torch import nn
import offload
from offload.core.errors import StoreError
from offload.storage import handout

torch.set_num_threads(1)
where = Path(sys.argv[1])
params = [nn.Parameter(torch.randn(1 << 20)) for _ in range(6)]
optimizer = offload.wrap(torch.optim.AdamW(params), host_memory="40MiB", nvme=where)
for param in params:
    param.grad = torch.ones_like(param)
optimizer.step()
outcomes = set()
if sys.argv[2] == "no memory":
    handout.free_memory_bytes = lambda _: 0
for left in (0, 10, 46, 49, 70):
    ballast, size, begin = os.open(where / "ballast", os.O_CREAT | os.O_WRONLY, 0o600), 1 << 20, 0
    with contextlib.suppress(OSError):
        while True:
            os.posix_fallocate(ballast, begin, size)
            begin += size
    os.ftruncate(ballast, max(0, begin - left * size))
    os.fsync(ballast)
    try:
        state = optimizer.state_dict()["state"]
        for each in state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.isfinite(each[name]).all()
                each[name].random_()  # a page without room would be the end
        outcomes.add("state")
        del state
    except StoreError as error:
        outcomes.add("refusal")
    os.close(ballast)
    os.unlink(where / "ballast")
    os.sync()
optimizer.step()
print("well", outcomes)
"""


def filled_up(directory: Path, memory: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DRIVE, str(directory), memory],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 0 and "well" in done.stdout, (done.returncode, done.stderr)
    if memory == "no memory":
        assert "refusal" in done.stdout and "state" in done.stdout, done.stdout
    else:
        assert "refusal" not in done.stdout, done.stdout


@pytest.mark.parametrize("memory", chosen(test=["no memory"], torture=["memory", "no memory"]))
def test_on_btrfs_that_fills_up_nobody_is_killed(memory: str, tmp_path: Path) -> None:
    tools = ("mkfs.btrfs", "losetup", "truncate")
    setup = loop_mount(tmp_path, "mkfs.btrfs -q -f", "256M", 4096)
    run_here(lambda directory: filled_up(directory, memory), tmp_path / "point", setup, tools)
