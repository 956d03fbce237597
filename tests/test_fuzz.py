"""Drawn trainings, offloaded and on plain torch: the same bits after every act, nothing left.

`make test` runs a few hundred acts, `make torture` 10,000 cases. A failure prints the command line
that runs its case again, and a smaller case that fails, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.fuzz import runner
from support.fuzz.campaign import Campaign
from support.fuzz.cases import NATIVE, draw, from_json, to_json
from support.fuzz.surroundings import scratch
from support.loops import chosen, tally

from offload import kernels

COUNT = chosen(test=24, torture=10_000, quick=8)
FIRST = 0  # seed
# With little at once a worker may take the next part, and a failure is found in a part of the time.
PARTS = chosen(test=2, torture=100, quick=1)
MOST_REFUSED = 0.1

pytestmark = pytest.mark.timeout(chosen(test=300, torture=3600))


@pytest.fixture
def campaign() -> Iterator[Campaign]:
    torch.set_num_threads(1)
    with scratch() as folder:
        yield Campaign(folder / "case", has_alarm=False)


@pytest.mark.quick
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_trainings_have_the_bits_of_torch(part: int, campaign: Campaign) -> None:
    for seed in range(FIRST + part, FIRST + COUNT, PARTS):
        print(f"case {seed}")  # where it hangs, this is the last line
        campaign.add(draw(seed))
        if len(campaign.failures) >= 3:
            break
    print(campaign.summary())
    tally("fuzzed cases", campaign.ran)
    tally("fuzzed acts", campaign.acts)
    tally("fuzzed cases that were refused", sum(campaign.refused.values()))
    tally("fuzzed interrupts", campaign.interrupts)
    assert not campaign.failures, "\n\n".join(map(str, campaign.failures))
    assert campaign.ran < 20 or campaign.refused_share < MOST_REFUSED


def test_a_wrong_bit_is_found_and_made_small(
    campaign: Campaign, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that is wrong in the last bit of one element."""
    update = kernels.update

    def wrong(rule: object, param: torch.Tensor, *rest: object, **options: object) -> None:
        update(rule, param, *rest, **options)  # type: ignore[arg-type]
        if param.numel():
            param.view(torch.int32)[-1] ^= 1

    monkeypatch.setattr(kernels, "update", wrong)
    campaign.tries = 25
    seeds = (seed for seed in range(1000) if draw(seed).optimizer.kind in NATIVE)
    failure = next(filter(None, (campaign.add(draw(seed)) for seed in seeds)))
    assert "Differs" in failure.error and f"--seed {failure.case.seed} " in str(failure)
    assert len(failure.smaller.acts) < len(failure.case.acts)
    monkeypatch.undo()
    assert campaign.add(failure.smaller) is None


def test_a_case_is_data() -> None:
    """That can be written down and read, and is the same for the same seed."""
    for seed in range(200):
        case = draw(seed)
        assert from_json(to_json(case)) == case == draw(seed)


def test_the_draw_has_everything() -> None:
    """So that no change of the draw takes something out unseen."""
    cases = [draw(seed) for seed in range(600)]
    acts = {(act.name, act.how) for case in cases for act in case.acts}
    names = {name for name, _ in acts}
    theirs = {name for name in dir(runner.Offloaded) if name.startswith("do_")}
    assert {f"do_{name.replace(' ', '_')}" for name in names - {"interrupt", "swap"}} == theirs
    assert {("fail", "forward"), ("fail", "backward"), ("save", "background")} <= acts
    assert {("evaluate", "inference"), ("interrupt", "step"), ("interrupt", "load")} <= acts
    places = {(place.mode, bool(place.memory)) for case in cases for place in case.places}
    assert len(places) == 5  # a plain one has no budget
    moves = {(case.place.mode, p.mode) for case in cases for p in case.places[1:]}
    assert {("wrap", "prepare"), ("prepare", "wrap"), ("prepare", "plain")} <= moves
    assert len({case.optimizer.kind for case in cases}) == 13
    assert {dtype for case in cases for dtype in case.dtypes} == {"float32", "bfloat16", "float16"}
    assert len({layer.kind for case in cases for layer in case.model.layers}) == 15
