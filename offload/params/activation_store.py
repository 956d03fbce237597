"""Where activations are until backward wants them: on drives, or in host memory and on drives."""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from offload.core.errors import CapacityError
from offload.core.pool import Pool
from offload.core.ticket import Ticket
from offload.device import DeviceBuffer, DeviceTransfer
from offload.params.saved_storage import SavedStorage, Stage
from offload.storage.engine import Priority
from offload.storage.growing import GrowingStore

_FULL = 3 / 4  # of the pool; from there on the oldest go on to the drives


class ActivationStore(Protocol):
    """Where pieces are when they are away."""

    limit_bytes: int  # of pieces where they are computed on

    @property
    def host_bytes(self) -> int:
        """Host memory in use now, beside what is computed on."""

    @property
    def disk_bytes(self) -> int:
        """In use now."""

    def leave(self, piece: SavedStorage) -> Ticket[Any] | None:
        """Start the piece's way out. Its memory is needed until the ticket ends; None: not any
        more. Raises `CapacityError` where there is no room: then it stays.
        """

    def begin(self, piece: SavedStorage, is_wanted: bool) -> None:
        """Start its way back. is_wanted: now, not later. Raises `CapacityError` where there is no
        room.
        """

    def finish(self, piece: SavedStorage) -> Tensor:
        """Its bytes, where they are computed on, once they have come."""

    def discard(self, piece: SavedStorage) -> None:
        """The piece has given its memory up; it is still outside."""

    def forget(self, piece: SavedStorage) -> None:
        """Nobody wants it any more. Called by finalizers: must not block and must not fail."""

    def close(self) -> None: ...


class DiskActivations:
    """For a model on the CPU, whose host memory they are in already. limit_bytes: of what stays
    there.
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
class _Stay:
    """Of a piece that is not, or not only, on the device. host: None where it is on the drives, or
    on the device again.
    """

    host: Tensor | None
    copying: Ticket[Tensor] | None  # from the device
    writing: Ticket[None] | None = None
    reading: Ticket[None] | None = None
    buffer: DeviceBuffer | None = None  # it is on the device again
    is_on_disk: bool = False


class _Sinking(NamedTuple):
    """A piece on its way from host memory to the drives. It may come back and leave again
    meanwhile; then its stay is another.
    """

    piece: weakref.ref[SavedStorage]
    stay: weakref.ref[_Stay]

    def still(self) -> tuple[SavedStorage, _Stay] | None:
        piece, stay = self.piece(), self.stay()
        if piece is None or stay is None or piece.outside is not stay:
            return None
        return piece, stay


class HostActivations:
    """For a model on a device: copies in the pool's memory, the oldest of them in the store when
    that is full. store: None where there is no drive.
    """

    limit_bytes = 0  # all that may go does

    def __init__(self, transfer: DeviceTransfer, pool: Pool, store: GrowingStore | None) -> None:
        self._transfer = transfer
        self._pool = pool
        self._store = store
        self._in_host: dict[int, weakref.ref[SavedStorage]] = {}  # oldest first
        self._sinking: deque[_Sinking] = deque()
        self._reading: dict[int, weakref.ref[SavedStorage]] = {}
        self._filling: deque[Ticket[None]] = deque()  # copies to the device, in their order
        self._over: deque[int] = deque()  # numbers of pieces that have ended

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
        if piece.outside is not None:  # it has come back once; its buffer ends after the copy
            self.discard(piece)
        piece.outside = _Stay(host, copying)
        self._in_host[piece.number] = weakref.ref(piece)
        self._sink_ahead()

    def begin(self, piece: SavedStorage, is_wanted: bool) -> None:
        stay: _Stay = piece.outside
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
        stay: _Stay = piece.outside
        if stay.buffer is None:
            self._upload(piece)
        assert stay.buffer is not None
        piece.is_outside = stay.is_on_disk
        piece.own_tensors = 2  # the buffer has one
        return stay.buffer.use()

    def _upload(self, piece: SavedStorage) -> None:
        """Start its way to the device, once it is in host memory, which is given up with it."""
        stay: _Stay = piece.outside
        # The way from the device must be over, too: the two are not in one order.
        self._end_copy(stay)
        self._end_reading(piece)
        assert stay.host is not None
        buffer = self._transfer.allocate(piece.nbytes, piece.name)
        self._filling.append(buffer.fill(stay.host))
        stay.buffer, stay.host = buffer, None
        self._in_host.pop(piece.number, None)

    def _end_reading(self, piece: SavedStorage) -> None:
        stay: _Stay = piece.outside
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
    def _end_copy(stay: _Stay) -> None:
        copying, stay.copying = stay.copying, None
        if copying is not None:
            copying.wait()

    def discard(self, piece: SavedStorage) -> None:
        stay: _Stay = piece.outside
        if stay.buffer is not None:
            stay.buffer.release()
            stay.buffer = None
            piece.own_tensors = 1

    def forget(self, piece: SavedStorage) -> None:
        stay: _Stay | None = piece.outside
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
        """Host memory for a piece; others go on to the drives for it if they must."""
        while True:
            self._take_in_over()
            self._transfer.poll()  # copies that are over hold no memory any more
            try:
                with self._pool.lease(piece.nbytes, what=piece.name) as lease:
                    return lease.tensor()
            except CapacityError:
                if not may_wait or not self._make_room():
                    raise

    def _make_room(self) -> bool:
        """Wait until one has left host memory: for the device, or for the drives. False: there is
        none.
        """
        if self._filling:
            self._filling.popleft().wait()
            return True
        for ref in list(self._reading.values()):  # fetched ahead; it need not wait here
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
        """Where the pool is nearly full, start the way of the oldest to the drives."""
        self._settle(may_wait=False)
        stats = self._pool.stats()
        excess = stats.used_bytes - int(stats.capacity_bytes * _FULL)
        excess -= sum(found[0].nbytes for each in self._sinking if (found := each.still()))
        while excess > 0 and (piece := self._next_to_sink()) is not None:
            if piece.outside.copying is not None and not piece.outside.copying.done:
                return  # nobody waits for a copy here
            self._sink(piece)
            excess -= piece.nbytes

    def _sink_oldest(self) -> bool:
        """Wait until one more is on the drives; False: there is none."""
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
        stay: _Stay = piece.outside
        assert self._store is not None and stay.host is not None
        self._end_copy(stay)
        del self._in_host[piece.number]
        self._store.free(piece.name)  # of an earlier stay
        stay.writing = self._store.write(piece.name, stay.host)
        self._sinking.append(_Sinking(weakref.ref(piece), weakref.ref(stay)))

    def _settle(self, may_wait: bool) -> None:
        """Take the memory of what has arrived on the drives; may_wait: for the oldest of it."""
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

    def _end_writing(self, piece: SavedStorage, stay: _Stay) -> None:
        writing, stay.writing = stay.writing, None
        assert writing is not None
        try:
            writing.wait()
        except BaseException:
            self._sinking.popleft()
            self._in_host[piece.number] = weakref.ref(piece)
            raise
        stay.is_on_disk = True
        if piece.stage is Stage.AWAY:  # else it is wanted again, and gives it up by itself
            stay.host = None
