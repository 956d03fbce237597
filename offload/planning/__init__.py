"""The planning: from sizes and budgets to a plan. Nothing is allocated and nothing is moved here.

`planner` places the optimizer state of a wrapped optimizer, `shares` divides the host memory of a
prepared model, `model_plan` is the plan of such a model; `sharding` and `rank_share` do the same
among ranks. `layout` cuts optimizer state into chunks, `unit` is a model's unit with its sizes,
`limits` are the byte budgets in force. `profile`, `tuning` and `trial` decide which tuning a call
runs with.
"""
