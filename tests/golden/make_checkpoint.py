"""How `checkpoint-v1` was made: `python tests/golden/make_checkpoint.py NEW_DIRECTORY`.

It is never made anew: every later version must load the one that is here. When the format changes,
the new one gets a golden checkpoint of its own beside it.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.golden import make

make(Path(sys.argv[1]))
