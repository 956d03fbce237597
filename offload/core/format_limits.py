"""The limits of the file formats. A file that exceeds one is refused by the reader, and the writer
refuses to write it.
"""

from __future__ import annotations

from typing import Final

# --- JSON ---
MOST_DEPTH: Final = 200  # nesting of lists and objects
MOST_CONTAINERS: Final = 1 << 22  # lists and objects in one document
MOST_DIGITS: Final = 32  # in a row; a number of 64 bits has 20 at most

# --- safetensors ---
MOST_HEADER_BYTES: Final = 100_000_000  # the limit of the safetensors library
MOST_DIMS: Final = 64  # the limit of torch
MOST_NUMBER: Final = (1 << 63) - 1  # for sizes, offsets and lengths

# --- manifest ---
MOST_MANIFEST_BYTES: Final = 64 << 20
MOST_FILES: Final = 10_000
MOST_TENSORS: Final = 500_000
MOST_PARTS: Final = 1 << 20  # of all tensors together; at 64 MiB each: 64 TiB
MOST_PART_BYTES: Final = 64 << 20
MOST_NAME_CHARS: Final = 4096  # of a tensor
MOST_FINGERPRINT_CHARS: Final = 128
MOST_CHECKPOINT_NUMBER: Final = 1 << 53  # every JSON reader holds numbers up to this exactly

# --- values ---
MOST_TREE_DEPTH: Final = 50  # nesting of dicts, lists and tuples; three levels of JSON each
MOST_TREE_NODES: Final = 1 << 20  # longer data belongs in a tensor
MOST_INT_BYTES: Final = 4096  # of a whole number

# --- directories ---
MOST_FILE_NAME_CHARS: Final = 200
MOST_NAMES: Final = 100_000  # in a directory

# --- verify ---
MOST_FINDINGS: Final = 100  # kept in full; further ones are only counted
READ_BYTES: Final = 4 << 20  # read from a file at once
