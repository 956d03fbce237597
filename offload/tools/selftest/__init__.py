"""The checks of `offload selftest`, which prove the engine on the user's own machine; they need
nothing that the package does not have.

`check` names the checks and defines what a check is, and each group has its checks in the file of
its name: kernels, wrap, prepare, copies, budgets, faults, checkpoints, leftovers. `supervisor` runs
them in another process (`worker`), so that a check that crashes or hangs is a line in the table and
does not end the run. check and supervisor need no torch.
"""
