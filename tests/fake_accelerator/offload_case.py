"""A small offload loop, right and with one fault at a time, under every schedule; prints JSON.

The parameters live on the host. Each layer's go to the device through a pool of pinned staging
buffers on one side stream, the gradients come back through a pool of pinned buffers on another, and
the host updates. Each fault is a mistake that real engines have made; most are invisible on a GPU.
"""

from __future__ import annotations

import json
import sys

import torch

from . import load
from .train_case import SCHEDULES, digest

FAULTS = [
    "no wait before use",
    "no wait before overwrite",
    "staging buffer reused too early",
    "device-to-host read without wait",
    "no record_stream",
    "no final synchronisation",
    "event recorded on the wrong stream",
    "buffer returned to the pool before its copy is done",
]
LAYERS, WIDTH, STEPS, RATE = 4, 16, 3, 0.1


class Offload:
    """A training of a chain of tanh layers with two device slots and two staging buffers."""

    def __init__(self, fault: str) -> None:
        self.fault = fault
        generator = torch.Generator().manual_seed(3)
        shape = (WIDTH, WIDTH)
        self.masters = [torch.randn(shape, generator=generator) / 4 for _ in range(LAYERS)]
        self.inputs = torch.randn(8, WIDTH, generator=generator).to("fake")
        self.target = torch.randn(8, WIDTH, generator=generator).to("fake")
        self.compute = torch.accelerator.current_stream()
        self.up, self.down = torch.Stream("fake"), torch.Stream("fake")
        self.staging = [torch.empty(shape, pin_memory=True) for _ in range(2)]
        self.staged: list[torch.Event | None] = [None, None]
        self.slots = [torch.empty(shape, device="fake") for _ in range(2)]
        self.read = [self.compute.record_event() for _ in range(2)]
        self.overwritten = [False, False]
        self.pool = [torch.empty(shape, pin_memory=True) for _ in range(2)]
        self.pending: list[tuple[int, torch.Tensor, torch.Event]] = []

    def fetch(self, layer: int) -> torch.Event:
        """Start the upload of a layer to its slot; the event says when it is there."""
        place = layer % 2
        staged = self.staged[place]
        if staged is not None and self.fault != "staging buffer reused too early":
            staged.synchronize()
        self.staging[place].copy_(self.masters[layer])
        if not self.overwritten[place] or self.fault != "no wait before overwrite":
            self.up.wait_event(self.read[place])
        self.overwritten[place] = True
        with self.up:
            self.slots[place].copy_(self.staging[place], non_blocking=True)
        self.staged[place] = self.up.record_event()
        wrong = self.fault == "event recorded on the wrong stream"
        return (self.compute if wrong else self.up).record_event()

    def weights(self, layer: int, there: torch.Event) -> torch.Tensor:
        if self.fault != "no wait before use":
            self.compute.wait_event(there)
        return self.slots[layer % 2]

    def forward(self) -> list[torch.Tensor]:
        """Return the inputs of each layer, and the output."""
        values = [self.inputs]
        there = self.fetch(0)
        for layer in range(LAYERS):
            after = self.fetch(layer + 1) if layer + 1 < LAYERS else None
            values.append(torch.tanh(values[-1] @ self.weights(layer, there)))
            self.read[layer % 2] = self.compute.record_event()
            there = after if after is not None else there
        return values

    def step(self) -> None:
        values = self.forward()
        slope = values[-1] - self.target
        there = self.fetch(LAYERS - 1)
        for layer in reversed(range(LAYERS)):
            after = self.fetch(layer - 1) if layer > 0 else None
            weights = self.weights(layer, there)
            slope = slope * (1 - values[layer + 1] ** 2)
            gradient = values[layer].t() @ slope
            slope = slope @ weights.t()
            self.read[layer % 2] = self.compute.record_event()
            self.send(layer, gradient)
            del gradient
            there = after if after is not None else there
        while self.pending:
            self.update()

    def send(self, layer: int, gradient: torch.Tensor) -> None:
        """Start the download of a gradient."""
        while not self.pool:
            self.update()
        buffer = self.pool.pop()
        self.down.wait_event(self.compute.record_event())
        with self.down:
            buffer.copy_(gradient, non_blocking=True)
        if self.fault != "no record_stream":
            gradient.record_stream(self.down)
        self.pending.append((layer, buffer, self.down.record_event()))
        if self.fault == "buffer returned to the pool before its copy is done":
            self.pool.append(buffer)

    def update(self) -> None:
        """Wait for the oldest gradient and apply it."""
        layer, buffer, done = self.pending.pop(0)
        if self.fault != "device-to-host read without wait":
            done.synchronize()
        self.masters[layer].sub_(buffer, alpha=RATE)
        if self.fault != "buffer returned to the pool before its copy is done":
            self.pool.append(buffer)

    def run(self) -> list[torch.Tensor]:
        """Train, and return the parameters and the last output."""
        for _ in range(STEPS):
            self.step()
        output = self.forward()[-1]
        result = torch.empty(output.shape, pin_memory=True)
        self.down.wait_event(self.compute.record_event())
        with self.down:
            result.copy_(output, non_blocking=True)
        output.record_stream(self.down)
        if self.fault != "no final synchronisation":
            torch.accelerator.synchronize()
        return [*self.masters, result.clone()]


def on_the_host() -> list[torch.Tensor]:
    """Do the same training in a few lines, on the CPU."""
    generator = torch.Generator().manual_seed(3)
    layers = [torch.randn(WIDTH, WIDTH, generator=generator) / 4 for _ in range(LAYERS)]
    inputs = torch.randn(8, WIDTH, generator=generator)
    target = torch.randn(8, WIDTH, generator=generator)
    for step in range(STEPS + 1):
        values = [inputs]
        for weights in layers:
            values.append(torch.tanh(values[-1] @ weights))
        slope = values[-1] - target
        for layer in reversed(range(LAYERS)) if step < STEPS else []:
            slope = slope * (1 - values[layer + 1] ** 2)
            gradient = values[layer].t() @ slope
            slope = slope @ layers[layer].t()
            layers[layer] = layers[layer] - RATE * gradient
    return [*layers, values[-1]]


def outcome(fault: str, schedule: str, seed: int) -> str:
    load(schedule, seed)
    try:
        return digest(Offload(fault).run())
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"


def main() -> None:
    torch.set_num_threads(1)
    load()
    cases = ["none", *FAULTS]
    rounds = [
        {
            case: {f"{name}-{seed}": outcome(case, name, seed) for name, seed in SCHEDULES}
            for case in cases
        }
        for _ in range(2)
    ]
    load("lazy")
    right = Offload("none").run()
    off = max(float((a - b).abs().max()) for a, b in zip(right, on_the_host(), strict=True))
    json.dump({"rounds": rounds, "off": off}, sys.stdout)


if __name__ == "__main__":
    main()
