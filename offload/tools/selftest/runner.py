"""Runs one check in this process and turns its result or exception into a `CheckResult`."""

from __future__ import annotations

import gc
import os
import random
import shutil
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from offload.core.errors import StoreError
from offload.tools.selftest.check import (
    CheckFailed,
    CheckResult,
    CheckStatus,
    NotRun,
    PassedCheck,
    Setting,
)
from offload.tools.selftest.registry import find

_MOST_CHARACTERS = 2000  # of a text in the table
_FRAMES = 4


def run_check(name: str, setting: Setting) -> CheckResult:
    """Run one check in a new directory below `setting.directory`, and remove that directory. Raises
    only exceptions that end the process, such as KeyboardInterrupt.
    """
    begin_s = time.perf_counter()
    status, text, count = CheckStatus.FAILED, "", 0
    try:
        facts = _run(find(name), replace(setting, directory=_make_directory(setting, name)))
        status, text, count = CheckStatus.PASSED, facts.compared, facts.count
    except NotRun as reason:
        status, text = CheckStatus.NOT_RUN, str(reason)
    except CheckFailed as failure:
        text = str(failure)
    except Exception as error:  # any exception: this check has failed, the others still run
        text = f"{_shown(error)} ({_where(error)})"
    finally:
        shutil.rmtree(setting.directory / name, ignore_errors=True)
    gc.collect()
    return CheckResult(name, status, time.perf_counter() - begin_s, text[:_MOST_CHARACTERS], count)


def _make_directory(setting: Setting, name: str) -> Path:
    directory = setting.directory / name
    try:
        directory.mkdir(mode=0o700)
    except OSError as error:
        raise StoreError(
            f"{directory}: cannot make it: {error.strerror}",
            errno=error.errno,
            operation="mkdir",
            file=str(directory),
        ) from error
    return directory


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


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_FRAMES:]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames))
