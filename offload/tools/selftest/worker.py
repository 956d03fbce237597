"""The process in which checks run: `python -m offload.tools.selftest.worker FD`.

It reads a request as a line of JSON from stdin: the setting, and the names of the checks. It writes
messages to file descriptor FD, a line of JSON each: "about" the machine, or "refused" with the
reason; then "begin" and "result" for each check. When stdin ends, the supervisor is gone: then the
worker ends at once, with all processes that it has started.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.core.config import Config
from offload.core.errors import OffloadError
from offload.device import find_device
from offload.tools.selftest.about import about_machine
from offload.tools.selftest.check import Setting
from offload.tools.selftest.runner import run_check


def main(fd: int) -> int:
    """Read the request, run its checks, and return the exit code."""
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
    tell(about=about_machine(setting, Path(request["parent"])))
    work(setting, request["names"], tell)
    return 0


def work(setting: Setting, names: list[str], tell: Callable[..., None]) -> None:
    """Run one check after the other, and report each."""
    gc.collect()
    gc.freeze()  # garbage collections, which every check makes, skip the imported modules
    for name in names:
        tell(begin=name)
        tell(result=run_check(name, setting).to_dict())


def _end_with_stdin() -> None:
    while os.read(0, 1 << 12):
        pass
    if os.getpgrp() == os.getpid():  # the supervisor starts it in its own process group
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    # Not sys.exit, which would wait for operations that an injected fault has left stuck by design.
    os._exit(code)
