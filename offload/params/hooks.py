"""Every hook that the engine registers with torch."""

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
from offload.distributed.group import world_size
from offload.planning.unit import Unit


def watch_gradients(
    params: Mapping[int, Tensor], arrived: Callable[[int], None], reduces: bool = False
) -> list[RemovableHandle]:
    """Call `arrived`, a bound method, with the number of each parameter whose gradient autograd has
    accumulated to, as long as the method's object lives.

    While ranks are connected it is not called: code that reduces gradients over ranks writes to
    them later, and no hook sees that. reduces: `arrived` itself reduces them, and so is called all
    the same.
    """
    method = weakref.WeakMethod(arrived)

    def hook(number: int, param: Tensor) -> None:
        owner = method()
        if owner is not None and (reduces or world_size() < 2):
            with uninterrupted:
                owner(number)
            HEAP.arrived(param.nbytes if param.is_cpu else 0)

    return _hooked(params, hook)


def watch_passes(
    params: Mapping[int, Tensor], arrived: Callable[[int], None], ended: Callable[[], None]
) -> list[RemovableHandle]:
    """Call `arrived` and `ended`, bound methods of one object, as long as the object lives.

    `arrived` is called with the number of each parameter whose gradient autograd has accumulated
    to, `ended` after each backward pass in which there was such a parameter. A backward pass inside
    another one, as activation checkpointing runs them, does not count as a pass of its own.
    """
    watcher = _Passes(weakref.WeakMethod(arrived), weakref.WeakMethod(ended))
    return _hooked(params, watcher.arrived)


def _hooked(
    params: Mapping[int, Tensor], hook: Callable[[int, Tensor], None]
) -> list[RemovableHandle]:
    """Call `hook` with each parameter that autograd has accumulated to, after its number."""
    return [
        param.register_post_accumulate_grad_hook(partial(hook, number))  # type: ignore[no-untyped-call]
        for number, param in params.items()
        if param.requires_grad and param.is_leaf
    ]


@dataclass
class _Passes:
    tell_arrived: weakref.WeakMethod[Callable[[int], None]]
    tell_ended: weakref.WeakMethod[Callable[[], None]]
    pass_id: int | None = None  # the backward pass after which `ended` is queued to be called

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
        if tell is not None and torch._C._current_autograd_node() is None:  # not a nested pass
            tell()


class ModuleRunObserver(Protocol):
    """An object that is called before and after a model and its units' modules run."""

    def before_forward(self, unit: Unit) -> None: ...

    def after_forward(self, unit: Unit, outputs: list[Tensor]) -> None: ...

    def enter(self) -> None: ...

    def leave(self) -> None: ...


def follow(
    model: nn.Module,
    units: Sequence[Unit],
    runner: ModuleRunObserver,
    expect: Callable[[int], None] | None = None,
) -> list[Handle]:
    """Call `runner` before and after every run of the model and of its units' modules, also of a
    run that ends with an exception. expect: called with the number of elements of the inputs
    before each run of the model.
    """
    runs = _ModuleRuns()
    handles = _follow_run(model, runs, lambda: runner.enter(), lambda _outputs: runner.leave())
    if expect is not None:
        look = _untraced(lambda _, *inputs: expect(sum(t.numel() for t in _tensors_in(inputs))))
        handles.append(model.register_forward_pre_hook(look, prepend=True, with_kwargs=True))
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
    """The callbacks that end the module runs in progress, innermost last; one list for
    each thread.
    """

    def __init__(self) -> None:
        self.ends: list[_End] = []


def _follow_run(
    module: nn.Module, runs: _ModuleRuns, begin: Callable[[], None], end: _End
) -> list[Handle]:
    def mine(outputs: list[Tensor]) -> None:  # one per pair of hooks: a module may have two pairs
        end(outputs)

    def before(*_: object) -> None:
        with uninterrupted:
            begin()
            runs.ends.append(mine)

    def after(_module: nn.Module, _inputs: object, output: object) -> None:
        with uninterrupted:
            if runs.ends and runs.ends[-1] is mine:  # else an earlier pre-hook raised
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
        Interception(module, "_call_impl", call),
    ]


def _untraced(hook: Callable[..., None]) -> Callable[..., None]:
    """Exclude the hook from torch.compile, at the price of a graph break. Does nothing unless
    torch._dynamo is imported already: the import takes long, and a program without an optimizer
    need not wait for it.
    """
    disable: Any = torch._disable_dynamo  # type: ignore[attr-defined]
    return cast("Callable[..., None]", disable(hook)) if "torch._dynamo" in sys.modules else hook


class Handle(Protocol):
    def remove(self) -> None: ...


class Interception:
    """A method of one module that is replaced on the instance by `instead`, which gets the module
    and the original method ahead of the call's arguments; `remove` undoes that.
    """

    def __init__(self, module: nn.Module, name: str, instead: Callable[..., object]) -> None:
        self._module, self._name = module, name
        self._before = vars(module).get(name)  # an earlier replacement
        vars(module)[name] = partial(instead, module, getattr(module, name))

    def remove(self) -> None:
        vars(self._module).pop(self._name, None)
        if self._before is not None:
            vars(self._module)[self._name] = self._before


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call `function` when the backward pass that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def forget_interrupted_backward() -> None:
    """Make torch release the graph of a backward pass that has ended with an error.

    The nodes that this pass did not reach stay in a queue of this thread, with all that the graph
    holds, until the next backward. This runs a tiny one, unless a backward pass runs now.
    """
    if torch._C._current_graph_task_id() == -1:
        with torch.enable_grad():
            nothing = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
            nothing.clone().backward()  # type: ignore[no-untyped-call]


def call_in_backward(tensors: Sequence[Tensor], function: Callable[[], None]) -> None:
    """Call `function` when the first gradient of one of these tensors is computed, before backward
    goes on to the operations that made them.
    """
    register_multi_grad_hook(tensors, lambda _: function(), mode="any")


def _tensors_in(output: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
