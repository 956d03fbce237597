"""What this machine can do, in figures: `offload bench`.

Each file measures one thing and leaves nothing behind; `survey.py` does all of it in turn,
`record.py` makes a profile of what was found. Every figure is the median of several short runs,
with its spread. How much of everything is used, and at most written, is in `sizes.py`.
"""
