"""A training loop as a program: `python -m offload.tools.tune.loop MODEL ...`, which is what
`offload tune MODEL` runs. It is an ordinary loop that knows nothing of trials: a trial ends it from
within `optimizer.step()`. Run by hand, with --steps, it prints the report of that many steps.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from offload.api import prepare, report
from offload.core.errors import ConfigError, OffloadError
from offload.core.host_facts import free_memory_bytes, read_memory
from offload.device.accelerator import find_device
from offload.planning.trial import current
from offload.tools.forecast.model_shape import Shape
from offload.tools.forecast.model_source import ModelSource
from offload.tools.forecast.sources import find_source
from offload.tools.tune.session import SHAPE, add_loop_options

SEED = 20261117


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="offload.tools.tune.loop", description=__doc__)
    parser.add_argument("model", metavar="MODEL")
    add_loop_options(parser.add_argument)
    parser.set_defaults(batch=1, sequence=512, device="auto")
    parser.add_argument("--profile")
    parser.add_argument("--steps", type=int)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = make_parser().parse_args(argv)
    try:
        run(options)
    except OffloadError as error:
        print(f"offload: error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Train until a trial has its measurements or the steps are done."""
    if options.steps is None and current() is None:
        raise ConfigError("--steps: expected a number of them, since no tuner runs this loop")
    source = find_source(options.model, Shape(**{name: getattr(options, name) for name in SHAPE}))
    model = make_model(source, options.dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = prepare(model, optimizer, **_fields(options))
    device = find_device(options.device)
    generator = torch.Generator().manual_seed(SEED)
    for _ in itertools.count() if options.steps is None else range(options.steps):
        batch = source.make_batch(options.batch, options.sequence, generator, device=device)
        source.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    print(report(model))


def make_model(source: ModelSource, dtype: str | None) -> nn.Module:
    """Make the model, with values if they fit in half of the free host memory; else on the meta
    device, where `prepare` fills it block by block, which some models' buffers do not allow.
    """
    with torch.device("meta"):
        model = _cast(source.make_model(), dtype)
    nbytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    free = free_memory_bytes(read_memory())
    if free is None or 2 * nbytes > free:
        return model
    torch.manual_seed(SEED)
    return _cast(source.make_model(), dtype)


def _cast(model: nn.Module, dtype: str | None) -> nn.Module:
    return model if dtype is None else model.to(getattr(torch, dtype))


def _fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the given options as keyword arguments of `prepare`."""
    names = ("device", "device_memory", "host_memory", "nvme", "profile")
    given = {name: getattr(options, name) for name in names}
    return {n: v for n, v in given.items() if v is not None} | {"activations": "auto"}


if __name__ == "__main__":
    sys.exit(main())
