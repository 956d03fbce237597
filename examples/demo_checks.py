"""What `make demo` finds: the functions `check_*` return what is not as it must be."""

from __future__ import annotations

from pathlib import Path

from demo_run import EXAMPLE, Run
from memory_limit import Limit

from offload.core.config import format_size


def check_bits(plain: Run, first: Run, second: Run, newest: int) -> list[str]:
    """Compare the killed run and the resumed one with plain torch that had no limit.

    newest: the step of the newest whole checkpoint that the killed run has left.
    """
    expected = {line["step"]: line["loss"] for line in plain.steps()}
    ours = first.steps() + second.steps()
    differs = sorted({line["step"] for line in ours if line["loss"] != expected[line["step"]]})
    problems = [f"the losses differ in steps {differs}"] if differs else []
    begin, end, last = second.steps()[0]["step"], second.steps()[-1]["step"], len(expected)
    if begin != newest + 1:
        problems.append(f"resumed with step {begin}; the newest checkpoint is of step {newest}")
    if end != last:
        problems.append(f"resumed up to step {end}, expected {last}")
    if second.lines()[-1]["digest"] != plain.lines()[-1]["digest"]:
        problems.append("the final parameters differ")
    if expected[last] >= expected[1]:
        problems.append(f"the loss does not fall: {expected[1]:.3f} -> {expected[last]:.3f}")
    return problems


def check_memory(run: Run) -> list[str]:
    """Compare what the run has taken with its limit."""
    taken, limit = run.peak_bytes, run.limit.nbytes
    if limit and taken > limit:
        return [f"{run.name}: has taken {format_size(taken)}, the limit is {format_size(limit)}"]
    return []


def check_failure(run: Run, code: int, failure: str | None) -> list[str]:
    """Return what plain torch has done under the limit, if it has not run out of memory."""
    if failure is not None:
        return []
    if code == 0:
        took, limit = format_size(run.peak_bytes), format_size(run.limit.nbytes)
        return [f"plain torch trains in {took}, within the limit of {limit}: give --limit less"]
    return [run.end_text]


def tell_limit(limit: Limit, taken_bytes: int) -> str:
    """Describe the limit beside the bytes that torch has taken without one."""
    if limit.nbytes:
        times = f"torch has taken {taken_bytes / limit.nbytes:.1f} times that"
        return f"{format_size(limit.nbytes)} ({limit.about}); {times}"
    return "none can be set here: torch will not fail, only the bits are compared"


def newest_checkpoint(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; those in the making have no such name."""
    return max((int(path.name) for path in folder.glob("[0-9]*") if path.name.isdigit()), default=0)


def lines_of_offload() -> list[str]:
    """Return the lines of train_gpt.py that plain torch does without."""
    lines = map(str.strip, EXAMPLE.read_text().splitlines())
    return [line for line in lines if line == "import offload" or "offload.prepare(" in line]
