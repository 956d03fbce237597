"""`offload selftest`: the engine proved on the user's own machine, with what the package has.

`registry` names the checks, `check` says what one is, and each other file has those of one group:
kernels, wrap, prepare, copies, budgets, faults, checkpoints, leftovers. `supervisor` runs them in a
process of their own (`worker`), so that one that crashes or hangs is a line in the table and not
its end; `table` shows what came of them. registry, check, supervisor and table need no torch.
"""
