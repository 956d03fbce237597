"""The tiers that hold activations until backward needs them: drives, or host memory and drives."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from offload.core.errors import CapacityError
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.device.buffer import DeviceBuffer
from offload.device.device import DeviceTransfer
from offload.params.activations import SavedStorage, Stage
from offload.storage.engine import Priority
from offload.storage.growing import GrowingStore

_FULL = 3 / 4  # of the pool; beyond it the oldest are written to the drives


class DiskActivations:
    """The activation store of a model on the CPU, whose activations are in host memory already: it
    writes them to the drives.

    limit_bytes: how many bytes of activations may stay in host memory.
    """

    def __init__(self, store: GrowingStore, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._store = store

    @property
    def host_bytes(self) -> int:
        return 0

    @property
    def disk_bytes(self) -> int:
        return self._store.used_bytes

    def leave(self, piece: SavedStorage) -> Ticket[Any]:
        assert piece.memory is not None
        self._store.free(piece.name)
        return self._store.write(piece.name, piece.memory)

    def begin(self, piece: SavedStorage, is_wanted: bool) -> None:
        memory = torch.empty(piece.nbytes, dtype=torch.uint8, device="cpu")
        priority = Priority.WAITED_FOR if is_wanted else Priority.PREFETCH
        piece.outside = memory, self._store.read(piece.name, memory, priority)

    def finish(self, piece: SavedStorage) -> Tensor:
        (memory, ticket), piece.outside = piece.outside, None
        ticket.wait()
        found: Tensor = memory
        return found

    def discard(self, piece: SavedStorage) -> None:
        return None

    def forget(self, piece: SavedStorage) -> None:
        self._store.free(piece.name)

    def close(self) -> None:
        self._store.close()


@dataclass(eq=False)
class _OffloadedActivation:
    """The state of a storage that is not, or not only, on the device. host: its host memory; None
    if it is on the drives, or on the device again.
    """

    host: Tensor | None
    copying: Ticket[Tensor] | None  # the download
    writing: Ticket[None] | None = None
    reading: Ticket[None] | None = None
    buffer: DeviceBuffer | None = None  # not None: it is on the device again
    is_on_disk: bool = False


class _ActivationWrite(NamedTuple):
    """A storage that is being written from host memory to the drives. It may be fetched and leave
    again meanwhile; then it has another `_OffloadedActivation`, and this one no longer counts.
    """

    piece: weakref.ref[SavedStorage]
    stay: weakref.ref[_OffloadedActivation]

    def still(self) -> tuple[SavedStorage, _OffloadedActivation] | None:
        piece, stay = self.piece(), self.stay()
        if piece is None or stay is None or piece.outside is not stay:
            return None
        return piece, stay


class HostActivations:
    """The activation store of a model on a device: it downloads activations to the pool's host
    memory and writes the oldest of them to the store when the pool is full. store: None if there is
    no drive.
    """

    limit_bytes = 0  # everything that may be offloaded is

    def __init__(self, transfer: DeviceTransfer, pool: Pool, store: GrowingStore | None) -> None:
        self._transfer = transfer
        self._pool = pool
        self._store = store
        self._in_host: dict[int, weakref.ref[SavedStorage]] = {}  # oldest first
        self._sinking: deque[_ActivationWrite] = deque()
        self._reading: dict[int, weakref.ref[SavedStorage]] = {}
        self._filling: deque[Ticket[None]] = deque()  # uploads, in their order
        self._over: deque[int] = deque()  # numbers of storages that no tensor refers to any more

    @property
    def host_bytes(self) -> int:
        return self._pool.stats().used_bytes

    @property
    def disk_bytes(self) -> int:
        return self._store.used_bytes if self._store is not None else 0

    def leave(self, piece: SavedStorage) -> None:
        assert piece.memory is not None
        host = self._room(piece, may_wait=True)
        copying = self._transfer.read(piece.memory, host, piece.name)
        if piece.outside is not None:  # it was uploaded once; that buffer ends after the copy
            self.discard(piece)
        piece.outside = _OffloadedActivation(host, copying)
        self._in_host[piece.number] = weakref.ref(piece)
        self._sink_ahead()

    def begin(self, piece: SavedStorage, is_wanted: bool) -> None:
        stay: _OffloadedActivation = piece.outside
        if stay.host is None:
            assert self._store is not None
            host = self._room(piece, may_wait=is_wanted)
            priority = Priority.WAITED_FOR if is_wanted else Priority.PREFETCH
            stay.reading = self._store.read(piece.name, host, priority)
            stay.host = host
            self._reading[piece.number] = weakref.ref(piece)
        elif stay.copying is None or stay.copying.done:
            self._upload(piece)

    def finish(self, piece: SavedStorage) -> Tensor:
        stay: _OffloadedActivation = piece.outside
        if stay.buffer is None:
            self._upload(piece)
        assert stay.buffer is not None
        piece.is_outside = stay.is_on_disk
        piece.own_tensors = 2  # the buffer holds one
        return stay.buffer.use()

    def _upload(self, piece: SavedStorage) -> None:
        """Start to upload the storage, once it is in host memory. Release its host memory with
        that.
        """
        stay: _OffloadedActivation = piece.outside
        # The download must have ended, too: uploads and downloads are not ordered with each other.
        self._end_copy(stay)
        self._end_reading(piece)
        assert stay.host is not None
        buffer = self._transfer.allocate(piece.nbytes, piece.name)
        self._filling.append(buffer.fill(stay.host))
        stay.buffer, stay.host = buffer, None
        self._in_host.pop(piece.number, None)

    def _end_reading(self, piece: SavedStorage) -> None:
        stay: _OffloadedActivation = piece.outside
        reading, stay.reading = stay.reading, None
        if reading is None:
            return
        self._reading.pop(piece.number, None)
        try:
            reading.wait()
        except BaseException:
            stay.host = None
            raise

    @staticmethod
    def _end_copy(stay: _OffloadedActivation) -> None:
        copying, stay.copying = stay.copying, None
        if copying is not None:
            copying.wait()

    def discard(self, piece: SavedStorage) -> None:
        stay: _OffloadedActivation = piece.outside
        if stay.buffer is not None:
            stay.buffer.release()
            stay.buffer = None
            piece.own_tensors = 1

    def forget(self, piece: SavedStorage) -> None:
        stay: _OffloadedActivation | None = piece.outside
        if stay is not None:
            self.discard(piece)
            self._over.append(piece.number)
            if self._store is not None:
                self._store.free(piece.name)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
        self._transfer.close()
        self._pool.close()

    # --- from host memory to the drives -----------------------------------------------------------

    def _room(self, piece: SavedStorage, may_wait: bool) -> Tensor:
        """Lease host memory for a storage; write others to the drives if there is no room."""
        while True:
            self._take_in_over()
            self._transfer.poll()  # copies that have ended hold no memory any more
            try:
                return self._pool.lease(piece.nbytes, what=piece.name).tensor()
            except CapacityError:
                if not may_wait or not self._make_room():
                    raise

    def _make_room(self) -> bool:
        """Wait until one storage releases its host memory: its upload, or its write to the drives,
        has ended. Return False if there is none that can.
        """
        if self._filling:
            self._filling.popleft().wait()
            return True
        for ref in list(self._reading.values()):  # prefetched; it need not wait in host memory
            piece = ref()
            if piece is not None:
                self._upload(piece)
                return True
        return self._sink_oldest()

    def _take_in_over(self) -> None:
        while self._over:
            number = self._over.popleft()
            self._in_host.pop(number, None)
            self._reading.pop(number, None)
        while self._filling and self._filling[0].done:
            self._filling.popleft().wait()

    def _sink_ahead(self) -> None:
        """Start to write the oldest storages to the drives if the pool is nearly full."""
        self._settle(may_wait=False)
        stats = self._pool.stats()
        excess = stats.used_bytes - int(stats.capacity_bytes * _FULL)
        excess -= sum(found[0].nbytes for each in self._sinking if (found := each.still()))
        while excess > 0 and (piece := self._next_to_sink()) is not None:
            if piece.outside.copying is not None and not piece.outside.copying.done:
                return  # this method does not wait for a download
            self._sink(piece)
            excess -= piece.nbytes

    def _sink_oldest(self) -> bool:
        """Wait until one more storage is on the drives. Return False if there is none to write."""
        if not self._sinking:
            piece = self._next_to_sink()
            if piece is None:
                return False
            self._sink(piece)
            del piece
        self._settle(may_wait=True)
        return True

    def _next_to_sink(self) -> SavedStorage | None:
        if self._store is None:
            return None
        for ref in self._in_host.values():
            piece = ref()
            if piece is not None and piece.stage is Stage.AWAY:
                return piece
        return None

    def _sink(self, piece: SavedStorage) -> None:
        stay: _OffloadedActivation = piece.outside
        assert self._store is not None and stay.host is not None
        self._end_copy(stay)
        del self._in_host[piece.number]
        self._store.free(piece.name)  # its copy from an earlier stay
        stay.writing = self._store.write(piece.name, stay.host)
        self._sinking.append(_ActivationWrite(weakref.ref(piece), weakref.ref(stay)))

    def _settle(self, may_wait: bool) -> None:
        """Release the host memory of storages whose writes have ended. may_wait: wait for the
        oldest one.
        """
        while self._sinking:
            found = self._sinking[0].still()
            if found is not None:
                piece, stay = found
                assert stay.writing is not None
                if not stay.writing.done and not may_wait:
                    return
                may_wait = False
                self._end_writing(piece, stay)
            self._sinking.popleft()

    def _end_writing(self, piece: SavedStorage, stay: _OffloadedActivation) -> None:
        writing, stay.writing = stay.writing, None
        assert writing is not None
        try:
            writing.wait()
        except BaseException:
            self._sinking.popleft()
            self._in_host[piece.number] = weakref.ref(piece)
            raise
        stay.is_on_disk = True
        if piece.stage is Stage.AWAY:  # else it is being fetched; its upload releases the memory
            stay.host = None
