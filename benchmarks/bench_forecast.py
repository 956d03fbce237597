"""How long `offload plan` takes, how much memory, and how far it is from the full simulation: `make
bench ONLY=forecast`, or pytest benchmarks/bench_forecast.py.

Each command runs in a process of its own, as a user runs it, and again with `--full`, which
simulates every layer and every chunk. For the largest models that takes minutes each: they are
compared if OFFLOAD_BENCH_LONG is set, and as far as it ends within `FULL_S`. OFFLOAD_BENCH_ONLY
(part of a command) chooses some; nothing is written down then.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

from model_results import result_path
from results import HERE, machine_header

FULL_S = 300.0
NEAR = 0.03
ON_4090, ON_A100 = "--on rtx4090-1ssd", "--on a100-80g-2ssd"
RECOMPUTE = "--activations recompute"
# The command, and the seconds that it may take.
PLANS = (
    (f"8B {ON_4090} --host-memory 48GiB --sequence 2048 {RECOMPUTE}", 3.0),
    (f"8B {ON_4090} --host-memory 16GiB --sequence 2048 {RECOMPUTE}", 3.0),
    (f"8B {ON_4090} --host-memory 100GiB --sequence 2048 {RECOMPUTE}", 3.0),
    (f"8B {ON_4090} --host-memory 24GiB --sequence 8192 --activations offload", 3.0),
    ("8B --on workstation-cpu --host-memory 32GiB --sequence 512", 3.0),
    (f"llama-3-8b {ON_4090} --host-memory 48GiB --sequence 4096 {RECOMPUTE}", None),
    (f"llama-3-8b {ON_4090} --host-memory 48GiB --sequence 4096 --lora 16 {RECOMPUTE}", None),
    (f"8B {ON_A100} --host-memory 64GiB --sequence 512 --use wrap", 3.0),
    (f"13B {ON_4090} --host-memory 24GiB --sequence 2048 {RECOMPUTE}", None),
    (f"qwen3-32b {ON_4090} --host-memory 56GiB --sequence 2048 {RECOMPUTE}", None),
    (f"70B {ON_4090} --host-memory 48GiB --sequence 2048 {RECOMPUTE}", 5.0),
    (f"70B {ON_A100} --host-memory 400GiB --batch 4 --sequence 4096 {RECOMPUTE}", 5.0),
    (f"llama-3-70b {ON_4090} --host-memory 56GiB --sequence 4096 {RECOMPUTE}", 5.0),
    (f"mixtral-8x22b {ON_4090} --host-memory 120GiB --sequence 2048 {RECOMPUTE}", None),
    (f"gpt-3-175b {ON_A100} --host-memory 400GiB --sequence 2048 {RECOMPUTE}", None),
    (f"t5-11b {ON_4090} --host-memory 32GiB --sequence 512 {RECOMPUTE}", None),
    (f"vit-g-14 {ON_4090} --host-memory 12GiB --batch 32 {RECOMPUTE}", None),
    (f"flux-12b {ON_4090} --host-memory 48GiB --sequence 4096 {RECOMPUTE}", None),
    (f"deepseek-v3 {ON_A100} --host-memory 400GiB --sequence 2048 {RECOMPUTE}", 20.0),
    (f"1T {ON_A100} --host-memory 400GiB --sequence 2048 {RECOMPUTE}", 20.0),
)
LARGE = re.compile("70B|1T|llama-3-70b|mixtral|gpt-3|deepseek")
_COUNTED = ("read_bytes", "written_bytes", "to_device_bytes", "to_host_bytes", "taken_bytes")


@dataclass(frozen=True)
class Told:
    """What a command told, how long it took, and its memory at the peak."""

    answer: dict[str, Any]
    seconds: float
    peak_bytes: int


def run(command: str, timeout_s: float) -> Told | None:
    """Run `offload plan` in a process of its own; None: it did not end in time."""
    words = [sys.executable, "-m", "offload", "plan", *command.split(), "--json"]
    begin_s = time.perf_counter()
    with TemporaryFile() as out, subprocess.Popen(words, stdout=out) as process:
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        _, status, used = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - begin_s
        if process.returncode == -signal.SIGKILL:
            return None
        assert process.returncode == 0, (command, process.returncode)
        out.seek(0)
        return Told(json.load(out), seconds, 1024 * used.ru_maxrss)


def differences(some: dict[str, Any], full: dict[str, Any]) -> dict[str, float]:
    """Return by how much the figures differ, as shares of those of the full simulation; gains as
    shares of its step.
    """
    step_s = full["timing"]["step_s"]
    found = {"step": some["timing"]["step_s"] / step_s - 1}
    for name in _COUNTED:
        if full[name] or some[name]:
            found[name] = some[name] / full[name] - 1 if full[name] else 1.0
    tokens = some["timing"]["hidden_tokens"], full["timing"]["hidden_tokens"]
    if all(tokens):
        found["hidden from"] = tokens[0] / tokens[1] - 1
    for name, gain_s in full["timing"]["gains"].items():
        found[name] = (some["timing"]["gains"][name] - gain_s) / step_s
    return found


def test_plans_are_quick_and_near_the_full_simulation(benchmark: Any) -> None:
    only = os.environ.get("OFFLOAD_BENCH_ONLY", "")
    plans = [(command, limit_s) for command, limit_s in PLANS if only in command]
    lines = [
        "# forecast",
        "",
        *machine_header(),
        "- command: `make bench ONLY=forecast`",
        "- the largest difference is that of the step, the bytes moved and taken, the tokens from "
        "which drives are hidden, and what one more of each resource brings (as a share of the "
        "step)",
        "",
        "| offload plan | s | MiB | full, s | step, s | step differs by | most |",
        "|---|--:|--:|--:|--:|--:|---|",
    ]
    late, far = [], []

    def measure(command: str, limit_s: float | None) -> None:
        some = run(command, FULL_S)
        assert some is not None, command
        is_compared = not LARGE.match(command) or os.environ.get("OFFLOAD_BENCH_LONG")
        full = run(f"{command} --full", FULL_S) if is_compared else None
        row = f"{command} | {some.seconds:.1f} | {some.peak_bytes / (1 << 20):.0f}"
        step_s = some.answer["timing"]["step_s"]
        if full is None:
            row += f" | {'over ' + format(FULL_S, '.0f') if is_compared else ''} | {step_s:.2f} | |"
        else:
            each = differences(some.answer, full.answer)
            most = max(each, key=lambda name: abs(each[name]))
            row += (
                f" | {full.seconds:.1f} | {step_s:.2f} | {each['step']:+.1%} | {most} "
                f"{each[most]:+.1%}"
            )
            if abs(each[most]) > NEAR:
                far.append((command, each))
        if limit_s is not None and some.seconds > limit_s:
            late.append((command, some.seconds))
        print(f"| {row} |", flush=True)
        lines.append(f"| {row} |")

    def measure_all() -> None:
        for command, limit_s in plans:
            measure(command, limit_s)

    benchmark.pedantic(measure_all, rounds=1)
    if not only:
        HERE.mkdir(exist_ok=True)
        result_path("forecast").write_text("\n".join(lines) + "\n")
    assert not far, far
    assert not late, late
