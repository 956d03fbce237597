"""Chunks of bytes on drives: swap files, I/O engines, the store above them, and weight files.

Read in this order: `disk`, `space`, `files`, `engine`, `native_engine`, `python_engine`.
"""
