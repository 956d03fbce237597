"""The measurements of `offload bench`: how fast this machine is, in figures.

Each file measures one thing and leaves nothing behind; `survey.py` runs all of them in turn and
turns the results into a profile. Every figure is the median of several short runs, with
its spread. `sizes.py` sets how much memory, disk space and time a measurement uses, and how many
bytes it writes at most.
"""
