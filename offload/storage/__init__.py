"""Chunks of bytes on drives: swap files, I/O engines, the store above them, and files of weights.

`DiskStore` and `MemoryStore` keep the promises of `contract.Store`. Read in this order: `contract`,
`disk`, `table`, `space`, `files`, `engine`, `native_engine`, `python_engine`.
"""
