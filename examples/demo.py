"""The show of `make demo`: train_gpt.py runs three times, and the second one is killed.

First plain torch with all in memory, then the same model with most of it on disk, until a SIGKILL
comes in the middle of a step; then again, from the newest whole checkpoint. Every loss and every
bit of the result must be those of the first run. A picture and a page with the timeline are left.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo_picture import draw

EXAMPLE = Path(__file__).parent / "train_gpt.py"
MI = 1 << 20


class Run:
    """A process of train_gpt.py and the lines that it notes. Its progress line is seen here."""

    def __init__(self, title: str, folder: Path, log: str, options: list[str]) -> None:
        print(f"\n--- {title}\n", flush=True)
        self._log = folder / log
        self._process = subprocess.Popen([sys.executable, EXAMPLE, "--log", self._log, *options])

    def lines(self) -> list[dict[str, Any]]:
        text = self._log.read_text() if self._log.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def steps(self) -> list[dict[str, Any]]:
        return [line for line in self.lines() if "step" in line]

    def wait(self) -> None:
        if self._process.wait() != 0:
            raise SystemExit(f"train_gpt.py ended with {self._process.returncode}")

    def kill_in_step(self, number: int) -> None:
        """Kill the process when it has begun that step."""
        while len(self.steps()) < number - 1:
            if self._process.poll() is not None:
                raise SystemExit(f"train_gpt.py ended with {self._process.returncode}")
            time.sleep(0.005)
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def show(options: argparse.Namespace, folder: Path) -> int:
    common = [f"--steps={options.steps}", f"--layers={options.layers}", f"--seed={options.seed}"]
    swap, trace = folder / "swap", options.out / "demo_trace.json"
    swap.mkdir()
    ours = [*common, f"--nvme={swap}", f"--save={folder / 'checkpoints'}", f"--trace={trace}"]
    ours.append(f"--every={options.every}")

    plain = Run("torch alone, everything in memory", folder, "plain", [*common, "--in-memory"])
    with_end(plain, plain.wait)
    first = Run("the same with offload, most of it on disk", folder, "first", ours)
    with_end(first, lambda: first.kill_in_step(options.steps * 3 // 5))
    print(f"\n\nkill -9 in step {len(first.steps()) + 1}", flush=True)
    left = list(swap.iterdir())
    print(f"left in the swap directory: {', '.join(map(str, left)) or 'nothing'}")
    second = Run("started again", folder, "second", ours)
    with_end(second, second.wait)

    print("\n--- what is to be seen\n")
    is_well = not left and tell(plain, first, second)
    draw(plain, first, second, options.out / "demo.png")
    page = options.out / "demo.html"
    subprocess.run([sys.executable, "-m", "offload", "report", trace, "-o", page], check=True)
    print(f"picture   {options.out / 'demo.png'}\ntimeline  {trace} (ui.perfetto.dev)")
    print(f"the page  {page.absolute()}")
    return 0 if is_well else 1


def with_end(run: Run, act: Any) -> None:
    """Run `act`; the run's process never outlives ours."""
    try:
        act()
    finally:
        run.close()


def tell(plain: Run, first: Run, second: Run) -> bool:
    """Print the comparison of the runs; return whether all is as it must be."""
    expected = {line["step"]: line["loss"] for line in plain.steps()}
    differs = [
        line["step"]
        for line in first.steps() + second.steps()
        if line["loss"] != expected[line["step"]]
    ]
    begin, end, theirs = second.lines()[0], second.lines()[-1], plain.lines()[-1]
    is_same = end["digest"] == theirs["digest"]
    is_within = end["host_bytes"] <= begin["budget_bytes"] < begin["needed_bytes"]
    again = second.steps()[0]["step"]
    print(f"loss      {expected[1]:.3f} -> {expected[len(expected)]:.3f}, {len(expected)} steps")
    print(f"resumed   with step {again}; steps {again} to {len(first.steps())} were run twice")
    print(f"losses    {f'differ in steps {differs}' if differs else 'the same to the bit, all'}")
    print(f"result    {'the same, bit for bit' if is_same else 'DIFFERS'}")
    print(
        f"budget    {begin['budget_bytes'] / MI:.1f} MiB of host memory for what needs "
        f"{begin['needed_bytes'] / MI:.1f} MiB; taken {end['host_bytes'] / MI:.1f} MiB, on disk "
        f"{end['disk_bytes'] / MI:.1f} MiB"
    )
    grown, others = (
        (one["peak_rss_bytes"] - one["rss_before_bytes"]) / MI for one in (end, theirs)
    )
    print(
        f"process   grew by {grown:.0f} MiB at most, activations included; torch {others:.0f} MiB"
    )
    return not differs and is_same and is_within and expected[len(expected)] < expected[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--out", type=Path, default=Path("build"), help="for picture and page")
    options = parser.parse_args()
    folder = options.out / "demo"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        return show(options, folder)
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
