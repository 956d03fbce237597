"""`offload export`: writes a checkpoint in formats that other programs read."""

from __future__ import annotations

import argparse
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from offload.core.config import format_size, parse_size
from offload.core.errors import ConfigError, StoreError
from offload.core.portable import refused
from offload.core.strict_json import printable
from offload.tools.output import complain, print_result

if TYPE_CHECKING:
    from offload.checkpoint.reader import CheckpointReader

SUMMARY: Final = "Write a checkpoint's model as Hugging Face safetensors, its optimizer as a .pt."
SHARD_BYTES: Final = 5 * 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload export CKPT OUT [--optimizer FILE.pt] [--max-shard-size SIZE] [--json]`."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a checkpoint, or a directory of some")
    parser.add_argument("out", metavar="OUT", help="the new directory for the model")
    parser.add_argument(
        "--optimizer",
        metavar="FILE.pt",
        help="also write the optimizer's state_dict, for torch.load(..., weights_only=True)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        default=str(SHARD_BYTES),
        help="of one model file, as 2GiB (default: 5 GB)",
    )


def run(args: argparse.Namespace) -> int:
    """Check every byte of the checkpoint, then copy; return the exit code."""
    # Imported here, because other commands must work where torch does not.
    from offload.checkpoint.exporting import export_model
    from offload.checkpoint.format.directory import find_newest
    from offload.checkpoint.reader import CheckpointReader

    shard_bytes = parse_size("--max-shard-size", args.max_shard_size)
    file = Path(args.optimizer) if args.optimizer is not None else None
    if file is not None and os.path.lexists(file):
        raise ConfigError(f"{printable(file)}: is there already; give a new file")
    out = Path(args.out)
    if file is not None and out.absolute() in file.absolute().parents:
        raise ConfigError(
            f"{printable(file)}: lies in {printable(out)}, which is made whole or not at all; give "
            "a file outside of it"
        )
    with CheckpointReader(find_newest(args.checkpoint)) as reader:
        reader.check()
        if file is not None:
            _export_optimizer(reader, file)
        names = export_model(reader, out, shard_bytes)
        saved = [t for t in reader.manifest.tensors.values() if t.section == "model"]
        nbytes = sum(tensor.nbytes for tensor in saved)
    if args.json:
        told = {"out": args.out, "files": names, "tensors": len(saved), "bytes": nbytes}
        print_result({**told, "optimizer": args.optimizer})
        return 0
    lines = [] if file is None else [f"{printable(file)}: state_dict of the optimizer"]
    some = f"{', '.join(names[:3])}{', ...' if len(names) > 3 else ''}"
    what = f"{len(saved)} tensors, {format_size(nbytes)}"
    print_result([*lines, f"{printable(args.out)}: {what}, in {some}"])
    return 0


def _export_optimizer(reader: CheckpointReader, file: Path) -> None:
    """Write the optimizer's state_dict for `torch.load`. The file is complete or absent. No other
    code of this package writes such files, and none reads them.
    """
    import torch

    from offload.checkpoint.exporting import has_masters, of_unknown_order, optimizer_state

    if has_masters(reader):
        complain(
            "the fp32 masters of 16-bit parameters are left out: torch's optimizers have none, "
            "and go on from the rounded parameters"
        )
    unknown = of_unknown_order(reader)
    if unknown:
        complain(
            "an old version has saved this checkpoint, without the order of memory: if "
            f"{unknown[0]} and others of three dimensions or more were channels_last, their "
            "moments must be made so after load_state_dict, for fused steps go by memory"
        )
    part = file.with_name(f".{file.name}.{secrets.token_hex(8)}.part")
    try:
        torch.save(optimizer_state(reader, file.parent), part)
        with open(part, "rb") as written:
            os.fsync(written.fileno())
        os.rename(part, file)
    except StoreError:  # of the checkpoint, with its own text
        raise
    except OSError as error:
        raise refused(file, "write", error, remedy="see that you may write there") from error
    finally:
        with suppress(OSError):
            part.unlink()
