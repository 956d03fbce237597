"""The show of `make demo`: in a memory limit where plain torch fails, the same script with two
lines of offload trains, is killed, goes on, and ends with the bits of torch without the limit.

`demo_run.py` has the runs, `memory_limit.py` the limit, `demo_checks.py` what must hold.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import median

import demo_checks as checks
from demo_run import Run
from memory_limit import KINDS, Limit, set_limit

from offload.core.config import format_size, parse_size

INTERRUPTED = 128  # and the signal's number


def show(options: argparse.Namespace, folder: Path, limit: Limit) -> list[str]:
    """Run all; return what is not as it must be."""
    shape = [f"--{name}={getattr(options, name)}" for name in ("steps", "layers", "width")]
    plain = run_plain(folder, shape)
    say("The limit from here on", checks.tell_limit(limit, plain.peak_bytes))
    problems = run_limited(folder, shape, limit) if limit.nbytes else []
    print("\nThe same script with two lines more:\n")
    print("\n".join(f"    + {line}" for line in checks.lines_of_offload()), end="\n\n")
    trace = options.out / "demo_trace.json"
    ours = [*shape, f"--host-memory={options.host_memory}", f"--every={options.every}"]
    ours += [f"--nvme={folder / 'swap'}", f"--save={folder / 'checkpoints'}", f"--trace={trace}"]
    first = run_killed(folder, ours, limit, options.steps * 3 // 4 + 1)
    newest = checks.newest_checkpoint(folder / "checkpoints")
    problems += [f"the killed run has left {path}" for path in (folder / "swap").iterdir()]
    second = run_again(folder, ours, limit)
    problems += checks.check_memory(first) + checks.check_memory(second)
    problems += tell_bits(plain, first, second, newest)
    write_page(trace, options.out / "demo.html")
    return problems


def run_plain(folder: Path, shape: list[str]) -> Run:
    with Run("torch without a limit", folder, Limit(), [*shape, "--in-memory"]) as run:
        run.start()
        run.finish()
    losses = [line["loss"] for line in run.steps()]
    count = run.lines()[0]["parameters"] / 1e6
    print(f"\nA GPT of {count:.0f} M parameters: fp32, AdamW, {len(losses)} steps, on the CPU.\n")
    took = f"peak {format_size(run.peak_bytes)}, {median(run.seconds):.2f} s a step"
    say("1. Plain torch, no limit", f"{took}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return run


def run_limited(folder: Path, shape: list[str], limit: Limit) -> list[str]:
    with Run("torch within the limit", folder, limit, [*shape, "--in-memory"]) as run:
        run.start()
        code = run.end()
    failure, step = run.memory_failure(), len(run.steps()) + 1
    text = f"OUT OF MEMORY in step {step}: {failure}" if failure else f"has ended with {code}"
    say("2. Plain torch, limited", text)
    return checks.check_failure(run, code, failure)


def run_killed(folder: Path, ours: list[str], limit: Limit, number: int) -> Run:
    with Run("offload", folder, limit, ours) as run:
        run.start()
        run.kill_in_step(number)
    step, peak = len(run.steps()) + 1, format_size(run.peak_bytes)
    say("3. offload, limited", f"it trains, peak {peak}; then kill -9 in the middle of step {step}")
    return run


def run_again(folder: Path, ours: list[str], limit: Limit) -> Run:
    with Run("offload again", folder, limit, ours) as run:
        run.start()
        run.finish()
    steps, peak = run.steps(), format_size(run.peak_bytes)
    since = f"goes on after step {steps[0]['step'] - 1}, its newest whole checkpoint"
    say("4. offload, started again", f"{since}; peak {peak}")
    return run


def tell_bits(plain: Run, first: Run, second: Run, newest: int) -> list[str]:
    problems = checks.check_bits(plain, first, second, newest)
    if not problems:
        count = len(plain.steps())
        say("   The result", f"all {count} losses and all parameters: bit for bit those of 1.")
    ours, theirs = median([*first.seconds, *second.seconds]), median(plain.seconds)
    say("What it costs", f"{ours:.2f} s a step; torch, without a limit, {theirs:.2f} s")
    return problems


def write_page(trace: Path, page: Path) -> None:
    command = [sys.executable, "-m", "offload", "report", trace, "-o", page]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    say("Where bytes and time went", f"{page} (open it in a browser)")


def say(title: str, text: str) -> None:
    print(f"{title:<27}{text}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--every", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--host-memory", default="128MiB", help="what offload may hold")
    parser.add_argument("--limit", default="704MiB", help="what a process may take in all")
    parser.add_argument("--by", default="auto", choices=["auto", *KINDS, "none"], help="its kind")
    parser.add_argument("--out", type=Path, default=Path("build"), help="for the page")
    options = parser.parse_args()
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out: {options.out} is not a directory; give another")
    return options


def main() -> int:
    options = parse()
    for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(one, lambda number, frame: sys.exit(INTERRUPTED + number))
    folder = options.out / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "swap").mkdir(parents=True)
    limit = Limit()
    try:
        limit, refusals = set_limit(options.by, parse_size("--limit", options.limit))
        if options.by in KINDS and not limit.nbytes:
            sys.exit(f"--by={options.by}: cannot be set here ({refusals[0]}); try --by=auto")
        for refusal in refusals:
            say("No limit by", refusal[:70])
        problems = show(options, folder, limit)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is left to do is quick
        limit.close()
        shutil.rmtree(folder, ignore_errors=True)
    for problem in problems:
        print(f"FAILED: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
