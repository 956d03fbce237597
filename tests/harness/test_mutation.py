"""Faults that are put into the source by way of its syntax tree stay applicable while the source is
rewritten, and say so where they are not.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support.mutation import (
    Edit,
    Fault,
    NoSuchPlace,
    Place,
    at,
    becomes,
    calling,
    dropped,
    never,
    stripped,
    swapped_with_next,
)
from support.mutation.tree import Function

TESTS = Path(__file__).parents[1]
PACKAGE = TESTS.parent / "offload"
FAULTS = TESTS / "support" / "device" / "faults.py"

SOURCE = '''
class Tank:
    def fill(self, hose, amount):
        """Fill it."""
        if self.full or not hose.ready():
            return (hose, amount)
        level = self.level
        hose.open(level, amount)
        self.level = level + hose.read()[0]
        hose.close()
        if amount > 1:
            hose.close()
        return self.level
'''
FILL = at("tank", "Tank.fill")


def with_fault(tmp_path: Path, *edits: Edit) -> str:
    (tmp_path / "tank.py").write_text(SOURCE)
    return Fault("a fault", *edits).applied(tmp_path)


# --- places and changes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "before", "after"),
    [
        (dropped(FILL.call("open")), "hose.open(level, amount)", "pass"),
        (dropped(FILL.call("open").argument(1)), "open(level, amount)", "open(amount)"),
        (dropped(FILL.operand("ready")), "self.full or not hose.ready()", "self.full"),
        (dropped(FILL.returned(1, of=2).element("hose")), "(hose, amount)", "(amount,)"),
        (dropped(FILL.assignment("level", 1, of=2)), "level = self.level\n", "pass\n"),
        (never(FILL.condition("amount")), "if amount > 1:", "if False:"),
        (never(FILL.operand("full")), "if self.full or", "if False or"),
        (becomes(FILL.comparison("amount").right(), "it + 1"), "> 1:", "> 1 + 1:"),
        (becomes(FILL.call("open").receiver(), "self.hose"), "hose.open(", "self.hose.open("),
        (stripped(FILL.call("read")), "hose.read()[0]", "hose[0]"),
        (stripped(FILL.assignment("level", 2, of=2).call("read")), "hose.read()", "hose"),
        (calling(FILL.call("read"), "pipe.look"), "hose.read()", "hose.pipe.look()"),
    ],
)
def test_a_place_and_what_is_changed_there(
    edit: Edit, before: str, after: str, tmp_path: Path
) -> None:
    source = ast.unparse(ast.parse(SOURCE)) + "\n"
    assert source.count(before) == 1
    assert with_fault(tmp_path, edit) == source.replace(before, after)


def test_a_statement_changes_places_with_the_next(tmp_path: Path) -> None:
    lines = with_fault(tmp_path, swapped_with_next(FILL.call("open"))).splitlines()
    here = lines.index("        hose.open(level, amount)")
    assert lines[here - 1] == "        self.level = level + hose.read()[0]"


def test_several_changes_are_one_fault(tmp_path: Path) -> None:
    call = FILL.call("open")
    source = with_fault(tmp_path, dropped(call.argument(1)), becomes(call.argument(2), "it + 1"))
    assert "hose.open(amount + 1)" in source


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        (
            at("tank", "Tank.empty"),
            "0 functions Tank.empty, expected 1; give the function's present",
        ),
        (at("tank", "fill"), "0 functions fill, expected 1"),
        (FILL.call("shut"), "0 times 'call of shut' in Tank.fill, expected 1; describe the place"),
        (FILL.call("close"), "2 times 'call of close' in Tank.fill, expected 1; say which"),
        (FILL.call("close", 1, of=3), "2 times 'call of close' in Tank.fill, expected 3"),
        (FILL.call("open").argument(3), "0 times 'argument 3'"),
        (FILL.call("open").element("level"), "0 times 'element that speaks of level'"),
    ],
)
def test_a_place_that_is_not_there_once_is_told(
    place: Place, complaint: str, tmp_path: Path
) -> None:
    with pytest.raises(NoSuchPlace, match=re.escape(complaint)):
        with_fault(tmp_path, dropped(place))


def test_a_change_that_changes_nothing_is_told(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="nothing has changed"):
        with_fault(tmp_path, becomes(FILL.call("open"), "it"))


# --- the faults of the device tests ---------------------------------------------------------------

# It is renamed with the rest, so it is a file like the rest.
APPLY_ALL = """
import json
from pathlib import Path
from support.device.faults import ALL
print(json.dumps([fault.applied(Path("offload")) for fault in ALL]))
"""


def texts() -> set[str]:
    """Return every string of the file that describes the faults."""
    nodes = ast.walk(ast.parse(FAULTS.read_text()))
    values = {node.value for node in nodes if isinstance(node, ast.Constant)}
    return {value for value in values if isinstance(value, str)}


def copied(root: Path) -> Path:
    """Copy to `root` the modules that have faults, the faults, and what is needed to apply them."""
    modules = [PACKAGE.joinpath(*text.split(".")).with_suffix(".py") for text in texts()]
    library = (TESTS / "support" / "mutation").glob("*.py")
    packages = [FAULTS.parent / "__init__.py", FAULTS.parents[1] / "__init__.py"]
    for path in [*filter(Path.exists, modules), *library, *packages, FAULTS]:
        target = root / path.relative_to(TESTS if path.is_relative_to(TESTS) else PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (root / "apply_all.py").write_text(APPLY_ALL)
    return root


def applied(root: Path) -> list[str]:
    """Return the sources with one fault each, from a copy."""
    done = subprocess.run(
        [sys.executable, "apply_all.py"], cwd=root, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def as_they_are(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return applied(copied(tmp_path_factory.mktemp("as-they-are")))


def test_every_fault_has_its_one_place_and_compiles(as_they_are: list[str]) -> None:
    for source in as_they_are:
        compile(source, "a fault", "exec")
    assert len(as_they_are) == len(set(as_they_are)) > 40


def names_of_places() -> list[str]:
    """List functions and classes of the package that the descriptions of faults name."""
    words = {word for text in texts() if " " not in text for word in text.split(".")}
    defined = re.compile(r"^ *(?:def|class) (?!__)(\w+)", re.MULTILINE)
    found = {name for path in PACKAGE.rglob("*.py") for name in defined.findall(path.read_text())}
    modules = {path.stem for path in PACKAGE.rglob("*")}  # a script does not rename files
    return sorted((found & words) - modules - {*dir(str), *dir(list)})  # nor Python's own methods


IN_IT, CALLED_THERE = "_let_go_of_sources", "await_upload"


@pytest.mark.parametrize(
    "names",
    [[IN_IT], [CALLED_THERE], names_of_places()],
    ids=["of the function", "of what is called", "of all"],
)
def test_a_rename_by_script_leaves_every_fault_where_it_was(
    names: list[str], as_they_are: list[str], tmp_path: Path
) -> None:
    assert set(names) <= set(names_of_places())
    words = re.compile(rf"\b({'|'.join(names)})\b")

    def renamed(text: str) -> str:
        return words.sub(r"\1_by_another_name", text)

    root = copied(tmp_path)
    for path in root.rglob("*.py"):
        path.write_text(renamed(path.read_text()))
    expected = [renamed(source) for source in as_they_are]
    assert applied(root) == expected != as_they_are


def test_formatting_and_the_order_of_functions_do_not_matter(
    as_they_are: list[str], tmp_path: Path
) -> None:
    root = copied(tmp_path)
    for path in (root / "offload").rglob("*.py"):
        path.write_text(reordered(path.read_text()))
    assert [reordered(one) for one in applied(root)] == [reordered(one) for one in as_they_are]


def reordered(text: str) -> str:
    """Return the source without comments, formatted otherwise, and with what a class or module
    defines in reverse.
    """
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef):
            moved = [one for one in node.body if isinstance(one, Function | ast.ClassDef)]
            rest = [one for one in node.body if one not in moved]
            node.body = [*rest, *sorted(moved, key=lambda one: one.name, reverse=True)]
    return ast.unparse(tree)
