"""The tools that run beside a training and are never imported by `wrap`, `prepare` and a step: the
command line and its commands.

`cli` has the commands; `forecast` predicts a training that has not run, `bench` measures a machine,
`tune` searches its best tuning, `selftest` proves the engine on it, `doctor` says what it can do,
`html_report` makes the page of a run.
"""
