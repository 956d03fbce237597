"""Faulty versions of the device code, made from its own source: without one wait, with an event
that is recorded elsewhere, with work on another stream, and with the faults of `faults.py`.

The first three are found in the source, so that a new one cannot be forgotten. `mutants` returns
all of the transfer; `loaded` gives the transfer's module with one of them in it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import offload
from support.device.faults import BY_HAND, OF_MODELS, OF_RANKS
from support.mutation import Fault, Seat, Tree
from support.mutation.tree import seats

PACKAGE = Path(offload.__file__).parent
WAITS = {"wait_event", "wait_stream", "synchronize", "record_stream"}


@dataclass(frozen=True)
class Mutant:
    """A module's source with a fault in it. module: its name in the package."""

    module: str
    name: str
    source: str


def mutant_of(fault: Fault) -> Mutant:
    return Mutant(fault.module, fault.name, fault.applied(PACKAGE))


def mutants_of_models() -> list[Mutant]:
    return [mutant_of(fault) for fault in OF_MODELS]


def mutants_of_ranks() -> list[tuple[Mutant, tuple[str, int]]]:
    """Return the mutants of sharded models, each with the schedule that notices it."""
    return [(mutant_of(fault), schedule) for fault, schedule in OF_RANKS]


@contextmanager
def patched(mutant: Mutant) -> Iterator[None]:
    """Give the functions of a module and its classes their faulty code while the block runs."""
    module = importlib.import_module(f"offload.{mutant.module}")
    faulty = ModuleType(module.__name__)
    sys.modules[f"{module.__name__}?"] = faulty
    faulty.__dict__.update(__name__=f"{module.__name__}?")
    exec(compile(mutant.source, mutant.name, "exec"), faulty.__dict__)
    undo = []
    for owner, name, function in _functions(module):
        other = vars(faulty if owner is module else getattr(faulty, owner.__name__))[name]
        if isinstance(other, property):
            other = other.fget
        # The function inside its decorators gets other code in place: all references to it have
        # the fault.
        inner, changed = inspect.unwrap(function), inspect.unwrap(other)
        if _gist(inner) != _gist(changed):
            undo.append((inner, inner.__code__))
            inner.__code__ = changed.__code__
    assert undo, "nothing has changed"
    try:
        yield
    finally:
        for inner, code in undo:
            inner.__code__ = code
        del sys.modules[f"{module.__name__}?"]


def _functions(module: ModuleType) -> Iterator[tuple[Any, str, FunctionType]]:
    classes = [one for one in vars(module).values() if isinstance(one, type)]
    owners = [module, *(one for one in classes if one.__module__ == module.__name__)]
    for owner in owners:
        for name, found in list(vars(owner).items()):
            function = found.fget if isinstance(found, property) else found
            if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                yield owner, name, function


def _gist(function: Any) -> tuple[Any, ...]:
    code = function.__code__
    return code.co_code, code.co_names, [c for c in code.co_consts if not hasattr(c, "co_code")]


def mutants() -> list[Mutant]:
    """Return the mutants of the transfer: those found in its source, then those of `BY_HAND`."""
    found = []
    for path in sorted((PACKAGE / "device").glob("*.py")):
        module = f"device.{path.stem}"
        for what, source in _changes(Tree(path.read_text())):
            found.append(Mutant(module, f"{module} {what}", source))
    return [*found, *(mutant_of(fault) for fault in BY_HAND)]


def _changes(tree: Tree) -> Iterator[tuple[str, str]]:
    """Yield description and changed source, one fault each; `tree` is as before afterwards."""
    for seat in list(seats(tree.root)):
        node = seat.node
        for what, replacement in _faults(seat):
            function = tree.function_of(node)
            assert function is not None, f"{what}: not in a function"
            seat.put(replacement)
            yield f"{tree.qualified(function)} {what}", tree.unparsed()
            seat.put(node)


def _faults(seat: Seat) -> Iterator[tuple[str, ast.AST]]:
    node = seat.node
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        function = node.value.func
        if isinstance(function, ast.Attribute) and function.attr in WAITS:
            yield f"without {ast.unparse(node)}", ast.Pass()
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "record_event"
    ):
        stream = ast.unparse(node.func.value)
        idle = ast.parse(f"torch.Stream({stream}.device).record_event()", mode="eval").body
        yield f"{stream}.record_event() on another stream", idle
    if isinstance(node, ast.With):
        call = node.items[0].context_expr
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "on":
            yield f"not {ast.unparse(call)}", ast.If(ast.Constant(True), node.body, [])


def synchronisations() -> int:
    """Count how often the source names waits, events and streams, without parsing it."""
    words = [f".{word}(" for word in (*sorted(WAITS), "record_event")]
    words.append("with on(")
    texts = [path.read_text() for path in (PACKAGE / "device").glob("*.py")]
    return sum(text.count(word) for text in texts for word in words)


@contextmanager
def loaded(mutant: Mutant) -> Iterator[ModuleType]:
    """Load `offload.device.device` with the fault while the block runs."""
    names = ["offload.device.buffer", "offload.device.device"]
    kept = {name: sys.modules.pop(name) for name in names}
    try:
        for name in names:
            if name == f"offload.{mutant.module}":
                module = ModuleType(name)
                sys.modules[name] = module
                exec(compile(mutant.source, mutant.name, "exec"), module.__dict__)
            else:
                importlib.import_module(name)
        yield sys.modules[names[-1]]
    finally:
        sys.modules.update(kept)
