"""`offload plan`: forecasts what training a model would take; allocates nothing."""

from __future__ import annotations

import argparse
import gc
from typing import TYPE_CHECKING, Any, Final

from offload.core.config import ACTIVATIONS, PARAM_DTYPES
from offload.core.errors import ConfigError
from offload.tools.forecast.request import FIELDS, OPTIMIZERS, PREPARE, WRAP, ForecastRequest
from offload.tools.output import EXIT_PROBLEM, print_result, status_line

if TYPE_CHECKING:
    from offload.tools.forecast.forecast import Forecast
    from offload.tools.forecast.replay import Replay

SUMMARY: Final = "What a model needs, what fits where, how long a step takes; nothing is allocated."
EPILOG: Final = """examples:
  offload plan 7B --batch 4 --sequence 2048 --host-memory 64GiB --on rtx4090-1ssd \\
      --activations recompute
  offload plan my_models:make_gpt --batch 8 --sequence 512 --nvme /mnt/nvme0 --json
  offload plan --trace run.json --on a100-80g-2ssd
"""
_BUDGETS: Final = ("host_memory", "device_memory", "nvme", "nvme_count")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload plan MODEL ...`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        help="module:function, a config.json of transformers or diffusers or its directory, a size "
        "such as 7B, or a published model such as llama-3-8b",
    )
    _add_model(parser.add_argument_group("the model"))
    _add_training(parser.add_argument_group("the training"))
    _add_machine(parser.add_argument_group("the machine"))


def _add_model(group: argparse._ArgumentGroup) -> None:
    for name in ("layers", "hidden", "vocabulary", "heads", "intermediate"):
        group.add_argument(f"--{name}", type=int, metavar="N", help="for a size; else derived")
    group.add_argument("--dtype", choices=PARAM_DTYPES, help="of parameters (default: the model's)")
    group.add_argument("--lora", type=int, metavar="RANK", help="freeze it, and train adapters")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--batch", type=int, metavar="N", help="texts of a step (default: 1)")
    group.add_argument("--sequence", type=int, metavar="N", help="tokens of each (default: 1024)")
    group.add_argument("--steps", type=int, metavar="N", help="of the training (default: 10000)")
    group.add_argument("--save-every", type=int, metavar="N", help="steps (default: never)")
    group.add_argument("--optimizer", choices=OPTIMIZERS, help="default: adamw; sgd has momentum")
    group.add_argument("--activations", choices=ACTIVATIONS, help="default: keep")
    group.add_argument("--use", choices=(PREPARE, WRAP), help="the call (default: prepare)")


def _add_machine(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host-memory", metavar="SIZE", help="budget, as 64GiB")
    group.add_argument("--device-memory", metavar="SIZE", help="budget, as 20GiB")
    drives = group.add_mutually_exclusive_group()
    drives.add_argument("--nvme-count", type=int, metavar="N", help="drives; 0: none")
    drives.add_argument("--nvme", nargs="+", metavar="DIR", help="their directories")
    group.add_argument("--endurance", type=float, metavar="TB", help="a drive is rated for")
    group.add_argument(
        "--on",
        metavar="PROFILE",
        help="a file that `offload bench` wrote, or the name of a shipped profile "
        "(default: this machine's own)",
    )
    group.add_argument(
        "--full",
        action="store_true",
        default=None,
        help="simulate every layer and chunk; otherwise those that are alike are taken from a few, "
        "within 3 %%",
    )
    group.add_argument(
        "--table",
        action="store_true",
        help="the largest model and its step for common machines, in Markdown; takes minutes",
    )
    group.add_argument("--trace", metavar="FILE", help="a recorded run, instead of MODEL")
    group.add_argument(
        "--from",
        dest="from_profile",
        metavar="PROFILE",
        help="of the machine that the run was recorded on (default: this machine's own)",
    )


def run(args: argparse.Namespace) -> int:
    """Forecast, or replay a trace, and print; return 1 if the training does not fit the machine."""
    if args.table:
        return _table(args)
    if args.trace is None:
        return _forecast(args)
    found = _replay(args)
    print_result(found.to_dict() if args.json else [str(found)], indent=1)
    return 0


def _forecast(args: argparse.Namespace) -> int:
    """Forecast; a table is printed as soon as only its last lines are missing."""
    if args.model is None:
        raise ConfigError(
            "plan: expected MODEL, or --trace FILE; `offload plan --help` has examples"
        )
    if args.from_profile is not None:
        raise ConfigError("--from: is for --trace, which tells what a run was recorded on")
    request = ForecastRequest.of(args.model, **_given(args))
    # Imported here, because other commands must work where torch does not.
    from offload.tools.forecast.forecast import MisfitError
    from offload.tools.forecast.forecaster import forecast

    gc.freeze()  # what is imported stays; looking for garbage in it takes longer than the plan
    with status_line() as line:

        def show(found: Forecast) -> None:
            if not args.json:
                line.erase()
                print_result([found.main_table])

        try:
            found = forecast(request, lambda text: line.update(f"{text} ..."), show)
        except MisfitError as error:
            line.erase()
            print_result(error.misfit.to_dict() if args.json else [str(error.misfit)], indent=1)
            return EXIT_PROBLEM
    print_result(found.to_dict() if args.json else found.gain_lines, indent=1)
    return 0 if found.works else EXIT_PROBLEM


def _table(args: argparse.Namespace) -> int:
    given = [name for name, value in _given(args).items() if value is not None]
    if args.model is not None or args.trace is not None or given:
        raise ConfigError("--table: has models, machines and options of its own; leave others out")
    from offload.tools.forecast.size_table import make_table

    gc.freeze()
    with status_line() as line:
        found = make_table(lambda text: line.update(f"{text} ..."))
    print_result(found.to_dict() if args.json else [str(found)], indent=1)
    return 0


def _replay(args: argparse.Namespace) -> Replay:
    if args.model is not None:
        raise ConfigError("plan: MODEL and --trace exclude each other; give one of them")
    given = _given(args)
    given.pop("on", None)
    for name in given:
        if name not in _BUDGETS:
            option = name.replace("_", "-")
            raise ConfigError(f"--{option}: a recorded run has its own; leave it out with --trace")
    from offload.tools.forecast.replay import replay

    return replay(args.trace, args.on, args.from_profile, ForecastRequest.of("", **given))


def _given(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in FIELDS if getattr(args, name, None) is not None}
