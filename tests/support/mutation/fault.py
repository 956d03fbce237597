"""A fault: its name, and the edits that make it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.mutation.places import Place
from support.mutation.tree import Seat, Tree

Change = Callable[[Tree, Seat], None]


@dataclass(frozen=True)
class Edit:
    """One change at one place."""

    place: Place
    change: Change


class Fault:
    """A fault: edits of one module, and `what` is wrong with them."""

    def __init__(self, what: str, *edits: Edit) -> None:
        self.what = what
        self.edits = edits
        (self.module,) = {edit.place.module for edit in edits}

    @property
    def name(self) -> str:
        return f"{self.module} {self.what}"

    def applied(self, package: Path) -> str:
        """Return the module's source with the fault in it."""
        path = package.joinpath(*self.module.split(".")).with_suffix(".py")
        tree = Tree(path.read_text())
        before = tree.unparsed()
        # All places are found before the first of them is changed.
        for seat, edit in [(edit.place.find(tree), edit) for edit in self.edits]:
            edit.change(tree, seat)
        after = tree.unparsed()
        assert after != before, f"{self.name}: nothing has changed"
        return after
