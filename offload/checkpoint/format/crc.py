"""CRC-32 as in zlib, gzip and PNG: the checksum of all tensor bytes in a checkpoint.

The native core computes it where it is built, at the speed of memory; otherwise zlib does.
`OFFLOAD_ISA` forces an instruction set here, too; `reference` is zlib.
"""

from __future__ import annotations

import os
import zlib
from functools import cache
from types import ModuleType
from typing import Any

from offload.core.errors import ConfigError


def crc32(data: Any, begin: int = 0) -> int:
    """Return the CRC-32 of contiguous bytes, as `zlib.crc32` does; the GIL is released.

    begin: the CRC-32 of the bytes before them.
    """
    native, isa = _choose()
    if native is None:
        return zlib.crc32(data, begin)
    return int(native.crc32(data, begin & 0xFFFF_FFFF, isa))


@cache
def _choose() -> tuple[ModuleType | None, str]:
    """Return the native core, or None for zlib, and the instruction set that the environment asks
    for ("" for none).
    """
    asked = os.environ.get("OFFLOAD_ISA", "")
    # Not through offload.kernels, which needs torch.
    try:
        from offload import _native
    except ImportError:
        native, known = None, ["reference"]
    else:
        if not hasattr(_native, "crc32"):
            raise ConfigError(
                f"the native core {_native.__file__} was built by another version of offload: it "
                "has no crc32; build it again: pip install --force-reinstall offload, or make setup"
            )
        native, known = _native, [*_native.isas(), "reference"]
    if asked and asked not in known:
        raise ConfigError(
            f"OFFLOAD_ISA: instruction set {asked!r} is not available here, only {', '.join(known)}"
        )
    return (None, "") if asked == "reference" else (native, asked)
