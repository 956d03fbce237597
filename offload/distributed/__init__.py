"""Ranks and collectives over `torch.distributed`, which only this package imports."""
