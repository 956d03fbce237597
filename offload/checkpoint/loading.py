"""Loading: the checkpoint is checked first, to the last byte; then it is read in, piece by piece.

Ranks that load together share the check: each compares its part of the bytes, and no rank changes
anything before all have reported that their part is right. Then each reads what it needs.
"""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.format.directory import find_newest, pass_over
from offload.checkpoint.format.values import decode
from offload.checkpoint.model import Differences, ModelContents
from offload.checkpoint.optimizer import OptimizerContents, innermost
from offload.checkpoint.rank_group import RankGroup
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.saves import (
    MODEL,
    OPTIMIZER,
    OWN,
    RNG,
    RNG_RANKS,
    await_saves,
    check_arguments,
    process_group_of,
)
from offload.checkpoint.trees import check_random_states, set_random_states
from offload.core.errors import ConfigError, CorruptionError, FormatError, OffloadError, StateError
from offload.core.locks import uninterrupted
from offload.core.log import LOG
from offload.optim.consistency import CHECKPOINT
from offload.optim.source import FieldSource, whole
from offload.params.prepared import Prepared


class Load:
    """A load in progress. `check` changes nothing; `read_together` changes everything."""

    def __init__(
        self,
        reader: CheckpointReader,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        keeper: Prepared | None,
        stateful: Mapping[str, Any],
        rank_group: RankGroup,
    ) -> None:
        self._reader, self._rank_group = reader, rank_group
        self._model = ModelContents(model, keeper)
        self._optimizer: OptimizerContents | None = None
        if optimizer is not None:
            self._optimizer = OptimizerContents(optimizer, self._model.names, stateful)
        self._session = self._optimizer.session if self._optimizer is not None else None
        self._stateful = stateful
        self._trees: dict[str, Any] = {}
        self._sources: dict[str, FieldSource] = {}
        self._state_dict: dict[str, Any] = {}

    def turn(self) -> AbstractContextManager[None]:
        if self._session is None:
            return nullcontext()
        return self._session.access.act("load", may_nest=True)

    # --- checking ---------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what does not fit, and what is damaged. Changes nothing."""
        differences = Differences(f"{self._reader.path} and what it is loaded into")
        self._check_sections(differences)
        self._reader.check(share=(self._rank_group.rank, self._rank_group.count))
        values = self._reader.manifest.values
        self._trees = {
            name: decode(tree, lambda each: whole(self._reader.tensor(each)))
            for name, tree in values.items()
        }
        self._sources = self._model.match(self._under(MODEL), self._trees[MODEL], differences)
        if self._optimizer is not None:
            self._state_dict = self._optimizer.match(
                self._under(OPTIMIZER), self._trees[OPTIMIZER], differences
            )
        differences.check()
        if self._optimizer is not None:
            self._optimizer.check(self._state_dict)
        for states in (self._trees[RNG], *self._trees.get(RNG_RANKS, ())):
            check_random_states(states)

    def _check_sections(self, differences: Differences) -> None:
        """Check that the caller asks for what was saved, and for nothing else."""
        saved = dict(self._reader.manifest.values)
        for name in OWN:
            if name not in saved and name not in (OPTIMIZER, RNG_RANKS):
                raise FormatError(f"{self._reader.path}: expected {name} in it")
        wanted = {*self._stateful, *([OPTIMIZER] if self._optimizer is not None else [])}
        differences.missing += wanted - saved.keys()
        left = saved.keys() - wanted - {name for name in OWN if name != OPTIMIZER}
        if OPTIMIZER in left and not wanted:  # a load of the model alone, for evaluation
            LOG.info("%s: only the model is loaded, not %s", self._reader.path, ", ".join(left))
            left = set()
        differences.extra += sorted(left)
        differences.check()

    def _under(self, section: str) -> dict[str, FieldSource]:
        return {
            saved.key: self._reader.tensor(saved.name)
            for saved in self._reader.manifest.of_section(section)
        }

    # --- changing ---------------------------------------------------------------------------------

    def read_together(self) -> Any:
        """Load everything into the objects, on all ranks; return `extra`. If one rank fails in the
        middle, the other ranks have values from which training cannot go on.
        """
        before: dict[str, Any] = {}  # to be put back, also where another rank has failed
        is_named = False
        try:
            self._rank_group.by_consensus("named", lambda: self._load_stateful(before))
            is_named = True
            extra = self._rank_group.own_by_consensus("reading", self._read)
        except BaseException as error:
            if is_named and self._session is not None:
                self._session.consistency.lose(CHECKPOINT, error)
            self._put_back(before)
            raise
        if self._session is not None:
            self._session.consistency.last_checkpoint = str(self._reader.path)
        return extra

    def _read(self) -> Any:
        self._model.read(self._sources, self._trees[MODEL]["additions"])
        if self._optimizer is not None:
            self._optimizer.read(self._state_dict)
        self._set_random_states()
        return self._trees["extra"]

    def _set_random_states(self) -> None:
        """Restore this rank's random state, if as many ranks have saved as load. Otherwise only the
        first rank restores its own.
        """
        saved = [self._trees[RNG], *self._trees.get(RNG_RANKS, ())]
        rank, count = self._rank_group.rank, self._rank_group.count
        if rank == 0 or len(saved) == count:
            set_random_states(saved[rank])
        if len(saved) != count:
            LOG.warning(
                "%s: was saved by %d ranks and is loaded by %d: random numbers continue on rank 0 "
                "alone; on others, if there are any, they are as they were",
                self._reader.path,
                len(saved),
                count,
            )

    def _load_stateful(self, before: dict[str, Any]) -> None:
        """Load the user's stateful objects. They come first, because they alone may refuse for
        reasons of their own: nothing else has changed then. before: gets their states until now.
        """
        for name, each in self._stateful.items():
            with suppress(Exception):  # without its state, it cannot be restored
                state = each.state_dict()
                # An optimizer takes other tensors in a load and leaves these; copies may be larger
                # than memory.
                is_left = isinstance(each, torch.optim.Optimizer)
                before[name] = state if is_left else copy.deepcopy(state)
            try:
                each.load_state_dict(self._trees[name])
            except OffloadError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"{name}: its load_state_dict does not take what was saved: "
                    f"{type(error).__name__}: {error}; model and optimizer are as they were"
                ) from error

    def _put_back(self, before: Mapping[str, Any]) -> None:
        for name, state in before.items():
            try:
                self._stateful[name].load_state_dict(state)
            except Exception as error:
                LOG.error("load: %s could not be put back as it was: %s", name, error)


@uninterrupted
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    keeper: Prepared | None,
    stateful: Mapping[str, Any],
) -> Any:
    """See `offload.load`."""
    rank_group = RankGroup.gather(f"load of {path}", process_group_of(optimizer, keeper))
    passed: dict[str, str] = {}

    def find() -> str | None:
        """Check the arguments, and find the checkpoint: the first rank decides for all ranks."""
        check_arguments(path, model, None, stateful)
        await_saves([model] if optimizer is None else [model, innermost(optimizer)])
        if not rank_group.is_first:
            return None
        found = find_newest(path, passed)
        return str(found if rank_group.count == 1 else Path.cwd() / found)

    def check_one(found: Path, opened: ExitStack) -> Load:
        """Open and check the checkpoint; it stays open, and steps are kept out, with `opened`."""
        reader = _open(found, rank_group, opened)
        task = rank_group.own_by_consensus(
            "a look at everything",
            lambda: Load(reader, model, optimizer, keeper, stateful, rank_group),
        )
        opened.enter_context(task.turn())
        rank_group.by_consensus("every byte", task.check)
        return task

    try:
        while True:
            found = Path(rank_group.by_consensus("arguments", find)[0])
            with ExitStack() as opened:
                try:
                    task = check_one(found, opened)
                except (FormatError, CorruptionError) as error:
                    if found in (Path(path), Path.cwd() / path):
                        raise
                    pass_over(found.name, error, passed)
                else:
                    return task.read_together()
    finally:
        rank_group.leave()


def _open(path: Path, rank_group: RankGroup, opened: ExitStack) -> CheckpointReader:
    """Open the checkpoint, and make sure that all ranks see the same one."""
    readers: list[CheckpointReader] = []

    def open_one() -> str:
        readers.append(opened.enter_context(CheckpointReader(path)))
        if rank_group.count == 1:
            return ""
        return hashlib.sha256(readers[0].manifest.to_bytes()).hexdigest()

    if len(set(rank_group.by_consensus("the manifest", open_one))) > 1:
        raise StateError(
            f"{path}: is not the same one on all ranks; all must be on one node, or see one file "
            "system"
        )
    return readers[0]
