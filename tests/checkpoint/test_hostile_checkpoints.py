"""Files that were made to do harm: refused with an error of ours, or harmless.

The judges run in processes of their own (support/hostile_layouts.py and hostile_mutants.py), where
an audit hook hears all that Python does, inotify tells of every file outside that is opened, and
memory is limited; a process that hangs or crashes fails its test.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from support import children, hostile_layouts
from support.loops import SEED, chosen, tally

from offload.core import format_limits

pytestmark = pytest.mark.timeout(chosen(test=240, torture=1200))

MUTANTS = chosen(test=1000, torture=50_000)
PATTERNS = chosen(test=1, torture=5)  # how each byte is changed
HERE = Path(__file__).parents[1]


def run_python(*args: object) -> str:
    done = children.run(
        [sys.executable, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=chosen(test=200, torture=1000),
        env={**os.environ, "PYTHONPATH": str(HERE)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run(module: str, *args: object) -> Any:
    return json.loads(run_python("-m", f"support.{module}", *args))


def run_program(text: str, *args: object) -> str:
    return run_python("-c", text, *args)


def test_every_flipped_byte_and_every_mutant_is_refused_or_harmless(tmp_path: Path) -> None:
    print(f"mutants of seed {SEED}")
    found = run("hostile_mutants", tmp_path, SEED, MUTANTS, PATTERNS)
    assert found["wrong"] == []
    counts = Counter(found["counts"])
    print(json.dumps(counts, indent=1))
    kinds = Counter()
    for name, count in counts.items():
        kinds[name.partition(":")[0]] += count
    nbytes = found["sizes"]["manifest"]
    tally("hostile files", counts.total())
    assert kinds["flip"] == PATTERNS * nbytes and counts["flip: ok"] == 0
    assert kinds["sealed flip"] == nbytes - found["sizes"]["digest"]
    assert kinds["header flip"] >= 4096 and counts["header flip: ok"] == 0
    assert kinds["mutant"] + kinds["header mutant"] == MUTANTS
    # The changes are neither all nonsense nor all harmless.
    assert counts["mutant: ok"] > MUTANTS / 50 and counts["mutant: FormatError"] > MUTANTS / 2
    assert counts["sound mutant: damaged"] > 0 < counts["sound mutant: ok"]


def test_hostile_directories_are_refused(tmp_path: Path) -> None:
    found = run("hostile_layouts", tmp_path)
    assert len(hostile_layouts.LAYOUTS) >= 40
    assert len(found) == len(hostile_layouts.LAYOUTS) + len(hostile_layouts.HARMLESS)
    tally("hostile files", len(found))
    for name, said in found.items():
        assert "problems" not in said, (name, said["problems"])
        if name in hostile_layouts.HARMLESS:
            assert set(said.values()) == {"ok"}, (name, said)
        else:
            assert said["verify"] == "damaged", (name, said)


BIG = """
import ast, sys
from pathlib import Path
from support.hostile_watch import limit_memory, outcome, warm_up
from support.hostile_layouts import document, seal
from support.formats import write_checkpoint
from offload.checkpoint.format.directory import CheckpointDirectory
import json
path = Path(sys.argv[1]) / "a"
write_checkpoint(path)
warm_up(path)
text = json.dumps(document(path), separators=(",", ":")).encode()

unit, end = ast.literal_eval(sys.argv[2])
room = %d - len(text) - 200
seal(path, text.replace(b'"extra":null', b'"extra":[' + unit * (room // len(unit)) + end + b']'))
del text
limit_memory(%d)
with CheckpointDirectory(path) as directory:
    print(outcome(directory.read_manifest))
"""


@pytest.mark.parametrize(
    "fill",
    [(b"[],", b"[]"), (b'{"":0},', b"0"), (b'"a",', b'"a"'), (b"0.1,", b"0"), (b'"\\\\",', b"0")],
    ids=["lists", "objects", "texts", "numbers", "escapes"],
)
def test_memory_grows_with_the_manifest_and_no_more(
    fill: tuple[bytes, bytes], tmp_path: Path
) -> None:
    part = chosen(test=32, torture=16)
    program = BIG % (format_limits.MOST_MANIFEST_BYTES // part, (4096 << 20) // part)
    # Some fills keep to the allowed number of values and are read; none may end in a `MemoryError`.
    assert run_program(program, tmp_path, repr(fill)) in ("ok\n", "FormatError\n")


WATCHED = """
import os, subprocess, sys
from pathlib import Path
from support.formats import write_checkpoint
from support.hostile_watch import Watch, limit_memory, warm_up
root = Path(sys.argv[1])
write_checkpoint(root / "outside")
(root / "in").mkdir()
(root / "in" / "link").symlink_to("../outside/manifest.json")
fd = os.open(root / "in", os.O_RDONLY)
def load():
    import wave
def take():
    try:
        bytearray(1 << 30)
    except MemoryError:
        watch.problems.append("memory")
acts = [
    lambda: os.close(os.open(root / "in" / "link", os.O_RDONLY)),
    lambda: os.close(os.open("link", os.O_RDONLY, dir_fd=fd)),
    lambda: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    lambda: os.close(os.open("../outside/manifest.json", os.O_RDONLY, dir_fd=fd)),
    lambda: eval("1"),
    load,
    lambda: subprocess.run(["true"]),
    lambda: os.remove(root / "in" / "link"),
    take,
]
watch = Watch(root, root / "outside")
limit_memory(256 << 20)
for act in acts:
    with watch.armed():
        act()
    assert watch.problems, acts.index(act)
    watch.problems.clear()
with watch.armed():
    os.close(os.open(root / "in", os.O_RDONLY))
assert not watch.problems
print("seen")
"""


def test_the_watch_sees_what_it_should(tmp_path: Path) -> None:
    done = run_program(WATCHED, tmp_path)
    assert done == "seen\n"
