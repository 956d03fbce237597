"""Every hook that is registered with torch."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from offload.core.heap import HEAP
from offload.core.locks import steadfast, uninterrupted
from offload.distributed import is_connected
from offload.planning.unit import Unit


def watch_gradients(
    params: Mapping[int, Tensor], arrived: Callable[[int], None], reduces: bool = False
) -> list[RemovableHandle]:
    """Call `arrived`, a method, with the number of each parameter whose gradient autograd has added
    to, as long as its owner lives. Not while ranks are connected: what reduces gradients over them
    writes to them later, unseen; unless it is `arrived` itself that does.
    """
    method = weakref.WeakMethod(arrived)

    def hook(number: int, param: Tensor) -> None:
        owner = method()
        if owner is not None and (reduces or not is_connected()):
            with uninterrupted:
                owner(number)
            HEAP.arrived(param.nbytes if param.is_cpu else 0)

    return [
        param.register_post_accumulate_grad_hook(_bound(hook, number))  # type: ignore[no-untyped-call]
        for number, param in params.items()
        if param.requires_grad and param.is_leaf
    ]


def watch_passes(
    params: Mapping[int, Tensor], arrived: Callable[[int], None], ended: Callable[[], None]
) -> list[RemovableHandle]:
    """Call `arrived` and `ended`, methods of one object, as long as it lives: with the number of
    each parameter whose gradient autograd has added to; and after each backward pass in which there
    was one. A pass within another, as checkpoints make them, is none of its own.
    """
    watcher = _Passes(weakref.WeakMethod(arrived), weakref.WeakMethod(ended))
    return [
        param.register_post_accumulate_grad_hook(_bound(watcher.arrived, number))  # type: ignore[no-untyped-call]
        for number, param in params.items()
        if param.requires_grad and param.is_leaf
    ]


@dataclass
class _Passes:
    tell_arrived: weakref.WeakMethod[Callable[[int], None]]
    tell_ended: weakref.WeakMethod[Callable[[], None]]
    pass_id: int | None = None  # of the one whose end will be told

    @uninterrupted
    def arrived(self, number: int, param: Tensor) -> None:
        tell = self.tell_arrived()
        if tell is None:
            return
        now: int = torch._C._current_graph_task_id()
        if self.pass_id != now:
            self.pass_id = now
            at_end_of_backward(self.ended)
        tell(number)
        HEAP.arrived(param.nbytes if param.is_cpu else 0)

    @uninterrupted
    def ended(self) -> None:
        self.pass_id = None
        tell = self.tell_ended()
        if tell is not None and torch._C._current_autograd_node() is None:  # else in another's
            tell()


class Runner(Protocol):
    """Is told when a model's modules run."""

    def before_forward(self, unit: Unit) -> None: ...

    def after_forward(self, unit: Unit, outputs: list[Tensor]) -> None: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...

    def expect(self, numel: int) -> None:
        """The model is about to run, with so many elements."""


def follow(model: nn.Module, units: Sequence[Unit], runner: Runner) -> list[Handle]:
    """Tell `runner` of every run of the model and of its units' modules, also of one that ends with
    an exception.
    """
    runs = _ModuleRuns()
    handles = _follow_run(model, runs, lambda: runner.enter(), lambda _outputs: runner.leave())
    handles.append(
        model.register_forward_pre_hook(
            _untraced(lambda _, args, kwargs: runner.expect(_numel_of((args, kwargs)))),
            prepend=True,
            with_kwargs=True,
        )
    )
    for unit in units:
        for module in unit.modules:
            handles += _follow_run(
                module,
                runs,
                partial(runner.before_forward, unit),
                partial(runner.after_forward, unit),
            )
    return handles


_End = Callable[[list[Tensor]], None]


class _ModuleRuns(threading.local):
    """Modules that run in a thread, and whose beginning was told: how to tell their end."""

    def __init__(self) -> None:
        self.ends: list[_End] = []


def _follow_run(
    module: nn.Module, runs: _ModuleRuns, begin: Callable[[], None], end: _End
) -> list[Handle]:
    def mine(outputs: list[Tensor]) -> None:  # one for each pair of hooks: a module may have two
        end(outputs)

    def before(*_: object) -> None:
        with uninterrupted:
            begin()
            runs.ends.append(mine)

    def after(_module: nn.Module, _inputs: object, output: object) -> None:
        with uninterrupted:
            if runs.ends and runs.ends[-1] is mine:  # else something before us raised
                runs.ends.pop()
                end(_tensors_in(output))

    def call(_module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        depth = len(runs.ends)
        try:
            return original(*args, **kwargs)
        except BaseException:  # torch calls no hook for an interrupt
            with steadfast:
                while len(runs.ends) > depth:
                    runs.ends.pop()([])
            raise

    return [
        module.register_forward_pre_hook(_untraced(before), prepend=True),
        module.register_forward_hook(_untraced(after), always_call=True),
        intercept(module, "_call_impl", call),
    ]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Not for torch.compile to look into: a graph ends there. Who has no optimizer, which loads the
    compiler, need not wait for it.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return cast("Callable[..., None]", disable(hook)) if "torch._dynamo" in sys.modules else hook


class Handle(Protocol):
    def remove(self) -> None: ...


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


def forget_interrupted_backward() -> None:
    """Have torch let go of a graph whose backward has ended with an error: what it had not come to
    stays in a queue of this thread, and so does all that the graph holds, until the next backward.
    """
    if torch._C._current_graph_task_id() == -1:
        with torch.enable_grad():
            nothing = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            nothing.clone().backward()  # type: ignore[no-untyped-call]


def call_in_backward(tensors: Sequence[Tensor], function: Callable[[], None]) -> None:
    """Call it when the first gradient of one of these is known: before backward goes on to what
    they were made from.
    """
    register_multi_grad_hook(tensors, lambda _: function(), mode="any")


def _numel_of(inputs: object) -> int:
    return sum(tensor.numel() for tensor in _tensors_in(inputs))


def _tensors_in(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def _bound(hook: Callable[[int, Tensor], None], number: int) -> Callable[[Tensor], None]:
    return lambda param: hook(number, param)
