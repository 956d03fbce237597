"""What the server of `support.ranks.launch` imports, too, where tests are those of the device."""

from __future__ import annotations

import fake_accelerator.collectives

import support.device.network_cases
import support.device.stage3_cases
import support.device.stages_loops  # noqa: F401

fake_accelerator.load()
