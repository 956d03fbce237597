"""Children that are forked with torch loaded behave as those of a fresh interpreter."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import children

ABOUT = """
import json, os, sys
place = [os.getcwd(), os.environ.get("MARK"), sys.path[0]]
print(json.dumps([sys.argv, place, __name__, os.getppid()]))
print("to standard error", file=sys.stderr)
print(sys.stdin.read(), flush=True)
"""


def both(command: list[str], **options: object) -> list[tuple[int, str, str]]:
    return [
        (done.returncode, done.stdout, done.stderr)
        for run in (subprocess.run, children.run)
        for done in [run(command, capture_output=True, text=True, timeout=120, **options)]
    ]


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_arguments_files_directory_and_environment(kind: str, tmp_path: Path) -> None:
    (tmp_path / "about.py").write_text(ABOUT)
    start = {"-c": ["-c", ABOUT], "-m": ["-m", "about"], "file": [str(tmp_path / "about.py")]}
    command = [sys.executable, *start[kind], "one", "two words"]
    environment = {**os.environ, "MARK": "ü"}
    fresh, forked = both(command, cwd=tmp_path, env=environment, input="from here")
    assert forked == fresh
    assert json.loads(fresh[1].splitlines()[0])[-1] == os.getpid()


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "raise SystemExit('a message')",
        "raise ValueError('not caught')",
        "import os; os._exit(3)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "raise KeyboardInterrupt",
        "import atexit; atexit.register(print, 'at exit')",
        "import threading as t, time; t.Thread(target=lambda: (time.sleep(0.1), print(1))).start()",
    ],
)
def test_the_end(code: str) -> None:
    fresh, forked = both([sys.executable, "-c", code])
    assert forked[:2] == fresh[:2]
    # A traceback has frames of the server in it; its last line is the interpreter's.
    assert forked[2].splitlines()[-1:] == fresh[2].splitlines()[-1:]


def test_signals_and_time_limits() -> None:
    code = "import time; print('there', flush=True); time.sleep(100)"
    with children.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "there\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == -signal.SIGINT
    with pytest.raises(subprocess.TimeoutExpired):
        children.run([sys.executable, "-c", code], timeout=0.2)


def test_what_needs_a_fresh_interpreter_is_refused() -> None:
    with pytest.raises(AssertionError, match="start-up flags"):
        children.run([sys.executable, "-O", "-c", "pass"])
    with pytest.raises(AssertionError, match="OMP_PROC_BIND is read when"):
        children.run([sys.executable, "-c", "pass"], env={**os.environ, "OMP_PROC_BIND": "true"})
    with pytest.raises(AssertionError, match="only for this Python"):
        children.run(["true"])
