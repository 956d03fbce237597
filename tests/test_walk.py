"""The walk in docs/design.md is the way that a parameter takes: its functions are entered in the
order in which the page has them, in a real step with everything on disk.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload.tools.selftest.model import least_bytes

PACKAGE = Path(offload.__file__).parent
PAGE = PACKAGE.parent / "docs" / "design.md"
ROW = re.compile(r"^\| `([a-z_/]+\.py)` \| `([\w.]+)` \|")
WIDTH, LAYERS = 128, 6
ROWS = 39  # one that goes from the page goes from here, too


def walk() -> list[tuple[str, str]]:
    """Return file and function of each row, as the page has them."""
    matches = map(ROW.match, PAGE.read_text().splitlines())
    return [(match[1], match[2]) for match in matches if match is not None]


class Calls:
    """A record of the functions of the package that this thread enters, in order."""

    def __init__(self) -> None:
        self.entered: list[tuple[str, str]] = []

    def __enter__(self) -> Calls:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            code = frame.f_code
            if code.co_filename.startswith(str(PACKAGE)):
                file = Path(code.co_filename).relative_to(PACKAGE).as_posix()
                self.entered.append((file, code.co_qualname))


def out_of_order(
    expected: list[tuple[str, str]], entered: list[tuple[str, str]]
) -> tuple[str, str] | None:
    """Return the first of `expected` that was entered for the first time before its predecessor."""
    firsts = [entered.index(each) for each in expected]
    pairs = zip(expected[1:], firsts, firsts[1:], strict=False)
    return next((each for each, before, first in pairs if first < before), None)


def test_the_walk_of_the_design_is_that_of_a_step(
    tmp_path: Path, nothing_is_left: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.planning.planner.CHUNK_NUMEL", 4096)
    monkeypatch.setattr("offload.planning.planner.LEAST_CHUNK_NUMEL", 256)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    fields: dict[str, Any] = {"nvme": tmp_path, "units": [nn.Linear]}
    least = least_bytes(model, optimizer, **fields)
    model, optimizer = offload.prepare(model, optimizer, host_memory=least, **fields)

    def step() -> None:
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # the trace knows the order then
        step()
    with Calls() as calls:
        step()
    optimizer.close()
    expected = walk()
    assert len(expected) == ROWS
    known = set(calls.entered)
    assert [each for each in expected if each not in known] == []
    assert out_of_order(expected, calls.entered) is None


def test_the_comparison_finds_another_order() -> None:
    a, b = ("a.py", "f"), ("b.py", "g")
    assert out_of_order([a, b], [a, b, a]) is None
    assert out_of_order([a, b], [b, a, b]) == b
