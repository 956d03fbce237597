"""The checkpoint format: what its files are made of, and how they are read without trust.

docs/checkpoint-format.md describes it. Needs neither torch nor numpy, so that `offload verify` runs
anywhere. Files come from anywhere too: every size, count and depth is bounded (`limits`), names are
checked before they are opened (`directory`), and what does not fit is a `FormatError`. Nothing here
changes a file.
"""
