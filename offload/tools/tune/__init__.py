"""`offload tune`: run a program with one tuning after the other, and keep the best."""
