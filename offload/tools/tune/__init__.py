"""`offload tune`: a program is run with one tuning after the other, and the best one is kept."""
