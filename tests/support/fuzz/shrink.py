"""The search for a smaller case that still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from support.fuzz.cases import Case, Layer, Loop, Place

Fails = Callable[[Case], bool]


def shrink(case: Case, fails: Fails, tries: int = 200) -> Case:
    """Leave out and simplify parts of a case, as long as it still fails.

    Acts come first, in halves and then one by one, then the model, the optimizer, the loop and the
    place. Ends after `tries` runs.
    """
    left = tries
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(case):
            left -= 1
            if left < 0:
                return case
            if fails(smaller):
                case, is_smaller = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    yield from _fewer_acts(case)
    yield from _simpler_model(case)
    yield from _simpler_rest(case)
    yield from _simpler_acts(case)


def _fewer_acts(case: Case) -> Iterator[Case]:
    acts, size = case.acts, len(case.acts)
    while size >= 1:
        for begin in range(0, len(acts), size):
            yield replace(case, acts=acts[:begin] + acts[begin + size :])
        size //= 2


def _simpler_model(case: Case) -> Iterator[Case]:
    model = case.model
    for number in reversed(range(len(model.layers))):
        if len(model.layers) > 1:
            rest = model.layers[:number] + model.layers[number + 1 :]
            kept = tuple(
                replace(each, target=min(each.target, max(n - 1, 0))) for n, each in enumerate(rest)
            )
            if kept[0].kind not in ("again", "borrow"):
                yield replace(case, model=replace(model, layers=kept, segments=0))
                yield replace(case, model=replace(model, layers=kept))
        own = model.layers[number]
        for simple in (Layer("linear"), Layer(own.kind, own.size, own.target)):
            if own != simple:
                layers = (*model.layers[:number], simple, *model.layers[number + 1 :])
                yield replace(case, model=replace(model, layers=layers))
    defaults = {"is_tied": False, "is_sequential": False, "is_transposed": False, "segments": 0}
    for name, value in {**defaults, "dtype": "float32", "width": 4, "words": 7}.items():
        if getattr(model, name) != value:
            yield replace(case, model=replace(model, **{name: value}))


def _simpler_rest(case: Case) -> Iterator[Case]:
    optimizer = case.optimizer
    if optimizer.kind != "SGD":
        yield replace(
            case,
            optimizer=replace(optimizer, kind="SGD", settings=(("lr", 0.1),), has_tensor_lr=False),
        )
    for name, value in (("groups", 1), ("late", 0), ("has_tensor_lr", False)):
        if getattr(optimizer, name) != value:
            yield replace(case, optimizer=replace(optimizer, **{name: value}))
    for each in ("schedule", "max_grad_norm", "has_scaler", "threads", "looks"):
        value = getattr(Loop(), each)
        if getattr(case.loop, each) != value and not (
            each == "schedule" and any(act.name == "schedule" for act in case.acts)
        ):
            yield replace(case, loop=replace(case.loop, **{each: value}))
    for each in ("memory", "directories", "depth", "activations", "chunk_numel", "large_bytes"):
        value = getattr(Place(case.place.mode), each)
        if getattr(case.place, each) != value:
            yield replace(case, place=replace(case.place, **{each: value}))


def _simpler_acts(case: Case) -> Iterator[Case]:
    for number, act in enumerate(case.acts):
        if act.name == "move" and act.place is not None and act.place.memory:
            simple = replace(act, place=Place(act.place.mode))
            yield replace(case, acts=(*case.acts[:number], simple, *case.acts[number + 1 :]))
