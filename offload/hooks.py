"""Every hook that is registered with torch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offload.shard import is_connected
from offload.units import Unit


def watch_gradients(
    params: Mapping[int, Tensor], arrived: Callable[[int], None]
) -> list[RemovableHandle]:
    """Call `arrived`, a method, with the number of each parameter whose gradient autograd has added
    to, as long as its owner lives. Not while ranks are connected: what reduces gradients over them
    writes to them later, unseen.
    """
    method = weakref.WeakMethod(arrived)

    def hook(number: int, _: Tensor) -> None:
        owner = method()
        if owner is not None and not is_connected():
            owner(number)

    return [
        param.register_post_accumulate_grad_hook(_bound(hook, number))  # type: ignore[no-untyped-call]
        for number, param in params.items()
        if param.requires_grad and param.is_leaf
    ]


class Runner(Protocol):
    """Is told when a model's modules run."""

    def before_forward(self, unit: Unit) -> None: ...

    def after_forward(self, unit: Unit, outputs: list[Tensor]) -> None: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...


def follow(model: nn.Module, units: Sequence[Unit], runner: Runner) -> list[RemovableHandle]:
    """Tell `runner` of every run of the model and of its units' modules, also of one that ends with
    an exception.
    """
    runs: list[object] = []  # modules that run, and whose beginning was told
    handles = _follow_run(model, runs, lambda: runner.enter(), lambda _outputs: runner.leave())
    for unit in units:
        for module in unit.modules:
            handles += _follow_run(
                module,
                runs,
                partial(runner.before_forward, unit),
                partial(runner.after_forward, unit),
            )
    return handles


def _follow_run(
    module: nn.Module,
    runs: list[object],
    begin: Callable[[], None],
    end: Callable[[list[Tensor]], None],
) -> list[RemovableHandle]:
    me = object()  # of this pair of hooks: a module may have two

    def before(*_: object) -> None:
        begin()
        runs.append(me)

    def after(_module: nn.Module, _inputs: object, output: object) -> None:
        if runs and runs[-1] is me:  # else it has not begun: something before us raised
            runs.pop()
            end(_tensors_in(output))

    return [
        module.register_forward_pre_hook(before, prepend=True),
        module.register_forward_hook(after, always_call=True),
    ]


@dataclass(frozen=True)
class Interception:
    """A method of one module that somebody else answers; `remove` undoes it."""

    module: nn.Module
    name: str
    before: object = None  # what somebody else had put there

    def remove(self) -> None:
        vars(self.module).pop(self.name, None)
        if self.before is not None:
            vars(self.module)[self.name] = self.before


def intercept(module: nn.Module, name: str, instead: Callable[..., object]) -> Interception:
    """Have `instead` called for a method of this very module, with the module and the method as it
    was before the other arguments.
    """
    original, before = getattr(module, name), vars(module).get(name)
    vars(module)[name] = partial(instead, module, original)
    return Interception(module, name, before)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call it when the backward pass that runs now is over."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def call_in_backward(tensors: Sequence[Tensor], function: Callable[[], None]) -> None:
    """Call it when the first gradient of one of these is known: before backward goes on to what
    they were made from.
    """
    register_multi_grad_hook(tensors, lambda _: function(), mode="any")


def _tensors_in(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _bound(hook: Callable[[int, Tensor], None], number: int) -> Callable[[Tensor], None]:
    return lambda param: hook(number, param)
