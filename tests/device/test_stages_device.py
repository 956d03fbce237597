"""`wrap` among ranks with parameters on a device: stages 1 and 2, beside plain torch on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import stages_cases as cases
from launch import outcomes, run


@pytest.mark.parametrize("stage", [1, 2])
def test_the_bits_of_plain_torch(stage: int, tmp_path: Path) -> None:
    for found in run(2, cases.the_same_bits, stage, str(tmp_path)):
        assert not found["wrong"]


@pytest.mark.parametrize("stage", [1, 2])
def test_each_rank_moves_its_part(stage: int) -> None:
    """Parameters and gradients come to the host and parameters go back, a rank's own; everything
    passes the network once, in stage 2 the gradients, too.
    """
    for found in run(2, cases.moved, stage):
        assert 0.98 <= found["up"] <= 1.02 and 1.96 <= found["down"] <= 2.04
        assert 1.0 <= found["gather"] <= 1.05
        assert ("reduce" in found) is (stage == 2) and 1.0 <= found.get("reduce", 1.0) <= 1.05
        assert "on the device" in found["text"]
        assert (found["host_bytes"] == 0) is (stage == 1)


IDLE = "Mark(m.stream, torch.Stream(m.stream.device).record_event())"
FAULTS = {
    "gathered before the own part was written": (
        1,
        "device_exchange",
        "        self._transfer.join()  # own",
        "        # own",
    ),
    "gathered before the last chunk was sent back": (
        1,
        "updater",
        "record.number in fresh, scale)\n        return True",
        "record.number in fresh, scale)\n        self.company.advance()\n        return True",
    ),
    "used before they were gathered": (
        1,
        "device_exchange",
        "self._transfer.wait_for(self._last)",
        "pass",
    ),
    "the buffer of a sum filled again too early": (
        2,
        "reducer",
        "self._flying.append(_Flight(step, buffer, ticket, to_add))",
        "self._flying.append(_Flight(step, buffer, ticket, to_add)); exchange.free.append(buffer)",
    ),
    "gradients dropped before they were copied": (
        2,
        "reducer",
        "there.copy_(grad[span.first : span.end])",
        "net = exchange._transfer; there, grad = there, grad[span.first : span.end]; "
        "net.across(lambda a=there, b=grad: a.copy_(b), after=net.mark())",
    ),
    "means used before they came": (
        2,
        "reducer",
        "            self._exchange.wait(flight.ticket)\n",
        "            flight.ticket\n",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_every_wait_is_needed(name: str) -> None:
    stage, module, old, new = FAULTS[name]
    found = outcomes(2, cases.with_a_fault, stage, f"offload.optim.{module}", old, new)
    assert any(one.error is not None or one.result for one in found)
