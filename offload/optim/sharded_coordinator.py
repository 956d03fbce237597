"""The acts that an optimizer does together with the ranks that share its state, from plan to plan.

Each act begins with a consensus: it starts when all ranks have said that they can, and a refusal on
one rank is a refusal on all. Calls that a program easily makes on one rank only (`state_dict`,
`close`) have a deadline of a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from offload.core.config import Config
from offload.core.errors import ConfigError, StateError
from offload.core.metrics import Metrics
from offload.distributed import DeviceLink, Ranks, check_alike, each_by_consensus
from offload.distributed.device_network import DeviceNetwork
from offload.optim.agreement import remedy_at_start, start_facts
from offload.optim.buckets import HOST, Buckets, no_buckets, place_of, share_out, stage_of
from offload.optim.gradient_source import Gradient, in_memory
from offload.optim.pending_step import PendingStep
from offload.optim.recipe import Record
from offload.optim.reducer import CarriedGradients, Reducer
from offload.optim.resources import OptimizerOwnResources, WatchPasses
from offload.optim.sharded_update import ShardedUpdate
from offload.planning.state_plan import Plan, RankShare

RENDEZVOUS_S = 60.0
_CALL_ON_ALL = (
    "state_dict() and close() put the state of all ranks together: call them on every rank, or "
    "save with offload.save"
)

# Returns the gradients for a step; raises where something stands in its way.
Look = Callable[[], dict[int, Gradient]]
Begin = Callable[[Mapping[int, Gradient]], PendingStep]


class ShardedCoordinator:
    """The coordinator of one optimizer's steps, gradients and state over ranks. watch: registers
    hooks on gradients that are averaged here. link: between the ranks' devices, where the
    parameters are on devices.
    """

    def __init__(
        self,
        ranks: Ranks,
        config: Config,
        metrics: Metrics,
        watch: WatchPasses | None,
        link: DeviceLink | None,
    ) -> None:
        self.ranks = ranks
        self._stage, self._link = stage_of(config), link
        self.buckets: Buckets = no_buckets(ranks.place, config)
        self.sharded_update: ShardedUpdate | None = None  # None: nothing is open
        self._metrics = metrics
        self._reduces = bool(config.release_grads)
        self._watch = watch
        self._carried: CarriedGradients | None = None  # gradients between two plans
        self._is_syncing = True

    def share_out(self, records: Sequence[Record]) -> tuple[Buckets, RankShare]:
        """Divide the parameters over the ranks for a new plan. Changes nothing but each record's
        `own`.
        """
        buckets, place = share_out(self.buckets, records), place_of(records)
        if place != HOST and self._link is None:
            raise ConfigError(
                f"optimizer: its parameters are on {place} now, and were on the CPU when ranks "
                "began to share them; close() it before they are moved, and wrap it again"
            )
        return buckets, buckets.share(self._stage, place)

    def open(
        self,
        records: Sequence[Record],
        plan: Plan,
        buckets: Buckets,
        resources: OptimizerOwnResources,
    ) -> ShardedUpdate:
        assert plan.ranks is not None, "made for ranks"
        network = None
        if resources.transfers:
            (transfer,) = resources.transfers.values()
            network = DeviceNetwork(self.ranks, transfer, self._link)
        sharded_update = ShardedUpdate(
            self.ranks,
            buckets,
            plan.ranks,
            records,
            resources.copies or resources.pool,
            self._metrics,
            self._watch,
            network,
        )
        if sharded_update.reducer is not None and self._carried is not None:
            sharded_update.reducer.take_over(self._carried)
        self.buckets, self.sharded_update, self._carried = buckets, sharded_update, None
        self._tell_syncing()
        return sharded_update

    def leave(self) -> None:
        """Close the present plan. Gradients that only the reducer holds are kept for the next."""
        sharded_update, self.sharded_update = self.sharded_update, None
        if sharded_update is not None:
            sharded_update.close()
            if sharded_update.reducer is not None and not self.ranks.is_broken:
                self._carried = sharded_update.reducer.carry()
            sharded_update.exchange.close()

    @property
    def _reducer(self) -> Reducer | None:
        return self.sharded_update.reducer if self.sharded_update is not None else None

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, look: Look, begin: Begin, steps_done: int) -> PendingStep:
        """Begin a step that no rank refuses, with the norm over all ranks' gradients."""
        looked: list[dict[int, Tensor]] = []
        pending: list[PendingStep] = []

        def say_what_is_here() -> dict[str, Any]:
            looked.append(in_memory(look()))
            return self._open_sharded_update.look(looked[0], steps_done)

        def say_squares() -> str | None:
            pending.append(begin(grads))
            return pending[0].squares_text

        try:
            said = each_by_consensus(self.ranks, "step", say_what_is_here, self._metrics)
            grads = self._open_sharded_update.settle(looked[0], said)
            squares = each_by_consensus(self.ranks, "step and norm", say_squares, self._metrics)
        except BaseException:
            for one in pending:
                one.undo()
            raise
        pending[0].take_squares(squares)
        return pending[0]

    @property
    def _open_sharded_update(self) -> ShardedUpdate:
        assert self.sharded_update is not None, "something is open"
        return self.sharded_update

    # --- gradients --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients unreduced over ranks while the block runs."""
        if not self._reduces:
            raise StateError(
                "no_sync: gradients are averaged by others here; use the no_sync() of "
                "DistributedDataParallel, or wrap(..., release_grads=True) without it"
            )
        before, self._is_syncing = self._is_syncing, False
        try:
            self._tell_syncing()
            yield
        finally:
            self._is_syncing = before
            self._tell_syncing()

    def _tell_syncing(self) -> None:
        if self._reducer is not None:
            self._reducer.is_syncing = self._is_syncing

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero or drop the gradients that were taken from the parameters."""
        self._carried = None
        if self._reducer is not None:
            self._reducer.zero_grad(set_to_none)

    def return_gradients(self) -> None:
        """Return the averaged gradients to the parameters, on all ranks together."""
        if self._reducer is not None:
            self._open_sharded_update.return_gradients(self._meet("close", self._reducer.look))

    # --- other meetings ---------------------------------------------------------------------------

    def meet(self, numbers: Callable[[], list[int]]) -> None:
        """Hold a rendezvous of all ranks before they gather the state of the parameters with these
        numbers.
        """
        said = self._meet("state_dict", lambda: {"which parameters have state": numbers()})
        check_alike("state_dict", said, "load it again", StateError)

    def _meet(self, what: str, act: Callable[[], Any]) -> list[Any]:
        deadline_s = min(RENDEZVOUS_S, self.ranks.deadline_s)
        return each_by_consensus(self.ranks, what, act, self._metrics, _CALL_ON_ALL, deadline_s)

    def add(
        self, group: Mapping[str, Any], add: Callable[[], None], records: Callable[[], Any]
    ) -> None:
        """Add another group of parameters, on all ranks or on none. records: gives the records that
        there are after `add`.
        """
        before = self.buckets

        def say_what_is_new() -> dict[str, Any]:
            add()
            new = {id(param) for param in group["params"]}
            return start_facts([record for record in records() if id(record.param) in new])

        try:
            said = each_by_consensus(self.ranks, "add_param_group", say_what_is_new, self._metrics)
            check_alike("add_param_group", said, remedy_at_start)
        except BaseException:
            self.buckets = before  # from which all ranks draw up the same ones again
            raise
