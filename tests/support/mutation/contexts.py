"""The tests that execute a line, from the data of coverage.py with contexts."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

# As pytest-cov and `tests/support/contexts` name contexts, and as PYTEST_CURRENT_TEST does.
_PHASE = re.compile(r"\|(?:setup|run|teardown)$| \((?:setup|call|teardown)\)$")


def nodeid_of(context: str) -> str | None:
    """Return the node id of the test in a context; None if it names none, as during an import."""
    found = _PHASE.search(context)
    return context[: found.start()] if found and "::" in context else None


def nodeids_of_lines(data: Path, file: str, lines: Iterable[int]) -> set[str]:
    """Return the tests that execute one of these lines. file: from the root of the checkout."""
    wanted = set(lines)
    with closing(sqlite3.connect(f"{data.resolve().as_uri()}?mode=ro", uri=True)) as database:
        rows = database.execute(
            "select context.context, line_bits.numbits from line_bits"
            " join file on file.id = line_bits.file_id"
            " join context on context.id = line_bits.context_id"
            " where substr(file.path, -length(?)) = ?",
            (f"/{file}", f"/{file}"),
        )
        found = {nodeid_of(context) for context, bits in rows if wanted & _numbers(bits)}
    return {nodeid for nodeid in found if nodeid is not None}


def _numbers(bits: bytes) -> set[int]:
    """Decode line numbers as coverage.py keeps them: one bit for each."""
    return {8 * at + bit for at, byte in enumerate(bits) for bit in range(8) if byte >> bit & 1}
