"""Checks of checkpoints: a resume is exact to the bit, damage is found, a kill loses nothing."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offload.api import close, load, prepare, save, wrap
from offload.checkpoint.format.verify import verify
from offload.core.errors import OffloadError
from offload.tools.selftest.bits import require_same, require_same_states
from offload.tools.selftest.check import (
    CheckFailed,
    PassedCheck,
    Setting,
    require,
    require_equal,
    require_error,
)
from offload.tools.selftest.model import least_bytes, make_model, make_optimizer, train

WAYS = ("wrap", "prepare")
_HALF = 2  # steps before a save, and after it
_LOOP_S = 200.0  # time limit of all loops that are killed, together


@contextmanager
def _folders(setting: Setting) -> Iterator[tuple[Path, Path]]:
    """Provide directories for checkpoints and for swap files while the block runs, then remove
    them. Raises `CheckFailed` if the second one is not empty at the end.
    """
    folder = setting.directory
    with TemporaryDirectory(dir=folder) as saves, TemporaryDirectory(dir=folder) as swap:
        yield Path(saves), Path(swap)
        left = os.listdir(swap)
        require(not left, "files in the directory for swapped bytes", got=left, expected="none")


@contextmanager
def _trained(setting: Setting, way: str, swap: Path) -> Iterator[tuple[Any, Any]]:
    """Provide a model and its optimizer while the block runs, in the least host memory that works:
    with way "wrap" most of the optimizer state is on disk, with "prepare" the parameters, too.
    """
    model = make_model(setting.seed)
    if way == "wrap":
        optimizer = make_optimizer(model.to(setting.device))
        wrap(optimizer, host_memory=least_bytes(optimizer, nvme=swap), nvme=swap)
    else:
        optimizer = make_optimizer(model)
        where: dict[str, Any] = {"nvme": swap, "device": setting.device}
        prepare(model, optimizer, host_memory=least_bytes(model, optimizer, **where), **where)
    try:
        yield model, optimizer
    finally:
        close(optimizer if way == "wrap" else model)


def _values(model: Any, optimizer: Any) -> tuple[list[Any], dict[int, Any]]:
    state = copy.deepcopy(optimizer.state_dict()["state"])
    return [value.cpu().clone() for value in model.state_dict().values()], state


def resume(setting: Setting) -> PassedCheck:
    """Check that a resume is exact: save, verify every byte, load into another model and train on;
    the bits must be those of the training that was not interrupted.
    """
    count = 0
    for way in WAYS:
        with _folders(setting) as (saves, swap):
            with _trained(setting, way, swap) as pair:
                train(*pair, setting, _HALF)
                save(saves / "first", *pair, extra={"step": _HALF}, keep=2)
                rest = train(*pair, setting, _HALF)
                values, states = _values(*pair)
            findings = verify(saves / "first")
            require(findings.is_whole, f"{way}: a save", got=findings.damage, expected="whole")
            with _trained(setting, way, swap) as pair:
                require_equal(load(saves, *pair), {"step": _HALF}, "extra")
                again = train(*pair, setting, _HALF)
                got, got_states = _values(*pair)
            count += require_same(again, rest, f"{way}, resumed: what was seen,")
            count += require_same(got, values, f"{way}, resumed: value")
            count += require_same_states(got_states, states, f"{way}, resumed: state")
    return PassedCheck("losses, gradients, values, state after a resume", count)


def damage(setting: Setting) -> PassedCheck:
    """Check that a flipped bit and a missing byte in each file of a checkpoint are found, and that
    the checkpoint before it is loaded instead.
    """
    count = 0
    with _folders(setting) as (saves, swap), _trained(setting, "wrap", swap) as pair:
        for number in (1, 2):
            train(*pair, setting, 1)
            save(saves / str(number), *pair, extra=number)
        newest = saves / "2"
        files = sorted(path for path in newest.rglob("*") if path.is_file())
        for path in files:
            for how in ("flipped", "cut"):
                whole = path.read_bytes()
                _spoil(path, whole, how)
                count += _require_found(saves, pair, newest, f"{path.name}, {how}")
                path.write_bytes(whole)
        require_equal(load(saves, *pair), 2, "the checkpoint that was mended")
    return PassedCheck("places of damage, each found by verify and by load", count)


def _spoil(path: Path, whole: bytes, how: str) -> None:
    middle = len(whole) // 2
    changed = bytes([whole[middle] ^ 16])
    path.write_bytes(whole[:-1] if how == "cut" else whole[:middle] + changed + whole[middle + 1 :])


def _require_found(saves: Path, pair: tuple[Any, Any], newest: Path, what: str) -> int:
    """Require that `verify` finds the damage, that `load` refuses the damaged checkpoint, and that
    `load` of the directory takes the other one. Returns the number of these requirements.
    """
    try:
        is_found = not verify(newest).is_whole
    except OffloadError:
        is_found = True
    require(is_found, f"verify with {what}", got="whole", expected="damaged")
    with require_error(OffloadError, f"load with {what}"):
        load(newest, *pair)
    require_equal(load(saves, *pair), 1, f"newest whole one with {what}")
    return 3


def kill(setting: Setting) -> PassedCheck:
    """Check that kills lose nothing: loops that train and save are killed at points of a save and
    between saves. The newest acknowledged checkpoint must be there, all must be whole, and the next
    loop must resume with the same bits. A full run uses every point of a save, a quick one some. On
    the CPU.
    """
    with _folders(setting) as (saves, _swap):
        command = [sys.executable, "-m", "offload.tools.selftest.kill_loop", str(saves)]
        command += ["quick" if setting.is_quick else "full", str(setting.seed)]
        # One thread, because threads would not survive a fork.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=_LOOP_S
            )
        except subprocess.TimeoutExpired as error:
            got = f"no end after {_LOOP_S} s"
            raise CheckFailed("the loops", got=got, expected="one") from error
        if done.returncode != 0:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise CheckFailed("loops that were killed", got=last, expected="nothing lost")
        seen = json.loads(done.stdout)
    return PassedCheck(
        f"kills, {seen['in_a_save']} of them within a save; {seen['saves']} saves, bits compared",
        seen["kills"],
    )
