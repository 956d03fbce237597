"""Saving: a model, its optimizer and whatever else has a state, whole or not at all.

Everything that user code may change at any time (parameters, buffers, plain optimizers, states of
other objects) is written at the call. The state of a wrapped optimizer is written chunk by chunk,
in the background if asked for, while training goes on; what is saved is the moment of the call.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.checkpoint import background
from offload.checkpoint.model import Keeper, ModelContents
from offload.checkpoint.optimizer import OptimizerContents
from offload.checkpoint.rng import random_states
from offload.checkpoint.shard import Shard
from offload.checkpoint.trees import OTHER, Leaves
from offload.checkpoint.writer import CheckpointWriter
from offload.errors import ConfigError
from offload.format.safetensors import TensorSpec
from offload.optim.saver import Saver
from offload.ticket import Ticket

MODEL, OPTIMIZER = "model", "optimizer"
OWN = (MODEL, OPTIMIZER, "rng", "extra")  # sections of a checkpoint that are no object's name
_MOST_SHARD_BYTES = 4 << 30


class Save:
    """One save. Looks at everything when it is made, and changes nothing on the disk before
    `begin`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        keeper: Keeper | None,
        extra: Any,
        keep: int | None,
        stateful: Mapping[str, Any],
    ) -> None:
        check_arguments(path, model, stateful)
        if keep is not None and (type(keep) is not int or keep < 1):
            raise ConfigError(f"keep: expected a number of checkpoints from 1 on, got {keep!r}")
        self.path = Path(path)
        self.owners: list[Any] = [model]
        self._keep = keep
        self._model = ModelContents(model, keeper)
        self._optimizer: OptimizerContents | None = None
        if optimizer is not None:
            self._optimizer = OptimizerContents(optimizer, self._model.names)
            self.owners.append(self._optimizer.optimizer)
        self._extra = extra
        self._stateful = stateful
        self._leaves = Leaves()
        self._writer: CheckpointWriter | None = None
        self._saver: Saver | None = None
        self._values: dict[str, Any] = {}
        self._cancelled: BaseException | None = None

    def turn(self) -> AbstractContextManager[None]:
        """Keeps steps out while it is inside."""
        if self._optimizer is None or self._optimizer.session is None:
            return nullcontext()
        return self._optimizer.session.turn.act("save")

    def begin(self) -> None:
        """Write all that may change when this has returned. In the turn."""
        fields = self._look()
        session = self._optimizer.session if self._optimizer is not None else None
        metrics = session.metrics if session is not None else None
        self._writer = CheckpointWriter(self.path, metrics=metrics)
        _UNDER_WAY.add(self)
        try:
            if self._cancelled is not None:
                raise self._cancelled
            model = _Shards(self._writer, MODEL, self._model.specs())
            other = _Shards(self._writer, OTHER, self._leaves.specs())
            state = _Shards(self._writer, OPTIMIZER, fields)
            if self._optimizer is not None and session is not None:
                names = self._optimizer.names

                def sink(number: int, field: str, begin: int, values: Tensor) -> None:
                    state.write(f"{names[number]}/{field}", begin, values)

                self._saver = session.begin_saving(sink)
            self._model.write(model.write)
            self._leaves.write(other.write)
            self._leaves.tensors.clear()
            if self._optimizer is not None and session is None:
                self._optimizer.write_plain(state.write)
        except BaseException as error:
            self.give_up(error)
            raise

    def _look(self) -> Sequence[TensorSpec]:
        """Everything that is no tensor of the model or field of the optimizer goes to the values.
        Refuses what cannot be saved.
        """
        trees: dict[str, Any] = {MODEL: self._model.values()}
        fields: Sequence[TensorSpec] = ()
        if self._optimizer is not None:
            fields, trees[OPTIMIZER] = self._optimizer.look()
        trees |= {"rng": random_states(), "extra": self._extra}
        trees |= {name: each.state_dict() for name, each in self._stateful.items()}
        self._values = {name: self._leaves.encode(name, tree) for name, tree in trees.items()}
        return fields

    def finish(self) -> Path:
        """Write the rest, and make it a checkpoint. Any thread."""
        assert self._writer is not None
        try:
            if self._saver is not None:
                self._saver.run()
            path = self._writer.commit(self._values, self._model.fingerprint, keep=self._keep)
        except BaseException as error:
            self.give_up(error)
            raise
        self._tell(str(path))
        return path

    def _tell(self, path: str) -> None:
        if self._optimizer is not None and self._optimizer.session is not None:
            self._optimizer.session.soundness.last_checkpoint = path

    def give_up(self, error: BaseException) -> None:
        """Leave nothing behind. Idempotent."""
        if self._saver is not None:
            self._saver.give_up(error)
        if self._writer is not None:
            self._writer.abandon()

    def cancel(self, error: BaseException) -> None:
        """Whoever works on it gets `error` soon and gives up, unless it is saved by then. Any
        thread.
        """
        self._cancelled = error
        if self._saver is not None:
            self._saver.cancel(error)
        if self._writer is not None:
            self._writer.cancel(error)

    def tell_failure(self, error: BaseException) -> None:
        """In the report, in case nobody asks."""
        session = self._optimizer.session if self._optimizer is not None else None
        if session is not None:
            session.metrics.note(f"background save of {self.path}", f"failed: {error}")


# Those that have begun; ended ones go with their last user.
_UNDER_WAY: weakref.WeakSet[Save] = weakref.WeakSet()


def cancel_all(error: BaseException) -> None:
    """Saves under way in any thread of this process end with `error`, or well if they are through.
    What they have made is removed. Does not wait for it.
    """
    for task in list(_UNDER_WAY):
        task.cancel(error)


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    keeper: Keeper | None,
    extra: Any,
    keep: int | None,
    in_background: bool,
    stateful: Mapping[str, Any],
) -> Path | Ticket[Path]:
    """See `offload.save`."""
    task = Save(path, model, optimizer, keeper, extra, keep, stateful)
    background.settle(task.owners)
    with task.turn():
        task.begin()
        return background.start(task) if in_background else task.finish()


def check_arguments(
    path: str | os.PathLike[str], model: nn.Module, stateful: Mapping[str, Any]
) -> None:
    """Of `save` and `load`."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path: expected a directory's name, got {type(path).__name__}")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    for name, each in stateful.items():
        if name in OWN:
            raise ConfigError(f"{name}: is a name that every checkpoint has; choose another")
        methods = (getattr(each, method, None) for method in ("state_dict", "load_state_dict"))
        if not all(callable(method) for method in methods):
            raise ConfigError(
                f"{name}: expected something with state_dict() and load_state_dict(), got "
                f"{type(each).__name__}; plain values go into extra={{...}}"
            )


class _Shards:
    """The files of one section: as many as are needed to keep each of a size that is easy to move
    about. A tensor lies in one.
    """

    def __init__(self, writer: CheckpointWriter, section: str, specs: Sequence[TensorSpec]) -> None:
        self._shard_of: dict[str, Shard] = {}
        for some in _cut(specs):
            shard = writer.open_shard(section, some)
            self._shard_of |= {spec.name: shard for spec in some}

    def write(self, name: str, begin: int, values: Tensor) -> None:
        self._shard_of[name].write(name, begin, values)


def _cut(specs: Iterable[TensorSpec]) -> list[list[TensorSpec]]:
    found: list[list[TensorSpec]] = []
    nbytes = 0
    for spec in specs:
        if not found or nbytes + spec.nbytes > _MOST_SHARD_BYTES:
            found.append([])
            nbytes = 0
        found[-1].append(spec)
        nbytes += spec.nbytes
    return found
