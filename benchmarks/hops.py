"""How far is it from a parameter to its update? `python benchmarks/hops.py`.

Counts the functions of the package that one steady step enters (`sys.setprofile`), each once, and
the files they are in: a prepared model on the CPU whose parameters, gradients and state are all on
disk, as in the walk of docs/design.md, and the same with room for everything. Functions without a
name of their own (lambdas, comprehensions) are not counted. With `--list` it names them.

Then the Python that one unit costs: the time of forward and backward passes of a prepared model of
tiny layers in memory beyond the time of the plain model, by the number of its layers. The least of
many passes, since the machine adds to it and never takes away.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

WIDTH, LAYERS = 128, 6
UNITS, PASSES = 200, 40
Functions = set[tuple[str, str]]


def entered(package: Path, step: Any) -> tuple[Functions, int]:
    """Run `step`; return the functions of the package that this thread enters, and all calls."""
    found: Functions = set()
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(package)):
            calls += 1
            name = code.co_qualname
            if not name.endswith(">"):
                found.add((Path(code.co_filename).relative_to(package).as_posix(), name))

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found, calls


def count(offload: Any, directory: str, is_tight: bool) -> tuple[Functions, int]:
    import torch
    from torch import nn

    from offload.planning import planner
    from offload.tools.selftest.model import least_bytes

    planner.CHUNK_NUMEL, planner.LEAST_CHUNK_NUMEL = 4096, 256
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer: Any = torch.optim.AdamW(model.parameters())
    fields: dict[str, Any] = {"units": [nn.Linear]}
    if is_tight:
        fields["nvme"] = directory
        fields["host_memory"] = least_bytes(model, optimizer, **fields)
    model, optimizer = offload.prepare(model, optimizer, **fields)

    def step() -> None:
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # then the trace knows the order
        step()
    found = entered(Path(offload.__file__).parent, step)
    optimizer.close()
    return found


def pass_s(model: Any) -> tuple[float, float]:
    """Return the least seconds of a forward and of a backward pass."""
    import torch

    found = []
    for _ in range(PASSES):
        begin_s = time.perf_counter()
        loss = model(torch.ones(1, 4)).sum()
        middle_s = time.perf_counter()
        loss.backward()
        found.append((middle_s - begin_s, time.perf_counter() - middle_s))
        model.zero_grad()
    forwards, backwards = zip(*found, strict=True)
    return min(forwards), min(backwards)


def unit_s(offload: Any) -> tuple[float, float]:
    """Return the seconds of Python that a unit costs in forward and in backward."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    model: Any = nn.Sequential(*(nn.Linear(4, 4) for _ in range(UNITS)))
    plain = pass_s(model)
    model, optimizer = offload.prepare(
        model, torch.optim.AdamW(model.parameters()), units=[nn.Linear]
    )
    ours = pass_s(model)
    optimizer.close()
    return (ours[0] - plain[0]) / UNITS, (ours[1] - plain[1]) / UNITS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name the functions")
    options = parser.parse_args()
    import offload

    for name, is_tight in (("everything on disk", True), ("everything in memory", False)):
        with tempfile.TemporaryDirectory() as directory:
            functions, calls = count(offload, directory, is_tight)
        files = {file for file, _ in functions}
        print(f"{name}: {len(functions)} functions in {len(files)} files, {calls} calls")
        for file, function in sorted(functions) if options.list else ():
            print(f"  {file} {function}")
    forward_s, backward_s = unit_s(offload)
    print(f"Python a unit: forward {forward_s * 1e6:.1f} us, backward {backward_s * 1e6:.1f} us")


if __name__ == "__main__":
    main()
