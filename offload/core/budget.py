"""The budget of host memory: one byte limit for all pools of this process.

A pool takes its share here before it allocates, so that together they stay below one number. (The
few MiB of an I/O engine's own buffers are not counted yet.) A share that does not fit is refused at
once, with a table of the holders and their bytes; no call blocks here, because a share lasts as
long as its holder. The module counts bytes by name and allocates nothing. Any thread may call it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from offload.core.config import format_size
from offload.core.errors import CapacityError, ConfigError


@dataclass(frozen=True)
class BudgetHolder:
    """The model or optimizer that a share is for, in words that the user knows, and since when."""

    name: str
    since_s: float = field(default_factory=time.time)

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_s))
        return f"{self.name} at {since}"


_HOLDER: ContextVar[BudgetHolder | None] = ContextVar("holder", default=None)


@contextmanager
def held_by(holder: BudgetHolder | None) -> Iterator[None]:
    """Assign the shares that this thread takes to `holder` while the block runs."""
    token = _HOLDER.set(holder)
    try:
        yield
    finally:
        _HOLDER.reset(token)


def holder_now() -> BudgetHolder | None:
    """Return the holder of the shares that this thread takes now; None: none is set."""
    return _HOLDER.get()


class Share:
    """A number of bytes taken from a budget. `release()` returns them; idempotent."""

    def __init__(self, budget: Budget, what: str, nbytes: int) -> None:
        self.what, self.nbytes, self.holder = what, nbytes, holder_now()
        self._budget: Budget | None = budget

    def release(self) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._returned.append(self)


class Budget:
    """A limit of `limit_bytes` on the sum of all shares; None: no limit yet, only count them."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self._lock = threading.Lock()
        self._shares: list[Share] = []
        # Shares that were released. A finalizer may run at any moment, even in a thread that holds
        # the lock, so it only appends them here; the next call that has the lock subtracts them.
        self._returned: deque[Share] = deque()
        self._peak_bytes = 0
        self._limit_bytes: int | None = None
        self.limit(limit_bytes)

    def limit(self, nbytes: int | None) -> None:
        """Set the limit. Raises `CapacityError` if it is below the bytes that are held already."""
        if nbytes is not None and nbytes < 1:
            raise ConfigError(f"limit: expected 1 byte or more, got {nbytes}")
        with self._lock:
            if nbytes is not None and nbytes < self._sum():
                raise CapacityError(
                    f"host budget: a limit of {format_size(nbytes)} ({nbytes} bytes) is below what "
                    f"is held already: {self._table()}"
                )
            self._limit_bytes = nbytes

    def put_back_limit(self, nbytes: int | None) -> None:
        """Restore the limit from before a call that failed, even below the bytes held now."""
        with self._lock:
            self._limit_bytes = nbytes

    def take(self, nbytes: int, what: str) -> Share:
        """Take `nbytes` for `what`. Raises `CapacityError` with the numbers if they do not fit."""
        if nbytes < 0:
            raise ConfigError(f"nbytes: expected 0 or more, got {nbytes}")
        with self._lock:
            used = self._sum()
            if self._limit_bytes is not None and used + nbytes > self._limit_bytes:
                raise CapacityError(
                    f"host budget: {what} needs {format_size(nbytes)} ({nbytes} bytes), "
                    f"{format_size(self._limit_bytes - used)} of "
                    f"{format_size(self._limit_bytes)} are free; held: {self._table()}; raise "
                    "host_memory, or use less"
                )
            share = Share(self, what, nbytes)
            self._shares.append(share)
            self._peak_bytes = max(self._peak_bytes, used + nbytes)
            return share

    def _sum(self) -> int:
        while self._returned:
            self._shares.remove(self._returned.popleft())
        return sum(share.nbytes for share in self._shares)

    def _table(self) -> str:
        rows = [f"{share.what} {format_size(share.nbytes)}" for share in self._shares]
        return ", ".join(rows) or "nothing"

    def holders(self) -> dict[str, int]:
        """Return the bytes held per holder, or per `what` for shares without a holder."""
        found: dict[str, int] = {}
        with self._lock:
            self._sum()
            for share in self._shares:
                name = str(share.holder or share.what)
                found[name] = found.get(name, 0) + share.nbytes
        return found

    @property
    def limit_bytes(self) -> int | None:
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._sum()

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes


HOST = Budget()
"""The budget of this process; `wrap` and `prepare` set its limit from `host_memory`."""
