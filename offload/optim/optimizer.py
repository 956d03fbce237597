"""`OffloadOptimizer`: a torch optimizer whose state is offloaded.

An existing optimizer is changed in place: its class becomes one made at run time, a subclass of
`OffloadOptimizer` and of the class it had. So it stays the object that schedulers, scalers and
trainers hold, and `isinstance` gives the same answers. `close()` makes it the plain optimizer
again, with its state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cache, wraps
from typing import Any, TypeGuard
from weakref import ref

import torch

from offload.core.errors import OffloadError, StateError
from offload.core.locks import steadfast, uninterrupted
from offload.core.log import LOG
from offload.core.tensors import outside_inference_mode
from offload.optim.consistency import LOAD
from offload.optim.session import Session


class WrappedOptimizerState(defaultdict[Any, Any]):
    """The `state` of a wrapped optimizer: empty, but true if the session has state. For a
    distributed checkpoint torch tests whether `state` is true, and takes a step with gradients of
    zero if it is not.
    """

    def __init__(self, session: Session, plain: defaultdict[Any, Any]) -> None:
        super().__init__(dict)
        self._session = session
        self.plain = plain  # the plain optimizer's own dict, put back by `close()`

    def __bool__(self) -> bool:
        return len(self) > 0 or self._session.has_state

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


class OffloadOptimizer(torch.optim.Optimizer):
    """An optimizer that has been wrapped: the methods in which it differs from the plain one. Only
    `offload.wrap` makes one.
    """

    _offload_session: Session

    @property
    def grad_norm(self) -> float | None:
        """The global gradient norm before clipping, of the last step with `max_grad_norm`."""
        return self._offload_session.grad_norm

    @torch.no_grad()
    def _step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss, session = None, self._offload_session
        if session.coordinator.scaler_refusal is not None:
            self._refuse_scaler(session.coordinator.scaler_refusal)
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with session.access.act("step"):
            session.step()
        return loss

    def _refuse_scaler(self, refusal: Callable[[], OffloadError]) -> None:
        """Refuse a step that a GradScaler has called: it sets `grad_scale` and `found_inf` on
        optimizers that unscale by themselves; see `attach`.
        """
        left = [name for name in ("grad_scale", "found_inf") if name in vars(self)]
        for name in left:
            delattr(self, name)
        if left:
            raise refusal()

    # As torch does to `step` when an optimizer is made: hooks and profiler ranges around it.
    step = torch.optim.Optimizer.profile_hook_step(_step)  # type: ignore[assignment, arg-type]
    step.hooked = True  # type: ignore[attr-defined]

    def no_sync(self) -> AbstractContextManager[None]:
        """Keep gradients with their parameters while the block runs. They are averaged over ranks
        once, with those of the next backward pass outside of the block. Does nothing without ranks.
        """
        return self._offload_session.coordinator.no_sync()

    @uninterrupted
    @outside_inference_mode
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients as the plain optimizer does, also those that `release_grads` has
        moved to host memory.
        """
        super().zero_grad(set_to_none)
        coordinator = self._offload_session.coordinator
        if coordinator.owner is None:  # a prepared model has no gradients beside its parameters'
            coordinator.zero_grad(set_to_none)

    @outside_inference_mode
    def state_dict(self) -> dict[str, Any]:
        """Return the state as the plain optimizer does, but in fp32, with `master` for 16-bit
        parameters. Tensors are copies; state that does not fit in host memory is in a memory-mapped
        file without a name. Among ranks all of them call it, and each gets the whole state. Blocks.
        """
        session = self._offload_session
        with session.access.act("state_dict"):
            exported = session.export()
            try:
                self.state.update(exported)
                found = super().state_dict()
            finally:
                self.state.clear()
            made = f"state_dict() after {session.steps_done} steps"
            session.consistency.last_checkpoint = made  # so that a later error can name it
            return found

    @outside_inference_mode
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a plain or a wrapped optimizer. If it raises a `ConfigError` or a
        `ValueError`, nothing has changed. It mends an optimizer whose last step or load failed in
        its middle.
        """
        session = self._offload_session
        taken: dict[int, Mapping[str, Any]] = {}

        def take(_: object, given: dict[str, Any]) -> dict[str, Any] | None:
            if session.incoming is not taken:
                return None  # left behind by a load that Ctrl-C ended before it could remove it
            taken.update(session.checked(given))
            return {**given, "state": {}}

        with session.access.act("load_state_dict", may_nest=True):
            handle = self.register_load_state_dict_pre_hook(take)  # after all others
            try:
                session.incoming = taken
                super().load_state_dict(state_dict)
            finally:
                session.incoming = None
                handle.remove()

    @outside_inference_mode
    def __setstate__(self, state: dict[str, Any]) -> None:
        session = self._offload_session
        if session.incoming is None:
            super().__setstate__(state)
            return
        with session.access.act("load_state_dict"):
            held = self.state
            try:
                try:
                    super().__setstate__(state)
                finally:
                    self.state = held
                session.take_in(session.incoming)
            except (KeyboardInterrupt, SystemExit) as error:  # new groups with the old state
                session.consistency.lose(LOAD, error)
                raise

    @outside_inference_mode
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group as the plain optimizer does, and make a new plan for all groups."""
        session = self._offload_session
        if isinstance(param_group, dict) and "params" in param_group:
            params = param_group["params"]  # may be a generator, which can be read only once
            param_group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        before = len(self.param_groups)

        def add() -> None:
            session.check_addable(param_group)
            super(OffloadOptimizer, self).add_param_group(param_group)
            session.reopen()

        with session.access.act("add_param_group"):
            try:
                session.coordinator.add(param_group, add, lambda: session.updater.records)
            except BaseException:
                del self.param_groups[before:]
                raise

    @uninterrupted
    @outside_inference_mode
    def close(self) -> None:
        """Release all memory and files; this is a plain optimizer again, with its state as torch
        would have it: in the parameters' dtype, on their device, without master weights. Among
        ranks all of them call it, and each gets the whole state. After a step that failed in its
        middle, or once the other ranks are lost, the plain optimizer has no state. Idempotent.
        """
        session: Session | None = getattr(self, "_offload_session", None)
        if session is not None:
            with session.access.act("close"):
                detach(session)  # Lightning's view of it inherits this method
            if session.coordinator.owner is not None:
                session.coordinator.owner.ended()

    def __enter__(self) -> OffloadOptimizer:
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        if not isinstance(self, OffloadOptimizer):
            return
        session = self._offload_session
        ranks = session.coordinator.ranks
        if kind is not None and ranks is not None:
            ranks.close()  # the other ranks may not get here: do not wait for them
        self.close()

    def __deepcopy__(self, memo: object) -> Any:
        raise StateError(
            "optimizer: a wrapped optimizer cannot be copied; copy its state_dict(), or close() it"
        )

    def __reduce__(self) -> Any:
        raise StateError(
            "optimizer: a wrapped optimizer cannot be pickled; save its state_dict() instead"
        )


@cache
def _offloaded(base: Any) -> type[OffloadOptimizer]:
    return type(f"Offload{base.__name__}", (OffloadOptimizer, base), {"__doc__": base.__doc__})


def is_wrapped(optimizer: object) -> TypeGuard[OffloadOptimizer]:
    return isinstance(optimizer, OffloadOptimizer)


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer inside of those that accelerate or Lightning made around it."""
    while not is_wrapped(optimizer):
        held = getattr(optimizer, "optimizer", None)
        if held is optimizer or not isinstance(held, torch.optim.Optimizer):
            break
        optimizer = held
    return optimizer


@uninterrupted
def attach(optimizer: torch.optim.Optimizer, session: Session) -> None:
    """Wrap the optimizer: change its class. Its state must be in the session already."""
    optimizer._offload_session = session  # type: ignore[attr-defined]
    optimizer.state.clear()
    optimizer.state = WrappedOptimizerState(session, optimizer.state)
    # With False a GradScaler unscales by itself and skips the step: our step reads no scale.
    session.supported_scaling = getattr(optimizer, "_step_supports_amp_scaling", None)
    # With True, where it would find no gradients to unscale, it calls `step`, which refuses it.
    refuses = session.coordinator.scaler_refusal is not None
    optimizer._step_supports_amp_scaling = refuses  # type: ignore[attr-defined]
    if vars(optimizer).get("close") is _nothing_to_close:
        del optimizer.close  # type: ignore[attr-defined]
    base: Any = type(optimizer)
    _change_class(optimizer, _offloaded(base))


def detach(session: Session) -> None:
    """Unwrap the optimizer: change its class back and put its state where torch expects it. If the
    export of the state raises, the optimizer stays wrapped and nothing is lost.
    """
    optimizer: Any = session.optimizer
    state = session.export_plain()  # if it raises, nothing is lost: still wrapped
    held = optimizer.state
    held.update(state)
    try:
        with steadfast:
            session.end()
    finally:
        optimizer.state = getattr(held, "plain", held)  # user code may have set another `state`
        optimizer.state.update(held)
        _change_class(optimizer, type(optimizer).__mro__[2])
        del optimizer._offload_session
        if not hasattr(optimizer, "close"):
            optimizer.close = _nothing_to_close
        if session.supported_scaling is None:
            delattr(optimizer, "_step_supports_amp_scaling")
        else:
            optimizer._step_supports_amp_scaling = session.supported_scaling
    LOG.debug("%s is closed", type(optimizer).__name__)


def _nothing_to_close() -> None:
    """Do nothing: the `close()` of an optimizer that is plain again, as in a `finally` after a
    `with`.
    """


def _change_class(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
    """Change the optimizer's class. If a scheduler has set a `step` of its own on the instance,
    replace that, too: it would go on calling the `step` of the old class.
    """
    optimizer.__class__ = kind
    left = vars(optimizer).get("step")
    if left is None:
        return
    function, held = kind.step, ref(optimizer)

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        this = held()
        assert this is not None
        this._opt_called = True  # type: ignore[attr-defined]
        return function.__get__(this, type(this))(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
