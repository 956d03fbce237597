"""A timeline only for chrome://tracing and ui.perfetto.dev: without the facts that `run_file` keeps
beside the events, with memory as counters, and with two runs as two processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.core.timeline import to_chrome
from offload.telemetry.run_file import Run
from offload.tools.html_report.memory import tiers_of


def to_perfetto(runs: Sequence[Run], paths: Sequence[str]) -> dict[str, Any]:
    """Build the trace; each run starts at its own 0. paths: the names of the runs."""
    events: list[dict[str, Any]] = []
    for pid, (run, path) in enumerate(zip(runs, paths, strict=True), start=1):
        for event in to_chrome(run.events)["traceEvents"]:
            if event["name"] == "process_name":
                event = {**event, "args": {"name": f"{run.about.title} ({path})"}}
            events.append({**event, "pid": pid})
        events += _counters(run, pid)
    about = {"made_by": "offload report"}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _counters(run: Run, pid: int) -> list[dict[str, Any]]:
    """Build the memory counters. Times count from the first event, as in `to_chrome`."""
    start_s = min((event.begin_s for event in run.events), default=0.0)
    return [
        {
            "ph": "C",
            "pid": pid,
            "name": f"memory: {tier.name}",
            "ts": round((at_s - start_s) * 1e6, 3),
            "args": {band.label: band.nbytes[number] for band in tier.bands},
        }
        for tier in tiers_of(run)
        for number, at_s in enumerate(tier.times_s)
        if at_s >= start_s
    ]
