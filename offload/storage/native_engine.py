"""The native engines: io_uring, and threads with pread and pwrite. They run in C++ without the GIL;
one Python thread takes in completions and ends tickets.
"""

from __future__ import annotations

import errno
import math
import threading
from collections.abc import Sequence
from typing import Any

from offload.storage.buffers import Buffer
from offload.storage.engine import SUM_BYTES, Fault, IOEngine, Priority, Transfer

_WAITED_FOR = int(Priority.WAITED_FOR)
_POLL_S = 0.25  # the longest time between two searches for overdue operations


class NativeEngine(IOEngine):
    """An engine of the native core (`IoEngine` in C++) and the thread that ends its tickets."""

    def __init__(
        self,
        name: str,
        native: Any,
        notes: Sequence[str],
        timeout_s: float,
        memory: Sequence[Buffer],
    ) -> None:
        super().__init__(name, native.piece_bytes, timeout_s)
        self.sum_bytes = native.sum_bytes
        self.takes_sums = self.sum_bytes == SUM_BYTES
        self.notes += notes
        self.held = memory  # registered with the ring by address: it must not be freed and reused
        self._native = native  # None: closed, and nothing is in flight
        self._stopped = False
        self._run(threading.Thread(target=self._take_in, name=f"offload-{name}", daemon=True))

    def _start(self, number: int, transfer: Transfer, priority: Priority) -> None:
        self._native.submit(
            number,
            transfer.is_write,
            transfer.file.fd,
            transfer.memory.address,
            transfer.memory.nbytes,
            transfer.offset,
            transfer.file.align,
            transfer.sums.buffer_info()[0],
            int(priority),
            transfer.is_known,
        )

    def _withdraw(self, number: int) -> None:
        if not self._native.knows(number):
            self._end(number, errno.ECANCELED)

    def _promote(self, number: int) -> None:
        native = self._native
        if native is not None:
            native.promote(number, _WAITED_FOR)

    def _ages(self) -> dict[int, float]:
        ages: dict[int, float] = {}
        native = self._native
        for number, _, _, _, seconds in native.in_flight() if native is not None else ():
            ages[number] = max(seconds, ages.get(number, seconds))
        return ages

    def sum_of(self, memory: Buffer) -> int:
        from offload import _native

        return int(_native.checksum(memory.address, memory.nbytes))

    def inject(self, fault: Fault) -> None:
        self._native.inject(fault.kind.value, fault.code, fault.nth, fault.forever, fault.seed)

    def attempts(self) -> int:
        return int(self._native.attempts())

    def _take_in(self) -> None:
        # An operation ages by at most `round_s` a round: time in which the process was stopped, or
        # a follow-up was slow, is not the drive's fault.
        round_s = min(_POLL_S, self.timeout_s / 4)
        try:
            while not self._stopped or self._flying:
                self._take_in_once(round_s, self.timeout_s, round_s)
        except BaseException as error:
            self._break(error)
            raise

    def _take_in_once(self, wait_s: float, age_s: float, round_s: float) -> None:
        """Time out operations older than `age_s`, wait up to `wait_s` for completions, and end
        their transfers.
        """
        # One call: a thread that waits for a ticket needs the GIL as soon as the ticket ends.
        done, late = self._native.take_in(wait_s, age_s, round_s)
        broken = None
        for number, code, at in done:
            try:
                self._end(number, code, at)
            except BaseException as error:  # the other transfers have ended, too
                broken = error
        for number in late:
            self._forget(number)
        if broken is not None:
            raise broken

    def _stop(self) -> None:
        self._stopped = True
        ended = self._native.stop(self.timeout_s)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(self.timeout_s + 1.0)
        if not self._thread.is_alive():
            self._take_in_once(0.0, math.inf, 0.0)  # late completions
            if ended and not self._abandoned:
                self._native, self.held = None, ()  # free both, however long this object lives
        self._keep_if_stuck(ended)
