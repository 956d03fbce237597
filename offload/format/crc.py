"""CRC-32 as zlib, gzip and PNG have it: the checksum of everything in a checkpoint."""

from __future__ import annotations

import zlib
from typing import Any


def crc32(data: Any, begin: int = 0) -> int:
    """The CRC-32 of something bytes-like, as `zlib.crc32`. begin: that of the bytes before it."""
    return zlib.crc32(data, begin)
