"""`python -m offload` is the command `offload`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run it, and return its exit code. What it imports takes a moment, in which somebody may
    think better of it.
    """
    try:
        from offload.tools.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("offload: error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
