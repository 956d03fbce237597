"""Every bound of the format, in one place. Files that exceed one are refused, on both sides: what
is over a limit cannot be written either.
"""

from __future__ import annotations

from typing import Final

# --- JSON ---
MOST_DEPTH: Final = 200  # lists and objects within each other
MOST_CONTAINERS: Final = 1 << 22  # lists and objects in one document
MOST_DIGITS: Final = 32  # in a row; a number of 64 bits has 20 at most

# --- safetensors ---
MOST_HEADER_BYTES: Final = 100_000_000  # as the safetensors library has it
MOST_DIMS: Final = 64  # as torch has it
MOST_NUMBER: Final = (1 << 63) - 1  # of sizes, offsets and lengths

# --- manifest ---
MOST_MANIFEST_BYTES: Final = 64 << 20
MOST_FILES: Final = 10_000
MOST_TENSORS: Final = 500_000
MOST_PARTS: Final = 1 << 20  # of all tensors; at 64 MiB each: 64 TiB
MOST_PART_BYTES: Final = 64 << 20
MOST_NAME_CHARS: Final = 4096  # of a tensor
MOST_FINGERPRINT_CHARS: Final = 128
MOST_CHECKPOINT_NUMBER: Final = 1 << 53  # what every reader of JSON holds exactly

# --- values ---
MOST_TREE_DEPTH: Final = 50  # dicts, lists and tuples within each other; three levels of JSON each
MOST_TREE_NODES: Final = 1 << 20  # what is longer belongs in a tensor
MOST_INT_BYTES: Final = 4096  # of a whole number

# --- directories ---
MOST_FILE_NAME_CHARS: Final = 200
MOST_NAMES: Final = 100_000  # in a directory

# --- verify ---
MOST_FINDINGS: Final = 100  # that are kept; the rest is counted
READ_BYTES: Final = 4 << 20  # of a file in memory at once
