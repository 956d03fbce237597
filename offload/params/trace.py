"""The trace: the recorded order in which units are used, which predicts the next uses.

It is always on: every use is one token, a phase and a unit, in one history. To predict, it finds
the last earlier place where the latest tokens occurred, the longest run of them that it can find,
and reads the history on from there. So a wrong prediction costs one miss, an order that was seen
once is known, and training, evaluation and generation do not disturb one another. A backward pass
that was never seen is predicted as its forward pass in reverse.

Knows units by number only. One thread at a time may use a trace.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import cycle
from os import PathLike
from pathlib import Path
from typing import Any

from offload.core.errors import FormatError
from offload.core.portable import read_json, write_private

CONTEXTS = (8, 4, 2, 1)  # lengths of the runs that are looked up, longest first
KEEP_TOKENS = 1 << 16  # length of the history; when it is full, half of it is dropped
VERSION = 1
MOST_FILE_BYTES = 32 * KEEP_TOKENS  # limit of a saved trace: 32 bytes a use, which takes half
_PACE_WEIGHT = 0.3  # weight of the newest time until the next use in the running mean


class Phase(Enum):
    FORWARD = "forward"  # in training: a backward pass may follow
    BACKWARD = "backward"
    EVALUATION = "evaluation"


_PHASES = list(Phase)


@dataclass(frozen=True)
class Use:
    """A use of a unit in a phase."""

    phase: Phase
    unit: int


class Trace:
    """The history of the uses of one model's units. fingerprint: that of the model, so that a trace
    saved for another model is refused. units: their number.
    """

    def __init__(self, fingerprint: str, units: int) -> None:
        self.fingerprint = fingerprint
        self.units = units
        self._uses = [Use(phase, unit) for phase in Phase for unit in range(units)]  # by token
        self.hits = self.misses = 0  # uses that were predicted one use before, or were not
        # Tokens, a number for each phase and unit; 4 bytes each, since a long run has all of them.
        self._history = array("i")
        self._dropped = 0  # tokens dropped from the front of the history
        self._seen: dict[tuple[int, ...], int] = {}  # a run of tokens -> where it last ended
        self._match: int | None = None  # where the present run of tokens ended before
        self._pace_s: dict[int, float] = {}

    # --- recording --------------------------------------------------------------------------------

    def record(self, phase: Phase, unit: int, since_last_s: float | None = None) -> None:
        """Record that a unit is used now. since_last_s: seconds since the use before, waits left
        out.
        """
        token = _PHASES.index(phase) * self.units + unit
        if self._history:
            foretold = next(self._tokens_ahead(), None)
            self.hits += foretold == token
            self.misses += foretold != token
            if since_last_s is not None:
                last = self._history[-1]
                before_s = self._pace_s.get(last, since_last_s)
                self._pace_s[last] = before_s + _PACE_WEIGHT * (since_last_s - before_s)
        self._learn(token)

    @property
    def last(self) -> Use | None:
        """The present use."""
        return self._uses[self._history[-1]] if self._history else None

    def uses(self) -> list[tuple[int, int]]:
        """Return the uses in the history, oldest first: the number of the phase, and the unit."""
        return [divmod(token, self.units) for token in self._history]

    def _learn(self, token: int) -> None:
        self._history.append(token)
        lengths = [length for length in CONTEXTS if length <= len(self._history)]
        runs = [tuple(self._history[-length:]) for length in lengths]
        # Where the longest run of tokens that ends now ended before.
        self._match = next((self._seen[run] for run in runs if run in self._seen), None)
        now = self._dropped + len(self._history) - 1
        self._seen |= dict.fromkeys(runs, now)
        if len(self._history) > KEEP_TOKENS:
            self._forget_half()

    def _forget_half(self) -> None:
        half = len(self._history) // 2
        del self._history[:half]
        self._dropped += half
        self._seen = {run: at for run, at in self._seen.items() if at >= self._dropped}
        if self._match is not None and self._match < self._dropped:
            self._match = None

    def paces_s(self) -> list[float]:
        """Return the paces of all uses that have one."""
        return list(self._pace_s.values())

    # --- predicting -------------------------------------------------------------------------------

    def ahead(self) -> Iterator[Use]:
        """Predict the uses after the present one, in order; endless where the history repeats
        itself.
        """
        return map(self._uses.__getitem__, self._tokens_ahead())

    def _tokens_ahead(self) -> Iterator[int]:
        history = self._history
        if self._match is not None:
            # The uses from there to here are the prediction, again and again.
            return cycle(history[self._match + 1 - self._dropped :])
        if history and self._uses[history[-1]].phase is Phase.BACKWARD:
            return self._reversed_forward()
        return iter(())

    def _reversed_forward(self) -> Iterator[int]:
        """Predict a backward pass that is not in the history: the forward pass, back from this
        unit.
        """
        uses = [self._uses[token] for token in self._history]
        forward = [use.unit for use in uses if use.phase is Phase.FORWARD]
        unit = uses[-1].unit
        if unit in forward:
            last = len(forward) - 1 - forward[::-1].index(unit)
            for earlier in reversed(forward[:last]):
                yield _PHASES.index(Phase.BACKWARD) * self.units + earlier

    # --- save and load ----------------------------------------------------------------------------

    def save(self, path: str | PathLike[str]) -> None:
        """Write the trace to a file that only its owner can read; replace an existing one."""
        write_private(Path(path), json.dumps(self.to_dict()))

    def load(self, path: str | PathLike[str]) -> None:
        """Load a saved trace and put it before the uses recorded here. The model must not be
        running. Raises `FormatError` if the file is no trace, or another model's, and `StoreError`
        if it cannot be read; then nothing has changed.
        """
        make = partial(Trace.from_dict, fingerprint=self.fingerprint, units=self.units)
        whole = read_json(Path(path), MOST_FILE_BYTES, make)
        for token in self._history:
            whole._learn(token)
        self._history, self._dropped = whole._history, whole._dropped
        self._seen, self._match = whole._seen, whole._match

    def to_dict(self) -> dict[str, Any]:
        """Return the trace as plain numbers, strings, lists and dicts, for a JSON file."""
        return {
            "version": VERSION,
            "fingerprint": self.fingerprint,
            "units": self.units,
            "history": [list(use) for use in self.uses()],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], fingerprint: str, units: int) -> Trace:
        """Make a trace from the result of `to_dict`, for the same model. Raises `FormatError` if
        `data` is not that.
        """
        if not isinstance(data, Mapping) or data.get("version") != VERSION:
            raise FormatError(f"trace: expected version {VERSION}; record it anew")
        if (data.get("fingerprint"), data.get("units")) != (fingerprint, units):
            raise FormatError(
                f"trace: was recorded for a model {data.get('fingerprint')!r} of "
                f"{data.get('units')!r} units, this one is {fingerprint!r} of {units}; record it "
                "anew"
            )
        trace = cls(fingerprint, units)
        for token in _checked_history(data.get("history"), units):
            trace._learn(token)
        return trace


def _checked_history(history: object, units: int) -> list[int]:
    if not isinstance(history, list) or len(history) > KEEP_TOKENS:
        raise FormatError(f"trace: expected a list of at most {KEEP_TOKENS} uses")
    found = []
    for token in history:
        well_formed = isinstance(token, list) and len(token) == 2
        if not well_formed or any(type(number) is not int for number in token):
            raise FormatError(f"trace: expected [phase, unit], got {token!r}")
        phase, unit = token
        if not (0 <= phase < len(_PHASES) and 0 <= unit < units):
            raise FormatError(f"trace: expected a phase below 3 and a unit below {units}: {token}")
        found.append(phase * units + unit)
    return found
