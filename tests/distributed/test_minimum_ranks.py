"""The least host memory that ranks are told, in the unit in which they give it: of each rank."""

from __future__ import annotations

import random
import re
import tempfile
from typing import Any

import pytest
import torch
from support.loops import SEED, chosen
from support.ranks.launch import run
from torch import nn

import offload
from offload.core.errors import OffloadError
from offload.params import units
from offload.planning import planner

pytestmark = pytest.mark.ranks
PAGE = 4096
DRAWS = chosen(test=2, torture=40)


def built(seed: int) -> tuple[nn.Module, Any]:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = draw.randint(9, 60)
    inner = [draw.randint(5, 90) for _ in range(draw.randint(2, 5))]
    layers = (nn.Sequential(nn.Linear(width, n), nn.ReLU(), nn.Linear(n, width)) for n in inner)
    model = nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def refusal(seed: int, host_bytes: int, folder: str, depth: int) -> int:
    """Ask for too little; return the least that the refusal names, of this rank or of another."""
    model, optimizer = built(seed)
    with pytest.raises(OffloadError) as refused:
        offload.prepare(model, optimizer, host_memory=host_bytes, nvme=folder, prefetch_depth=depth)
    found = re.search(r"the least that works is about (\d+)", str(refused.value))
    assert found is not None, refused.value
    return int(found[1])


def trains_with_the_least(rank: int) -> list[int]:
    units.LARGE_BYTES, planner.LEAST_CHUNK_NUMEL = 2048, 256
    told = []
    for seed in range(SEED, SEED + DRAWS):
        depth = seed % 3
        with tempfile.TemporaryDirectory() as folder:
            least = refusal(seed, PAGE, folder, depth)
            assert refusal(seed, least - PAGE, folder, depth) == least
            model, optimizer = built(seed)
            width = model[0][0].in_features  # type: ignore[index]
            offload.prepare(model, optimizer, host_memory=least, nvme=folder, prefetch_depth=depth)
            for number in range(3):
                torch.manual_seed(10 * number + rank)
                model(torch.randn(3, width)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.inference_mode():
                    model(torch.randn(3, width))
            optimizer.close()
            told.append(least)
    return told


@pytest.mark.parametrize("count", [2, 3])
def test_what_ranks_are_told_works(count: int) -> None:
    told = run(count, trains_with_the_least)
    assert all(each == told[0] for each in told)
