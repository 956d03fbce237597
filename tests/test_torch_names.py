"""Every name of torch that the package uses is there: what no test can call without a device, a
version of torch might have dropped. `make versions` asks several.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import offload

ROOT = Path(offload.__file__).parent
KINDS = {"torch.Stream": torch.Stream, "torch.Event": torch.Event}
# Calls whose result is a stream or an event, by their last name.
MAKERS = {
    "Stream": "torch.Stream",
    "current_stream": "torch.Stream",
    "Event": "torch.Event",
    "record_event": "torch.Event",
}


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return what each name of a file that comes out of torch stands for: `nn` for `torch.nn`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def imported_modules(tree: ast.Module) -> set[str]:
    """Return modules of torch that a file imports as such: `import torch._dynamo`."""
    names = [a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names]
    return {name for name in names if name.split(".")[0] == "torch"}


def chain_of(node: ast.expr, known: dict[str, str]) -> str | None:
    """Return `torch.accelerator.current_stream` as text; None if it does not begin with torch."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        begin = chain_of(node.value, known)
        return None if begin is None else f"{begin}.{node.attr}"
    return None


def chains_in(tree: ast.Module) -> set[str]:
    known = imported_names(tree)
    nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    chains = {chain for node in nodes if (chain := chain_of(node, known)) is not None}
    return chains | imported_modules(tree) | set(known.values())


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
    }


CHAINS = sorted(set().union(*map(chains_in, trees().values())))


def find(chain: str) -> Any:
    """Return the object; import its modules where no other code has."""
    names = chain.split(".")
    found: Any = torch
    for depth, name in enumerate(names[1:], start=2):
        if not hasattr(found, name) and hasattr(found, "__path__"):
            with contextlib.suppress(ModuleNotFoundError):
                importlib.import_module(".".join(names[:depth]))
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("chain", CHAINS)
def test_torch_has_it(chain: str) -> None:
    find(chain)


def test_a_name_that_torch_lacks_is_found() -> None:
    tree = ast.parse(
        "import torch\nfrom torch import nn as layers\ndef f():\n"
        "    from torch.utils.weak import Gone\n    torch.accelerator.no_such_call(layers.Odd)\n"
    )
    missing = set()
    for chain in chains_in(tree):
        try:
            find(chain)
        except AttributeError:
            missing.add(chain)
    assert missing == {
        "torch.accelerator.no_such_call",
        "torch.nn.Odd",
        "torch.utils.weak.Gone",
    }


# --- what is done with streams and events --------------------------------------------------------


def kind_of(node: ast.expr | None) -> str | None:
    """Return `torch.Stream` or `torch.Event`, if an annotation or a call says so."""
    if node is None:
        return None
    if isinstance(node, ast.Call):
        return MAKERS.get(last_name(node.func) or "")
    named = ast.unparse(node).removesuffix(" | None")
    return named if named in KINDS else None


def last_name(node: ast.expr) -> str | None:
    """Return `up` of `self._loan.up`."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def typed_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield names of variables, arguments and fields, each with its kind: empty if it is neither a
    stream nor an event.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, kind_of(node.annotation) or ""
        elif isinstance(node, ast.AnnAssign):
            yield last_name(node.target) or "", kind_of(node.annotation) or ""
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                yield from assigned(target, node.value)


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, str]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, other in zip(target.elts, value.elts, strict=False):
            yield from assigned(one, other)
    elif isinstance(value, ast.Call):
        yield last_name(target) or "", kind_of(value) or ""


def used_methods() -> set[tuple[str, str]]:
    """Return all attributes of streams and events that offload/device looks at."""
    files = [tree for name, tree in trees().items() if name.startswith("device/")]
    kinds = {name: kind for tree in files for name, kind in typed_names(tree) if kind}
    found = set()
    for node in (node for tree in files for node in ast.walk(tree)):
        if isinstance(node, ast.Attribute):
            kind = kind_of(node.value) if isinstance(node.value, ast.Call) else None
            kind = kind or kinds.get(last_name(node.value) or "")
            if kind is not None:
                found.add((kind, node.attr))
    return found


def test_streams_and_events_have_what_is_used_of_them() -> None:
    used = used_methods()
    assert used >= {
        ("torch.Stream", "record_event"),
        ("torch.Stream", "wait_event"),
        ("torch.Stream", "synchronize"),
        ("torch.Stream", "stream_id"),
        ("torch.Event", "query"),
        ("torch.Event", "synchronize"),
    }
    assert {(kind, name) for kind, name in used if not hasattr(KINDS[kind], name)} == set()
    for name in ("is_pinned", "pin_memory", "record_stream"):
        assert hasattr(torch.Tensor, name)
