"""Hints: each only where its figure is bad, and where what it says to change can be changed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import batch, loss_of, make

import offload
from offload.core.config import format_size, parse_size
from offload.core.timeline import StepFact
from offload.params import prefetch, units
from offload.params.prepared import prepared_of
from offload.telemetry import hints
from offload.telemetry.hints import HITS, HOST, TIME, WAITING, Hint, hints_of
from offload.telemetry.iterations import IterationSummary
from offload.telemetry.run_facts import RunFacts
from offload.telemetry.run_file import About, UnitFact

MIB = 1 << 20
ABOUT = About(
    title="Model",
    device="cpu",
    kind="prepare",
    prefetch_depth="auto",
    activations="keep",
    tuned=None,
    host_bytes=100 * MIB,
    device_bytes=None,
    directories=1,
    plan="",
    shares={"gradients": 40 * MIB},
    units=tuple(UnitFact(str(n), 8 * MIB, (n,), False, False) for n in range(10)),
)
NUMBERS = {
    "state_bytes_on_disk": 60 * MIB,
    "model/param_bytes": 80 * MIB,
    "model/memory_bytes": 50 * MIB,
}
HIT, LATE = {"parameter_hits": 99, "parameter_misses": 1}, {"parameter_misses": 9}


def facts(
    seconds: Mapping[str, float],
    counts: Mapping[str, int] = HIT,
    numbers: Mapping[str, float] = NUMBERS,
    steps: int = 4,
    fallbacks: Mapping[str, str] | None = None,
    **about: Any,
) -> RunFacts:
    """Make the facts of a run whose iterations take 10 s, 1 s of them in `step()`."""
    moved = {"disk_read_bytes": 300 * MIB, "disk_written_bytes": 100 * MIB}
    done = [
        StepFact(n, 10.0 * n, 10.0 * n + 1, dict(seconds), {**moved, **counts})
        for n in range(steps)
    ]
    found = IterationSummary.of(done, numbers)
    return RunFacts(replace(ABOUT, **about), numbers, fallbacks or {}, found)


def texts(found: list[Hint]) -> list[str]:
    return [" ".join([hint.fact, *hint.ways]) for hint in found]


def waiting(seconds: Mapping[str, float], **rest: Any) -> str:
    return " ".join(texts(hints_of(facts(seconds, **rest))[WAITING]))


# --- where all is well ----------------------------------------------------------------------------

STATE = {"step(): disk read": 2.0, "step(): disk write": 0.5}
PARAMETERS = {"model: parameter read": 1.5}
GRADIENTS = {"model: gradient write": 1.0, "step(): gradient read": 1.0}
COPIES = {"model: device copy": 2.0}
ACTIVATIONS = {"model: activation read": 2.0}


def test_a_good_run_has_no_hint() -> None:
    assert not any(hints_of(facts({"step(): update": 1.0})).values())
    assert not any(hints_of(facts({name: s / 3 for name, s in STATE.items()})).values())


@pytest.mark.parametrize("seconds", [STATE, PARAMETERS, GRADIENTS, COPIES, ACTIVATIONS])
def test_no_wait_is_explained_by_what_is_not_on_disk(seconds: Mapping[str, float]) -> None:
    """All fits, nothing was refused, activations stay: there is nothing to change."""
    fits = {"state_bytes_on_disk": 0, "model/param_bytes": 80, "model/memory_bytes": 80}
    assert not any(hints_of(facts(seconds, numbers=fits)).values())
    assert not any(hints_of(facts(seconds, counts=LATE, numbers=fits)).values())


def test_one_step_alone_has_no_waits_to_judge() -> None:
    assert not any(hints_of(facts(STATE, steps=1)).values())


# --- waits ----------------------------------------------------------------------------------------


def test_waits_for_state() -> None:
    hint = waiting(STATE)
    assert "2.5 s of an iteration (25 %) are waits for optimizer state" in hint
    assert "60 MiB are on disk" in hint
    assert 'host_memory="190MiB" (now 100 MiB) holds all and saves the 400 MiB' in hint
    assert "one more drive in nvme=[...] (now 1)" in hint
    assert "3 times the tokens" in hint, "2.5 s are a tenth of 2.5 + 3 * 7.5 s"


def test_more_tokens_are_advised_only_where_they_help() -> None:
    assert "times the tokens" not in waiting({"step(): disk read": 9.9}), "times 900"
    assert "times the tokens" not in waiting(PARAMETERS), "each pass reads them again"


def test_what_is_not_there_is_not_advised() -> None:
    no_drive = waiting(STATE, directories=0)
    assert "nvme" not in no_drive and "host_memory=" in no_drive
    assert "host_memory=" not in waiting(STATE, host_bytes=None)


def test_waits_for_parameters_are_about_hits_if_these_are_low() -> None:
    found = hints_of(facts(PARAMETERS))
    assert not found[HITS]
    (hint,) = texts(found[WAITING])
    assert "host memory has 50 MiB for the 80 MiB of them" in hint
    found = hints_of(facts(PARAMETERS, counts=LATE))
    assert not found[WAITING] and texts(found[HITS]) == [hint]


def test_without_room_for_a_second_unit_that_comes_first() -> None:
    tight = {**NUMBERS, "model/memory_bytes": 9 * MIB}
    (hint,) = hints_of(facts({}, counts=LATE, numbers=tight))[HITS]
    assert hint.ways == (
        'host_memory="108MiB" (now 100 MiB) has room for the next unit beside the one in use, '
        "without which nothing is fetched ahead",
    )
    spilled = {"gradients on disk": 70 * MIB}
    (hint,) = hints_of(facts({}, counts=LATE, numbers=tight, shares=spilled))[HITS]
    assert "has room for the 70 MiB of gradients on disk, which come first, and" in hint.ways[0]


@pytest.mark.parametrize(
    ("depth", "is_told"),
    [("auto", False), ("1", True), ("4", True), ("5", False), ("8", False), ("", False)],
)
def test_a_depth_is_questioned_if_it_was_set_and_there_is_room_for_more(
    depth: str, is_told: bool
) -> None:
    """There is room for six units: one in use, four ahead, one more."""
    (hint,) = texts(hints_of(facts(PARAMETERS, counts=LATE, prefetch_depth=depth))[HITS])
    assert (f'prefetch_depth="auto") instead of {depth} fetches' in hint) is is_told
    assert hints.DEEPEST == prefetch.MOST_DEPTH


def test_waits_for_gradients() -> None:
    moved = {"spilled_bytes": 20 * MIB, "spilled_read_bytes": 20 * MIB}
    shares = {"gradients": 0, "gradients on disk": 20 * MIB}
    hint = waiting(GRADIENTS, counts={**HIT, **moved}, shares=shares)
    assert "waits for gradients, of which 20 MiB are on disk" in hint
    assert 'host_memory="120MiB" (now 100 MiB)' in hint and "saves the 40 MiB" in hint


def test_waits_for_activations() -> None:
    hint = waiting(ACTIVATIONS, activations="offload")
    assert 'offload.prepare(activations="recompute")' in hint


def test_waits_for_copies_are_explained_by_refusals_and_by_hits() -> None:
    refused = {"pinned host memory": "x", "gradients while backward runs": "y"}
    hint = waiting(COPIES, fallbacks=refused)
    assert "max_grad_norm=" in hint and "pinned memory, which was refused" in hint
    late = {**HIT, "device_hits": 1, "device_misses": 3}
    assert waiting(COPIES, counts=late) == "", "there is no budget of a device"
    hint = waiting(COPIES, counts=late, device_bytes=200 * MIB)
    assert "more device_memory than 200 MiB" in hint and "25 %" in hint


# --- other figures --------------------------------------------------------------------------------


def test_fall_backs_are_named() -> None:
    one = hints_of(facts({}, fallbacks={"io_uring": "why"}))[TIME]
    assert texts(one) == ["A fall-back was taken, for the reasons below: io_uring."]
    two = hints_of(facts({}, fallbacks={"a": "", "b": ""}))[TIME]
    assert texts(two) == ["2 fall-backs were taken, for the reasons below: a; b."]


def test_memory_beyond_the_account() -> None:
    known = {"process/peak_bytes": 900 * MIB, "process/base_bytes": 300 * MIB}
    known |= {"process/engine_bytes": 100 * MIB, "process/beyond_books_bytes": 500 * MIB}
    (hint,) = texts(hints_of(facts({}, numbers=known))[HOST])
    assert "900 MiB at the peak, 500 MiB more than the 300 MiB before and the 100 MiB" in hint
    assert 'activations="recompute"' in hint
    for about in ({"activations": "recompute"}, {"kind": "wrap"}, {"device": "cuda:0"}):
        (hint,) = texts(hints_of(facts({}, numbers=known, **about))[HOST])
        assert "activations=" not in hint
    known["process/beyond_books_bytes"] = hints.BEYOND_BYTES
    assert not hints_of(facts({}, numbers=known))[HOST]


@pytest.mark.parametrize("nbytes", [1, 999, 1000, 1023, 1 << 20, 12_345_678, 999 << 20, 1 << 45])
def test_a_size_that_is_advised_is_enough_and_no_more(nbytes: int) -> None:
    text = hints._argument(nbytes)
    assert nbytes <= parse_size("host_memory", text.strip('"')) <= 1.01 * nbytes + 11, text


# --- a real run -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_left")
def test_what_is_advised_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with room for one unit: the first size has room for the next, the second for all."""
    monkeypatch.setattr(units, "LARGE_BYTES", 2048)
    monkeypatch.setattr(hints, "LONG_WAIT", 1e-9)  # whatever this machine waits

    def run(host_memory: int | str) -> RunFacts:
        model = make("gpt")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        offload.prepare(model, optimizer, host_memory=host_memory, nvme=tmp_path)
        for seed in range(4):
            loss_of(model, batch(seed)).backward()
            optimizer.step()
            optimizer.zero_grad()
        made = offload.report(model).run_facts
        assert prepared_of(model) is not None
        offload.close(model)
        return made

    tight = run(90 << 10)
    (hint,) = hints_of(tight)[HITS]
    second, whole = re.findall(r'host_memory="(\w+)"', " ".join(hint.ways))
    roomy = run(second)
    assert roomy.number("model/memory_bytes") >= 2 * roomy.largest_unit
    assert roomy.found.hit_rate > tight.found.hit_rate
    best = run(whole)
    assert not (best.state_away or best.params_away or best.gradients_away)
    assert not any(hints_of(best).values()), format_size(best.about.host_bytes)
