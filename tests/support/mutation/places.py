"""Places in a function, described by the syntax there."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from support.mutation.tree import Seat, Tree, seats

_TESTED = (ast.If, ast.While, ast.IfExp)


class NoSuchPlace(LookupError):
    """An error: no place is as described, or more than one is."""


@dataclass(frozen=True)
class _Step:
    """A step from one place to those inside it that `what` describes.

    nth, of: which of how many; None: the only one.
    """

    what: str
    find: Callable[[Seat], Iterable[Seat]]
    nth: int | None = None
    of: int | None = None


@dataclass(frozen=True)
class Place:
    """A place in a function of a module: `at("params.copies", "Copies.detach").call("hide")`.

    Each step must match once. If it matches more often, `nth` (from 1) says which match is meant
    and `of` how many there are, so that one more does not move the place unnoticed.
    """

    module: str
    function: str
    steps: tuple[_Step, ...] = ()

    # --- what is looked for, anywhere inside ------------------------------------------------------

    def call(self, name: str, nth: int | None = None, of: int | None = None) -> Place:
        """Find the call of a function or method of that name."""
        return self._search(f"call of {name}", lambda seat: _is_call(seat, name), nth, of)

    def condition(self, name: str, nth: int | None = None, of: int | None = None) -> Place:
        """Find the condition of an `if` (also in an expression) or `while` that has the name."""
        return self._search(
            f"condition that speaks of {name}",
            lambda seat: (
                seat.field == "test" and isinstance(seat.owner, _TESTED) and _speaks_of(seat, name)
            ),
            nth,
            of,
        )

    def operand(self, name: str, nth: int | None = None, of: int | None = None) -> Place:
        """Find the operand of an `and` or `or` that contains the name."""
        return self._search(
            f"operand of and/or that speaks of {name}",
            lambda seat: (
                isinstance(seat.owner, ast.BoolOp)
                and not isinstance(seat.node, ast.BoolOp)  # its own operands are meant
                and _speaks_of(seat, name)
            ),
            nth,
            of,
        )

    def comparison(self, name: str, nth: int | None = None, of: int | None = None) -> Place:
        """Find the comparison that contains the name."""
        return self._search(
            f"comparison that speaks of {name}",
            lambda seat: isinstance(seat.node, ast.Compare) and _speaks_of(seat, name),
            nth,
            of,
        )

    def assignment(self, name: str, nth: int | None = None, of: int | None = None) -> Place:
        """Find the statement that assigns to a variable or an attribute of that name."""
        return self._search(
            f"assignment to {name}",
            lambda seat: (
                isinstance(seat.node, ast.Assign)
                and any(_name_of(target) == name for target in seat.node.targets)
            ),
            nth,
            of,
        )

    def returned(self, nth: int | None = None, of: int | None = None) -> Place:
        """Find the returned value."""
        return self._search(
            "returned value", lambda seat: isinstance(seat.owner, ast.Return), nth, of
        )

    # --- parts of what was found ------------------------------------------------------------------

    def argument(self, nth: int) -> Place:
        """Take the nth positional argument of a call, from 1."""
        return self._part(
            f"argument {nth}", lambda seat: seat.field == "args" and seat.index == nth - 1
        )

    def element(self, name: str) -> Place:
        """Take the element of a tuple or list that contains the name."""
        return self._part(
            f"element that speaks of {name}",
            lambda seat: seat.field == "elts" and _speaks_of(seat, name),
        )

    def right(self) -> Place:
        """Take the right side of a comparison."""
        return self._part("right side", lambda seat: seat.field == "comparators")

    def receiver(self) -> Place:
        """Take the object that a method is called on."""
        return self._then(
            _Step(
                "receiver",
                lambda seat: [
                    inner
                    for inner in seats(seat.node)
                    if isinstance(seat.node, ast.Call)
                    and inner.owner is seat.node.func
                    and inner.field == "value"
                ],
            )
        )

    # --- finding ----------------------------------------------------------------------------------

    def _search(
        self, what: str, fits: Callable[[Seat], bool], nth: int | None, of: int | None
    ) -> Place:
        assert (nth is None) == (of is None), "nth and of go together"

        def find(seat: Seat) -> list[Seat]:
            return [one for one in seats(seat.node) if fits(one)]

        return self._then(_Step(what, find, nth, of))

    def _part(self, what: str, fits: Callable[[Seat], bool]) -> Place:
        return self._then(
            _Step(
                what,
                lambda seat: [
                    one for one in seats(seat.node) if one.owner is seat.node and fits(one)
                ],
            )
        )

    def _then(self, step: _Step) -> Place:
        return replace(self, steps=(*self.steps, step))

    def __str__(self) -> str:
        return " > ".join([f"{self.module} {self.function}", *(step.what for step in self.steps)])

    def find(self, tree: Tree) -> Seat:
        """Return the one seat in a module's tree that is meant, or raise `NoSuchPlace`."""
        functions = tree.functions.get(self.function, [])
        if len(functions) != 1:
            raise NoSuchPlace(
                f"{self}: {self.module} has {len(functions)} functions {self.function}, expected 1;"
                " give the function's present name and class where the fault is described"
            )
        seat = tree.seat_of(functions[0])
        for step in self.steps:
            seat = self._choose(step, list(step.find(seat)))
        # The tree's own seat of the node, which shows later changes of the tree.
        return tree.seat_of(seat.node)

    def _choose(self, step: _Step, found: list[Seat]) -> Seat:
        expected = 1 if step.of is None else step.of
        if len(found) == expected:
            return found[0 if step.nth is None else step.nth - 1]
        hint = (
            "say which one is meant: nth=..., of=..."
            if len(found) > expected
            else "describe the place as it is now, or drop the fault if what it breaks is gone"
        )
        raise NoSuchPlace(
            f"{self}: {len(found)} times {step.what!r} in {self.function}, expected {expected}; "
            f"{hint}"
        )


def at(module: str, function: str) -> Place:
    """Return the place of a function, by its qualified name in a module of the package."""
    return Place(module, function)


def _is_call(seat: Seat, name: str) -> bool:
    return isinstance(seat.node, ast.Call) and _name_of(seat.node.func) == name


def _speaks_of(seat: Seat, name: str) -> bool:
    return any(_name_of(node) == name for node in ast.walk(seat.node))


def _name_of(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
