"""What people are told when something is refused: what, which one, and what to do about it."""

from __future__ import annotations

import errno
import os
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_tensors
from support.leftovers import await_nothing_held
from torch import nn

import offload
from offload.core.budget import Budget
from offload.core.errors import CapacityError, ConfigError, StateError, StoreError
from offload.optim.updater import Updater
from offload.params.placeholder import is_offloaded
from offload.params.prepared import prepared_of
from offload.storage import handout
from offload.storage.files import System

WIDTH = 64


def layers(count: int = 6) -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count)))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


# --- who holds the budget -------------------------------------------------------------------------


@pytest.fixture
def no_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("last_exc", "last_value", "last_traceback"):
        monkeypatch.delattr(sys, name, raising=False)


def run_cell(cell: Callable[[], None]) -> str:
    """Run a cell as a notebook does: what was raised is shown, and kept. Return its message."""
    try:
        cell()
    except Exception as error:
        sys.last_value, sys.last_traceback = error, error.__traceback__
        if sys.version_info >= (3, 12):
            sys.last_exc = error
        return str(error)
    return ""


@pytest.mark.usefixtures("no_last_error")
def test_a_cell_that_is_run_again_is_told_who_holds_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_budget: Budget
) -> None:
    fails = True

    def cell() -> None:
        model: Any = layers()
        model, optimizer = offload.prepare(model, adam(model), host_memory="300KiB", nvme=tmp_path)
        if fails:
            raise ValueError("a mistake further down")
        optimizer.close()

    assert run_cell(cell) == "a mistake further down"
    kept = sys.last_value, sys.last_traceback  # what the prompt still has when it shows the next
    told = run_cell(cell)
    assert "0 B (0 bytes) are allowed" in told
    assert "300 KiB are held: 300 KiB by Sequential, prepared at 20" in told
    assert "offload.close(...)" in told
    (advice,) = [part for part in told.split("; ") if "the last error" in part]
    del kept
    exec(advice.rpartition(": ")[2], {"sys": sys})  # what it says is what helps
    fails = False
    assert run_cell(cell) == ""
    await_nothing_held(own_budget)


@pytest.mark.usefixtures("no_last_error")
def test_a_wrapped_optimizer_is_told_as_a_holder_also_after_its_plan_was_made_anew(
    own_budget: Budget,
) -> None:
    first = offload.wrap(adam(layers(1)), host_memory="64KiB")
    for _ in range(2):
        with pytest.raises(CapacityError) as caught:
            offload.wrap(adam(layers()), host_memory="70KiB")
        assert "KiB by AdamW, wrapped at 20" in str(caught.value)
        assert "last error" not in str(caught.value)  # there was none
        first.add_param_group({"params": [nn.Parameter(torch.zeros(8))]})
    first.close()
    assert not own_budget.used_bytes


# --- limits of the process ------------------------------------------------------------------------


@contextmanager
def file_limit(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("act", ["wrap", "prepare"])
def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path, act: str) -> None:
    model = layers(24)
    fields: Any = {"host_memory": "600KiB", "nvme": tmp_path}
    with file_limit(65536), pytest.raises(CapacityError) as caught:
        if act == "wrap":
            offload.wrap(adam(model), **fields)
        else:
            offload.prepare(model, adam(model), **fields)
    for part in ("EFBIG", "64 KiB (65536 bytes)", "`ulimit -f unlimited`", "add a directory"):
        assert part in str(caught.value)


def test_a_file_system_without_large_files_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, nbytes: int, begin: int = 0) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("offload.storage.files.System.reserve", staticmethod(refuse))
    with pytest.raises(CapacityError, match=r"EFBIG.*its file system has no files of that size"):
        offload.wrap(adam(layers(24)), host_memory="600KiB", nvme=tmp_path)


# --- a full drive ---------------------------------------------------------------------------------


class FullDrive:
    """A set of directories without room for files that are handed out, and the free memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: set[Path] = set()
        self.is_memory_full = False
        really_free = handout.free_memory_bytes
        monkeypatch.setattr(handout, "System", lambda: FullSystem(self.full))
        monkeypatch.setattr(
            handout, "free_memory_bytes", lambda m: 0 if self.is_memory_full else really_free(m)
        )


class FullSystem(System):
    """A system that has no room in these directories."""

    def __init__(self, full: set[Path]) -> None:
        self._full, self._where = full, dict[int, Path]()

    def open_unnamed(self, directory: Path) -> tuple[int, bool]:
        fd, unnamed = super().open_unnamed(directory)
        self._where[fd] = directory
        return fd, unnamed

    def reserve(self, fd: int, nbytes: int, begin: int = 0) -> None:
        if self._where[fd] in self._full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().reserve(fd, nbytes, begin)


def trained(directories: list[Path], seed: int) -> tuple[Any, Any, list[torch.Tensor]]:
    """Make a prepared model and its optimizer after a step, and what its parameters must be."""
    torch.manual_seed(seed)
    plain, model = layers(24), layers(24)
    model.load_state_dict(plain.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters(), fused=True) for m in (plain, model)]
    made: Any = offload.prepare(model, optimizers[1], host_memory="300KiB", nvme=directories)
    for each, optimizer in zip((plain, made[0]), optimizers, strict=True):
        each(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
    return *made, [param.detach() for param in plain.parameters()]


def assert_closed(model: nn.Module, expected: list[torch.Tensor]) -> None:
    for param, values in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param, values)
    model(torch.ones(2, WIDTH)).sum().backward()  # a plain model


@pytest.mark.parametrize("has_another", [True, False])
def test_close_takes_another_directory_or_memory_where_one_is_full(
    has_another: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drive, names = FullDrive(monkeypatch), ["full", "other"] if has_another else ["full"]
    directories = [tmp_path / name for name in names]
    for directory in directories:
        directory.mkdir()
    model, optimizer, expected = trained(directories, seed)
    drive.full = {tmp_path / "full"}
    model.state_dict()
    told = offload.report(model).fallbacks
    assert ("values that are handed out" in told) is not has_another
    optimizer.close()
    assert_closed(model, expected)


def test_close_without_any_room_loses_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drive = FullDrive(monkeypatch)
    model, optimizer, expected = trained([tmp_path], seed)
    drive.full, drive.is_memory_full = {tmp_path}, True
    for _ in range(2):
        with pytest.raises(StoreError, match=r"no room .* make room .* nothing is lost") as caught:
            optimizer.close()
        assert caught.value.errno == errno.ENOSPC
    offload.save(tmp_path / "elsewhere", model, optimizer)  # as it says
    drive.full = set()
    optimizer.close()
    assert_closed(model, expected)


def test_a_model_that_finds_no_room_after_its_optimizer_can_be_saved_and_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    drive = FullDrive(monkeypatch)
    model, optimizer, expected = trained([tmp_path], seed)
    drive.is_memory_full, close = True, type(prepared_of(model)).ended

    def fill(self: Any) -> None:
        drive.full = {tmp_path}
        close(self)

    monkeypatch.setattr(type(prepared_of(model)), "ended", fill)
    with pytest.raises(StoreError, match="nothing is lost"):
        optimizer.close()
    offload.save(tmp_path / "elsewhere", model, optimizer)  # as it says
    monkeypatch.setattr(type(prepared_of(model)), "ended", close)
    drive.full = set()
    offload.close(model)
    assert_closed(model, expected)


# --- optimizers -----------------------------------------------------------------------------------


class Own(torch.optim.AdamW):
    """An optimizer of the user's own making."""


def named(name: str, module: str) -> type[torch.optim.Optimizer]:
    return type(name, (torch.optim.AdamW,), {"__module__": module})


def test_prepare_advises_nothing_that_it_does_not_take(tmp_path: Path) -> None:
    model = layers()
    optimizer: Any = Own(model.parameters())
    with pytest.raises(ConfigError, match=r"is not known; for prepare, take one") as caught:
        offload.prepare(model, optimizer, host_memory="1MiB", nvme=tmp_path)
    assert "offload.wrap(optimizer, elementwise=True) moves its state alone" in str(caught.value)
    offload.wrap(optimizer, elementwise=True, host_memory="1MiB").close()  # as it says


@pytest.mark.parametrize(
    "kind, reason",
    [
        (named("Adam8bit", "bitsandbytes.optim.adam"), "bitsandbytes updates blocks"),
        (named("AdamW4bit", "torchao.optim.adam"), "torchao updates blocks"),
        (named("Adafactor", "transformers.optimization"), "rows and columns"),
        (named("Muon", "muon"), "orthogonalises"),
    ],
)
@pytest.mark.parametrize("elementwise", [False, True])
def test_what_is_not_elementwise_is_not_sent_to_a_dead_end(
    kind: type[torch.optim.Optimizer], reason: str, elementwise: bool
) -> None:
    model = layers()
    with pytest.raises(ConfigError, match=reason) as caught:
        offload.wrap(kind(model.parameters()), elementwise=elementwise, host_memory="1MiB")  # type: ignore[call-arg, arg-type]
    assert "elementwise=" not in str(caught.value) and "AdamW" in str(caught.value)


# --- modules --------------------------------------------------------------------------------------


def lazy() -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.LazyLinear(WIDTH), nn.ReLU()))


def lazy_buffers() -> nn.Module:
    return nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(WIDTH, WIDTH))


ACTS: dict[str, Callable[[nn.Module], Any]] = {
    "wrap": lambda model: offload.wrap(adam(model), host_memory="1MiB"),
    "plan of an optimizer": lambda model: offload.plan(adam(model), host_memory="1MiB"),
    "prepare": lambda model: offload.prepare(model, adam(model), host_memory="1MiB"),
    "evaluate": lambda model: offload.prepare(model, host_memory="1MiB"),
    "plan of a model": lambda model: offload.plan(model, adam(model), host_memory="1MiB"),
}


OF_OPTIMIZERS = ("wrap", "plan of an optimizer")  # which have no buffers


@pytest.mark.parametrize(
    ("make", "act"),
    [
        *((lazy, act) for act in ACTS),
        *((lazy_buffers, act) for act in ACTS if act not in OF_OPTIMIZERS),
    ],
)
def test_lazy_modules_are_refused_by_name(make: Callable[[], nn.Module], act: str) -> None:
    model = make()
    with pytest.raises(ConfigError, match=r"is lazy and has no shape yet; run one batch"):
        ACTS[act](model)
    model(torch.randn(2, WIDTH))  # as it says
    offload.close(ACTS[act](model)) if act == "evaluate" else None


def lazy_model() -> nn.Module:
    return lazy()


def test_a_lazy_model_is_refused_by_plan_of_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.weight: is lazy and has no shape yet"):
        offload.plan(f"{__name__}:lazy_model", host_memory="1MiB")


class ByFunction(nn.Module):
    """A module that asks for sparse gradients where no module shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(512, WIDTH))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(rows, self.weight, sparse=True)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_are_refused_up_front_by_name(kind: Any, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Sequential(kind(512, WIDTH, sparse=True)), layers())
    with pytest.raises(ConfigError, match=r"0\.0\.weight: its gradients would be sparse") as caught:
        offload.prepare(model, adam(model), host_memory="1MiB", nvme=tmp_path)
    exec(str(caught.value).rpartition(": ")[2], {"model": model})  # as it says
    offload.plan(model, adam(model), host_memory="1MiB", nvme=tmp_path)


def test_a_frozen_sparse_embedding_has_no_gradients(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(512, WIDTH, sparse=True), layers())
    model[0].requires_grad_(False)
    offload.plan(model, adam(model), host_memory="1MiB", nvme=tmp_path)


def test_a_sparse_gradient_that_nothing_foretold_is_refused_by_name(tmp_path: Path) -> None:
    model: Any = nn.Sequential(ByFunction(), layers(8))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = offload.prepare(model, optimizer, host_memory="500KiB", nvme=tmp_path)
    with optimizer:
        model(torch.arange(8)).sum().backward()
        assert model[0].weight.grad.is_sparse
        with pytest.raises(ConfigError, match=r"gradient is sparse .*\.to_dense"):
            optimizer.step()
        model[0].weight.grad = model[0].weight.grad.to_dense()  # as it says
        optimizer.step()


# --- a step that an error has ended in its middle -------------------------------------------------


def eight_layers() -> tuple[nn.Module, Any]:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def interrupted_step(directory: Path, host_memory: int) -> tuple[nn.Module, Any]:
    """Return a prepared model and its optimizer after a first step that was interrupted after one
    chunk.
    """
    model, optimizer = eight_layers()
    offload.prepare(model, optimizer, host_memory=host_memory, nvme=directory, units=[nn.Linear])
    model(torch.ones(2, 64)).sum().backward()
    update, left = Updater._update, iter(range(1))

    def interrupted(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return update(*args)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Updater, "_update", interrupted)
        optimizer.step()
    return model, optimizer


def test_parameters_of_two_ages_are_not_saved_and_not_handed_out_in_silence(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = interrupted_step(tmp_path, 480 << 10)
    with pytest.raises(StateError, match="failed halfway"):
        offload.save(tmp_path / "saved", model)
    model.state_dict()
    assert "model.state_dict(): an earlier step failed halfway" in caplog.text
    caplog.clear()
    offload.close(model)
    assert "close(): the optimizer has no state any more" in caplog.text


def least_bytes(directory: Path) -> int:
    """Return the least host memory for such a model."""
    model, optimizer = eight_layers()
    with pytest.raises(CapacityError, match="the least that works") as refused:
        offload.plan(model, optimizer, host_memory=4096, nvme=directory, units=[nn.Linear])
    return int(str(refused.value).split("about ")[1].split()[0])


def test_parameters_of_two_ages_are_refused_where_they_are_not_in_memory(tmp_path: Path) -> None:
    """A load of the optimizer's state names them until the model is loaded."""
    model, optimizer = interrupted_step(tmp_path, least_bytes(tmp_path))
    plain, fresh = eight_layers()
    assert sum(is_offloaded(param) for param in model.parameters()) > 8, "most are not in memory"
    with torch.no_grad():  # each of them is fetched, and most are evicted again
        model(torch.ones(2, 64))
    with pytest.raises(StateError, match=r"one of 16\) .* load the model's checkpoint first"):
        optimizer.load_state_dict(fresh.state_dict())
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(fresh.state_dict())
    for each, stepping in ((model, optimizer), (plain, fresh)):
        stepping.zero_grad()
        each(torch.ones(2, 64)).sum().backward()
        stepping.step()
    assert_same_tensors(plain.state_dict().values(), model.state_dict().values())
    offload.close(model)
