"""The C library's heap: what it gives back to the kernel, and when.

An optimizer's state, made in the first step, lies at the top of the heap, above gradients and
activations, and so keeps glibc from giving their memory back to the kernel whenever they are freed.
When the state moves away, every step would pay for that: its pages are handed back, and faulted in
and cleared again. So glibc is told to keep what is freed. The process takes no more than it did at
its peak.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache

from offload.log import LOG

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt
_NEVER = -1
_MOST_MMAP_BYTES = 32 << 20  # where glibc itself ends up; a limit of our own turns its own off


@cache
def keep_freed_memory() -> bool:
    """Once for the process; whether it was done. Whoever has set glibc's own variables knows
    better.
    """
    chosen = [name for name in os.environ if name.startswith("MALLOC_")]
    if chosen or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version()
        mallopt = library.mallopt
    except (OSError, AttributeError):  # another C library
        return False
    done = mallopt(_M_MMAP_THRESHOLD, _MOST_MMAP_BYTES) and mallopt(_M_TRIM_THRESHOLD, _NEVER)
    LOG.debug("glibc keeps memory that is freed, as it did while the state lay on top of it")
    return bool(done)
