"""Chunks of bytes on drives: swap files, I/O engines, the stores above them, and weight files.

`DiskStore` and `MemoryStore` implement `contract.Store`. Read in this order: `contract`,
`disk`, `table`, `space`, `files`, `engine`, `native_engine`, `python_engine`.
"""
