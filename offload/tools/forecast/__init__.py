"""What a training would need and take, told before anything is made.

`request` is the question; `model_source` and `model_shape` find the model, `machines` the machine;
`footprint` runs it on shapes alone, `outline` draws up what it needs, and `model_cost` makes a
workload of that; `simulator` runs one, or a recorded run (`replay`), through the engine in virtual
time (`simulation`); `forecaster` puts it together, and `forecast` holds and shows the answer.
"""
