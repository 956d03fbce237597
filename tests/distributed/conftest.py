"""What ranks compute with one thread each is compared with what this process computes."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread(threads_as_before: None) -> None:
    """Products of matrices have other last bits with two."""
    torch.set_num_threads(1)
