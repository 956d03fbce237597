"""The checkpoint format: the contents of its files, and how to read them without trusting them.

docs/checkpoint-format.md describes it. Needs neither torch nor numpy, so that `offload verify` runs
anywhere. The files may be from anywhere, too: every size, count and depth is bounded
(`offload.core.format_limits`), names are checked before they are opened (`directory`), and what
does not fit raises a `FormatError`. Nothing here changes a file.
"""
