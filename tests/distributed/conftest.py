"""Ranks compute with one thread each, and so does this process, with which they are compared."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    """Run torch on one thread: with two, products of matrices have other last bits."""
    torch.set_num_threads(1)
