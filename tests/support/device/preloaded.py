"""Imports that the server of `support.ranks.launch` makes in addition for tests of the device."""

from __future__ import annotations

import fake_accelerator.collectives

import support.device.network_cases
import support.device.stage3_cases
import support.device.stages_loops  # noqa: F401

fake_accelerator.load()
