"""The planning: from sizes and budgets to a plan. Nothing is allocated and nothing is moved here.

`training` plans a whole training from facts and budgets: `shares` divides the host memory of a
prepared model, `planner` places the state of the optimizer, which `state_plan` describes;
`sharding` is what ranks have of a model. `layout` cuts optimizer state into chunks, `unit` is a
model's unit with its sizes, `limits` are the byte budgets in force. `profile`, `tuning` and `trial`
decide which tuning a call runs with.
"""
