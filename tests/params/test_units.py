"""Units: found in the structure, every parameter with one owner."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.core.errors import ConfigError
from offload.params import units
from offload.params.units import find_units, refuse_lazy
from offload.planning.unit import Unit, enclosing

ALIGN_BYTES = 256  # up to which torch tells cuBLASLt, which may choose another algorithm elsewhere


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)


class Gpt(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = True, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)
        self.scale = nn.Parameter(torch.ones(3))
        if tied:
            self.head.weight = self.embedding.weight


def check(model: nn.Module, found: list[Unit]) -> None:
    """Assert what must hold for any model."""
    owned = [member.param for unit in found for member in unit.members]
    assert len(owned) == len(set(owned)) and set(owned) == set(model.parameters())
    names = dict(model.named_parameters())
    owner = {}
    for number, unit in enumerate(found):
        assert unit.number == number
        end = 0
        for member in unit.members:
            assert names[member.name] is member.param
            assert member.begin % ALIGN_BYTES == 0 and member.begin >= end
            end = member.begin + member.nbytes
            owner[member.param] = number
        assert unit.nbytes % ALIGN_BYTES == 0 and end <= unit.nbytes < end + ALIGN_BYTES
    for unit in found:
        assert {owner[p] for m in unit.modules for p in m.parameters(recurse=False)} <= set(
            unit.needs
        )


def test_repeated_layers_are_units_and_the_rest_is_together() -> None:
    model = Gpt()
    found = find_units(model)
    check(model, found)
    assert [unit.name for unit in found] == [
        "the model and 3 more", "blocks.0", "blocks.1", "blocks.2",
    ]  # fmt: skip
    assert all(unit.needs == (unit.number,) for unit in found)


def test_large_layers_are_alone_and_shared_ones_have_one_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(units, "LARGE_BYTES", 1000)
    model = Gpt(tied=True)
    found = find_units(model)
    check(model, found)
    by_name = {unit.name: unit for unit in found}
    head = by_name["head"]
    assert head.members == () and head.nbytes == 0
    assert head.needs == (by_name["embedding"].number,)
    untied = find_units(Gpt(tied=False))
    assert [u.nbytes for u in untied if u.name == "head"] == [1792]  # 50 * 8 * 4, rounded up


def test_lists_of_lists_are_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = nn.Sequential(*(nn.Sequential(Block(4), Block(4)) for _ in range(2)))
    model = nn.Sequential(nn.Conv2d(1, 1, 3), stages, nn.Linear(4, 2))
    check(model, find_units(model))
    assert [unit.name for unit in find_units(model)] == [
        "0 and 1 more", "1.0.0", "1.0.1", "1.1.0", "1.1.1",
    ]  # fmt: skip
    monkeypatch.setattr(units, "MOST_BYTES", 100)  # too large to move at once
    check(model, find_units(model))
    assert len(find_units(model)) == 1


def test_chosen_by_class_or_by_function() -> None:
    model = Gpt()
    by_class = find_units(model, [Block, nn.Embedding])
    check(model, by_class)
    names = [unit.name for unit in by_class]
    assert names == ["the model and 2 more", "embedding", "blocks.0", "blocks.1", "blocks.2"]
    by_function = find_units(model, lambda name, module: name.endswith("up"))
    check(model, by_function)
    assert [u.name for u in by_function if u.name.startswith("blocks.1")] == ["blocks.1.up"]
    for wrong in (3, [], [int], "Block"):
        with pytest.raises(ConfigError, match="units: expected module classes or a function"):
            find_units(model, wrong)  # type: ignore[arg-type]


def test_models_without_structure() -> None:
    assert find_units(nn.ReLU()) == []
    single = nn.Linear(3, 3)
    check(single, find_units(single))
    with torch.device("meta"):
        meta = Gpt()
    check(meta, find_units(meta))


def test_what_cannot_move_is_refused_by_name() -> None:
    class Int8Params(nn.Parameter):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight = Int8Params(torch.ones(2, 2))
    with pytest.raises(ConfigError, match=r"1\.weight: is a .*Int8Params"):
        find_units(model)
    with pytest.raises(ConfigError, match="weight: is lazy and has no shape yet"):
        refuse_lazy(nn.LazyLinear(3))
    model[1].weight = nn.Parameter(torch.ones(2, 2).t()[:, :1].expand(2, 2))
    with pytest.raises(ConfigError, match=r"1\.weight: expected a contiguous parameter"):
        find_units(model)


def test_frozen_parameters_beside_trained_ones_are_a_unit_of_their_own() -> None:
    model = Gpt()
    for name, param in model.named_parameters():
        param.requires_grad_("norm" in name)
    found = find_units(model)
    check(model, found)
    assert [unit.name for unit in found] == [
        "the model and 3 more", "the model and 3 more, frozen",
        "blocks.0", "blocks.0, frozen", "blocks.1", "blocks.1, frozen",
        "blocks.2", "blocks.2, frozen",
    ]  # fmt: skip
    for unit in found:
        assert len({member.param.requires_grad for member in unit.members}) == 1
    assert [unit.needs for unit in found[:4]] == [(0, 1), (1,), (2, 3), (3,)]
    assert enclosing(found) == {0, 1}
    assert len(find_units(model.requires_grad_(False))) == 4


def test_types_are_units_of_their_own_where_that_is_asked_for() -> None:
    layers = nn.ModuleList(
        nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.bfloat16)) for _ in range(2)
    )
    layers[1][0].requires_grad_(False)
    together, apart = find_units(layers), find_units(layers, splits_types=True)
    assert [len(unit.members) for unit in together] == [4, 2, 2]
    assert [len(unit.members) for unit in apart] == [2, 2, 2, 2]
    assert [unit.needs for unit in apart] == [(0, 1), (1,), (2, 3), (3,)]
    for unit in apart:
        assert len({(m.dtype, m.param.requires_grad) for m in unit.members}) == 1
    assert [unit.name for unit in apart] == ["0", "0, bfloat16", "1", "1, frozen float32"]
