"""Loading: everything is looked at first, to the last byte; then it is read in, piece by piece."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint import background
from offload.checkpoint.differences import Differences
from offload.checkpoint.model import Keeper, ModelContents
from offload.checkpoint.optimizer import OptimizerContents, innermost
from offload.checkpoint.reader import CheckpointReader, SavedTensorSource
from offload.checkpoint.rng import check_random_states, set_random_states
from offload.checkpoint.saving import MODEL, OPTIMIZER, OWN, check_arguments
from offload.checkpoint.tensors import whole
from offload.checkpoint.trees import decoded
from offload.errors import FormatError
from offload.format.directory import find_newest
from offload.log import LOG
from offload.optim.soundness import CHECKPOINT
from offload.optim.source import Source
from offload.store.safetensors_file import DTYPES


class _Saved:
    """A tensor of a checkpoint, with torch's own type."""

    def __init__(self, source: SavedTensorSource) -> None:
        self._source = source
        self.dtype = DTYPES[source.dtype]
        self.shape = tuple(source.shape)

    def read_into(self, begin_bytes: int, target: Tensor) -> None:
        if target.numel():
            self._source.read_into(begin_bytes, target)


class Load:
    """One load. `check` changes nothing; `read` changes everything."""

    def __init__(
        self,
        reader: CheckpointReader,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        keeper: Keeper | None,
        stateful: Mapping[str, Any],
    ) -> None:
        self._reader = reader
        self._model = ModelContents(model, keeper)
        self._optimizer: OptimizerContents | None = None
        if optimizer is not None:
            self._optimizer = OptimizerContents(optimizer, self._model.names)
        self._stateful = stateful
        self._trees: dict[str, Any] = {}
        self._sources: dict[str, Source] = {}
        self._state_dict: dict[str, Any] = {}

    def turn(self) -> AbstractContextManager[None]:
        if self._optimizer is None or self._optimizer.session is None:
            return nullcontext()
        return self._optimizer.session.turn.hold("load")

    # --- looking ----------------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse what does not fit, and what is damaged."""
        self._check_sections()
        self._reader.check()
        values = self._reader.manifest.values
        self._trees = {name: decoded(tree, self._read_whole) for name, tree in values.items()}
        differences = Differences(f"{self._reader.path} and what it is loaded into")
        self._sources = self._model.match(self._under(MODEL), self._trees[MODEL], differences)
        if self._optimizer is not None:
            self._state_dict = self._optimizer.match(
                self._under(OPTIMIZER), self._trees[OPTIMIZER], differences
            )
        differences.check()
        if self._optimizer is not None:
            self._optimizer.check(self._state_dict)
        check_random_states(self._trees["rng"])

    def _check_sections(self) -> None:
        """What was saved is asked for, and the other way round."""
        saved = dict(self._reader.manifest.values)
        differences = Differences(f"{self._reader.path} and what it is loaded into")
        for name in OWN:
            if name not in saved and name != OPTIMIZER:
                raise FormatError(f"{self._reader.path}: expected {name} in it")
        wanted = {*self._stateful, *([OPTIMIZER] if self._optimizer is not None else [])}
        for name in wanted - saved.keys():
            differences.missing(name)
        left = saved.keys() - wanted - {name for name in OWN if name != OPTIMIZER}
        if OPTIMIZER in left and not wanted:  # for evaluation
            LOG.info("%s: only the model is loaded, not %s", self._reader.path, ", ".join(left))
            left = set()
        for name in sorted(left):
            differences.extra(name)
        differences.check()

    def _under(self, section: str) -> dict[str, Source]:
        return {
            saved.key: self._source(name)
            for name, saved in self._reader.manifest.tensors.items()
            if saved.section == section
        }

    def _source(self, name: str) -> Source:
        return _Saved(self._reader.tensor(name))

    def _read_whole(self, name: str) -> Tensor:
        return whole(self._source(name))

    # --- changing ---------------------------------------------------------------------------------

    def read(self) -> Any:
        """Make all of it the objects' own; returns `extra`."""
        try:
            self._model.read(self._sources, self._trees[MODEL]["additions"])
            if self._optimizer is not None:
                self._optimizer.read(self._state_dict)
            for name, each in self._stateful.items():
                each.load_state_dict(self._trees[name])
            set_random_states(self._trees["rng"])
        except BaseException as error:
            self._lose(error)
            raise
        self._tell()
        return self._trees["extra"]

    def _lose(self, error: BaseException) -> None:
        if self._optimizer is not None and self._optimizer.session is not None:
            self._optimizer.session.soundness.lose(CHECKPOINT, error)

    def _tell(self) -> None:
        if self._optimizer is not None and self._optimizer.session is not None:
            self._optimizer.session.soundness.last_checkpoint = str(self._reader.path)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    keeper: Keeper | None,
    stateful: Mapping[str, Any],
) -> Any:
    """See `offload.load`."""
    check_arguments(path, model, stateful)
    background.settle([model] if optimizer is None else [model, innermost(optimizer)])
    reader = CheckpointReader(find_newest(path))
    try:
        task = Load(reader, model, optimizer, keeper, stateful)
        with task.turn():
            task.check()
            return task.read()
    finally:
        reader.close()
