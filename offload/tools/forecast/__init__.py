"""The forecast of a training: the memory and the time that it needs, before anything is made.

`model_source` and `model_shape` find the model, `machines`
the machine; `footprint` runs the model on shapes alone and makes a workload of that;
`simulator` runs a workload, also one from a recorded run (`replay`), through the engine in virtual
time (`simulation`); `forecaster` combines these; `forecast` holds the request and shows the answer.
"""
