"""Imports point down. The rows are those of docs/design.md; a new file gets its row here."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import offload

pytestmark = pytest.mark.quick

# Row 0 stands below everything; its files and those of row 1 may import each other, but not in a
# circle.
ROWS = [
    {
        "errors",
        "locks",
        "log",
        "portable",
        "modes",
        "torch_versions",
        "rules",
        "arguments",
        "reference",
        "_native",
        "kernels",
    },
    {
        "planner",
        "block",
        "budget",
        "ticket",
        "extents",
        "layout",
        "limits",
        "partition",
        "sharding",
        "sliced_gradient",
        "gradient_handle",
        "spilled_gradient",
        "machine",
        "machine_disk",
        "config",
        "metrics",
        "decoded",
        "event_log",
        "number_log",
        "placeholder",
        "draws",
        "model_buffers",
        "casts",
        "heap",
        "holders",
        "saved_storage",
        "rank_share",
        "units",
        "shares",
        "model_plan",
        "initialise",
        "timeline",
        "node_share",
        "private_file",
        "format",
        "profile",
        "tuning",
        "trial",
        "tuner",
        "run_file",
        "workload",
        "recording",
        "gauges",
        "loggers",
        "screen",
        "synthetic_llama",
        "meta_cost",
    },
    {"transfer", "pool", "store", "shard", "page"},
    {"scheduler", "trace", "matching", "side_channel"},
    {"tiers"},
    {"hooks", "optim", "report"},
    {"live_stats"},
    {"engine", "checkpoint", "block_staging", "services", "start", "recompute"},
    {"foresight"},
    {"accord", "sharded_state"},
    {"prepared"},
    {"report_builder"},
    {"api"},
    {"measurement", "selftest"},
    {"cli"},
    {"progress_line", "trial_loop", "signals", "huggingface"},
    {"__init__", "__main__"},
]
# The same within packages of many files; there too those of row 0 may import each other.
WITHIN = {
    "tiers": [
        {"device_budget", "activation_store", "device_network", "gathered"},
        {"prefetch_depth", "block_store", "external_edits", "copies", "gathered_device", "spill"},
        {"residency", "gradients", "activations", "device_tier", "gathered_tier", "gathered_host"},
        {"mean_gradients"},
        {"device_residency", "device_gradients", "sharded_residency", "sharded_gradients"},
    ],
    "foresight": [
        {"forecast_request", "forecast", "machines", "model_shape", "model_source"},
        {"footprint", "prepare_plan", "simulation"},
        {"model_cost", "simulator"},
        {"forecaster", "replay"},
    ],
}


def rows_by_name(rows: list[set[str]]) -> dict[str, int]:
    return {name: row for row, names in enumerate(rows) for name in names}


ROW_OF = rows_by_name(ROWS)


def imports_of(file: Path, package: str) -> set[str]:
    """Names directly below `package` that `file` imports, anywhere in the file."""
    found, depth = set(), package.count(".") + 1
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: only absolute imports, line {node.lineno}"
            module = node.module or ""
            if module == package:
                found |= {alias.name for alias in node.names}
            elif module.startswith(f"{package}."):
                found.add(module.split(".")[depth])
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            found |= {name.split(".")[depth] for name in names if name.startswith(f"{package}.")}
    return found


def graph(
    root: Path, package: str = "offload", row_of: dict[str, int] = ROW_OF
) -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for file in sorted(root.rglob("*.py")):
        me = file.relative_to(root).parts[0].removesuffix(".py")
        # `from offload import __version__` and the like name attributes of the package, that is
        # __init__.
        names = {name if name in row_of else "__init__" for name in imports_of(file, package)}
        edges.setdefault(me, set()).update(names - {me})
    return edges


def upward(
    edges: dict[str, set[str]], row_of: dict[str, int] = ROW_OF, open_row: int = 1
) -> list[str]:
    """open_row: up to this one, files of one row may import each other."""
    return [
        f"{me} -> {dep}"
        for me, deps in edges.items()
        for dep in sorted(deps)
        if row_of[dep] > row_of[me] or row_of[dep] == row_of[me] > open_row
    ]


def circles(edges: dict[str, set[str]]) -> list[str]:
    def reaches(start: str, goal: str, seen: set[str]) -> bool:
        return any(
            dep == goal or (dep not in seen and reaches(dep, goal, seen | {dep}))
            for dep in edges.get(start, ())
        )

    return [name for name in edges if reaches(name, name, set())]


ROOT = Path(offload.__file__).parent


def test_every_file_has_a_row() -> None:
    names = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in ROOT.rglob("*.py")}
    assert names <= set(ROW_OF), f"give these a row: {sorted(names - set(ROW_OF))}"


def test_imports_point_down() -> None:
    # Commands read the version from the package itself.
    assert [edge for edge in upward(graph(ROOT)) if edge != "cli -> __init__"] == []


@pytest.mark.parametrize("package", WITHIN)
def test_imports_within_a_package_point_down(package: str) -> None:
    row_of = {**rows_by_name(WITHIN[package]), "__init__": len(WITHIN[package])}
    edges = graph(ROOT / package, f"offload.{package}", row_of)
    assert set(edges) == set(row_of), "each file has a row"
    assert upward(edges, row_of, open_row=0) == []
    assert circles(edges) == []


def test_no_circles() -> None:
    edges = {me: deps - {"__init__"} for me, deps in graph(ROOT).items()}
    assert circles(edges) == []


def test_the_check_finds_what_it_should(tmp_path: Path) -> None:
    (tmp_path / "transfer.py").write_text("def f():\n    from offload.scheduler import x\n")
    (tmp_path / "pool.py").write_text("import offload.store.file\n")
    (tmp_path / "config.py").write_text("from offload import machine\n")
    (tmp_path / "machine.py").write_text("from offload.config import Config\n")
    edges = graph(tmp_path)
    assert upward(edges) == ["pool -> store", "transfer -> scheduler"]
    assert sorted(circles(edges)) == ["config", "machine"]


def imported_modules(root: Path) -> dict[str, set[str]]:
    """Top-level names of foreign packages that each file imports."""
    found: dict[str, set[str]] = {}
    for file in root.rglob("*.py"):
        names = found.setdefault(str(file.relative_to(root)), set())
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    return found


def test_nothing_can_run_what_a_file_says() -> None:
    """No pickle, no eval, no torch.load in the package."""
    for file, modules in imported_modules(ROOT).items():
        assert not modules & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}, file
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                assert called not in {"eval", "exec", "torch.load"}, f"{file.name}: {called}"


# Who may speak of what: a word, and the files or folders it may stand in.
RESERVED = {
    "torch.Stream": {"transfer"},
    "torch.Event": {"transfer"},
    "torch.accelerator": {"transfer", "pool", "machine"},
    "torch.cuda": {"pool"},  # registering host memory has no general call
    "torch.distributed": {"shard"},
}


def test_streams_and_their_like_stay_with_their_owner() -> None:
    root = Path(offload.__file__).parent
    for file in sorted(root.rglob("*.py")):
        me = file.relative_to(root).parts[0].removesuffix(".py")
        for number, line in enumerate(file.read_text().splitlines(), start=1):
            for word, owners in RESERVED.items():
                assert word not in line or me in owners, f"{file}:{number} speaks of {word}"


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
    """Names of what may only be used in locks.py, and calls of `acquire`, with their lines."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module in ("threading", "queue"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found += [f"{node.lineno}: {name}" for name in sorted(names & ENTERED_BY_PYTHON)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in ENTERED_BY_PYTHON:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".acquire"):
            found.append(f"{node.lineno}: {ast.unparse(node.func)}")
    return found


def test_locks_are_entered_by_c_or_by_their_own_file() -> None:
    for file in sorted(ROOT.rglob("*.py")):
        if file.name == "locks.py":
            continue
        allowed = ["self._gate.acquire"] if file.name == "ticket.py" else []  # that nobody has yet
        found = [each for each in unsafe_locks(file.read_text()) if each.split()[1] not in allowed]
        assert found == [], f"{file}: use offload.locks: {found}"


def test_the_check_of_locks_finds_what_it_should() -> None:
    source = "from threading import Event, Lock\nx = threading.Condition()\nx.acquire(False)\n"
    assert sorted(unsafe_locks(source)) == [
        "1: threading.Event",
        "2: threading.Condition",
        "3: x.acquire",
    ]
