"""Where the numbers of a run go: TensorBoard and Weights & Biases, mostly as small stand-ins, or
nowhere.
"""

from __future__ import annotations

import importlib.util
import io
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import batch, loss_of, make

import offload
from offload.integrations import progress_line, screen
from offload.params import units

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)


class Scalars:
    """A stand-in for TensorBoard's writer."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        assert isinstance(value, int | float) and tag not in self.seen.setdefault(step, {})
        self.seen[step][tag] = value


class Run:
    """A stand-in for a run of W&B."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[str, float]] = {}

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is not None and step not in self.seen, "once for each step"
        self.seen[step] = data


@pytest.mark.parametrize("kind", [Scalars, Run])
def test_numbers_are_logged_every_few_steps_and_at_the_end(
    kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    clock = types.SimpleNamespace(monotonic=lambda: now_s[0])
    for module in (progress_line, screen):
        monkeypatch.setattr(module, "time", clock)
    model = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload.prepare(model, optimizer, host_memory=140 << 10, nvme=tmp_path)
    writer, numbers = kind(), range(5)
    bar = offload.progress(
        numbers, optimizer, file=io.StringIO(), tokens=30, start=10, log_to=writer, log_every=2
    )
    for seed in bar:
        now_s[0] += 0.5
        loss = loss_of(model, batch(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        bar.set(loss=loss)
    told = offload.report(optimizer)
    assert list(writer.seen) == [12, 14, 15]
    last = writer.seen[15]
    assert last["train/loss"] == loss.item() and last["offload/steps"] == 5
    assert last["offload/seconds_per_step"] == 0.5, "of the loop"
    assert last["offload/tokens_per_s"] == 30 / last["offload/iteration_seconds"]
    assert last["offload/host_bytes"] == told.model.host_bytes
    assert 0 <= last["offload/stall_share"] <= 1
    assert last["offload/total/disk_read_bytes"] == told.disk_read_bytes > 0
    assert all(isinstance(value, int | float) for value in last.values())
    assert 0 < last["offload/disk_read_bytes"] < told.disk_read_bytes, "of an iteration"
    offload.close(model)


def test_a_report_is_logged_to_a_run(tmp_path: Path) -> None:
    model = make("gpt")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    offload.prepare(model, optimizer, host_memory=140 << 10, nvme=tmp_path)
    loss_of(model, batch(0)).backward()
    optimizer.step()
    told, writer = offload.report(optimizer), Run()
    told.log_to(writer, 4)
    flat = told.to_dict()
    assert writer.seen == {
        4: {f"offload/{k}": v for k, v in flat.items() if not isinstance(v, str)}
    }
    with pytest.raises(offload.ConfigError, match=r"log_to: expected TensorBoard.*got list"):
        told.log_to([], 1)
    offload.close(model)


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard (pip install)"
)
def test_tensorboards_own_writer_takes_them(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "logs") as writer:
        assert list(offload.progress([1, 2], None, file=io.StringIO(), log_to=writer)) == [1, 2]
    assert any(path.stat().st_size for path in (tmp_path / "logs").iterdir())


# --- when there is nowhere to write ---------------------------------------------------------------


def test_among_ranks_the_first_one_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    for rank in (0, 1):
        monkeypatch.setattr(progress_line, "place_of", lambda group, rank=rank: (rank, 2))
        out, writer = io.StringIO(), Scalars()
        bar = offload.progress(range(3), None, file=out, log_to=writer, log_every=1)
        assert list(bar) == [0, 1, 2]
        told.append((bool(out.getvalue()), list(writer.seen)))
    assert told == [(True, [1, 2, 3]), (False, [])]


class Gone(io.StringIO):
    """A terminal whose other end is closed after a line."""

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        if self.getvalue().count("\r") > 1:
            raise BrokenPipeError(32, "Broken pipe")


def test_training_goes_on_without_its_terminal(caplog: pytest.LogCaptureFixture) -> None:
    out, closed = Gone(), io.StringIO()
    assert list(offload.progress(range(5), None, file=out, every_s=0)) == list(range(5))
    assert out.getvalue().count("\r") == 2 and "\n" not in out.getvalue()
    bar = offload.progress(range(3), None, file=closed)
    closed.close()
    assert list(bar) == [0, 1, 2]
    assert [record.message.partition(":")[0] for record in caplog.records] == ["progress"] * 2
    assert "Broken pipe" in caplog.records[0].message


def test_without_a_standard_error_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    assert list(offload.progress(range(3), None)) == [0, 1, 2]
