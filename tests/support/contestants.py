"""Contestants of the benchmarks, as tests run them: warm, with one thread each."""

from __future__ import annotations

import sys
from typing import Any

from support import children

# The contestant takes all cores. Beside other tests its threads would wait for each other, for
# several times as long as so small a model takes.
_START = """
import os, runpy, sys
os.sched_getaffinity = lambda process: {0}
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def start(command: list[str], **options: Any) -> Any:
    """Start a contestant; patched in for `subprocess.Popen`."""
    assert command[0] == sys.executable
    return children.Popen([sys.executable, "-c", _START, *command[1:]], **options)
