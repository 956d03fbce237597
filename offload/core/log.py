"""The package's logger, "offload". It speaks in the first rank only, and prints nothing by itself.

`logging.basicConfig(level="INFO")` shows what is logged: the plan, each new fall-back, a step that
went wrong. In other ranks, which torchrun numbers in the environment, everything is dropped; errors
are raised there all the same.
"""

from __future__ import annotations

import logging
import os


def _is_first_rank(record: logging.LogRecord) -> bool:
    return os.environ.get("RANK", "0") in ("", "0")


LOG = logging.getLogger("offload")
LOG.addHandler(logging.NullHandler())
LOG.addFilter(_is_first_rank)
