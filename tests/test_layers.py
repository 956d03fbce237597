"""Imports point down. The rows are those of docs/design.md; a package has one of them."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import offload

pytestmark = pytest.mark.quick

ROOT = Path(offload.__file__).parent

# From the bottom up. The packages of one row do not import each other.
ROWS = [
    {"_native"},
    {"core"},
    {"kernels"},
    {"storage", "device"},
    {"distributed"},
    {"planning"},
    {"optim"},
    {"params"},
    {"telemetry"},
    {"checkpoint"},
    {"api"},
    {"integrations"},
    {"tools"},
    {"__init__", "__main__"},
]
ROW_OF = {name: row for row, names in enumerate(ROWS) for name in names}

FROM_THE_TOP = {("tools", "__init__")}  # commands read the version from the package itself
# Training never runs these: a forecast by the name of a model loads them when it is asked for.
LATE = {("api", "tools")}

MOST_ENTRIES = 15  # of the top level: a stranger sees the architecture in one listing


def modules(root: Path) -> dict[str, Path]:
    """Return every module below `root` by its dotted name; a package by that of its folder."""
    found = {}
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and parts[:-1] else parts)] = file
    return found


def imports_of(file: Path, known: dict[str, Path], package: str = "offload") -> set[str]:
    """Return the modules of the package that `file` imports, anywhere in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: only absolute imports, line {node.lineno}"
            module = node.module or ""
            if module != package and not module.startswith(f"{package}."):
                continue
            below = module.removeprefix(package).removeprefix(".")
            for alias in node.names:
                full = f"{below}.{alias.name}".removeprefix(".")
                inside = full if full in known or full in ROW_OF else below
                found.add(inside or "__init__")
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {n.removeprefix(f"{package}.") for n in names if n.startswith(f"{package}.")}
            found |= {"__init__" for n in names if n == package}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in BY_NAME:
            names = [each.value for each in node.args if isinstance(each, ast.Constant)]
            assert not any(str(n).startswith(package) for n in names), f"{file}: {node.lineno}"
    return found | {outer for name in found for outer in outer_packages(name)}


BY_NAME = {"importlib.import_module", "import_module", "__import__"}


def outer_packages(name: str) -> list[str]:
    """List the packages around a module: their `__init__` runs first when it is imported."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def graph(root: Path) -> dict[str, set[str]]:
    known = modules(root)
    return {
        name: imports_of(file, known) - {name, *outer_packages(name)}
        for name, file in known.items()
    }


def upward(edges: dict[str, set[str]]) -> list[str]:
    """List imports from one package to another that is not below it."""
    found = set()
    for name, deps in edges.items():
        me = name.partition(".")[0]
        for other in {dep.partition(".")[0] for dep in deps} - {me}:
            if ROW_OF[other] >= ROW_OF[me] and (me, other) not in FROM_THE_TOP | LATE:
                found.add(f"{me} -> {other}")
    return sorted(found)


def circles(edges: dict[str, set[str]]) -> list[str]:
    """List modules that import themselves by way of others."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        left = list(edges.get(start, ()))
        while left:
            name = left.pop()
            if name not in seen:
                seen.add(name)
                left.extend(edges.get(name, ()))
        return seen

    return [name for name in edges if name in reached(name)]


def test_the_architecture_is_one_listing() -> None:
    hidden = ("__pycache__", "py.typed", "_native")
    entries = {each.name for each in ROOT.iterdir() if not each.name.startswith(hidden)}
    assert len(entries) <= MOST_ENTRIES, sorted(entries)
    assert {name.removesuffix(".py") for name in entries} | {"_native"} == set(ROW_OF)


def test_the_page_has_the_same_rows() -> None:
    page = (ROOT.parent / "docs" / "design.md").read_text()
    table = page[page.index("| package |") :].partition("\n\n")[0]
    cells = [line.split(" | ")[0] for line in table.splitlines()[2:]]
    found = [{name.removesuffix(".py") for name in re.findall(r"`([\w.]+)/?`", c)} for c in cells]
    expected = [names - {"_native", "__init__", "__main__"} for names in ROWS]
    assert found[::-1] == [names for names in expected if names]


def test_every_folder_is_a_package_that_says_what_it_is_for() -> None:
    for folder in {file.parent for file in ROOT.rglob("*.py")}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_no_entry_has_a_public_name() -> None:
    """A module that is imported would stand where the function of its name was."""
    entries = {file.name.removesuffix(".py") for file in ROOT.iterdir()}
    assert entries & set(offload.__all__) == set()


def test_imports_point_down() -> None:
    assert upward(graph(ROOT)) == []


def test_no_circles() -> None:
    edges = {name: deps - {"__init__"} for name, deps in graph(ROOT).items()}
    assert circles(edges) == []


def test_the_check_finds_what_it_should(tmp_path: Path) -> None:
    for name, source in {
        "core/pool.py": "from offload.storage.files import File\n",
        "device/streams.py": "def f():\n    import offload.storage.disk\n",
        "core/config.py": "from offload.core import budget\n",
        "core/budget.py": "from offload.core.config import Config\n",
        "storage/disk.py": "from offload import _native, ConfigError\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(source)
    edges = graph(tmp_path)
    assert upward(edges) == ["core -> storage", "device -> storage", "storage -> __init__"]
    assert circles(edges) == ["core.budget", "core.config"]


LOADS = """
import sys
import offload
assert "torch" not in sys.modules
import torch
layers = [torch.nn.Linear(4, 4) for _ in range(2)]
offload.wrap(torch.optim.AdamW(layers[0].parameters()), host_memory="1MiB").close()
model, optimizer = offload.prepare(
    layers[1], torch.optim.AdamW(layers[1].parameters()), host_memory="1MiB"
)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
str(offload.report(optimizer))
optimizer.close()
assert not [name for name in sys.modules if name.startswith("offload.tools")]
"""


def test_what_a_training_loads() -> None:
    """`import offload` is free of torch, and a training loads no tools."""
    subprocess.run([sys.executable, "-c", LOADS], check=True, timeout=60)


def imported_modules(root: Path) -> dict[str, set[str]]:
    """Return the top-level names of foreign packages that each file imports."""
    found: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        names = found.setdefault(str(file.relative_to(root)), set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    return found


def dotted_names(tree: ast.AST) -> set[tuple[int, str]]:
    """Find the names that a file uses of modules, whatever it calls them: line and dotted name."""
    of: dict[str, str] = {}
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                of[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
                found.add((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                of[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                found.add((node.lineno, f"{node.module}.{alias.name}"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            if first in of:
                found.add((node.lineno, f"{of[first]}.{rest}"))
    return found


def test_names_are_found_by_whatever_alias() -> None:
    source = "import torch as t\nfrom torch import distributed as d, load\nt.Event()\nd.gather()\n"
    assert {name for _, name in dotted_names(ast.parse(source))} == {
        "torch",
        "torch.distributed",
        "torch.load",
        "torch.Event",
        "torch.distributed.gather",
    }


def test_nothing_can_run_what_a_file_says() -> None:
    """No pickle, no eval, no torch.load in the package."""
    for file, modules in imported_modules(ROOT).items():
        assert not modules & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, file
    for file in ROOT.rglob("*.py"):
        names = {name for _, name in dotted_names(ast.parse(file.read_text()))}
        assert not names & {"torch.load", "torch.serialization.load"}, file
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load"}, f"{file.name}: {called}"


# Who may speak of what: a word, and the files or folders it may stand in.
RESERVED = {
    "torch.Stream": {"device/"},
    "torch.Event": {"device/"},
    "torch.accelerator": {"device/", "core/pool.py", "core/host_facts.py"},
    "torch.cuda": {"core/pool.py"},  # registering host memory has no general call
    "torch.distributed": {"distributed/"},
    "torch._C._distributed_c10d": {"distributed/"},
    "torch.xpu": set(),
    "torch.mps": set(),
}


def test_streams_and_their_like_stay_with_their_owner() -> None:
    root = Path(offload.__file__).parent
    for file in sorted(root.rglob("*.py")):
        me = file.relative_to(root).as_posix()
        lines = enumerate(file.read_text().splitlines(), start=1)
        spoken = {(number, word) for number, line in lines for word in RESERVED if word in line}
        for number, name in sorted(spoken | dotted_names(ast.parse(file.read_text()))):
            for word, owners in RESERVED.items():
                is_it = name == word or name.startswith(f"{word}.")
                assert not is_it or me.startswith(tuple(owners)), f"{file}:{number}: {name}"


# Python enters these, so that Ctrl-C may leave their locks held, or they wait without a deadline.
# What C has made (Lock, RLock, SimpleQueue) is safe, but only by `with`.
ENTERED_BY_PYTHON = {
    "threading.Condition",
    "threading.Event",
    "threading.Semaphore",
    "threading.BoundedSemaphore",
    "threading.Barrier",
    "threading.Timer",
    "queue.Queue",
    "queue.LifoQueue",
    "queue.PriorityQueue",
}


def unsafe_locks(source: str) -> list[str]:
    """List names that only locks.py may use, and calls of `acquire`, with their lines."""
    tree = ast.parse(source)
    used = sorted(dotted_names(tree))
    found = [f"{line}: {name}" for line, name in used if name in ENTERED_BY_PYTHON]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".acquire"):
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
    return found


def test_locks_are_entered_by_c_or_by_their_own_file() -> None:
    for file in sorted(ROOT.rglob("*.py")):
        if file == ROOT / "core" / "locks.py":
            continue
        allowed = ["self._gate.acquire"] if file.name == "ticket.py" else []  # of a new ticket
        found = [each for each in unsafe_locks(file.read_text()) if each.split()[1] not in allowed]
        assert found == [], f"{file}: use offload.core.locks: {found}"


def test_the_check_of_locks_finds_what_it_should() -> None:
    source = "from threading import Event, Lock\nimport threading as th\n"
    source += "x = th.Condition()\nx.acquire(False)\n"
    assert sorted(unsafe_locks(source)) == [
        "1: threading.Event",
        "3: threading.Condition",
        "4: x.acquire",
    ]
