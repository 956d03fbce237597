"""The syntax tree of a module, in which every node knows its seat."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
# The parser has one node of each of these for the whole tree: they have no seat of their own.
_SHARED = (ast.expr_context, ast.operator, ast.boolop, ast.unaryop, ast.cmpop)


@dataclass(eq=False)
class Seat:
    """The place of a node in its owner: a field, or an element of a field that is a list."""

    owner: ast.AST
    field: str
    node: ast.AST

    @property
    def siblings(self) -> list[ast.AST] | None:
        """The list that the node is in, if it is in one."""
        held = getattr(self.owner, self.field)
        return held if isinstance(held, list) else None

    @property
    def index(self) -> int | None:
        """The node's number in that list."""
        if self.siblings is None:
            return None
        return next(n for n, one in enumerate(self.siblings) if one is self.node)

    def put(self, other: ast.AST) -> None:
        """Put another node here."""
        siblings, index = self.siblings, self.index
        if siblings is None or index is None:
            setattr(self.owner, self.field, other)
        else:
            siblings[index] = other
        self.node = other


def seats(root: ast.AST) -> Iterator[Seat]:
    """Yield the seats of all nodes below `root`, in the order of the source, outer nodes first."""
    for name, value in ast.iter_fields(root):
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not isinstance(node, _SHARED):
                yield Seat(root, name, node)
                yield from seats(node)


@dataclass(eq=False)
class Tree:
    """The syntax tree of one module."""

    text: str
    root: ast.Module = field(init=False)
    functions: dict[str, list[Function]] = field(default_factory=dict, init=False)
    _seats: dict[ast.AST, Seat] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.root = ast.parse(self.text)
        for seat in seats(self.root):
            self._seats[seat.node] = seat
            if isinstance(seat.node, Function):
                self.functions.setdefault(self.qualified(seat.node), []).append(seat.node)

    def seat_of(self, node: ast.AST) -> Seat:
        return self._seats[node]

    def owners(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that contain the node, from the inside out."""
        while (seat := self._seats.get(node)) is not None:
            node = seat.owner
            yield node

    def function_of(self, node: ast.AST) -> Function | None:
        """Return the innermost function that contains the node, if any."""
        return next((one for one in self.owners(node) if isinstance(one, Function)), None)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """Return the innermost statement that the node is, or is in."""
        return next(one for one in [node, *self.owners(node)] if isinstance(one, ast.stmt))

    def qualified(self, node: ast.AST) -> str:
        """Return the name of a function or class, after those of all that contain it."""
        named = [
            one.name
            for one in [node, *self.owners(node)]
            if isinstance(one, Function | ast.ClassDef)
        ]
        return ".".join(reversed(named))

    def unparsed(self) -> str:
        return ast.unparse(ast.fix_missing_locations(self.root)) + "\n"
