"""How parameters are shared out over ranks: pure numbers."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from offload.optim.buckets import Buckets, bucket_bytes_for, share_out
from offload.optim.recipe import Record
from offload.planning.layout import ParamSpec, lay_out
from offload.planning.planner import Budgets, TrainingFacts, plan_state

SIZES = (1, 5, 1000, 0, 37, 4096, 3, 20_001)
FIELDS = ("m", "v")


def records(sizes: tuple[int, ...] = SIZES, frozen: int | None = None) -> list[Record]:
    params = [
        nn.Parameter(torch.empty(n, dtype=(torch.float32, torch.bfloat16)[i % 3 == 2]))
        for i, n in enumerate(sizes)
    ]
    return [
        Record(i, f"p{i}", param, {}, FIELDS, is_frozen=i == frozen)
        for i, param in enumerate(params)
    ]


@pytest.mark.parametrize("count", [2, 3, 7])
def test_every_element_is_one_ranks(count: int) -> None:
    made = records(frozen=4)
    each = [Buckets(rank, count, 4096).of(made) for rank in range(count)]
    assert len({buckets.digest for buckets in each}) == 1
    for record in made:
        owned = [buckets.own(record.number) for buckets in each]
        if record.is_frozen or not record.param.numel():
            assert owned == [None] * count
            continue
        elements = [i for first, end in owned for i in range(first, end)]  # type: ignore[misc]
        assert elements == list(range(record.param.numel()))
        assert all(first % 16 == 0 for first, _ in owned)  # type: ignore[misc]


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rounds_bring_every_element_once(itemsize: int) -> None:
    made = records()
    buckets = Buckets(0, 3, 4096).of(made)
    found: dict[int, list[int]] = {}
    for bucket in buckets.each:
        for begin, end in bucket.rounds(buckets.whole_bytes, itemsize):
            assert 3 * (end - begin) * itemsize <= buckets.whole_bytes
            for rank in range(3):
                for span in bucket.spans(rank, begin, end):
                    assert span.at + span.end - span.first <= end - begin
                    found.setdefault(span.number, []).extend(range(span.first, span.end))
    for record in made:
        assert sorted(found.get(record.number, [])) == list(range(record.param.numel()))


def test_buckets_are_in_the_order_of_backward_and_of_one_type() -> None:
    buckets = Buckets(0, 2, 4096).of(records())
    assert buckets.each[0].places[0].number == len(SIZES) - 1
    for bucket in buckets.each:
        assert all(place.param.dtype == bucket.dtype for place in bucket.places)
        assert all(place.begin * bucket.dtype.itemsize % 64 == 0 for place in bucket.places)
        assert len(bucket.places) == 1 or bucket.partition.nbytes <= 4096
    turns = [bucket.number for bucket in buckets.in_order_of_update]
    assert sorted(turns) == list(range(len(buckets.each)))


def test_parameters_keep_their_places() -> None:
    made = records()
    before = Buckets(1, 2, 4096).of(made[:5])
    after = before.of(made)
    assert [before.own(n) for n in range(5)] == [after.own(n) for n in range(5)]
    assert all(after.own(n) is not None for n in (5, 6, 7))
    without = after.of([Record(0, "p7", made[7].param, {}, FIELDS)])  # under another number
    assert without.own(0) == after.own(7) and without.own(3) is None
    spans = [span for bucket in without.each for span in bucket.spans(0, 0, bucket.shard_numel)]
    assert {span.number for span in spans} == {0}


def test_state_is_laid_out_for_own_elements_only() -> None:
    draw = random.Random(5)
    for _ in range(50):
        begin = draw.randrange(0, 5000, 16)
        own = begin, draw.randint(begin, 6000)
        params = [ParamSpec("a", 6000, FIELDS, own=own), ParamSpec("b", 70, FIELDS, own=(0, 0))]
        slices = [part for chunk in lay_out(params, 1024) for part in chunk.slices]
        assert [i for part in slices for i in range(part.begin, part.end)] == list(range(*own))
        assert all(part.param == 0 and part.begin % 16 == 0 for part in slices)
        assert 4 * sum(p.own_numel * len(p.fields) for p in params) == 8 * (own[1] - own[0])


def test_the_plan_has_the_shares() -> None:
    made = records((1 << 20, 1 << 18))
    for stage, grads in ((1, 0), (2, 1)):
        share = share_out(Buckets(1, 4, 1 << 20), made).share(stage)
        specs = tuple(ParamSpec(r.name, r.param.numel(), FIELDS, own=r.own) for r in made)
        plan = plan_state(TrainingFacts(specs, ranks=share), Budgets())
        numel = (1 << 20) + (1 << 18)
        assert abs(plan.state_bytes - 8 * numel / 4) <= 2 * 4096
        assert abs(share.grad_bytes - grads * numel) <= 4096
        assert plan.arena_bytes == plan.resident_bytes + share.host_bytes
        assert share.step_sent_bytes == pytest.approx(stage * 4 * numel * 3 / 4, rel=0.01)
        text = str(plan)
        assert f"rank 1 of 4, stage {stage}" in text and "network" in text
        assert "fits without offload" not in text


def test_small_budgets_have_small_buckets() -> None:
    assert bucket_bytes_for(None) == 32 << 20 == bucket_bytes_for(1 << 40)
    assert bucket_bytes_for(64 << 20) == 4 << 20
    assert bucket_bytes_for(1000) == 64 << 10
