"""The process in which checks run: `python -m offload.tools.selftest.worker`.

It reads a request as a line of JSON from stdin: the setting, and the names of the checks. It writes
messages to stdout, a line of JSON each: "about" the machine, or "refused" with the
reason; then "begin" and "result" for each check. When stdin ends, the supervisor is gone: then the
worker ends at once, with all processes that it has started.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import random
import shutil
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload import kernels
from offload.core.config import Config
from offload.core.drive_facts import read_directory
from offload.core.errors import OffloadError
from offload.core.host_facts import HostFacts, free_memory_bytes, read_machine, usable_cores
from offload.core.metrics import Metrics
from offload.core.torch_versions import describe
from offload.device.accelerator import find_device
from offload.storage.choose import open_engine
from offload.tools.output import show_size
from offload.tools.selftest.check import (
    CheckFailed,
    CheckResult,
    CheckStatus,
    NotRun,
    PassedCheck,
    Setting,
    find,
)

_MOST_CHARACTERS = 2000  # of a text in the table
_FRAMES = 4
_CHOICES = ("OFFLOAD_ISA", "OFFLOAD_IO")  # environment variables that force a choice


def main() -> int:
    """Read the request, run its checks, and return the exit code."""
    fd = os.dup(1)
    os.dup2(2, 1)  # what else is printed goes to stderr
    request = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    def tell(**message: Any) -> None:
        os.write(fd, (json.dumps(message) + "\n").encode())

    try:
        device = str(find_device(Config(device=request["device"]).device))
    except OffloadError as error:
        tell(refused=str(error))
        return 0
    setting = Setting(device, Path(request["directory"]), request["is_quick"], request["seed"])
    tell(about=about_machine(setting))
    gc.collect()
    gc.freeze()  # garbage collections, which every check makes, skip the imported modules
    for name in request["names"]:
        tell(begin=name)
        tell(result=asdict(run_check(name, setting)))
    return 0


def _end_with_stdin() -> None:
    while os.read(0, 1 << 12):
        pass
    if os.getpgrp() == os.getpid():  # the supervisor starts it in its own process group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


# --- one check ------------------------------------------------------------------------------------


def run_check(name: str, setting: Setting) -> CheckResult:
    """Run one check in a new directory below `setting.directory`, and remove that directory. Raises
    only exceptions that end the process, such as KeyboardInterrupt.
    """
    begin_s, own = time.perf_counter(), setting.directory / name
    status, text, count = CheckStatus.FAILED, "", 0
    try:
        own.mkdir(mode=0o700)
        facts = _run(find(name), replace(setting, directory=own))
        status, text, count = CheckStatus.PASSED, facts.compared, facts.count
    except NotRun as reason:
        status, text = CheckStatus.NOT_RUN, str(reason)
    except CheckFailed as failure:
        text = str(failure)
    except Exception as error:  # any exception: this check has failed, the others still run
        text = f"{type(error).__name__}: {error} ({_where(error)})"
    finally:
        shutil.rmtree(own, ignore_errors=True)
    gc.collect()
    return CheckResult(name, status, time.perf_counter() - begin_s, text[:_MOST_CHARACTERS], count)


def _run(check: Callable[[Setting], PassedCheck], setting: Setting) -> PassedCheck:
    """Call a check with freshly seeded generators, so that its random numbers do not depend on
    earlier checks. Raises `CheckFailed` if it leaves files in its directory or has compared
    nothing.
    """
    random.seed(setting.seed)
    np.random.seed(setting.seed % 2**32)
    torch.manual_seed(setting.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # errors are exceptions; a warning is not a result
        facts = check(setting)
    gc.collect()
    left = sorted(os.listdir(setting.directory))
    if left:
        raise CheckFailed("files after the check", got=", ".join(left[:5]), expected="none")
    if facts.count < 1:
        raise CheckFailed(f"comparisons ({facts.compared})", got=facts.count, expected="some")
    return facts


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))


# --- the machine ----------------------------------------------------------------------------------


def about_machine(setting: Setting) -> dict[str, str]:
    """Return the facts about the machine that a bug report must have: names and texts, in order."""
    machine = read_machine()
    cpu, memory, found = machine.cpu, machine.memory, machine.torch
    total, free = memory.total_bytes, free_memory_bytes(memory)
    limit = memory.cgroup_limit_bytes
    rows = {
        "cpu": cpu.model or platform.processor() or platform.machine(),
        "cores": f"{usable_cores(cpu) or 'unknown'} usable of {cpu.logical or 'unknown'}",
        "memory": f"{show_size(free)} free of {show_size(total)}"
        + (f", limited to {show_size(limit)}" if limit else ""),
        "kernel": f"{machine.system} {machine.kernel}",
        "python": platform.python_version(),
        "torch": f"broken: {found.error}" if found.version is None else describe(found.version),
        "instruction set": _instruction_set(),
        "I/O engine": _io_engine(),
        "device": _device(setting, machine),
        "directory": _directory(setting.directory),
    }
    forced = [f"{name}={os.environ[name]}" for name in _CHOICES if os.environ.get(name)]
    if forced:
        rows["environment"] = ", ".join(forced)
    return rows


def _instruction_set() -> str:
    error = kernels.native_error()
    text = f"{kernels.isa()} of {', '.join(kernels.available_isas())}"
    text += f", {kernels.num_threads()} threads"
    return text if error is None else f"{text} ({error})"


def _io_engine() -> str:
    metrics = Metrics()
    try:
        engine = open_engine([], metrics=metrics)
    except OffloadError as error:
        return f"none: {error}"
    engine.close()
    lesser = metrics.snapshot().fallbacks
    return engine.name + "".join(f"; {what}: {why}" for what, why in lesser.items())


def _device(setting: Setting, machine: HostFacts) -> str:
    found = machine.accelerator
    if setting.is_on_cpu or found is None:
        return setting.device
    memory = f", {show_size(found.total_bytes)}" if found.total_bytes else ""
    return f"{setting.device}: {found.count} x {found.name or found.kind}{memory}"


def _directory(path: Path) -> str:
    """Describe the directory's file system and drive. Leaves out the path, which may be private."""
    facts = read_directory(path)
    mount, drive, direct = facts.mount, facts.drive, facts.direct_io
    words = [mount.fs_type if mount else "unknown file system"]
    words += [drive.model or drive.name] if drive else []
    words += ["in memory"] if facts.ram_backed else []
    words += ["O_DIRECT" if direct.works else "no O_DIRECT"]
    words += ["O_TMPFILE" if facts.o_tmpfile else "no O_TMPFILE"]
    return ", ".join([*words, f"{show_size(facts.free_bytes)} free"])


if __name__ == "__main__":
    code = main()
    # Not sys.exit, which would wait for operations that an injected fault has left stuck by design.
    os._exit(code)
