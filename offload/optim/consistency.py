"""Whether parameters and state of an optimizer are of one age, and what helps when they are not.

An error in the middle of a step leaves some slices a step ahead of the others; one in the middle of
a load leaves states of two origins. Nothing mixed may be stepped or saved then. A whole
`load_state_dict` mends it. After a step the parameters are mixed as well, so they must have been
loaded before that: those that the step may have touched and nobody has written to since are refused
by name. (What writes through `.data` is not seen; the message tells the way round.)
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from offload.core.errors import StateError
from offload.core.log import LOG
from offload.distributed import local_of
from offload.optim.recipe import Record

STEP, LOAD = "step", "load_state_dict"
CHECKPOINT = "load of a checkpoint"
MOVE = "move of the state to another plan"


@dataclass(frozen=True)
class _Touched:
    """A parameter as the step left it."""

    name: str
    param: Tensor
    likeness: tuple[int, ...]


def _likeness(param: Tensor, may_move: bool) -> tuple[int, ...]:
    """Address and versions: what is done to a DTensor leaves that of its part as it was. may_move:
    the engine gives it another address, or none, when it likes; versions alone tell then.
    """
    if may_move:
        return (param._version,)
    local = local_of(param)
    return local.data_ptr(), local._version, param._version


def clear_frames(error: BaseException | None) -> None:
    """Give up the memory that the frames of an error hold, however long somebody keeps it: a
    notebook keeps the last one, and our budget would be taken as long.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # others may have made a circle of them
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


class Consistency:
    """The verdict on one optimizer's parameters and state. may_move: its parameters are those of a
    prepared model.
    """

    def __init__(self, may_move: bool) -> None:
        self._may_move = may_move
        self.last_checkpoint: str | None = None  # the newest state that was handed out
        self._error: BaseException | None = None
        self._act = ""
        self._touched: list[_Touched] = []

    @property
    def is_lost(self) -> bool:
        return self._error is not None

    def lose(self, act: str, error: BaseException, touched: Sequence[Record] = ()) -> None:
        """`act` has ended with `error` in its middle. touched: parameters it may have changed."""
        self._act, self._error = act, error
        LOG.error(
            "%s ended with an error in its middle; nothing can be stepped or saved until a whole "
            "checkpoint is loaded: %s: %s",
            act,
            type(error).__name__,
            str(error),  # not itself: whoever keeps the record would keep our memory
        )
        if act == STEP:  # a load that fails after it makes the parameters no better
            self._touched = [
                _Touched(record.name, record.param, _likeness(record.param, self._may_move))
                for record in touched
            ]

    def mend(self) -> None:
        """All state has been replaced."""
        self._error, self._touched = None, []

    def let_go(self) -> None:
        """Before memory is given back: the error is no reason to keep it."""
        clear_frames(self._error)

    def check(self) -> None:
        """Refuse to step or to save what is mixed."""
        if self._error is None:
            return
        known = self.last_checkpoint or "none is known here"
        if self._act in (STEP, CHECKPOINT) or self._touched:
            what = "parameters and state are of two ages; load a checkpoint into the model, then "
            what += f"its optimizer state by load_state_dict (the last one: {known})"
        else:
            what = "the state is of two origins; load it again (the parameters are as they were)"
        raise StateError(
            f"optimizer: an earlier {self._act} ended with an error in its middle, so that {what}; "
            f"the error was: {type(self._error).__name__}: {self._error}"
        ) from self._error

    def tell(self, what: str) -> None:
        """Warn where `what` hands out something mixed."""
        if self._error is not None:
            LOG.warning(
                "%s: an earlier %s ended with an error in its middle, so that these values are of "
                "two ages; load a whole checkpoint before they are used",
                what,
                self._act,
            )

    def check_mendable(self) -> None:
        """Refuse a load that would leave parameters of two ages."""
        left = [
            touched.name
            for touched in self._touched
            if _likeness(touched.param, self._may_move) == touched.likeness
        ]
        if left:
            raise StateError(
                f"optimizer: an earlier step ended with an error in its middle, and {left[0]} "
                f"(one of {len(left)}) may be of another age than the rest: nobody has written to "
                "it since; load the model's checkpoint first, then the optimizer's (weights that "
                "were put in through .data are not seen: close() then, and wrap or prepare again)"
            ) from self._error
