"""The coordinator of an optimizer whose state ranks share: stages 1 and 2.

Each act begins with a consensus: it starts when all ranks have said that they can, and a refusal on
one rank is a refusal on all. Calls that a program easily makes on one rank only (`state_dict`,
`close`) have a deadline of a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload import kernels
from offload.core.config import Config
from offload.core.errors import ConfigError, StateError
from offload.core.metrics import Metrics
from offload.distributed.consensus import check_alike, each_by_consensus
from offload.distributed.device_network import DeviceNetwork
from offload.distributed.group import DeviceLink
from offload.distributed.ranks import Ranks
from offload.optim.agreement import remedy_at_start, start_facts
from offload.optim.buckets import HOST, Buckets, no_buckets, place_of, share_out, stage_of
from offload.optim.coordinator import (
    Begin,
    Look,
    OptimizerOwnResources,
    PendingStep,
    Resources,
    StepCoordinator,
    Watch,
)
from offload.optim.export import OptimizerStateGatherer
from offload.optim.gradient_source import in_memory
from offload.optim.recipe import Record
from offload.optim.records import OptimizerDraft
from offload.optim.reducer import CarriedGradients, Reducer
from offload.optim.sharded_update import ShardedUpdate, WatchPasses
from offload.planning.state_plan import RankShare

RENDEZVOUS_S = 60.0
_CALL_ON_ALL = (
    "state_dict() and close() put the state of all ranks together: call them on every rank, or "
    "save with offload.save"
)
_NO_SCALER = partial(
    ConfigError,
    "GradScaler: with release_grads=True among ranks it finds no gradients to unscale: "
    "they are averaged and kept by the optimizer; train in bfloat16 without a scaler, "
    "or use DistributedDataParallel and leave release_grads out",
)


class ShardedCoordinator(StepCoordinator):
    """The coordinator of one optimizer's steps, gradients and state over ranks. watch_passes:
    registers hooks on gradients that are averaged here. link: between the ranks' devices, where the
    parameters are on devices.
    """

    ranks: Ranks

    def __init__(
        self,
        ranks: Ranks,
        config: Config,
        metrics: Metrics,
        watch: Watch,
        watch_passes: WatchPasses,
        link: DeviceLink | None,
    ) -> None:
        super().__init__(config, metrics, watch)
        self.ranks = ranks
        self._stage, self._link = stage_of(config), link
        self._buckets: Buckets = no_buckets(ranks.place, config)
        self._watch_passes = watch_passes
        self._carried: CarriedGradients | None = None  # gradients between two plans
        self._is_syncing = True
        if config.release_grads:
            self.scaler_refusal = _NO_SCALER

    # --- from plan to plan ------------------------------------------------------------------------

    def share_out(self, records: Sequence[Record]) -> tuple[Buckets, RankShare]:
        buckets, place = share_out(self._buckets, records), place_of(records)
        if place != HOST and self._link is None:
            raise ConfigError(
                f"optimizer: its parameters are on {place} now, and were on the CPU when ranks "
                "began to share them; close() it before they are moved, and wrap it again"
            )
        return buckets, buckets.share(self._stage, place)

    def open(self, draft: OptimizerDraft) -> Resources:
        resources, share, buckets = super().open(draft), draft.plan.ranks, draft.buckets
        assert isinstance(resources, OptimizerOwnResources), "no prepared model has them"
        assert share is not None and buckets is not None, "made for ranks"
        network = None
        if resources.transfers:
            (transfer,) = resources.transfers.values()
            network = DeviceNetwork(self.ranks, transfer, self._link)
        sharded = resources.sharded = ShardedUpdate(
            self.ranks,
            buckets,
            share,
            draft.records,
            resources.copies or resources.pool,
            self.metrics,
            self._watch_passes,
            network,
        )
        if sharded.reducer is not None:
            resources.grads_are_own = True
            if self._carried is not None:
                sharded.reducer.take_over(self._carried)
        self._buckets, self._carried = buckets, None
        self._tell_syncing()
        return resources

    def close(self) -> None:
        """Close the present plan. Gradients that only the reducer holds are kept for the next."""
        if self.resources is not None and self.resources.sharded is not None:
            sharded, self.resources.sharded = self.resources.sharded, None
            sharded.close()
            if sharded.reducer is not None and not self.ranks.is_broken:
                self._carried = sharded.reducer.carry()
            sharded.exchange.close()
        super().close()

    def alone(self) -> StepCoordinator:
        self.ranks.close()
        return StepCoordinator(self._config, self.metrics, self._watch)

    @property
    def _sharded(self) -> ShardedUpdate:
        assert self.resources is not None and self.resources.sharded is not None
        return self.resources.sharded

    @property
    def _reducer(self) -> Reducer | None:
        sharded = self.resources.sharded if self.resources is not None else None
        return sharded.reducer if sharded is not None else None

    # --- a step -----------------------------------------------------------------------------------

    def begin_step(self, optimizer: torch.optim.Optimizer, look: Look, begin: Begin) -> PendingStep:
        looked: list[dict[int, Tensor]] = []
        pending: list[PendingStep] = []
        steps_done = self.metrics.snapshot().counts.get("steps", 0)

        def say_what_is_here() -> dict[str, Any]:
            looked.append(in_memory(look()))
            return self._sharded.look(looked[0], steps_done)

        def say_squares() -> str | None:
            pending.append(begin(grads))
            squares = pending[0].sum_squares
            return None if squares is None else squares.hex()  # exact

        try:
            said = each_by_consensus(self.ranks, "step", say_what_is_here, self.metrics)
            grads = self._sharded.settle(looked[0], said)
            squares = each_by_consensus(self.ranks, "step and norm", say_squares, self.metrics)
        except BaseException:
            for one in pending:
                one.undo()
            raise
        each = [float.fromhex(text) for text in squares if text is not None]
        pending[0].complete(lambda _: kernels.GradStats.of(each).sum_squares)
        return pending[0]

    # --- gradients --------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        if not self._config.release_grads:
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
        super().zero_grad(set_to_none)
        self._carried = None
        if self._reducer is not None:
            self._reducer.zero_grad(set_to_none)

    def return_gradients(self) -> None:
        if self._reducer is not None:
            self._sharded.return_gradients(self._meet("close", self._reducer.look))

    # --- state of other ranks ---------------------------------------------------------------------

    @property
    def has_lost_ranks(self) -> bool:
        return self.ranks.is_broken

    def meet(self, numbers: Callable[[], list[int]]) -> None:
        said = self._meet("state_dict", lambda: {"which parameters have state": numbers()})
        check_alike("state_dict", said, "load it again", StateError)

    def _meet(self, what: str, act: Callable[[], Any]) -> list[Any]:
        deadline_s = min(RENDEZVOUS_S, self.ranks.deadline_s)
        return each_by_consensus(self.ranks, what, act, self.metrics, _CALL_ON_ALL, deadline_s)

    def gatherer(self, records: Sequence[Record]) -> OptimizerStateGatherer | None:
        return self._sharded.gatherer()

    def add(
        self, group: Mapping[str, Any], add: Callable[[], None], records: Callable[[], Any]
    ) -> None:
        before = self._buckets

        def say_what_is_new() -> dict[str, Any]:
            add()
            new = {id(param) for param in group["params"]}
            return start_facts([record for record in records() if id(record.param) in new])

        try:
            said = each_by_consensus(self.ranks, "add_param_group", say_what_is_new, self.metrics)
            check_alike("add_param_group", said, remedy_at_start)
        except BaseException:
            self._buckets = before  # from which all ranks draw up the same ones again
            raise
