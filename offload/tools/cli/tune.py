"""`offload tune`: runs a training loop with one tuning after the other, and writes the best to the
machine's profile, where `prefetch_depth="auto"` finds it.

The loop is the user's own program, unchanged, or a stand-in for a model that the arguments name.
Each trial runs in another process (`offload.tools.tune.trials`), and `offload.tools.tune.search`
chooses the next tuning. This process needs no torch.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from offload.core.strict_json import printable
from offload.tools.child import ended_by_signals
from offload.tools.output import print_result, status_line, table
from offload.tools.tune.picture import draw
from offload.tools.tune.search import Search, TunedTrial
from offload.tools.tune.session import (
    TrialTable,
    TuneRequest,
    TuneSession,
    add_loop_options,
    describe,
)
from offload.tools.tune.space import FIELDS
from offload.tools.tune.trials import Program

SUMMARY: Final = "Run a training loop with other settings, find the best, and write a profile."
EPILOG: Final = """\
examples:
  offload tune -- python train.py --config small.yaml
  offload tune 350M --host-memory 2GiB --nvme /mnt/nvme0 --sequence 1024 --minutes 5

The program behind -- is run once for each trial, as it is, and ended from within optimizer.step()
by SystemExit when enough was measured. What it does before its first steps, and on its way out, it
does each time: let it write nothing that matters. It must call offload.prepare or offload.wrap, in
one process, without profile=... other than the file that is tuned. To tune activations it must ask
for activations="auto".

exit codes: 0 tuned, 2 it could not be done, 130 interrupted (nothing is written without --keep)
"""
MINUTES: Final = 10.0
WARM_UP, STEPS = 2, 5
_EVERY_S: Final = 0.5  # between two updates of the status line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `offload tune [MODEL] [options] [-- PROGRAM ...]`."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="MODEL | -- PROGRAM ...",
        help="module:function, a config.json or a size such as 7B; or a program with its arguments",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=MINUTES, help="for all trials together (default: 10)")
    add("--steps", type=int, default=STEPS, help="to measure in a trial (default: 5)")
    add("--warm-up", type=int, default=WARM_UP, help="steps before those (default: 2)")
    add(
        "--try",
        action="append",
        default=[],
        metavar="KNOB=VALUES",
        dest="tries",
        help=f"values instead of the usual, or none; knobs: {', '.join(FIELDS)} "
        "(units: layers in one), as --try depth=0,1,2 --try chunk=512Ki,2Mi --try threads=",
    )
    add(
        "--activations",
        metavar="POLICIES",
        help='auto, or some of keep,recompute,offload; the loop must ask for activations="auto"',
    )
    add("--profile", metavar="FILE", help="to write to (default: the machine's own)")
    add("--picture", metavar="FILE", help="for the picture (default: beside the profile)")
    add("--keep", action="store_true", help="when interrupted, write the best so far")
    loop = parser.add_argument_group("the stand-in loop of MODEL")
    add_loop_options(loop.add_argument)


def run(args: argparse.Namespace) -> int:
    """Tune, write the profile and the picture, print the result; return the exit code."""
    wish = TuneRequest.of(args)
    line = status_line(_EVERY_S)
    scratch = tempfile.TemporaryDirectory(prefix="offload-tune-")
    with ended_by_signals(lambda number: SystemExit(128 + number)), scratch as directory:
        program = Program(wish.command, Path(directory), args.warm_up, args.steps)
        session = TuneSession(program, wish, TrialTable(line))
        try:
            session.run()
        except BaseException:
            if args.keep and session.has_found:
                line.say(f"broken off; the best so far is kept: {session.write()}")
            raise
        finally:
            line.erase()
    path = session.write()
    note = draw(
        session.search.trials,
        session.search.best,
        session.limit.seconds,
        f"{wish.name}: {describe(session.search.best, session.table.layer_bytes)}",
        wish.picture,
    )
    tell = _as_json if args.json else _as_text
    print_result(tell(session, path, note))
    return 0


# --- output ---------------------------------------------------------------------------------------


def _as_text(session: TuneSession, path: Path, note: str | None) -> list[str]:
    wish, search = session.wish, session.search
    base, best_s = search.space.base, search.step_s(search.best)
    base_s = search.step_s(base)
    chosen = describe(search.best, session.table.layer_bytes)
    rows = [("derived", f"{base_s:.4g} s a step")]
    tried = {trial.tuning for trial in search.trials} - {base}
    if not tried:
        rows.append(("chosen", f"{chosen}: there was time for nothing else; raise --minutes"))
    elif search.best == base:
        rows.append(("chosen", f"{chosen}: nothing has beaten it by more than the noise"))
    else:
        less = 1 - best_s / base_s
        shown = f"{best_s:.4g} s ± {search.spread_s:.2g} ({less:.1%} less)"
        rows.append(("chosen", f"{chosen}: {shown}"))
    rows += [
        ("noise", f"{search.noise:.1%} between trials of the same" if tried else "not known"),
        ("stalls", f"{search.stall_share:.0%} of a step"),
        ("limit", str(session.limit)),
        ("trials", _how_many(search)),
        ("profile", printable(path)),
        ("picture", note or printable(wish.picture)),
        ("use it", _how_to_use(wish)),
    ]
    return table(rows, width=None)


def _how_many(search: Search) -> str:
    text = f"{len(search.trials)} in {search.spent_s:.0f} s"
    return f"{text}; time was up before all was tried (--minutes)" if search.was_cut else text


def _how_to_use(wish: TuneRequest) -> str:
    if wish.is_own:
        return 'nothing to do: prefetch_depth="auto", the default, reads the machine\'s own profile'
    return f"give profile={os.fspath(wish.profile)!r} to offload.prepare or offload.wrap"


def _as_json(session: TuneSession, path: Path, note: str | None) -> dict[str, Any]:
    search, base = session.search, session.search.space.base
    return {
        "name": session.wish.name,
        "targets": [asdict(target) for target in session.targets],
        "best": asdict(search.best),
        "is_beaten": search.best != base,
        "step_s": search.step_s(search.best),
        "spread_s": search.spread_s,
        "base_s": search.step_s(base),
        "stall_share": search.stall_share,
        "noise": search.noise,
        "limit_s": session.limit.seconds,
        "limit": asdict(session.limit),
        "spent_s": search.spent_s,
        "was_cut": search.was_cut,
        "profile": str(path),
        "picture": None if note else str(session.wish.picture),
        "trials": [_trial_json(session, trial) for trial in search.trials],
    }


def _trial_json(session: TuneSession, trial: TunedTrial) -> dict[str, Any]:
    measured, result = trial.measured, session.results.get(trial.number)
    shown = {n: v for n, v in asdict(result).items() if n != "targets"} if result else None
    return {
        "number": trial.number,
        "tuning": asdict(trial.tuning),
        "step_s": measured.step_s if measured.failure is None else None,
        "took_s": measured.took_s,
        "failure": measured.failure,
        "result": shown,
    }
