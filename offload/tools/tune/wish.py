"""The arguments of `offload tune`, checked as far as that can be done before a trial."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offload.core.config import parse_size
from offload.core.errors import ConfigError
from offload.core.strict_json import printable
from offload.planning import profile
from offload.tools.tune.picture import check_place
from offload.tools.tune.space import parse_activations, parse_try

# Valid with MODEL only: the options of offload.tools.tune.loop.
LOOP_OPTIONS: Final = (
    *("layers", "hidden", "vocabulary", "heads", "intermediate", "batch", "sequence"),
    *("dtype", "device", "device_memory", "host_memory"),
)


@dataclass(frozen=True)
class TuneRequest:
    """The arguments of the command, checked. limit_s: of all trials together. tries: the values to
    try, by knob.
    """

    command: tuple[str, ...]
    name: str
    limit_s: float
    tries: dict[str, tuple[int, ...]]
    activations: tuple[str, ...]
    profile: Path
    picture: Path
    is_own: bool  # the profile is the machine's own

    @classmethod
    def of(cls, args: argparse.Namespace) -> TuneRequest:
        for name, least in (("minutes", 0), ("steps", 1), ("warm_up", 1)):
            value = getattr(args, name)
            if not least <= value < 1e6 or (name == "minutes" and not value):
                option = name.replace("_", "-")
                raise ConfigError(f"--{option}: expected {least or 'more than 0'}, got {value}")
        command, name = _command(args)
        is_own = args.profile is None
        path = profile.own_path() if is_own else Path(args.profile)
        _check_profile(path, is_own)
        picture = Path(args.picture) if args.picture else path.with_name(f"{path.stem}_tune.png")
        if args.picture:
            check_place(picture)
        return cls(
            command=command,
            name=name,
            limit_s=60.0 * args.minutes,
            tries=dict(parse_try(text) for text in args.tries),
            activations=parse_activations(args.activations),
            profile=path,
            picture=picture,
            is_own=is_own,
        )


def _command(args: argparse.Namespace) -> tuple[tuple[str, ...], str]:
    """Return the command to run and a name for it."""
    what: list[str] = args.what
    if not what:
        raise ConfigError(
            "tune: expected a MODEL, or -- and a program with its arguments, as in `offload tune "
            "-- python train.py`"
        )
    given = [name for name in (*LOOP_OPTIONS, "nvme") if getattr(args, name) is not None]
    is_program = len(what) > 1 or (os.path.isfile(what[0]) and os.access(what[0], os.X_OK))
    if is_program:
        if given:
            option = given[0].replace("_", "-")
            raise ConfigError(f"--{option}: is for a MODEL; a program has its own options")
        script = next((word for word in what if word.endswith(".py")), what[0])
        return tuple(what), Path(script).name
    for name in ("host_memory", "device_memory"):
        if name in given:
            parse_size(f"--{name.replace('_', '-')}", getattr(args, name))
    options = [
        word
        for name in given
        for value in (args.nvme if name == "nvme" else [getattr(args, name)])
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return (sys.executable, "-m", "offload.tools.tune.loop", *options, "--", what[0]), what[0]


def _check_profile(path: Path, is_own: bool) -> None:
    """Raise `ConfigError`, before any trial, if the profile at `path` is another machine's, or if
    its directory does not exist.
    """
    if path.exists():
        if not profile.load(path).is_of_this_machine:
            raise ConfigError(
                f"{printable(path)}: is the profile of another machine and stays as it is; give "
                "--profile another file, or move it away"
            )
    elif not is_own and not path.parent.is_dir():
        raise ConfigError(f"--profile: the directory {printable(path.parent)} is not there")
