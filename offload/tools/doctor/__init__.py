"""`offload doctor`: what this machine can do, and what to do about what it cannot."""
