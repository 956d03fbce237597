"""Offload of activations: the tensors that autograd saves leave memory until backward needs them.

The unit of the offload is the storage behind saved tensors. A storage is offloaded when there are
too many bytes of them and only autograd holds it: a leaf, a buffer, or a tensor that the caller
still uses would stay in memory anyway. So no code can change a storage that is offloaded. Backward
needs the storages in reverse order; those saved before the one that it needs are prefetched.

The `ActivationStore` decides where a storage goes: to the drives, for a model on the CPU; to host
memory and from there to the drives, for a model on a device. Any thread may call; a lock lets one
in at a time.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque
from itertools import count

import torch
from torch import Tensor, nn

from offload.core.errors import CapacityError, StateError
from offload.core.metrics import Metrics
from offload.params.activation_store import ActivationStore
from offload.params.saved_storage import PackedTensor, SavedStorage, Stage

LEAST_BYTES = 64 << 10  # smaller storages stay in memory
AHEAD = 4  # storages that are prefetched before backward needs them
_WINDOW_SHARE = 1 / 4  # of the limit, for storages that are being offloaded


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
        self._away: dict[int, weakref.ref[SavedStorage]] = {}
        self._away_numbers: list[int] = []  # sorted
        self._sizes: dict[int, int] = {}  # of those that have memory
        self._held_bytes = 0  # their sum
        self._going_sizes: dict[int, int] = {}  # of those that are being offloaded
        self._coming: set[int] = set()
        self.peak_bytes = 0
        # Storages that no tensor refers to any more. A finalizer may run at any moment, even while
        # the lock is held; so it only notes the number here.
        self._over: deque[int] = deque()
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
                piece = self._new_piece(tensor, address)
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

    def _new_piece(self, tensor: Tensor, address: int) -> SavedStorage:
        bytes_ = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        bytes_.set_(tensor.untyped_storage())
        piece = SavedStorage(self, next(self._numbers), bytes_)
        self._by_address[address] = piece
        self._hold(piece)
        self._here[piece.number] = weakref.ref(piece)
        return piece

    def _hold(self, piece: SavedStorage) -> None:
        self._sizes[piece.number] = piece.nbytes
        self._held_bytes += piece.nbytes

    def _shrink(self, nbytes: int = 0) -> None:
        """Offload the oldest storages until the rest, and `nbytes` more, are within the limit less
        a window for storages that are being offloaded. Above the limit, wait for those.
        """
        limit = self._activation_store.limit_bytes - nbytes
        self._settle(may_wait=False)
        staying = self._held_bytes - sum(self._going_sizes.values())
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
            self._going_sizes[piece.number] = piece.nbytes
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
        del self._going_sizes[piece.number]
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
        assert piece.memory is not None
        self._by_address[piece.memory.untyped_storage().data_ptr()] = piece
        self._here[piece.number] = weakref.ref(piece)

    def _is_gone(self, piece: SavedStorage) -> None:
        piece.move_to(Stage.AWAY)
        piece.is_outside = True
        piece.memory = None
        self._activation_store.discard(piece)
        self._release(piece.number)
        self._away[piece.number] = weakref.ref(piece)
        insort(self._away_numbers, piece.number)

    def _release(self, number: int) -> None:
        self._held_bytes -= self._sizes.pop(number, 0)

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
                del self._going_sizes[piece.number]
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
        self._hold(piece)

    def _no_longer_away(self, number: int) -> None:
        if self._away.pop(number, None) is not None:
            del self._away_numbers[bisect_left(self._away_numbers, number)]

    def _fetch_ahead(self, number: int) -> None:
        """Prefetch the storages saved before this one: backward needs them next."""
        last = bisect_left(self._away_numbers, number)
        limit = self._activation_store.limit_bytes  # 0: fetched storages are not counted
        for earlier in reversed(self._away_numbers[max(0, last - AHEAD) : last]):
            piece = self._away[earlier]()
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
            piece.move_to(Stage.AWAY)
            self._release(piece.number)
            self._away[piece.number] = weakref.ref(piece)
            insort(self._away_numbers, piece.number)
            raise
        self._stays(piece)

    # --- end --------------------------------------------------------------------------------------

    def ended(self, piece: SavedStorage) -> None:
        self._over.append(piece.number)
        self._activation_store.forget(piece)

    def _take_in_ended(self) -> None:
        while self._over:
            number = self._over.popleft()
            self._here.pop(number, None)
            self._going_sizes.pop(number, None)
            self._coming.discard(number)
            self._no_longer_away(number)
            self._release(number)

    def close(self) -> None:
        """Close the store. Storages that are offloaded now cannot be fetched any more."""
        with self._lock:
            self._closed = True
            self._activation_store.close()
