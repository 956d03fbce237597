"""Places where a random fault can be put into a package, and the faults themselves.

Only code inside functions counts. Excluded are annotations, signatures, messages of exceptions and
asserts, formatted texts, calls that log, and code that only a type checker reads.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.mutation.tree import Function, Seat, Tree

NEGATE, COMPARE = "negate a condition", "another comparison"
CONSTANT, DROP, SWAP = "another constant", "drop a call", "swap two arguments"

_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_LOGGERS = {"log", "logger", "logging"}
_SYMMETRIC = {"max", "min"}  # the order of their arguments does not matter


@dataclass(frozen=True)
class Site:
    """One fault at one place.

    file: from the root of the checkout.
    function: its qualified name.
    nth: which of the functions of that name, from 0.
    place: fields of the syntax tree from the function to the node.
    part: which comparison of the node, or which argument is swapped with the next.
    """

    file: str
    function: str
    nth: int
    place: str
    operator: str
    part: int
    before: str
    after: str
    sha256: str  # of the file

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Mutation:
    """A file with the fault in it.

    lines: those of the changed statement, without the statements inside it. All other lines keep
    their numbers.
    """

    original: str
    mutated: str
    lines: range


# --- finding --------------------------------------------------------------------------------------


def sites(root: Path, package: str = "offload") -> list[Site]:
    """List all sites of a package in a checkout."""
    found = []
    for path in sorted((root / package).rglob("*.py")):
        found += sites_of(path.read_text(), path.relative_to(root).as_posix())
    return found


def sites_of(text: str, file: str) -> list[Site]:
    tree = Tree(text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = []
    for seat in _mutable(tree.root, inside=False):
        for operator, part in _operators(seat):
            function, place = _place_of(tree, seat.node)
            qualified = tree.qualified(function)
            before, after = _shown(tree, seat, operator, part)
            found.append(
                Site(
                    file,
                    qualified,
                    tree.functions[qualified].index(function),
                    place,
                    operator,
                    part,
                    before,
                    after,
                    digest,
                )
            )
    return found


def drawn(candidates: list[Site], count: int, seed: int) -> list[Site]:
    """Draw so many different sites, each as likely as any other."""
    return random.Random(seed).sample(candidates, count)


def _mutable(root: ast.AST, inside: bool) -> Iterator[Seat]:
    """Yield the seats of all nodes that may be changed. inside: `root` is code of a function."""
    for name, value in ast.iter_fields(root):
        if isinstance(root, Function | ast.Lambda) and name != "body":
            continue
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST):
                continue
            seat = Seat(root, name, node)
            if _is_left_alone(seat):
                continue
            within = inside or isinstance(root, Function)
            if within:
                yield seat
            yield from _mutable(node, within)


def _is_left_alone(seat: Seat) -> bool:
    node = seat.node
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.expr_context):
        return True
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _logs(node.value):
        return True
    return seat.field == "annotation" or (
        isinstance(seat.owner, ast.Assert) and seat.field == "msg"
    )


def _logs(call: ast.Call) -> bool:
    whom = call.func.value if isinstance(call.func, ast.Attribute) else None
    name = ast.unparse(whom).split(".")[-1] if whom is not None else ""
    return name.strip("_").lower() in _LOGGERS


def _operators(seat: Seat) -> Iterator[tuple[str, int]]:
    node = seat.node
    if _is_condition(seat) and not isinstance(node, ast.Constant) and not _has_opposite(node):
        yield NEGATE, 0
    if isinstance(node, ast.Compare):
        for part in range(len(node.ops)):
            yield COMPARE, part
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool | int | float) and node.value + 1 != node.value:
            yield CONSTANT, 0
    elif isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Call):
            yield DROP, 0
    elif isinstance(node, ast.Call) and ast.unparse(node.func) not in _SYMMETRIC:
        for part, two in enumerate(zip(node.args, node.args[1:], strict=False)):
            is_unpacked = any(isinstance(one, ast.Starred) for one in two)
            if not is_unpacked and ast.dump(two[0]) != ast.dump(two[1]):
                yield SWAP, part


def _is_condition(seat: Seat) -> bool:
    if isinstance(seat.owner, ast.If | ast.While | ast.IfExp):
        return seat.field == "test"
    return isinstance(seat.owner, ast.comprehension) and seat.field == "ifs"


def _has_opposite(node: ast.AST) -> bool:
    """Return whether another comparison is the same as its negation."""
    return (
        isinstance(node, ast.Compare)
        and len(node.ops) == 1
        and not isinstance(node.ops[0], _ORDERS)
    )


# --- places ---------------------------------------------------------------------------------------


def _place_of(tree: Tree, node: ast.AST) -> tuple[Function, str]:
    """Return the function that a node is in, and the fields from there to it."""
    steps: list[str] = []
    while not steps or not isinstance(node, Function):
        seat = tree.seat_of(node)
        steps.append(seat.field if seat.index is None else f"{seat.field}[{seat.index}]")
        node = seat.owner
    return node, ".".join(reversed(steps))


def _node_at(function: ast.AST, place: str) -> ast.AST:
    node: Any = function
    for step in place.split("."):
        name, index = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", step).groups()  # type: ignore[union-attr]
        node = getattr(node, name)
        node = node if index is None else node[int(index)]
    assert isinstance(node, ast.AST)
    return node


# --- changing -------------------------------------------------------------------------------------


def changed(node: ast.AST, operator: str, part: int) -> ast.AST:
    """Return the node that is there with the fault."""
    other: Any = copy.deepcopy(node)
    if operator == NEGATE:
        is_not = isinstance(other, ast.UnaryOp) and isinstance(other.op, ast.Not)
        other = other.operand if is_not else ast.UnaryOp(ast.Not(), other)
    elif operator == COMPARE:
        other.ops[part] = _COMPARISONS[type(other.ops[part])]()
    elif operator == CONSTANT:
        is_bool = isinstance(other.value, bool)
        other.value = not other.value if is_bool else other.value + 1
    elif operator == SWAP:
        other.args[part : part + 2] = reversed(other.args[part : part + 2])
    else:
        assert operator == DROP, operator
        other = ast.Pass()
    assert isinstance(other, ast.AST)
    return other


def _shown(tree: Tree, seat: Seat, operator: str, part: int) -> tuple[str, str]:
    """Return the text of the statement without and with the fault, without statements inside it."""
    node = seat.node
    statement = tree.statement_of(node)
    if statement is node:
        return ast.unparse(node), ast.unparse(changed(node, operator, part))
    before = _head(statement)
    seat.put(changed(node, operator, part))
    after = _head(statement)
    seat.put(node)
    return before, after


def _head(statement: ast.stmt) -> str:
    head = copy.copy(statement)
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        if hasattr(head, name):
            setattr(head, name, [])
    return ast.unparse(head)


def mutation(root: Path, site: Site) -> Mutation:
    """Put the fault of a site into the text of its file in a checkout of the same source."""
    text = (root / site.file).read_text()
    if hashlib.sha256(text.encode()).hexdigest() != site.sha256:
        raise ValueError(f"{root / site.file}: is not the file that the faults were drawn from")
    tree = Tree(text)
    node = _node_at(tree.functions[site.function][site.nth], site.place)
    seat, statement = tree.seat_of(node), tree.statement_of(node)
    lines = _lines_of(statement)
    other = changed(node, site.operator, site.part)
    mutated = _replaced(text, node, other)
    seat.put(other)
    # Fails if brackets or indentation were not as assumed.
    assert ast.dump(ast.parse(mutated)) == ast.dump(tree.root), site
    return Mutation(text, mutated, lines)


def _lines_of(statement: ast.stmt) -> range:
    body = getattr(statement, "body", None) or getattr(statement, "cases", None)
    assert statement.end_lineno is not None
    if not body:
        return range(statement.lineno, statement.end_lineno + 1)
    first = body[0].pattern if isinstance(body[0], ast.match_case) else body[0]
    return range(statement.lineno, max(statement.lineno + 1, first.lineno))


def _replaced(text: str, node: Any, other: ast.AST) -> str:
    """Replace the text of a node and nothing else; the lines after it keep their numbers."""
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    blank = "\n" * (node.end_lineno - node.lineno)
    code = ast.unparse(other)
    if isinstance(other, ast.expr) and not isinstance(other, ast.Constant):
        code = f"({code}{blank})"
    else:
        code += blank
    whole = text.encode()
    return (whole[:begin] + code.encode() + whole[end:]).decode()
