"""Offload of activations: the tensors that autograd saves leave memory until backward needs them.

The unit of the offload is the storage behind saved tensors, however many of them view it. It is
offloaded when there are too many bytes and only autograd holds it: a leaf, a buffer, or a tensor
that the caller still uses would stay in memory anyway. So no code can change a storage that is
offloaded. Backward needs the storages in reverse order; those saved before the one that it needs
are prefetched.

The `ActivationStore` decides where a storage goes: to the drives, for a model on the CPU; to host
memory and from there to the drives, for a model on a device. Any thread may call; a lock lets one
in at a time.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offload.core.errors import CapacityError, StateError
from offload.core.metrics import Metrics
from offload.core.tensors import holders
from offload.core.ticket import Ticket

LEAST_BYTES = 64 << 10  # smaller storages stay in memory
AHEAD = 4  # storages that are prefetched before backward needs them
_WINDOW_SHARE = 1 / 4  # of the limit, for storages that are being offloaded


class Stage(Enum):
    """The stage of a saved storage on its way to the activation store and back."""

    HERE = "here"
    GOING = "going"  # the write is in flight; it keeps its memory until then
    AWAY = "away"
    COMING = "coming"


MOVES = {
    Stage.HERE: {Stage.GOING, Stage.AWAY},
    Stage.GOING: {Stage.AWAY, Stage.HERE},
    Stage.AWAY: {Stage.COMING},
    Stage.COMING: {Stage.HERE, Stage.AWAY},
}


class SavedStorage:
    """A storage of which autograd has saved one or more tensors. The graph owns it: it ends with
    the last of them, whether backward ran or not, in any stage.
    """

    def __init__(self, owner: Activations, number: int, memory: Tensor) -> None:
        self.owner = owner
        self.number = number
        self.nbytes = memory.nbytes
        self.memory: Tensor | None = memory
        self.stage = Stage.HERE
        self.is_outside = False  # the activation store has these very bytes, too
        self.leaving: Ticket[Any] | None = None  # the write in flight
        self.outside: Any = None  # for the activation store
        self.own_tensors = 1  # the engine's own views of its memory, beside the saved tensors
        self.saved: list[weakref.ref[PackedTensor]] = []

    @property
    def name(self) -> str:
        return f"activations {self.number}"

    def move_to(self, stage: Stage) -> None:
        assert stage in MOVES[self.stage], f"{self.name}: {self.stage} -> {stage}"
        self.stage = stage

    def living(self) -> list[PackedTensor]:
        found = [(ref, ref()) for ref in self.saved]
        self.saved = [ref for ref, saved in found if saved is not None]
        return [saved for _, saved in found if saved is not None]

    def is_ours_alone(self) -> bool:
        """Return whether only the engine and the saved tensors hold the memory."""
        assert self.memory is not None
        own = self.own_tensors + sum(saved.tensor is not None for saved in self.living())
        return holders(self.memory) == own

    def __del__(self) -> None:
        self.memory = None
        self.owner.ended(self)


@dataclass(frozen=True)
class KeptTensor:
    """A saved tensor that stays in memory. It is detached, since a node that keeps its own output
    would keep itself. With hooks in force torch leaves the check of the version to them.
    """

    tensor: Tensor
    version: int

    def refusal(self) -> RuntimeError:
        """Return the error that autograd raises for a tensor that was changed since it was
        saved.
        """
        size, now = tuple(self.tensor.shape), self.tensor._version
        return _modified(self.tensor.dtype, size, now, self.version)


class PackedTensor:
    """A tensor that autograd has saved: a view of a saved storage."""

    def __init__(self, piece: SavedStorage, tensor: Tensor) -> None:
        self._piece = piece
        self._look = tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        # Detached: a node that saves its own output would keep itself alive in a reference cycle.
        self.tensor: Tensor | None = tensor.detach()
        self._version = tensor._version
        self._spoiled: int | None = None  # its version at eviction, if it was changed before
        piece.saved.append(weakref.ref(self))

    def leave(self) -> None:
        """Release the tensor; keep its type, offset, shape and stride."""
        assert self.tensor is not None
        if self.tensor._version != self._version:
            self._spoiled = self.tensor._version
        self.tensor = None

    def checked(self) -> Tensor:
        """Return the tensor, fetched if need be. Raises `RuntimeError` as autograd does if it was
        changed in place since it was saved.
        """
        dtype, offset, size, stride = self._look
        if self._spoiled is None:
            memory = self._piece.owner.bring(self._piece)
            if self.tensor is None:
                empty = torch.empty(0, dtype=dtype, device=memory.device)
                self.tensor = empty.set_(memory.untyped_storage(), offset, size, stride)
                self._version = self.tensor._version
        version = self._spoiled if self.tensor is None else self.tensor._version
        if self.tensor is None or version != self._version:
            raise _modified(dtype, size, version, self._version)
        return self.tensor


class ActivationStore(Protocol):
    """The tier below the memory that the model computes in, for saved storages."""

    limit_bytes: int  # of activations in the memory that the model computes in

    @property
    def host_bytes(self) -> int:
        """The host memory in use now, without the memory that the model computes in."""

    @property
    def disk_bytes(self) -> int:
        """The bytes of drives in use now."""

    def leave(self, piece: SavedStorage) -> Ticket[Any] | None:
        """Start to copy the storage out. Return a ticket until whose end the storage's memory is
        still needed, or None if it is not needed any more. Raises `CapacityError` if there is no
        room; then the storage stays in memory.
        """

    def begin(self, piece: SavedStorage, is_wanted: bool) -> None:
        """Start to fetch the storage. is_wanted: backward needs it now, this is no prefetch. Raises
        `CapacityError` if there is no room.
        """

    def finish(self, piece: SavedStorage) -> Tensor:
        """Wait until the storage is fetched and return its bytes, in the memory that the model
        computes in.
        """

    def discard(self, piece: SavedStorage) -> None:
        """Note that the storage has released its memory; its copy outside remains."""

    def forget(self, piece: SavedStorage) -> None:
        """Free the storage's copy; no tensor refers to it any more. Called by finalizers: must not
        block and must not fail.
        """

    def close(self) -> None: ...


class Activations:
    """The activations of one model. device: where the model runs."""

    def __init__(self, outside: ActivationStore, device: torch.device, metrics: Metrics) -> None:
        self._activation_store = outside
        self._device = device
        self._metrics = metrics
        self._numbers = count()
        self._lock = threading.RLock()
        self._by_address: weakref.WeakValueDictionary[int, SavedStorage] = (
            weakref.WeakValueDictionary()
        )
        self._here: dict[int, weakref.ref[SavedStorage]] = {}  # may be offloaded, oldest first
        self._going: deque[weakref.ref[SavedStorage]] = deque()
        self._away: list[tuple[int, weakref.ref[SavedStorage]]] = []  # by number, sorted
        self._held_bytes = 0  # of those that have memory
        self._going_bytes = 0  # of those that are being offloaded
        self._coming: set[int] = set()
        self.peak_bytes = 0
        # Number, size and stage of storages that no tensor refers to any more. A finalizer may run
        # at any moment, even while the lock is held; so it only notes them here.
        self._over: deque[tuple[int, int, Stage]] = deque()
        self._closed = False

    @property
    def host_bytes(self) -> int:
        """The bytes of activations in host memory now."""
        with self._lock:
            self._take_in_ended()
            computed_on = self._held_bytes if self._device.type == "cpu" else 0
            return computed_on + self._activation_store.host_bytes

    @property
    def disk_bytes(self) -> int:
        """The bytes of activations on the drives now."""
        return self._activation_store.disk_bytes

    # --- forward ----------------------------------------------------------------------------------

    def save(self, tensor: Tensor) -> PackedTensor | None:
        """Keep a tensor for autograd. Return None if it is not worth it: it is small, on another
        device, or of a kind that is not offloaded.
        """
        if not self._is_worth_it(tensor):
            return None
        with self._lock:
            self._take_in_ended()
            address = tensor.untyped_storage().data_ptr()
            piece = self._by_address.get(address)
            if piece is None:
                empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
                piece = SavedStorage(
                    self, next(self._numbers), empty.set_(tensor.untyped_storage())
                )
                del empty  # it is the piece's memory now
                self._held_bytes += piece.nbytes
                self._note_here(piece)
            saved = PackedTensor(piece, tensor)
            self._shrink()
            return saved

    def _is_worth_it(self, tensor: Tensor) -> bool:
        return (
            not self._closed
            and type(tensor) in (Tensor, nn.Parameter)
            and tensor.layout == torch.strided
            and tensor.device == self._device
            and not (tensor.is_conj() or tensor.is_neg())
            and tensor.untyped_storage().nbytes() >= LEAST_BYTES
        )

    def _shrink(self, nbytes: int = 0) -> None:
        """Offload the oldest storages until the rest, and `nbytes` more, are within the limit less
        a window for storages that are being offloaded. Above the limit, wait for those.
        """
        limit = self._activation_store.limit_bytes - nbytes
        self._settle(may_wait=False)
        staying = self._held_bytes - self._going_bytes
        for ref in list(self._here.values()):
            if staying <= limit * (1 - _WINDOW_SHARE):
                break
            piece = ref()
            if piece is not None and piece.is_ours_alone():
                if not self._let_go(piece):
                    break
                staying -= piece.nbytes
        while self._held_bytes > limit and self._going:
            self._settle(may_wait=True)
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)

    def _let_go(self, piece: SavedStorage) -> bool:
        """Start to offload a storage. Return whether the store had room for it."""
        if not piece.is_outside:
            try:
                piece.leaving = self._activation_store.leave(piece)
            except CapacityError as error:
                self._metrics.fall_back("offload of activations", f"{error}; they are kept")
                return False
            self._metrics.count("activations_offloaded_bytes", piece.nbytes)
        assert piece.memory is not None
        del self._here[piece.number]
        self._by_address.pop(piece.memory.untyped_storage().data_ptr(), None)
        for saved in piece.living():
            if saved.tensor is not None:
                saved.leave()
        if piece.leaving is None:
            self._is_gone(piece)
        else:
            piece.move_to(Stage.GOING)
            self._going.append(weakref.ref(piece))
            self._going_bytes += piece.nbytes
        return True

    def _settle(self, may_wait: bool) -> None:
        """Release the memory of storages whose offload has ended. may_wait: wait for the oldest
        one.
        """
        while self._going:
            piece = self._going[0]()
            if piece is not None and piece.stage is Stage.GOING:
                assert piece.leaving is not None
                if not piece.leaving.done and not may_wait:
                    return
                self._end_leaving(piece)
                may_wait = False
            self._going.popleft()

    def _end_leaving(self, piece: SavedStorage) -> None:
        ticket, piece.leaving = piece.leaving, None
        assert ticket is not None
        self._going_bytes -= piece.nbytes
        try:
            with self._metrics.span("activation write"):
                ticket.wait()
        except BaseException:
            self._stays(piece)
            raise
        self._is_gone(piece)

    def _stays(self, piece: SavedStorage) -> None:
        """Note that a storage has its memory and stays in it: it was being offloaded, or was
        fetched.
        """
        piece.move_to(Stage.HERE)
        self._note_here(piece)

    def _note_here(self, piece: SavedStorage) -> None:
        assert piece.memory is not None
        self._by_address[piece.memory.untyped_storage().data_ptr()] = piece
        self._here[piece.number] = weakref.ref(piece)

    def _is_gone(self, piece: SavedStorage) -> None:
        piece.is_outside = True
        piece.memory = None
        self._activation_store.discard(piece)
        self._note_away(piece)

    def _note_away(self, piece: SavedStorage) -> None:
        piece.move_to(Stage.AWAY)
        self._held_bytes -= piece.nbytes
        insort(self._away, (piece.number, weakref.ref(piece)))

    # --- backward ---------------------------------------------------------------------------------

    def bring(self, piece: SavedStorage) -> Tensor:
        """Return the storage's bytes in the memory that the model computes in; fetch them if
        they are outside.
        """
        with self._lock:
            self._take_in_ended()
            if piece.stage is Stage.AWAY:
                self._shrink(piece.nbytes)
                self._begin(piece, is_wanted=True)
                self._metrics.count("activation_misses")
            elif piece.stage is Stage.COMING:
                self._metrics.count("activation_hits")
            self._fetch_ahead(piece.number)
            if piece.stage is Stage.GOING:
                self._going_bytes -= piece.nbytes
                piece.leaving = None
                self._stays(piece)
            if piece.stage is Stage.COMING:
                self._arrive(piece)
            assert piece.memory is not None
            return piece.memory

    def _begin(self, piece: SavedStorage, is_wanted: bool) -> None:
        if self._closed:
            raise StateError(
                f"{piece.name}: the model has been closed since the forward pass whose backward "
                "needs them; run the forward pass again"
            )
        self._activation_store.begin(piece, is_wanted)
        piece.move_to(Stage.COMING)
        self._no_longer_away(piece.number)
        self._coming.add(piece.number)
        self._held_bytes += piece.nbytes

    def _no_longer_away(self, number: int) -> None:
        at = bisect_left(self._away, (number,))
        if at < len(self._away) and self._away[at][0] == number:
            del self._away[at]

    def _fetch_ahead(self, number: int) -> None:
        """Prefetch the storages saved before this one: backward needs them next."""
        last = bisect_left(self._away, (number,))
        limit = self._activation_store.limit_bytes  # 0: fetched storages are not counted
        for _, earlier in reversed(self._away[max(0, last - AHEAD) : last]):
            piece = earlier()
            if piece is None:
                continue
            if len(self._coming) >= AHEAD or (limit and self._held_bytes + piece.nbytes > limit):
                return
            try:
                self._begin(piece, is_wanted=False)
            except CapacityError:
                return

    def _arrive(self, piece: SavedStorage) -> None:
        self._coming.discard(piece.number)
        try:
            with self._metrics.span("activation read"):
                piece.memory = self._activation_store.finish(piece)
        except BaseException:
            self._note_away(piece)
            raise
        self._stays(piece)

    # --- end --------------------------------------------------------------------------------------

    def ended(self, piece: SavedStorage) -> None:
        """Note that no saved tensor refers to the storage any more. Finalizers call it: it must not
        block and must not fail.
        """
        self._over.append((piece.number, piece.nbytes, piece.stage))
        self._activation_store.forget(piece)

    def _take_in_ended(self) -> None:
        while self._over:
            number, nbytes, stage = self._over.popleft()
            self._here.pop(number, None)
            self._coming.discard(number)
            self._no_longer_away(number)
            self._held_bytes -= nbytes * (stage is not Stage.AWAY)
            self._going_bytes -= nbytes * (stage is Stage.GOING)

    def close(self) -> None:
        """Close the store. Storages that are offloaded now cannot be fetched any more."""
        with self._lock:
            self._closed = True
            self._activation_store.close()


def _modified(
    dtype: torch.dtype, size: tuple[int, ...], version: int | None, expected: int
) -> RuntimeError:
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a {dtype} tensor of shape {size} is at version {version}; expected version "
        f"{expected} instead"
    )
