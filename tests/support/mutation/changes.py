"""The changes that can be made at a place."""

from __future__ import annotations

import ast
from functools import partial

from support.mutation.fault import Edit
from support.mutation.places import Place
from support.mutation.tree import Seat, Tree


def dropped(place: Place) -> Edit:
    """Drop a statement, or a call that is one; or an operand, an argument or an element."""
    return Edit(place, _drop)


def becomes(place: Place, code: str) -> Edit:
    """Put another expression there; the name `it` in it stands for the old one."""
    return Edit(place, partial(_become, code))


def never(place: Place) -> Edit:
    """Make a condition False."""
    return becomes(place, "False")


def stripped(place: Place) -> Edit:
    """Leave only `x` of `x.f(...)` or of `x[...]`."""
    return Edit(place, _strip)


def calling(place: Place, method: str) -> Edit:
    """Call another method of the same object; with dots, of an attribute of it."""
    return Edit(place, partial(_call, method))


def swapped_with_next(place: Place) -> Edit:
    """Put a statement, or a call that is one, after the one that follows it."""
    return Edit(place, _swap_with_next)


def _drop(tree: Tree, seat: Seat) -> None:
    owner = seat.owner
    if isinstance(owner, ast.Expr):
        tree.seat_of(owner).put(ast.Pass())
    elif isinstance(seat.node, ast.stmt):
        seat.put(ast.Pass())
    elif isinstance(owner, ast.BoolOp):
        owner.values = [one for one in owner.values if one is not seat.node]
        if len(owner.values) == 1:
            tree.seat_of(owner).put(owner.values[0])
    elif seat.siblings is not None:
        seat.siblings.remove(seat.node)
    else:
        raise TypeError(f"{ast.unparse(seat.node)} cannot be dropped from {ast.unparse(owner)}")


def _become(code: str, _: Tree, seat: Seat) -> None:
    seat.put(_With(seat.node).visit(ast.parse(code, mode="eval").body))


class _With(ast.NodeTransformer):
    """A transformer that puts a node in place of the name `it`."""

    def __init__(self, node: ast.AST) -> None:
        self._node = node

    def visit_Name(self, name: ast.Name) -> ast.AST:
        return self._node if name.id == "it" else name


def _strip(_: Tree, seat: Seat) -> None:
    node = seat.node
    if isinstance(node, ast.Call):
        node = node.func
    assert isinstance(node, (ast.Attribute, ast.Subscript)), ast.unparse(seat.node)
    seat.put(node.value)


def _call(method: str, _: Tree, seat: Seat) -> None:
    call = seat.node
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    function: ast.expr = call.func.value
    for name in method.split("."):
        function = ast.Attribute(function, name, ast.Load())
    call.func = function


def _swap_with_next(tree: Tree, seat: Seat) -> None:
    statement = tree.seat_of(tree.statement_of(seat.node))
    index, body = statement.index, statement.siblings
    assert index is not None and body is not None and index + 1 < len(body), "nothing follows"
    body[index], body[index + 1] = body[index + 1], body[index]
