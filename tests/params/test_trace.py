"""The trace: an order that was seen once is known, and a change of order costs one miss."""

from __future__ import annotations

import json
import os
import stat
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.loops import chosen, tally

from offload.core.errors import ConfigError, FormatError, StoreError
from offload.params import trace as trace_module
from offload.params.trace import KEEP_TOKENS, MOST_FILE_BYTES, Phase, Trace

FORWARD, BACKWARD, EVALUATION = Phase


def run(trace: Trace, phase: Phase, units: list[int]) -> int:
    """Record one pass, and return its misses."""
    before = trace.misses
    for unit in units:
        trace.record(phase, unit)
    return trace.misses - before


def step(trace: Trace, units: list[int]) -> int:
    return run(trace, FORWARD, units) + run(trace, BACKWARD, units[::-1])


def test_a_pass_that_was_seen_is_known() -> None:
    trace = Trace("m", 5)
    step(trace, [0, 1, 2, 3, 4])
    assert step(trace, [0, 1, 2, 3, 4]) == 1  # only that it begins again was new
    assert step(trace, [0, 1, 2, 3, 4]) == 0
    ahead = [use.unit for use in islice(trace.ahead(), 12)]
    assert ahead == [0, 1, 2, 3, 4, 4, 3, 2, 1, 0, 0, 1]


def test_the_first_backward_is_the_forward_in_reverse() -> None:
    trace = Trace("m", 5)
    run(trace, FORWARD, [0, 1, 2, 3, 4])
    assert run(trace, BACKWARD, [4, 3, 2, 1, 0]) == 1  # only its beginning was new
    other = Trace("m", 3)
    run(other, FORWARD, [0, 1, 2, 0, 1, 2])  # two forwards before a backward
    other.record(BACKWARD, 2)
    assert [use.unit for use in other.ahead()] == [1, 0, 2, 1, 0]


def test_one_layer_three_times() -> None:
    trace, order = Trace("m", 4), [0, 1, 0, 2, 0, 3]
    step(trace, order)
    step(trace, order)
    assert step(trace, order) == 0
    again = Trace("m", 2)
    for _ in range(3):
        missed = step(again, [0, 0, 0, 1])
    assert missed == 0


def test_evaluation_between_steps_disturbs_nothing() -> None:
    trace, order = Trace("m", 6), list(range(6))
    for _ in range(3):
        step(trace, order)
    run(trace, EVALUATION, [0, 2, 4])
    assert step(trace, order) == 1
    assert run(trace, EVALUATION, [0, 2, 4]) <= 1  # its beginning; the rest is known
    assert step(trace, order) == 0  # training after it is known, too


def test_another_order_costs_its_own_misses_once() -> None:
    trace, usual, other = Trace("m", 8), list(range(8)), [0, 3, 1, 6, 7]
    for _ in range(3):
        step(trace, usual)
    first = run(trace, FORWARD, other)
    assert 0 < first <= len(other)
    run(trace, BACKWARD, other[::-1])
    step(trace, usual)
    assert run(trace, FORWARD, other) <= 1  # where the two orders part
    run(trace, BACKWARD, other[::-1])
    assert step(trace, usual) <= 1


@settings(max_examples=chosen(test=20, torture=1000))
@given(
    orders=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=20), min_size=1, max_size=4, unique_by=str
    )
)
def test_the_next_repetition_of_any_order_hits(orders: list[list[int]]) -> None:
    """A round of several orders that was seen twice is predicted."""
    tally("hypothesis examples")
    trace = Trace("m", 10)
    # Orders that share long runs cannot be told apart before they part.
    tokens = [unit for order in orders for unit in order]
    runs = [tuple((tokens * 2)[i : i + 8]) for i in range(len(tokens))]
    for _ in range(2):
        run(trace, FORWARD, tokens)
    missed = run(trace, FORWARD, tokens)
    assert missed <= len(tokens) - len(set(runs))


def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "KEEP_TOKENS", 100)
    trace = Trace("m", 7)
    for _ in range(100):
        missed = run(trace, FORWARD, list(range(7)))
    assert missed == 0
    assert len(trace._history) <= 101 and len(trace._seen) < 400
    run(trace, EVALUATION, [5])
    assert next(trace.ahead(), None) is None  # never seen: nothing is predicted


def test_pace() -> None:
    trace = Trace("m", 2)
    trace.record(FORWARD, 0)
    assert not trace.paces_s()
    for _ in range(50):
        trace.record(FORWARD, 1, since_last_s=0.2)
        trace.record(FORWARD, 0, since_last_s=0.5)
    assert trace.paces_s() == pytest.approx([0.2, 0.5])  # of 0 and of 1


def test_kept_and_taken_up_again() -> None:
    trace, order = Trace("model of 3", 3), [0, 1, 2]
    for _ in range(2):
        step(trace, order)
    text = json.dumps(trace.to_dict())
    back = Trace.from_dict(json.loads(text), "model of 3", 3)
    assert (back.hits, back.misses) == (0, 0)
    assert step(back, order) == 0


def test_to_a_file_and_back(tmp_path: Path) -> None:
    """It predicts from the first use on, and what was recorded before loading still counts."""
    trace, order, path = Trace("model of 3", 3), [0, 1, 2], tmp_path / "order.json"
    for _ in range(2):
        step(trace, order)
    trace.save(path)
    trace.save(path)  # a file that is there is replaced
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["order.json"]
    back = Trace("model of 3", 3)
    run(back, EVALUATION, [2, 1, 0])
    missed = back.misses
    back.load(path)
    assert back.misses == missed, "what is loaded is no miss"
    assert step(back, order) == 1, "only that training follows evaluation is new"
    assert run(back, EVALUATION, [2, 1, 0]) <= 1, "what was recorded before is still known"
    fresh = Trace("model of 3", 3)
    fresh.load(path)
    assert step(fresh, order) == 0 == fresh.misses


def test_a_long_history_can_be_loaded(tmp_path: Path) -> None:
    """A history without a forward pass loads, too; the search for one takes no quadratic time."""
    trace = Trace("m", KEEP_TOKENS)
    for unit in range(KEEP_TOKENS):
        trace._learn(KEEP_TOKENS + unit)  # its use in a backward pass
    trace.save(tmp_path / "order")
    back = Trace("m", KEEP_TOKENS)
    back.load(tmp_path / "order")
    assert back._history == trace._history


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path, mine = tmp_path / "order", Trace("mine", 3)
    run(mine, FORWARD, [0, 1])
    before = mine.to_dict()
    Trace("theirs", 3).save(path)
    with pytest.raises(FormatError, match=r"order: trace: was recorded .* 'theirs' .* 'mine' of 3"):
        mine.load(path)
    mine.save(path)
    text = path.read_bytes()
    damaged = [
        b"",
        text[:-3],
        text + b"}",
        text.replace(b"[0, 1]", b"[0, 7]"),
        text.replace(b"[0, 1]", b"[0, NaN]"),
        text.replace(b'"units": 3', b'"units": 3, "units": 3'),
        b"[1, 2]",
        b"\xff" + text,
        b"[" * 100_000,
        text + b" " * MOST_FILE_BYTES,
    ]
    for wrong in damaged:
        path.write_bytes(wrong)
        with pytest.raises(FormatError, match="order: "):
            mine.load(path)
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path):
        with pytest.raises(FormatError, match="ordinary file"):
            mine.load(other)
    with pytest.raises(StoreError, match="cannot read it"):
        mine.load(tmp_path / "none")
    with pytest.raises(ConfigError, match="is not there; make it"):
        mine.save(tmp_path / "none" / "order")
    assert mine.to_dict() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 1"),
        ({"fingerprint": "x"}, "recorded for a model 'x' of 3 units, this one is 'm' of 3"),
        ({"units": 4}, "of 4 units"),
        ({"history": None}, "a list"),
        ({"history": [[0, 0]] * (KEEP_TOKENS + 1)}, "at most"),
        ({"history": [[0]]}, r"\[phase, unit\]"),
        ({"history": [[0, True]]}, r"\[phase, unit\]"),
        ({"history": [[3, 0]]}, "a phase below 3"),
        ({"history": [[0, 3]]}, "a unit below 3"),
        ({"history": [[0, -1]]}, "a unit below 3"),
    ],
)
def test_what_is_no_trace_of_this_model_is_refused(change: dict, words: str) -> None:
    good = {"version": 1, "fingerprint": "m", "units": 3, "history": [[0, 1]]}
    Trace.from_dict(good, "m", 3)
    with pytest.raises(FormatError, match=words):
        Trace.from_dict(good | change, "m", 3)
