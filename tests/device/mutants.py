"""Faults for the device code, made from its own source: every wait, every place where an event is
recorded, every stream that work is put on, and others: what is held, in which order, by whom.

The first three are found in the source, so that a new one cannot be forgotten; the others are
listed by hand. `mutants` names them all; `loaded` gives the package with one of them in it.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import offload.transfer

FOLDER = Path(offload.transfer.__file__).parent
WAITS = {"wait_event", "wait_stream", "synchronize", "record_stream"}

# Faults that are no missing call: file, text, text instead of it, what is wrong.
BY_HAND = [
    (
        "device.py",
        "after, None, (host,), note",
        "after, None, (), note",
        "a fill's host memory free",
    ),
    ("device.py", "target, (host, target))", "target, (target,))", "a write's host memory free"),
    ("device.py", "target, (host, target))", "None, (host,))", "a write's target free"),
    ("device.py", "host, (host,), source,", "host, (host,), None,", "a read's source free"),
    ("device.py", "or not self.queue[0].event.query()", "", "a ticket ends before its copy"),
    (
        "device.py",
        "weakref.finalize(self, flights.finish)",
        "pass",
        "a lost transfer's copies",
    ),
    (
        "device.py",
        "flight.owner.wait_event(flight.event)\n            flight.source = None",
        "flight.source = None\n            flight.owner.wait_event(flight.event)",
        "memory let go before the wait",
    ),
    (
        "device.py",
        "flight.owner.wait_event",
        "torch.accelerator.current_stream(self.device).wait_event",
        "another stream than the owner waits",
    ),
    ("buffer.py", ", *(stream.record_event() for stream in self._loan.users)]", "]", "a refill"),
    ("buffer.py", "[self._loan.filled, *(", "[*(", "filled from elsewhere before the fill"),
    ("buffer.py", "self._loan.filled = event", "pass", "no fill is noted"),
    ("buffer.py", "holders(memory) > 1", "holders(memory) > 2", "one view passes unnoticed"),
    ("buffer.py", "return memory.detach()", "return memory", "the buffer's own tensor is no view"),
    ("buffer.py", "self._loan.users.append(stream)", "pass", "users are not noted"),
]

# The same for models that are prepared for a device: module, text, text instead of it, fault.
OF_MODELS = [
    ("tiers.device_tier", ".use()\n", "._loan.memory.detach()\n", "nobody waits for a block"),
    (
        "tiers.device_tier",
        "elif block.on_device is not Presence.AWAY:",
        "elif 0:",
        "an old copy is used",
    ),
    (
        "tiers.device_tier",
        "            return\n        if block.is_attached:\n            self.detach(block)\n",
        "            return\n        if 0:\n            self.detach(block)\n",
        "released without the flip",
    ),
    (
        "tiers.copies",
        "        self.hide(block)\n        block.is_attached = False",
        "        block.is_attached = False",
        "no flip back",
    ),
    ("tiers.copies", "!= self._versions[block.number] or", "!= _versions(block) or", "a lost edit"),
    ("tiers.copies", "or not self.is_in_place(block)\n", "or False\n", "other memory is lost"),
    ("tiers.device_gradients", "addend.ticket.wait()", "pass", "a sum of what has not come"),
    (
        "tiers.device_gradients",
        "        if ticket is not None:\n            ticket.wait()",
        "        if ticket is not None:\n            pass",
        "a gradient before it has come",
    ),
    (
        "tiers.device_gradients",
        "self._add(param, held, grad.detach())\n        set_own_grad(param, None)",
        "self._add(param, held, grad.detach())\n        pass",
        "a gradient stays and counts twice",
    ),
    ("tiers.device_gradients", "if addend.is_first:", "if 0:", "added to what was there before"),
    (
        "tiers.device_gradients",
        "if param in self._on_disk and",
        "if 0 and",
        "the CPU waits for a copy",
    ),
    (
        "tiers.device_gradients",
        "holders(place) > 1",
        "False",
        "a gradient that is held is overwritten",
    ),
    (
        "tiers.device_gradients",
        "target[part], values, slot",
        "target, values, slot",
        "a wrong part",
    ),
    (
        "tiers.device_gradients",
        "held.detach().copy_(grad.detach())",
        "pass",
        "a gradient that was lent does not come home",
    ),
    (
        "tiers.device_residency",
        "stack.callback(self._take_back, block)",
        "pass",
        "nothing is copied back",
    ),
    (
        "tiers.device_residency",
        "if block.generation != generation:",
        "if 0:",
        "loaded values stay away",
    ),
    (
        "tiers.device_residency",
        "if block.is_attached and block.number not in self._lent:",
        "if 0:",
        "parameters are seen outside of runs",
    ),
    (
        "tiers.device_residency",
        "self.tier.await_lift(block)\n        if",
        "if",
        "dropped too early",
    ),
    (
        "tiers.device_residency",
        "self.tier.await_lift(block)  # the",
        "pass  # the",
        "updated before the device has its copy",
    ),
    (
        "tiers.device_residency",
        "self.tier.await_lift(block)\n        self._shown",
        "self._shown",
        "loaded before the device has its copy",
    ),
    ("guard", "nowhere, GuardedOnDevice)", "nowhere, Guarded)", "gradients are not seen"),
    (
        "tiers.allowance",
        "int(max(_MARGIN, _LONGER",
        "int(0 * max(_MARGIN, _LONGER",
        "no room for others",
    ),
    ("tiers.allowance", "self._least_bytes)", "left)", "too much before anything is known"),
]

# And for those that are shared out over ranks; with the schedule that notices it.
OF_RANKS = [
    (
        "tiers.device_wholes",
        "return self.buffer.use()",
        "return self.buffer._loan.memory.detach()",
        "nobody waits for a gathered block",
        ("lazy", 0),
    ),
    (
        "tiers.device_network",
        ".then(lambda reading: reading)",
        "",
        "a mean ends before it has been read",
        ("lazy", 0),
    ),
    ("tiers.gathered_tier", "lift.wait()", "pass", "nobody waits for a lift", ("eager", 0)),
    (
        "tiers.sharded_residency",
        "self.tier.await_own(block)  # the others",
        "pass  # the others",
        "updated before the device has its slice",
        ("eager", 0),
    ),
    (
        "tiers.mean_gradients",
        "flight.ticket.wait()",
        "pass",
        "a mean before it has come",
        ("lazy", 0),
    ),
    (
        "tiers.mean_gradients",
        "self._slots.append(flight.slot)",
        "pass",
        "a staging place is lost",
        ("lazy", 0),
    ),
    (
        "tiers.mean_gradients",
        "direct = one.is_empty and number not in self._on_disk",
        "direct = one.is_empty",
        "the CPU waits for a gradient on disk",
        ("eager", 0),
    ),
    (
        "tiers.sharded_residency",
        "                self.tier.forget(block)\n                block.generation += 1",
        "                block.generation += 1",
        "old whole blocks after the update",
        ("eager", 0),
    ),
]


# The same for gradients that several streams make.
OF_STREAMS = [
    (
        "tiers.device_wholes",
        "buffer.note_fill()  # gradients",
        "pass  # gradients",
        "zeroed too late",
    ),
]


@dataclass(frozen=True)
class Mutant:
    file: str
    name: str
    source: str


def mutants_of_models() -> list[Mutant]:
    return [mutant_of(*one) for one in OF_MODELS]


def mutants_of_ranks() -> list[tuple[Mutant, tuple[str, int]]]:
    """Each with the schedule that notices it."""
    return [(mutant_of(*one), schedule) for *one, schedule in OF_RANKS]


def mutant_of(module: str, old: str, new: str, what: str) -> Mutant:
    text = (FOLDER.parent / f"{module.replace('.', '/')}.py").read_text()
    assert text.count(old) == 1, f"{module} has {text.count(old)} times {old!r}: mend the list"
    return Mutant(module, f"{module} {what}", text.replace(old, new))


@contextmanager
def patched(mutant: Mutant) -> Iterator[None]:
    """The functions of a module as they would be with the fault, in the module and its classes."""
    module = importlib.import_module(f"offload.{mutant.file}")
    faulty = ModuleType(module.__name__)
    sys.modules[f"{module.__name__}?"] = faulty
    faulty.__dict__.update(__name__=f"{module.__name__}?")
    exec(compile(mutant.source, mutant.name, "exec"), faulty.__dict__)
    undo = []
    for owner, name, function in _functions(module):
        other = vars(faulty if owner is module else getattr(faulty, owner.__name__))[name]
        if isinstance(other, property):
            other = other.fget
        if _gist(function) != _gist(other):
            changed = FunctionType(
                other.__code__, module.__dict__, name, function.__defaults__, function.__closure__
            )
            changed.__kwdefaults__ = function.__kwdefaults__
            users = [one for key, one in sys.modules.items() if key.startswith("offload.")]
            for user in [owner, *(one for one in users if vars(one).get(name) is function)]:
                undo.append((user, name, vars(user)[name]))
                is_property = isinstance(vars(user)[name], property)
                setattr(user, name, property(changed) if is_property else changed)
    assert undo, "nothing has changed"
    try:
        yield
    finally:
        for owner, name, function in undo:
            setattr(owner, name, function)
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
    found = []
    for path in sorted(FOLDER.glob("*.py")):
        text = path.read_text()
        for line, what, changed in _changes(ast.parse(text)):
            found.append(Mutant(path.name, f"{path.name}:{line} {what}", changed))
    for file, old, new, what in BY_HAND:
        text = (FOLDER / file).read_text()
        assert text.count(old) == 1, f"{file} has {text.count(old)} times {old!r}: mend BY_HAND"
        found.append(Mutant(file, f"{file} {what}", text.replace(old, new)))
    return found


def _changes(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Line, description and changed source, one fault each; `tree` is as before afterwards."""
    for parent in ast.walk(tree):
        for name, value in list(ast.iter_fields(parent)):
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                for what, replacement in _faults(node):
                    siblings = getattr(parent, name)
                    if isinstance(value, list):
                        siblings[index] = replacement
                    else:
                        setattr(parent, name, replacement)
                    yield node.lineno, what, ast.unparse(ast.fix_missing_locations(tree))
                    if isinstance(value, list):
                        siblings[index] = node
                    else:
                        setattr(parent, name, node)


def _faults(node: object) -> Iterator[tuple[str, ast.AST]]:
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
    """How often the source speaks of streams and events, counted without parsing it."""
    words = [f".{word}(" for word in (*sorted(WAITS), "record_event")]
    words.append("with on(")
    return sum(path.read_text().count(word) for path in FOLDER.glob("*.py") for word in words)


@contextmanager
def loaded(mutant: Mutant) -> Iterator[ModuleType]:
    """`offload.transfer.device` as it would be with the fault."""
    names = ["offload.transfer.buffer", "offload.transfer.device"]
    kept = {name: sys.modules.pop(name) for name in names}
    try:
        for name in names:
            if mutant.file == f"{name.rpartition('.')[2]}.py":
                module = ModuleType(name)
                sys.modules[name] = module
                exec(compile(mutant.source, mutant.name, "exec"), module.__dict__)
            else:
                importlib.import_module(name)
        yield sys.modules[names[-1]]
    finally:
        sys.modules.update(kept)
