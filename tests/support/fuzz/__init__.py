"""A fuzzer: drawn trainings, run on plain torch and offloaded, compared bit for bit after each act.

python -m support.fuzz --seed 0 --count 1000     # with tests/ on the path
"""
