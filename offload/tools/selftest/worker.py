"""The process in which checks run: `python -m offload.tools.selftest.worker FD`.

Gets a request as a line of JSON on stdin: the setting, and the names of the checks. Tells on file
descriptor FD, a line of JSON each: "about" the machine, or "refused" with why; then for each check
"begin" and "result". When stdin ends, whoever started it is gone: then it ends at once, with all
that it has started.
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
    """Run what is asked for."""
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
    """One check after the other."""
    gc.collect()
    gc.freeze()  # what was imported: every check looks for what is left, and would walk over it
    for name in names:
        tell(begin=name)
        tell(result=run_check(name, setting).to_dict())


def _end_with_stdin() -> None:
    while os.read(0, 1 << 12):
        pass
    if os.getpgrp() == os.getpid():  # as the supervisor starts it
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    # What a fault has left stuck, as it should, would be waited for.
    os._exit(code)
