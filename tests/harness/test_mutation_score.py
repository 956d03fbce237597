"""Random faults are drawn, put into a checkout, judged by its tests and taken out again."""

from __future__ import annotations

import ast
import itertools
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import mutation_score
import psutil
import pytest
from support.mutation import judge, sites
from support.mutation.contexts import nodeid_of, nodeids_of_lines
from support.mutation.judge import Judge, in_place, ordered, recover
from support.mutation.sites import Mutation, Site, drawn, mutation, sites_of

ROOT = Path(__file__).parents[2]

# --- drawing --------------------------------------------------------------------------------------

SOURCE = '''
from typing import TYPE_CHECKING

LIMIT = 3


class Tank:
    size: int = 4

    def fill(self, amount: int = 1, *, hose: "Hose | None" = None) -> int:
        """Fill it, 5 at most."""
        count: "list[6]" = []
        if self.full and amount:
            raise ValueError(f"{amount + 7} > 8", 9)
        assert amount < 10, str(11)
        _LOG.warning("%d", 12)
        if TYPE_CHECKING:
            self.never(13)
        hose.open(amount, self.size)
        return max(amount, 14)
'''


def changes(text: str) -> set[tuple[str, str, str]]:
    return {(one.operator, one.before, one.after) for one in sites_of(text, "tank.py")}


def test_every_place_in_code_and_no_other() -> None:
    call = "hose.open(amount, self.size)"
    assert changes(SOURCE) == {
        (
            sites.NEGATE,
            "if self.full and amount:",
            "if not (self.full and amount):",
        ),
        (sites.COMPARE, "assert amount < 10, str(11)", "assert amount <= 10, str(11)"),
        (sites.CONSTANT, "assert amount < 10, str(11)", "assert amount < 11, str(11)"),
        (sites.DROP, call, "pass"),
        (sites.SWAP, call, "hose.open(self.size, amount)"),
        (sites.CONSTANT, "return max(amount, 14)", "return max(amount, 15)"),
    }


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("return x is None", {"return x is not None"}),
        ("return 1 < x <= y", {"return 2 < x <= y", "return 1 <= x <= y", "return 1 < x < y"}),
        ("return True", {"return False"}),
        ("return 0.5", {"return 1.5"}),
        ("return 1e300", set()),  # the next number is the same
        ("return f(x, *y, z)", set()),
        ("return f(x, x, y)", {"return f(x, y, x)"}),
        ("return [z for z in x if not z]", {"return [z for z in x if z]"}),
        ("return x if y == 'a' else z", {"return x if y != 'a' else z"}),
        ("return lambda z=1: z > x", {"return lambda z=1: z >= x"}),
    ],
)
def test_what_can_become_of_a_line(line: str, expected: set[str]) -> None:
    assert {after for _, _, after in changes(f"def f(x, y):\n    {line}\n")} == expected


def test_the_same_seed_draws_the_same() -> None:
    candidates = sites.sites(ROOT, "offload/device")
    assert drawn(candidates, 20, 1) == drawn(candidates, 20, 1) != drawn(candidates, 20, 2)
    assert drawn(candidates, len(candidates), 3) != candidates
    assert set(drawn(candidates, len(candidates), 3)) == set(candidates)


def test_what_is_drawn_survives_its_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "offload").mkdir()
    (tmp_path / "offload" / "tank.py").write_text(SOURCE)
    out = tmp_path / "mutants.json"
    words = ["draw", f"--root={tmp_path}", "--count=4", "--seed=1", f"--out={out}"]
    assert mutation_score.main(words) == 0
    written, shown = json.loads(out.read_text()), capsys.readouterr().out
    assert written["places"] == 6 and len(written["mutants"]) == 4
    for one in written["mutants"]:
        site = Site(**one)
        assert site in sites.sites(tmp_path)
        assert mutation(tmp_path, site).mutated != SOURCE
        assert f"- {site.before}\n   + {site.after}\n" in shown


def test_a_fault_changes_its_line_alone() -> None:
    candidates = drawn(sites.sites(ROOT, "offload/params"), 60, 4)
    assert len({site.operator for site in candidates}) == 5
    for site in candidates:
        fault = mutation(ROOT, site)
        compile(fault.mutated, site.file, "exec")
        pairs = zip(fault.original.splitlines(), fault.mutated.splitlines(), strict=True)
        other = [number for number, (old, new) in enumerate(pairs, 1) if old != new]
        assert other and set(other) <= set(fault.lines), site


def test_a_statement_of_several_lines_keeps_those_behind_it_in_place(tmp_path: Path) -> None:
    text = """def f(x, y):
    if g(
        x,  # é
        y,
    ):
        h(
            x)
    k()
"""
    (tmp_path / "m.py").write_text(text)
    for site in sites_of(text, "m.py"):
        fault = mutation(tmp_path, site)
        assert fault.mutated.splitlines()[7] in ("    k()", "    pass")
        assert ast.unparse(ast.parse(fault.mutated)) != ast.unparse(ast.parse(text))
        assert fault.lines in (range(2, 6), range(6, 8), range(8, 9))


def test_another_source_than_that_it_was_drawn_from_is_told(tmp_path: Path) -> None:
    site = sites_of(SOURCE, "tank.py")[0]
    (tmp_path / "tank.py").write_text(f"{SOURCE}\n")
    with pytest.raises(ValueError, match="is not the file that the faults were drawn from"):
        mutation(tmp_path, site)


# --- contexts -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "nodeid"),
    [
        ("tests/test_a.py::test_b|run", "tests/test_a.py::test_b"),
        ("tests/test_a.py::test_b[x|run]|setup", "tests/test_a.py::test_b[x|run]"),
        ("tests/test_a.py::test_b (teardown)", "tests/test_a.py::test_b"),
        ("tests/test_a.py::test_b[a (call)] (call)", "tests/test_a.py::test_b[a (call)]"),
        ("", None),
        ("something else", None),
    ],
)
def test_contexts_name_tests(context: str, nodeid: str | None) -> None:
    assert nodeid_of(context) == nodeid


def recorded(path: Path, lines: dict[tuple[str, str], list[int]]) -> Path:
    """Write what coverage.py writes, as far as it is read. lines: by file and context."""
    with sqlite3.connect(path) as database:
        database.execute("create table file (id integer primary key, path text)")
        database.execute("create table context (id integer primary key, context text)")
        database.execute(
            "create table line_bits (file_id integer, context_id integer, numbits blob)"
        )
        for number, ((file, context), numbers) in enumerate(lines.items()):
            bits = bytearray(max(numbers) // 8 + 1)
            for line in numbers:
                bits[line // 8] |= 1 << line % 8
            database.execute("insert into file values (?, ?)", (number, file))
            database.execute("insert into context values (?, ?)", (number, context))
            database.execute(
                "insert into line_bits values (?, ?, ?)", (number, number, bytes(bits))
            )
    return path


def test_the_tests_of_a_line(tmp_path: Path) -> None:
    data = recorded(
        tmp_path / "data",
        {
            ("/there/offload/a_b.py", "t.py::one|run"): [8, 9, 200],
            ("/there/offload/a_b.py", "t.py::two|setup"): [16],
            ("/there/offload/a_b.py", ""): [8, 9, 10, 16, 200],
            ("/there/offload/axb.py", "t.py::three|run"): [8],
            ("/there/more/a_b.py", "t.py::four|run"): [8],
        },
    )
    assert nodeids_of_lines(data, "offload/a_b.py", range(9, 12)) == {"t.py::one"}
    assert nodeids_of_lines(data, "offload/a_b.py", range(8, 17)) == {"t.py::one", "t.py::two"}
    assert nodeids_of_lines(data, "offload/a_b.py", [200]) == {"t.py::one"}
    assert nodeids_of_lines(data, "offload/a_b.py", [10]) == set()


# --- the file -------------------------------------------------------------------------------------

FAULT = Mutation("x = 1\n", "x = 2\n", range(1, 2))


def test_the_file_is_as_before_whatever_happens(tmp_path: Path) -> None:
    path, journal = tmp_path / "m.py", tmp_path / "journal"
    path.write_text(FAULT.original)
    os.utime(path, (1, 1))
    with pytest.raises(KeyboardInterrupt), in_place(path, FAULT, journal):
        assert path.read_text() == FAULT.mutated
        raise KeyboardInterrupt
    assert path.read_text() == FAULT.original and path.stat().st_mtime == 1
    assert not journal.exists()


def test_what_a_run_that_was_killed_has_left_is_taken_out(tmp_path: Path) -> None:
    path, journal = tmp_path / "m.py", tmp_path / "journal"
    path.write_text(FAULT.original)
    inside = in_place(path, FAULT, journal)
    inside.__enter__()
    recover(journal)  # as if that was another process
    assert path.read_text() == FAULT.original and not journal.exists()
    recover(journal)  # there is nothing to do
    journal.write_text("{}")
    inside.__exit__(None, None, None)


def test_no_compiled_file_of_the_fault_is_left(tmp_path: Path) -> None:
    path, cached = tmp_path / "m.py", tmp_path / "__pycache__" / "m.cpython-399.pyc"
    path.write_text(FAULT.original)
    cached.parent.mkdir()
    cached.touch()
    with in_place(path, FAULT, tmp_path / "journal"):
        assert not cached.exists()
        cached.touch()
    assert not cached.exists()


# --- judging --------------------------------------------------------------------------------------


def test_the_fastest_come_first_and_stay_together() -> None:
    durations = {"b.py::1": 0.011, "a.py::1": 0.012, "b.py::2": 0.013, "a.py::2": 9.0}
    expected = ["a.py::1", "b.py::1", "b.py::2", "c.py::unknown", "a.py::2"]
    for tests in itertools.permutations(expected):
        assert ordered(tests, durations) == expected


PACKAGE = """
def one():
    return 1


def twice(x):
    return 2 * x


def nobody():
    return 5


def flag():
    return True
"""
ITS_TESTS = """
import pytest
import tank

def test_one():
    assert tank.one() == 1

def test_twice():
    assert tank.twice(0) == 0

def test_broken():
    assert tank.flag() and False

@pytest.mark.parametrize("name", [f"flag {tank.flag()}"])
def test_flag(name):
    assert tank.flag() is not None
"""
ON_DEVICE = """
import pytest
import tank

@pytest.mark.device
def test_flag():
    assert tank.flag()
"""
LINES = {"test_one": 3, "test_twice": 7, "test_broken": 15, "test_flag[flag True]": 15}


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # its tests need none
    root = tmp_path / "checkout"
    for name, text in (
        ("tank/__init__.py", PACKAGE),
        ("tests/test_tank.py", ITS_TESTS),
        ("tests/device/test_tank_device.py", ON_DEVICE),
        (
            "pyproject.toml",
            '[tool.pytest.ini_options]\naddopts = ["-m", "not device"]\nmarkers = ["device"]\n',
        ),
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def judge_of(root: Path, limit_s: float | None = None, also: Sequence[str] = ()) -> Judge:
    """Return a judge of the checkout, with what a run recorded. also: tests that execute `one`,
    too.
    """
    file = str(root / "tank" / "__init__.py")
    lines = {(file, f"tests/test_tank.py::{name}|run"): [line] for name, line in LINES.items()}
    lines[file, "tests/device/test_tank_device.py::test_flag|run"] = [15]
    lines |= {(file, f"{nodeid}|run"): [3] for nodeid in also}
    data, journal = recorded(root.parent / "data", lines), root.parent / "journal"
    return Judge(root, Path(sys.executable), data, journal, limit_s=limit_s, package="tank")


def site_in(root: Path, function: str) -> Site:
    """Return the last fault in a constant of this function."""
    found = [
        site
        for site in sites.sites(root, "tank")
        if site.function == function and site.operator == sites.CONSTANT
    ]
    return found[-1]


@pytest.mark.parametrize(
    ("function", "outcome", "test"),
    [
        ("one", judge.KILLED, "tests/test_tank.py::test_one"),
        ("twice", judge.SURVIVED, None),
        ("nobody", judge.UNTESTED, None),
    ],
)
def test_what_becomes_of_a_fault(
    function: str, outcome: str, test: str | None, checkout: Path
) -> None:
    verdict = judge_of(checkout).judge(site_in(checkout, function))
    assert (verdict.outcome, verdict.test) == (outcome, test)
    assert verdict.candidates == (0 if outcome == judge.UNTESTED else 1)
    assert (verdict.cpu_s > 0) == (outcome != judge.UNTESTED)
    assert (checkout / "tank" / "__init__.py").read_text() == PACKAGE


@pytest.mark.parametrize(
    ("usual_s", "outcome"), [(0.0001, judge.TIMED_OUT), (1.0, judge.UNDECIDED)]
)
def test_time_that_is_up_is_a_failure_only_where_there_was_enough(
    usual_s: float, outcome: str, checkout: Path
) -> None:
    judging = judge_of(checkout, limit_s=0.001)  # no process starts so fast
    judging.durations = {"tests/test_tank.py::test_one": usual_s}
    assert judging.judge(site_in(checkout, "one")).outcome == outcome
    assert (checkout / "tank" / "__init__.py").read_text() == PACKAGE


def test_nothing_is_left_of_a_process_that_is_killed() -> None:
    code = """
import signal, subprocess
print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, flush=True)
signal.pause()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        descendant = psutil.Process(int(process.stdout.readline()))
    judge.kill(process)
    with suppress(psutil.NoSuchProcess):
        while descendant.status() != psutil.STATUS_ZOMBIE:  # or until it is reaped
            time.sleep(0.01)
    assert process.returncode == -signal.SIGKILL


def test_tests_that_fail_anyway_and_those_of_devices(checkout: Path) -> None:
    """One fails without the fault, one has another name with it; the device's notices it."""
    judging = judge_of(checkout)
    verdict = judging.judge(site_in(checkout, "flag"))
    assert verdict.outcome == judge.KILLED
    assert verdict.test == "tests/device/test_tank_device.py::test_flag"
    assert verdict.missing == 1
    assert judging.failing == {"tests/test_tank.py::test_broken"}


def test_a_file_that_cannot_be_imported_does_not_hide_a_test_that_notices(checkout: Path) -> None:
    quotes = checkout / "tests" / "test_quotes.py"
    quotes.write_text("import tank\n\nassert tank.one() == 1\n\ndef test_one():\n    pass\n")
    site = site_in(checkout, "one")
    judging = judge_of(checkout, also=["tests/test_quotes.py::test_one"])
    assert judging.judge(site).test == "tests/test_tank.py::test_one"
    (checkout / "tests" / "test_tank.py").write_text("def test_one():\n    pass\n")
    verdict = judging.judge(site)
    assert (verdict.outcome, verdict.test) == (judge.KILLED, "tests/test_quotes.py")
    assert verdict.why is not None and "assert tank.one() == 1" in verdict.why


def test_an_environment_with_another_package_is_refused(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"imports .*, not .*offload"):
        Judge(checkout, Path(sys.executable), checkout, checkout.parent / "journal")
