"""A run as a file: `Report.save_trace` writes it; `offload report` and `offload plan --trace` read
it.

The file is a timeline for chrome://tracing and ui.perfetto.dev, which ignore unknown keys: one more
key, `offload`, has the facts of the run and what it did. Read strictly, and within bounds. Needs no
torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from offload.core.errors import FormatError
from offload.core.portable import read_json, write_private
from offload.core.strict_json import read_as, shown
from offload.core.timeline import ROWS, Event, StepFact, to_chrome
from offload.planning.layout import ParamSpec
from offload.telemetry.iterations import IterationSummary

KEY = "offload"
VERSION = 1
MOST_FILE_BYTES = 64 << 20


@dataclass(frozen=True)
class UnitFact:
    """A unit of a prepared model. is_kept: never evicted. is_weight_block: read from the files that
    it was loaded from, never written.
    """

    name: str
    nbytes: int
    needs: tuple[int, ...]
    is_kept: bool
    is_weight_block: bool


@dataclass(frozen=True)
class ParamFact:
    """A parameter that is trained.

    fields: of its optimizer state, fp32 each.
    unit: its number; None: the model is not prepared.
    grad_bytes: the bytes of its gradient.
    """

    name: str
    numel: int
    element_bytes: int
    fields: tuple[str, ...]
    unit: int | None
    grad_bytes: int
    is_on_device: bool

    @classmethod
    def of(cls, spec: ParamSpec) -> ParamFact:
        each = spec.element_bytes
        grad = spec.numel * each
        is_on_device = spec.device_bytes > 0
        return cls(spec.name, spec.numel, each, spec.fields, spec.unit, grad, is_on_device)


@dataclass(frozen=True)
class About:
    """The facts of a run: those that do not change while it goes on, which a report has, and those
    with a default, which are added for a file.

    prefetch_depth, activations: as the user set them.
    host_bytes, device_bytes: budgets in force; None: none.
    shares: of host memory, by their purpose.
    units: none if the model is not prepared.
    order: phase (0 forward, 1 backward, 2 evaluation) and unit of the last uses.
    """

    title: str
    device: str
    kind: str  # wrap or prepare
    prefetch_depth: str
    activations: str
    tuned: str | None
    host_bytes: int | None
    device_bytes: int | None
    directories: int
    plan: str  # for people
    shares: dict[str, int]
    units: tuple[UnitFact, ...]
    made_by: str = ""
    date: str = ""
    cpu: str = ""
    cores: int = 0
    chunk_numel: int | None = None  # of optimizer state that goes to disk
    params: tuple[ParamFact, ...] = ()
    order: tuple[tuple[int, ...], ...] = ()
    steps: tuple[StepFact, ...] = ()
    fallbacks: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)  # of the report, from its start on


@dataclass(frozen=True)
class Run:
    """A run as it is in a file. Times are seconds from the first event or step on. samples: of
    memory, seconds and bytes of each kind, in the order of `memory`.
    """

    about: About
    events: tuple[Event, ...]
    memory: tuple[str, ...]
    samples: tuple[tuple[float, tuple[int, ...]], ...]

    @property
    def iterations(self) -> IterationSummary:
        """The summary of the iterations, as that of the report."""
        return IterationSummary.of(self.about.steps, self.about.numbers)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the run to a file that only its owner can read; an existing one is replaced."""
        text = json.dumps(self.to_dict(), allow_nan=False)
        if len(text) > MOST_FILE_BYTES:
            raise FormatError(
                f"trace: would have {len(text)} bytes, more than the {MOST_FILE_BYTES} that are "
                "read again"
            )
        write_private(Path(path), text)

    def to_dict(self) -> dict[str, Any]:
        return {
            **to_chrome(self.events),
            KEY: {
                "version": VERSION,
                "about": asdict(self.about),
                "events": [list(event) for event in self.events],
                "memory": list(self.memory),
                "samples": [[at_s, *nbytes] for at_s, nbytes in self.samples],
            },
        }


def load(path: str | os.PathLike[str]) -> Run:
    """Read the file of a run. Raises `FormatError` if it is not such a file, `StoreError` if it
    cannot be read.
    """
    remedy = "; expected what offload.report(...).save_trace(path) writes"
    return read_json(Path(path), MOST_FILE_BYTES, from_dict, remedy)


def from_dict(data: Any) -> Run:
    found = data.get(KEY) if isinstance(data, Mapping) else None
    if not isinstance(found, Mapping):
        raise FormatError(f"has no {KEY!r}")
    if found.get("version") != VERSION:
        raise FormatError(f"expected version {VERSION}, got {shown(found.get('version'))}")
    about = read_as(About, found.get("about"), "about")
    missing = [each.name for each in fields(About) if each.name not in found["about"]]
    if missing:
        raise FormatError(f"about: has no {missing[0]!r}")
    _check_units(about)
    memory = read_as(tuple[str, ...], found.get("memory"), "memory")
    events = tuple(_event(item) for item in _list(found, "events"))
    samples = tuple(_sample(item, len(memory)) for item in _list(found, "samples"))
    return Run(about, events, memory, samples)


def _check_units(about: About) -> None:
    count = len(about.units)
    named = [n for unit in about.units for n in unit.needs]
    of_params = [param.unit for param in about.params if param.unit is not None]
    if of_params and len(of_params) < len(about.params):
        raise FormatError("about.params: expected a unit for each of them, or for none")
    named += of_params
    for use in about.order:
        if len(use) != 2 or use[0] > 2:
            raise FormatError(f"about.order: expected [phase, unit], got {shown(use)}")
        named.append(use[1])
    if any(number >= count for number in named):
        raise FormatError(f"about: names unit {max(named)}, there are {count}")


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list):
        raise FormatError(f"{name}: expected a list, got {shown(value)}")
    return value


def _event(item: Any) -> Event:
    if isinstance(item, list) and len(item) == 5 and item[0] in ROWS:
        row, name, begin_s, end_s, nbytes = item
        is_right = isinstance(name, str) and _are_numbers(begin_s, end_s, nbytes)
        if is_right and begin_s <= end_s and type(nbytes) is int and nbytes >= 0:
            return Event(row, name, float(begin_s), float(end_s), nbytes)
    raise FormatError(f"events: expected [row, name, begin, end, bytes], got {shown(item)}")


def _sample(item: Any, count: int) -> tuple[float, tuple[int, ...]]:
    if isinstance(item, list) and len(item) == count + 1 and _are_numbers(*item):
        return float(item[0]), tuple(int(nbytes) for nbytes in item[1:])
    raise FormatError(f"samples: expected {count + 1} numbers, got {shown(item)}")


def _are_numbers(*values: object) -> bool:
    return all(
        isinstance(v, int | float) and not isinstance(v, bool) and -1e15 < v < 1e18 for v in values
    )
