"""The ranks that save or load one checkpoint together, or one process by itself.

They talk over a side channel of their own, made when the save begins and closed when it ends: a
background save cannot get mixed up with training or with another save. Everything is done in
phases. A phase ends alike on all ranks: well, or with an error of one kind, which the rank where it
happened raises and the other ranks report. A rank that leaves ends the side channel for all, so
that no rank waits for it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from offload.core.errors import StateError
from offload.distributed import check_alike, each_by_consensus
from offload.distributed.side_channel import SideChannel, open_side_channel

ARRIVAL_S = 60.0  # until all ranks have reached the same save or load


class RankGroup:
    """The ranks of one save or load. what: the save or load, for messages. side_channel: None for
    one process. One thread at a time may use it; any thread may call `cancel` and `leave`.
    """

    told_errors: type[BaseException] = BaseException

    def __init__(self, what: str, side_channel: SideChannel | None) -> None:
        self.what, self._side_channel = what, side_channel
        self.rank = side_channel.rank if side_channel is not None else 0
        self.count = side_channel.count if side_channel is not None else 1
        self.is_first = self.rank == 0

    @classmethod
    def gather(cls, what: str, process_group: Any) -> RankGroup:
        """Wait until every rank has reached this point of its program; a `StateError` names the
        ranks that have not. process_group: as in a `Config`.
        """
        return cls(what, open_side_channel(what, process_group, ARRIVAL_S))

    def by_consensus(self, phase: str, act: Callable[[], Any]) -> list[Any]:
        """Run `act` on every rank; return the results (JSON) of all, by rank, when all have one. If
        it fails on one rank, all raise. It may take any time, as long as every rank gives signs of
        life.
        """
        if self._side_channel is None:
            return [act()]
        self._side_channel.begin(self.what)
        return each_by_consensus(self, f"{phase} of {self.what}", act)

    def exchange(self, value: Any, what: str, deadline_s: float | None = None) -> list[Any]:
        """All-gather one value from each rank, once all ranks have reached the phase `what`."""
        assert self._side_channel is not None, "one process has no one to ask"
        heard = self._side_channel.exchange([what, value])
        for rank, (phase, _) in enumerate(heard):
            if phase != what:
                raise StateError(
                    f"{self.what}: rank {rank} is at {phase}, rank {self.rank} at {what}; do the "
                    "same on every rank"
                )
        return [theirs for _, theirs in heard]

    def agree(self, phase: str, entries: Mapping[str, str], remedy: str) -> None:
        """Raise `ConfigError` on all ranks if their entries differ; name the first that does."""
        if self.count == 1:
            return
        text = json.dumps(sorted(entries.items()))
        digests = self.by_consensus(phase, lambda: hashlib.sha256(text.encode()).hexdigest())
        if len(set(digests)) > 1:
            each = self.by_consensus(f"{phase}, one by one,", lambda: dict(entries))
            check_alike(self.what, each, remedy)

    def bring_together(self, mine: Tensor) -> list[Tensor]:
        """All-gather the bytes of the ranks: return those of each, by rank. Blocks until all ranks
        have called it.
        """
        if self._side_channel is None:
            return [mine]
        self._side_channel.begin(self.what)
        return self._side_channel.gather(mine)

    def cancel(self, error: BaseException) -> None:
        """Make the thread that waits here for other ranks raise `error`. Any thread may call it."""
        if self._side_channel is not None:
            self._side_channel.leave(error)

    def leave(self) -> None:
        """End this rank's part. Idempotent. Ranks that still wait for it get an error. Any thread
        may call it.
        """
        if self._side_channel is not None:
            self._side_channel.leave()
