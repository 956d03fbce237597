"""The module behind `python -m offload`, which runs the command `offload`."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command and return its exit code. The imports take a moment, in which Ctrl-C must
    work, too.
    """
    try:
        from offload.tools.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("offload: error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
