"""The package's logger, "offload". It logs on rank 0 only, and prints nothing by itself.

`logging.basicConfig(level="INFO")` shows its records: the plan, each new fall-back, a failed step.
On other ranks, which torchrun numbers by RANK in the environment, all records are dropped; errors
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
