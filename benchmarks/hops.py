"""How far is it from a parameter to its update? `python benchmarks/hops.py`.

Counts the functions of the package that one steady step enters (`sys.setprofile`), each once, and
the files they are in: a prepared model on the CPU whose parameters, gradients and state are all on
disk, as in the walk of docs/design.md, and the same with room for everything. Functions without a
name of their own (lambdas, comprehensions) are not counted. With `--list` it names them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

WIDTH, LAYERS = 128, 6
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
        fields["host_memory"] = least_bytes(
            lambda limit: offload.plan(model, optimizer, **{**fields, "host_memory": limit})
        )
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


if __name__ == "__main__":
    main()
