"""Children that are forked with torch loaded behave as those of a fresh interpreter."""

from __future__ import annotations

import fcntl
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


def test_a_file_of_the_caller_stays_open(tmp_path: Path) -> None:
    with open(tmp_path / "said", "w+") as said:
        for word in ("one", "two"):
            command = [sys.executable, "-c", f"import sys; print({word!r}, file=sys.stderr)"]
            children.run(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, check=True)
        said.seek(0)
        assert said.read() == "one\ntwo\n"


def test_files_that_are_passed_keep_their_numbers() -> None:
    """Also where the server has something else at that number by chance."""
    for least in (3, 4, 7, 40):
        read, write = os.pipe()
        with open(read) as answers:
            number = fcntl.fcntl(write, fcntl.F_DUPFD, least)  # one that is free here
            code = f"import os; os.write({number}, b'here')"
            children.run([sys.executable, "-c", code], pass_fds=[number], check=True)
            os.close(number)
            os.close(write)
            assert answers.read() == "here"


@pytest.mark.parametrize("options", [["-W", "error"], ["-W", "error", "-W", "ignore"], []])
def test_what_is_said_of_warnings(options: list[str]) -> None:
    code = "import sys, warnings; print(sys.warnoptions); warnings.warn('careful')"
    fresh, forked = both([sys.executable, *options, "-c", code])
    assert forked[:2] == fresh[:2]
    assert forked[2].splitlines()[-1:] == fresh[2].splitlines()[-1:]


NESTED = r"""
import os, subprocess, sys
code = (
    "import os, sys; print(os.getppid(), os.getpgrp(), 'torch' in sys.modules, flush=True)\n"
    "if len(sys.argv) > 1:\n"
    "    import subprocess\n"
    "    sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)"
)
done = subprocess.run([sys.executable, "-c", code, "-c", code], capture_output=True, text=True)
assert done.stderr == "", done.stderr
(parent, group, _), (_, others, _) = lines = [line.split() for line in done.stdout.splitlines()]
assert (int(parent), int(group), int(others)) == (os.getpid(), os.getpgrp(), os.getpgrp())
print([is_loaded for _, _, is_loaded in lines])
print(subprocess.run(["echo", "others"], capture_output=True, text=True).stdout)
sys.exit(subprocess.run([sys.executable, "-c", "raise SystemExit(5)"]).returncode)
"""


@pytest.mark.parametrize("session", [False, True])
def test_children_of_children(session: bool) -> None:
    """All have torch; each is waited for by the process that started it, in its group."""
    options = {"capture_output": True, "text": True, "start_new_session": session, "timeout": 60}
    command = [sys.executable, "-c", NESTED]
    done = children.run(command, nested=True, **options)
    assert (done.returncode, done.stderr) == (5, "")
    assert done.stdout == "['True', 'True']\nothers\n\n"
    assert subprocess.run(command, **options).stdout == "['False', 'False']\nothers\n\n"


def test_in_the_place_of_popen_others_are_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", children.start)
    code = "import sys; print('torch' in sys.modules)"
    for command, said in (([sys.executable, "-c", code], "True\n"), (["echo", "yes"], "yes\n")):
        assert subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout == said


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
