"""The judge of faults: whether the tests of a checkout that execute a fault notice it."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from support.mutation.contexts import nodeids_of_lines
from support.mutation.sites import Mutation, Site, mutation

KILLED = "killed"
TIMED_OUT = "timed out"  # a hang is a failure, too
SURVIVED = "survived"
UNTESTED = "no test executes it"
UNDECIDED = "undecided"  # the tests need longer than there was time

_DEVICE = "tests/device/"  # tests that carry the mark `device` and need a process of their own
_DRIVER = Path(__file__).with_name("driver.py")
_LEAST_LIMIT_S, _TIMES_AS_LONG = 300.0, 5.0  # where no limit was given
_UNKNOWN_S = 1.0  # of a test
_OURS = {"PYTEST_CURRENT_TEST", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"}


@dataclass(frozen=True)
class Verdict:
    """The verdict on a fault.

    outcome: one of the constants above.
    test: the test that failed, or that ran when time was up; a file if the fault was noticed only
    because that cannot be imported.
    missing: how many tests do not exist with the fault, since their names are made of the source.
    """

    outcome: str
    candidates: int
    test: str | None = None
    why: str | None = None
    missing: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True)
class _Run:
    """The end of one process with tests. told: see driver.py."""

    code: int | None  # None: it was killed because time was up
    told: Mapping[str, Any]
    output: str

    @property
    def is_good(self) -> bool:
        return self.code in (0, 5)  # 5: none of them is there any more

    @property
    def only_lacks_files(self) -> bool:
        """Whether all tests that can be imported have passed, and some files cannot."""
        has_ended = self.told.get("is_finished", False) and "failed" not in self.told
        return has_ended and bool(self.uncollected)

    @property
    def uncollected(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.told.get("uncollected", {})
        return found

    @property
    def test(self) -> str:
        found: str = self.told.get("failed") or self.told.get("running") or "before the first test"
        return found

    @property
    def why(self) -> str:
        found: str = self.told.get("why") or self.output
        return found


@dataclass
class Judge:
    """A judge of faults in one checkout.

    root: the checkout; no other process may use it meanwhile.
    python: the interpreter of its environment.
    data: the data of coverage.py, with contexts.
    journal: a file that has the original source while a fault is in place.
    durations: seconds by node id.
    """

    root: Path
    python: Path
    data: Path
    journal: Path
    durations: Mapping[str, float] = field(default_factory=dict)
    limit_s: float | None = None
    package: str = "offload"
    failing: set[str] = field(default_factory=set)  # tests that fail without any fault
    _passing: set[str] = field(default_factory=set)  # tests that are known to pass without one

    def __post_init__(self) -> None:
        recover(self.journal)
        self._check_environment()

    def _check_environment(self) -> None:
        """Check that `python` imports the package from the checkout, where the faults are put."""
        code = f"import importlib.util as u; print(u.find_spec({self.package!r}).origin)"
        command = [str(self.python), "-c", code]
        said = subprocess.run(command, cwd=self.root, capture_output=True, text=True, check=True)
        found, expected = Path(said.stdout.strip()), self.root / self.package / "__init__.py"
        if found.resolve() != expected.resolve():
            raise ValueError(f"{self.python} imports {found}, not {expected}")

    def judge(self, site: Site) -> Verdict:
        fault = mutation(self.root, site)
        executed = nodeids_of_lines(self.data, site.file, fault.lines)
        while True:
            tests = ordered(executed - self.failing, self.durations)
            if not tests:
                return Verdict(UNTESTED, 0)
            verdict = self._judge(site, fault, tests)
            if verdict.outcome != KILLED or self._passes_without(verdict, tests):
                return verdict

    def _judge(self, site: Site, fault: Mutation, tests: list[str]) -> Verdict:
        begin_s, cpu_s = time.monotonic(), _cpu_s()
        with in_place(self.root / site.file, fault, self.journal):
            verdict = self._until_one_fails(tests)
        wall_s, cpu_s = time.monotonic() - begin_s, _cpu_s() - cpu_s
        return replace(verdict, wall_s=round(wall_s, 1), cpu_s=round(cpu_s, 1))

    def _until_one_fails(self, tests: list[str]) -> Verdict:
        expected_s = sum(self.durations.get(test, _UNKNOWN_S) for test in tests)
        limit_s = self.limit_s or _LEAST_LIMIT_S + _TIMES_AS_LONG * expected_s
        end_s, missing, uncollected = time.monotonic() + limit_s, 0, dict[str, str]()
        for group in _groups(tests):
            run = self._run(group, end_s)
            missing += len(run.told.get("missing", ()))
            uncollected |= run.uncollected
            if run.code is None:
                outcome = TIMED_OUT if 2 * expected_s < limit_s else UNDECIDED
                return Verdict(outcome, len(tests), run.test, run.why, missing)
            if not run.is_good and not run.only_lacks_files:
                return Verdict(KILLED, len(tests), run.test, run.why, missing)
        for file, why in uncollected.items():
            return Verdict(KILLED, len(tests), file, why, missing)
        return Verdict(SURVIVED, len(tests), missing=missing)

    def _passes_without(self, verdict: Verdict, tests: list[str]) -> bool:
        """Return whether the failed test passes without the fault; if not, it is not run again."""
        assert verdict.test is not None
        if verdict.test in self._passing:
            return True
        its_own = [test for test in tests if test.partition("::")[0] == verdict.test]
        one = verdict.test if verdict.test in tests else (its_own or tests)[0]
        run = self._run([one], math.inf)
        if run.is_good:
            self._passing.add(verdict.test)
            return True
        if one != verdict.test:
            raise RuntimeError(f"the tests do not even begin without a fault:\n{run.output}")
        self.failing.add(one)
        return False

    def _run(self, tests: list[str], end_s: float) -> _Run:
        with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
            chosen, told, output = (Path(folder, name) for name in ("chosen", "told", "output"))
            chosen.write_text(json.dumps(tests))
            command = [str(self.python), str(_DRIVER), str(chosen), str(told)]
            if tests[0].startswith(_DEVICE):
                command += ["-m", "device"]
            with output.open("wb") as file:
                code = _ended(command, self.root, file, end_s)
            said = output.read_bytes().decode(errors="replace")[-2000:]
            state = json.loads(told.read_text()) if told.exists() else {}
        return _Run(code, state, said)


def ordered(tests: Iterable[str], durations: Mapping[str, float]) -> list[str]:
    """Order tests, the fastest first; those that take about as long by file, to share fixtures."""

    def rank(test: str) -> tuple[int, str, float, str]:
        seconds = durations.get(test, _UNKNOWN_S)
        magnitude = math.frexp(max(seconds, 0.01))[1]
        return magnitude, test.partition("::")[0], seconds, test

    return sorted(tests, key=rank)


def _groups(tests: list[str]) -> list[list[str]]:
    on_device = [test for test in tests if test.startswith(_DEVICE)]
    others = [test for test in tests if not test.startswith(_DEVICE)]
    return [group for group in (others, on_device) if group]


# --- processes ------------------------------------------------------------------------------------


def _ended(command: list[str], root: Path, output: Any, end_s: float) -> int | None:
    """Run a command; return its exit code, None if it was killed because time was up.

    None of its processes is left.
    """
    environment = {k: v for k, v in os.environ.items() if k not in _OURS}
    process = subprocess.Popen(
        command,
        cwd=root,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait(None if end_s == math.inf else max(0.0, end_s - time.monotonic()))
    except subprocess.TimeoutExpired:
        return None
    finally:
        kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, all in its session, and those of its descendants that have left it."""
    descendants = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for one in descendants:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def _cpu_s() -> float:
    """Return the CPU seconds of all children that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# --- the file -------------------------------------------------------------------------------------


@contextmanager
def in_place(path: Path, fault: Mutation, journal: Path) -> Iterator[None]:
    """Put the fault into the file while the block runs.

    If this process is killed, `recover` takes it out.
    """
    assert path.read_text() == fault.original, path
    journal.write_text(json.dumps({"path": str(path.resolve()), "text": fault.original}))
    times = path.stat()
    try:
        _write(path, fault.mutated)
        yield
    finally:
        _write(path, fault.original)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        journal.unlink()


def recover(journal: Path) -> None:
    """Take out the fault that an earlier run has left, if any."""
    if journal.exists():
        left = json.loads(journal.read_text())
        _write(Path(left["path"]), left["text"])
        journal.unlink()


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    # Python would take another text of the same length and second for the same.
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)
