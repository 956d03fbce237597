"""Imports that the server of `launch` makes before it forks, so that no process of a test has to.

Imports would take most of the time of such a process: torch, what the first optimizer imports
(torch._dynamo), what FSDP2 imports, pytest, and what tests of ranks share. The imported objects are
no garbage: collections in the processes need not walk over them, and copy their pages.
"""

from __future__ import annotations

import gc

import pytest  # noqa: F401
import safetensors.torch  # noqa: F401
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import offload.api  # noqa: F401
import support.ranks.checkpoint_cases
import support.ranks.fsdp
import support.ranks.launch
import support.ranks.stage3
import support.ranks.stages  # noqa: F401

gc.collect()
gc.freeze()
