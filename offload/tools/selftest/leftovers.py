"""Check of leftovers after close: no file, no open swap file, no host memory, no thread."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from offload.api import close, prepare
from offload.core.budget import HOST
from offload.tools.selftest.check import PassedCheck, Setting, require
from offload.tools.selftest.model import adamw, make_model, make_optimizer, train
from offload.tools.selftest.wrap import parameters, tensors, tight, train_steps

_SOON_S = 20.0  # threads that were told to end may take a moment


def disk(setting: Setting) -> PassedCheck:
    """Check that wrap and prepare leave nothing after they were used and closed: no open file, no
    host memory, no thread. A file with a name must not exist even while they run.
    """
    gc.collect()
    held, threads = HOST.used_bytes, threading.active_count()
    params = parameters(tensors(setting.seed), setting.device)
    optimizer = tight(setting, adamw(params))
    named = os.listdir(setting.directory)
    train_steps(params, optimizer, setting)
    optimizer.close()
    model = make_model(setting.seed)
    other = make_optimizer(model)
    prepare(model, other, device=setting.device, nvme=setting.directory)
    train(model, other, setting, 2)
    named += os.listdir(setting.directory)
    close(model)
    del optimizer, other, model, params
    gc.collect()
    named += os.listdir(setting.directory)
    require(not named, "files with a name", got=named, expected="none, also while it runs")
    left = _soon_none(lambda: _open_below(str(setting.directory)))
    require(not left, "open files", got=left, expected="none")
    require(HOST.used_bytes <= held, "host bytes", got=HOST.used_bytes, expected=held)
    more = _soon_none(lambda: [t.name for t in threading.enumerate()][threads:])
    require(not more, "threads of Python", got=more, expected="none")
    return PassedCheck("kinds: named files, open files, host memory, threads", 4)


def _soon_none(look: Callable[[], list[str]]) -> list[str]:
    end_s = time.monotonic() + _SOON_S
    while (found := look()) and time.monotonic() < end_s:
        time.sleep(0.01)
    return found


def _open_below(directory: str) -> list[str]:
    """Return the open files of this process in `directory`, named or not; [] if the system does not
    list them.
    """
    found = []
    with suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # the descriptor of the listing itself
                found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(directory)]
