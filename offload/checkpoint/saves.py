"""The saves of this process: a model, its optimizer and other objects that have a state, whole or
not at all; finished in the call or in the background, or cancelled.

Everything that user code may change at any time (parameters, buffers, plain optimizers, states of
other objects) is written during the call. The state of a wrapped optimizer is written chunk by
chunk, in the background if the caller wants that, while training goes on: a snapshot of the moment
of the call. A background save has a thread of its own. A model or an optimizer has one save at a
time: the next save or load of either waits for it to end. The thread is no daemon: a process that
ends finishes its saves first, which takes bounded time because every operation on the disk has a
deadline. A process that is killed leaves no checkpoint, and no file that the next save would not
remove.

`ticket.wait()` raises the error of a save, and the report of a wrapped optimizer has a line about
it. If the user's code has not waited, the next save or load of that model or optimizer raises it
instead of going on.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.draft import sweep
from offload.checkpoint.model import ModelContents
from offload.checkpoint.optimizer import OptimizerContents, innermost
from offload.checkpoint.rank_group import RankGroup, TensorToSave
from offload.checkpoint.shard import Shards
from offload.checkpoint.trees import OTHER, SavedTreeTensors, random_states
from offload.checkpoint.writer import CheckpointWriter
from offload.core.errors import ConfigError, StateError, reason
from offload.core.locks import Flag, steadfast, uninterrupted
from offload.core.log import LOG
from offload.core.ticket import Ticket, TicketState
from offload.optim import is_wrapped
from offload.optim.saver import Saver
from offload.params.prepared import Prepared

MODEL, OPTIMIZER, RNG = "model", "optimizer", "rng"
RNG_RANKS = "rng_ranks"  # of all ranks but the first, where several have saved
# Sections whose names no object of the user's may have.
OWN = (MODEL, OPTIMIZER, RNG, RNG_RANKS, "extra")


class Save:
    """A save by one process, or by all ranks of a group. `begin` looks at everything first, and
    changes nothing on the disk before that.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        keeper: Prepared | None,
        extra: Any,
        keep: int | None,
        stateful: Mapping[str, Any],
        rank_group: RankGroup,
    ) -> None:
        check_arguments(path, model, keep, stateful)
        self.path = Path(path)
        self.owners: list[Any] = [model]  # and the optimizer
        self.ticket: Ticket[Path] = Ticket(f"save of {self.path}")  # of a background save
        self.is_over = Flag()
        self._rank_group, self._keep = rank_group, keep
        self._model = ModelContents(model, keeper)
        self._optimizer: OptimizerContents | None = None
        if optimizer is not None:
            self._optimizer = OptimizerContents(optimizer, self._model.names, stateful)
            self.owners.append(self._optimizer.optimizer)
        self._extra, self._stateful = extra, stateful
        self._session = self._optimizer.session if self._optimizer is not None else None
        self._leaves = SavedTreeTensors()
        self._holdings: dict[str, list[TensorToSave]] = {}
        self._writer: CheckpointWriter | None = None
        self._shards: dict[str, Shards] = {}
        self._saver: Saver | None = None
        self._values: dict[str, Any] = {}
        self._cancelled: BaseException | None = None

    def turn(self) -> AbstractContextManager[None]:
        """Keep optimizer steps out while the block runs."""
        return nullcontext() if self._session is None else self._session.access.act("save")

    def begin(self) -> None:
        """Write everything that user code may change once this has returned. Call it in `turn`."""
        rank_group = self._rank_group
        try:
            states = rank_group.by_consensus("a look at everything", self._look)
            if rank_group.count > 1:
                self._settle_differences()
                self._values[RNG_RANKS] = states[1:]
            invitation = rank_group.by_consensus("files", self._make)[0]
            rank_group.by_consensus("what may change", lambda: self._write(invitation))
        except BaseException as error:
            self.give_up(error)
            raise

    def _look(self) -> Any:
        """Put everything that is no tensor of the model and no field of the optimizer into the
        values. Refuses what cannot be saved. Returns this rank's random state, None on the first
        rank.
        """
        is_first = self._rank_group.is_first
        trees: dict[str, Any] = {MODEL: self._model.values()}
        fields: list[TensorToSave] = []
        if self._optimizer is not None:
            fields, trees[OPTIMIZER] = self._optimizer.look(self._rank_group)
        trees |= {RNG: random_states(), "extra": self._extra}
        trees |= {name: each.state_dict() for name, each in self._stateful.items()}
        self._values = {name: self._leaves.encode(name, tree) for name, tree in trees.items()}
        self._holdings = {
            MODEL: self._model.holdings(is_first),
            OTHER: self._leaves.holdings() if is_first else [],
            OPTIMIZER: fields,
        }
        return None if is_first else self._values[RNG]

    def _settle_differences(self) -> None:
        """Refuse differences between ranks in what must be the same on all; warn where they differ
        in what the first rank alone saves.
        """
        rank_group = self._rank_group
        rank_group.agree("what is saved", self._described(), "save the same things on every rank")
        params, buffers = self._model.samples()
        if self._optimizer is not None:
            params |= self._optimizer.samples()
        rank_group.agree(
            "values that all ranks have",
            params,
            "all ranks train one model, so that its values are the same on all: give them the same "
            "gradients (DistributedDataParallel), or wrap with process_group=False",
        )
        names = ("extra", *self._stateful)
        found = {name: self._leaves.digest(name, self._values[name]) for name in names}
        found |= {f"buffer {name}": crc for name, crc in buffers.items()}
        differing = [
            (name, rank)
            for rank, theirs in enumerate(
                rank_group.by_consensus("values of the first rank", lambda: found)
            )
            for name in found
            if theirs.get(name) != found[name]
        ]
        if differing and rank_group.is_first:
            LOG.warning(
                "%s: rank 0's is saved, other ranks have different values: %s",
                rank_group.what,
                ", ".join(f"{name} (rank {rank})" for name, rank in differing[:20]),
            )

    def _described(self) -> dict[str, str]:
        """Describe what must be the same on all ranks: names, types and shapes of all tensors,
        settings and counts, path and node.
        """
        found = {
            f"{section}/{each.spec.name}": f"{each.spec.dtype} {list(each.spec.shape)}"
            for section in (MODEL, OPTIMIZER)
            for each in self._holdings[section]
        }
        for section in (MODEL, OPTIMIZER):
            if section in self._values:
                text = json.dumps(self._values[section], sort_keys=True)
                found[f"the {section}'s settings"] = hashlib.sha256(text.encode()).hexdigest()[:16]
        found |= {"keep": str(self._keep), "path": str(Path.cwd() / self.path)}
        try:  # the kernel's id of this machine since it was booted
            node = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            node = socket.gethostname()
        return found | {"the node": node}

    def _make(self) -> dict[str, Any] | None:
        """Make directory and files on the first rank; return the invitation for the other ranks."""
        return self._open(None).invitation() if self._rank_group.is_first else None

    def _open(self, invitation: Mapping[str, Any] | None) -> CheckpointWriter:
        self._writer = writer = CheckpointWriter(
            self.path,
            metrics=self._session.metrics if self._session is not None else None,
            rank_group=self._rank_group,
            invitation=invitation,
        )
        if self._cancelled is not None:
            raise self._cancelled
        for section, holdings in self._holdings.items():
            self._shards[section] = writer.open_section(section, holdings)
        return writer

    def _write(self, invitation: Mapping[str, Any]) -> None:
        if not self._rank_group.is_first:
            self._open(invitation)
        if self._optimizer is not None:
            self._saver = self._optimizer.begin_saving(self._shards[OPTIMIZER])
        self._model.write(self._shards[MODEL])
        if self._rank_group.is_first:
            self._leaves.write(self._shards[OTHER])
        self._leaves.tensors.clear()

    def finish(self) -> Path:
        """Write the rest, and publish the checkpoint. Any thread may call it."""
        assert self._writer is not None
        try:
            run = self._saver.run if self._saver is not None else lambda: None
            self._rank_group.by_consensus("the optimizer's state", run)
            if self._optimizer is not None:
                self._optimizer.write_strided(self._rank_group, self._shards[OPTIMIZER])
            path = self._writer.commit(self._values, self._model.fingerprint, keep=self._keep)
        except BaseException as error:
            self.give_up(error)
            raise
        self._rank_group.leave()
        if self._session is not None:
            self._session.consistency.last_checkpoint = str(path)
        return path

    @steadfast
    def give_up(self, error: BaseException) -> None:
        """Remove everything that the save has made. Idempotent."""
        if self._saver is not None:
            self._saver.give_up(error)
        if self._optimizer is not None:
            self._optimizer.strided.drop()
        if self._writer is not None:
            self._writer.abandon()
        self._rank_group.leave()
        if self._writer is None and not self._rank_group.is_first and self._holdings:
            sweep(Path.cwd() / self.path)  # the first rank may have been lost

    def cancel(self, error: BaseException) -> None:
        """Make every thread that works on the save raise `error` soon and give up, unless the
        checkpoint is saved by then. Any thread may call it.
        """
        self._cancelled = error
        if self._saver is not None:
            self._saver.cancel(error)
        if self._writer is not None:
            self._writer.cancel(error)
        self._rank_group.cancel(error)

    def tell_failure(self, error: BaseException) -> None:
        """Note the failure in the report, in case no code waits for the ticket."""
        if self._session is not None:
            self._session.metrics.note(
                f"background save of {self.path}", f"failed, nothing was kept: {reason(error)}"
            )

    def progress(self) -> object:
        """Return a value that changes whenever the save has made progress. Any thread."""
        return (
            self._saver.progress if self._saver is not None else 0,
            self._writer.progress if self._writer is not None else 0,
        )


# --- the saves of this process --------------------------------------------------------------------

# A save that shows no progress for so long is not waited for any more. A file system may need that
# time to write the bytes that it accepted before.
_SILENCE_S = 1800.0

# The saves that have begun. Weak references: an ended save is freed with its last user.
_UNDER_WAY: weakref.WeakSet[Save] = weakref.WeakSet()
_LOCK = threading.Lock()
_LATEST: weakref.WeakKeyDictionary[Any, Save] = weakref.WeakKeyDictionary()


@uninterrupted
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    keeper: Prepared | None,
    extra: Any,
    keep: int | None,
    in_background: bool,
    stateful: Mapping[str, Any],
) -> Path | Ticket[Path]:
    """See `offload.save`."""
    rank_group = RankGroup.gather(f"save of {path}", process_group_of(optimizer, keeper))

    def prepare() -> Save:
        if keeper is not None:
            keeper.check_age()
        task = Save(path, model, optimizer, keeper, extra, keep, stateful, rank_group)
        await_saves(task.owners)
        _UNDER_WAY.add(task)
        return task

    try:
        task = rank_group.own_by_consensus("arguments", prepare)
    except BaseException:
        rank_group.leave()
        raise
    with task.turn():
        task.begin()
        return start(task) if in_background else task.finish()


@uninterrupted
def start(task: Save) -> Ticket[Path]:
    """Finish the task in a thread of its own; return its ticket, which ends with the path."""
    ticket = task.ticket
    with _LOCK:
        for owner in task.owners:
            _LATEST[owner] = task
    thread = threading.Thread(
        target=_finish, args=(task,), name=f"offload save of {task.path.name}", daemon=False
    )
    try:
        thread.start()
    except BaseException as error:
        task.give_up(error)
        _forget(task)
        task.is_over.set()
        raise
    return ticket


def _finish(task: Save) -> None:
    try:
        path = task.finish()
    except BaseException as error:
        LOG.error("background save of %s failed: %s", task.path, reason(error))
        task.tell_failure(error)
        task.ticket.fail(error)
    else:
        _forget(task)
        task.ticket.finish(path)
    finally:
        task.is_over.set()


@uninterrupted
def await_saves(owners: Sequence[Any]) -> None:
    """Wait until no save of these owners is in flight. Raises a `StateError` with the error of one
    that failed, if no caller has taken it from the ticket yet.
    """
    with _LOCK:
        tasks = {id(task): task for owner in owners if (task := _LATEST.get(owner)) is not None}
    for task in tasks.values():
        task.is_over.wait(f"background save of {task.path}", _SILENCE_S, task.progress)
        _forget(task)
        if task.ticket.state is TicketState.FAILED:  # and not collected
            try:
                task.ticket.wait()
            except BaseException as error:
                raise StateError(
                    f"save: the background save of {task.path} failed, and its ticket was "
                    f"never waited for: {reason(error)}; nothing of it was kept, older checkpoints "
                    "are unchanged, and this call did nothing: call again"
                ) from error


def _forget(task: Save) -> None:
    with _LOCK:
        for owner in [owner for owner, known in _LATEST.items() if known is task]:
            del _LATEST[owner]


def cancel_all(error: BaseException) -> None:
    """Cancel the saves in flight in all threads of this process: each ends with `error`, or well if
    it is through already. What they have made is removed. Does not wait for that.
    """
    for task in list(_UNDER_WAY):
        task.cancel(error)


def process_group_of(optimizer: Any, keeper: Any) -> Any:
    """Return the process group that `wrap` or `prepare` was given; None, for all ranks, if none."""
    if keeper is not None:
        return keeper.config.process_group
    found = innermost(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    if found is None or not is_wrapped(found):
        return None
    return found._offload_session.config.process_group


def check_arguments(
    path: str | os.PathLike[str], model: nn.Module, keep: int | None, stateful: Mapping[str, Any]
) -> None:
    """Check the arguments of `save` and `load`; raises `ConfigError`."""
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
    if keep is not None and (type(keep) is not int or keep < 1):
        raise ConfigError(f"keep: expected a number of checkpoints from 1 on, got {keep!r}")
