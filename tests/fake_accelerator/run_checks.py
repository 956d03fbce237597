"""Runs all checks under one schedule and prints a JSON object: name to "ok" or a traceback.

``python -m fake_accelerator.run_checks lazy 0``
"""

from __future__ import annotations

import gc
import json
import sys
import traceback

import torch

from . import check_copies, check_memory, check_operators, check_streams, load
from .checks import CHECKS

__all__ = ["CHECKS", "check_copies", "check_memory", "check_operators", "check_streams"]


def main() -> None:
    schedule, seed = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    answers = {}
    for name, function in CHECKS.items():
        fake = load(schedule, seed)
        gc.collect()
        torch.accelerator.empty_cache()
        fake.reset_counters()
        try:
            function(fake)
            answers[name] = "ok"
        except Exception:
            answers[name] = traceback.format_exc()
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
