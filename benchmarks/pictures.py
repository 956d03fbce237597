"""The pictures of the documents: `make pictures` writes docs/pictures.

`one_step.png` is drawn by hand, so to speak: four units, memory for three of them, one step.
`page.png` is of a real run: the demo's page as Chromium shows it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
COLOURS = {"forward": "#0072b2", "backward": "#d55e00", "update": "#009e73"}
READ, WRITE, WAIT = "#56b4e9", "#cc79a7", "#999999"

# Row, what is written on it, begin, end, colour. Units are 0 to 3; time is in no unit.
COMPUTE, READS, WRITES, HELD = "cores: compute", "drive: reads", "drive: writes", "in memory"
BARS = [
    (COMPUTE, "0", 0.0, 2.0, COLOURS["forward"]),
    (COMPUTE, "1", 2.0, 4.0, COLOURS["forward"]),
    (COMPUTE, "2", 4.0, 6.0, COLOURS["forward"]),
    (COMPUTE, "3", 6.0, 8.0, COLOURS["forward"]),
    (COMPUTE, "3", 8.0, 11.0, COLOURS["backward"]),
    (COMPUTE, "2", 11.0, 14.0, COLOURS["backward"]),
    (COMPUTE, "1", 14.0, 17.0, COLOURS["backward"]),
    (COMPUTE, "0", 17.0, 20.0, COLOURS["backward"]),
    (READS, "2", 2.0, 3.6, READ),
    (READS, "3", 4.0, 5.6, READ),
    (READS, "1", 11.0, 12.6, READ),
    (READS, "0", 14.0, 15.6, READ),
    (READS, "m v 0", 20.0, 21.4, READ),
    (READS, "p m v 1", 21.4, 22.8, READ),
    (READS, "p m v 2", 22.8, 24.2, READ),
    (READS, "p m v 3", 24.2, 25.6, READ),
    (COMPUTE, "0", 21.4, 22.2, COLOURS["update"]),
    (COMPUTE, "1", 22.8, 23.6, COLOURS["update"]),
    (COMPUTE, "2", 24.2, 25.0, COLOURS["update"]),
    (COMPUTE, "3", 25.6, 26.4, COLOURS["update"]),
    (WRITES, "0", 22.2, 23.6, WRITE),
    (WRITES, "1", 23.6, 25.0, WRITE),
    (WRITES, "2", 25.0, 26.4, WRITE),
]
# How long each unit's parameters are in memory.
STAYS = [(0, 0.0, 4.0), (1, 0.0, 6.0), (2, 2.0, 14.0), (3, 4.0, 11.0), (1, 11.0, 17.0)]
STAYS += [(0, 14.0, 27.0)]


def draw_one_step(path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(12, 4.4))
    rows = [HELD, WRITES, READS, COMPUTE]
    for row, text, begin, end, colour in BARS:
        y = rows.index(row) + 0.9
        axes.broken_barh([(begin, end - begin - 0.06)], (y, 0.7), color=colour)
        axes.text((begin + end) / 2, y + 0.35, text, ha="center", va="center", color="white")
    for unit, begin, end in STAYS:
        y = 0.05 + 0.36 * unit
        axes.broken_barh([(begin, end - begin)], (y, 0.3), color="#444444")
        axes.text(begin + 0.15, y + 0.14, f"unit {unit}", va="center", color="white", fontsize=8)
    for at, text in ((0.0, "forward"), (8.0, "backward"), (20.0, "step()")):
        axes.axvline(at, color="black", linewidth=0.8)
        axes.text(at + 0.15, 4.85, text, fontweight="bold")
    axes.set_yticks([0.8, *(n + 1.25 for n in range(1, 4))], [HELD, WRITES, READS, COMPUTE])
    axes.set(xlim=(0, 27), ylim=(0, 5.2), xlabel="time")
    axes.set_xticks([])
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"picture: {path}")


def show_demo(pictures: Path) -> None:
    """Run the demo and take a picture of the page that it leaves."""
    subprocess.run(["make", "demo"], cwd=ROOT, check=True)
    browser = shutil.which("chromium")
    if browser is None:
        sys.exit("pictures: the page is shown by Chromium, which is not here (apt: chromium)")
    with tempfile.TemporaryDirectory() as directory:
        options = "--headless --no-sandbox --disable-gpu --no-first-run --disable-quic "
        options += "--disable-background-networking --disable-component-update --disable-sync"
        shot = f"--screenshot={pictures / 'page.png'}"
        page = (ROOT / "build" / "demo.html").as_uri()
        where = [f"--user-data-dir={directory}", shot, "--window-size=1280,1500", page]
        subprocess.run([browser, *options.split(), *where], check=True, timeout=120)
    print(f"picture: {pictures / 'page.png'}")


def main() -> None:
    PICTURES.mkdir(parents=True, exist_ok=True)
    draw_one_step(PICTURES / "one_step.png")
    if "--drawn-only" not in sys.argv[1:]:
        show_demo(PICTURES)


if __name__ == "__main__":
    main()
