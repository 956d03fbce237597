"""The picture of `make demo`: the losses, the steps, where the bytes were, and the waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MI = 1 << 20


def draw(plain: Any, first: Any, second: Any, path: Path) -> None:
    """Draw torch alone, the run that was killed, and the one that was resumed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps, begin, end = second.steps(), second.lines()[0], second.lines()[-1]
    figure, ((losses, tiers), (times, waits)) = pyplot.subplots(2, 2, figsize=(11, 7))
    losses.plot(*_each(plain.steps(), "loss"), color="0.75", linewidth=7, label="torch, in memory")
    losses.plot(*_each(first.steps(), "loss"), color="tab:orange", linewidth=3, label="offload")
    losses.plot(*_each(steps, "loss"), color="tab:blue", label="offload, resumed")
    killed_in = len(first.steps()) + 1
    losses.axvline(killed_in, color="tab:red", linestyle=":", label="kill -9")
    losses.set(xlabel="step", ylabel="loss", title="one curve: both agree to the bit")
    losses.legend()
    sizes = {
        "needed": begin["needed_bytes"],
        "budget": begin["budget_bytes"],
        "taken": end["host_bytes"],
        "on disk": end["disk_bytes"],
    }
    colors = ["0.6", "tab:red", "tab:blue", "tab:orange"]
    tiers.bar(list(sizes), [nbytes / MI for nbytes in sizes.values()], color=colors)
    tiers.set(ylabel="MiB", title="host memory and disk")
    times.plot(*_each(plain.steps(), "seconds"), color="0.6", label="torch, in memory")
    times.plot(*_each(steps, "seconds"), color="tab:blue", label="offload, most of it on disk")
    times.set(xlabel="step", ylabel="seconds", title="a whole step", ylim=(0, None))
    times.legend()
    each = {cause: s / len(steps) * 1e3 for cause, s in end["seconds"].items() if s > 0}
    waits.barh(list(each), list(each.values()))
    waits.set(xlabel="ms a step", title="where step() and the model's waits go")
    waits.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _each(steps: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    return [line["step"] for line in steps], [line[name] for line in steps]
