"""How good the tests are: random faults in the package, and which of them the tests notice.

    python tests/mutation_score.py draw --root CHECKOUT --count 20 --seed 1 --out mutants.json
    python tests/mutation_score.py record --root CHECKOUT --mutants mutants.json --out contexts.db
    python tests/mutation_score.py run --root CHECKOUT --mutants mutants.json \\
        --coverage contexts.db --durations contexts.db.durations.json --out results.json

`record` runs the tests once, and again those with the mark `device`, with coverage.py in every
Python process: which lines run under which test, of the files of these mutants, or of all. Words
after `--` are pytest's, for a part (`-- tests/test_layers.py`) or for both cores (`-- -n 2`); what
was recorded before in the same file stays. If only a process that is killed by SIGKILL, or that
Python starts without `site`, runs a line, the line counts as one that no test executes. `run` also
reads what `pytest --cov=offload --cov-context=test` and `context = ${PYTEST_CURRENT_TEST}` in a
child's configuration have written.

`draw` is uniform over all places and operators (`support/mutation/sites.py`).

`run` puts one fault after the other into the checkout's files, and takes it out again: nothing else
may use the checkout meanwhile. After it was killed, the same command takes out what was left, and
goes on. Each fault is judged by the tests that execute its line, the fastest first, until one
fails, which must pass without the fault. Where only a file of tests cannot be imported any more,
that file is named: it may be one that quotes the source. Nothing of the checkout is needed but its
tests and its environment; its package must be the one that the faults were drawn from.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from support.mutation.judge import KILLED, TIMED_OUT, UNDECIDED, Judge
from support.mutation.sites import Site, drawn, sites

_RECORDER = Path(__file__).parent / "support" / "contexts"
_AT_START = "import os; exec('import recorder' if 'CONTEXTS_DATA' in os.environ else '')"


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    options.root = options.root.resolve()
    result: int = options.do(options)
    return result


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Have what is in place taken out, as after Ctrl-C."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    whole = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = whole.add_subparsers(required=True)
    record = commands.add_parser("record", help="which test executes which line")
    record.add_argument("words", nargs="*", help="of pytest, after --")
    record.add_argument("--mutants", type=Path, help="only lines of their files, which is faster")
    draw = commands.add_parser("draw", help="random faults")
    draw.add_argument("--count", type=int, default=20)
    draw.add_argument("--seed", type=int, required=True)
    run = commands.add_parser("run", help="which faults are noticed")
    run.add_argument("--mutants", type=Path, required=True)
    run.add_argument("--coverage", type=Path, required=True, help="data of coverage.py")
    run.add_argument("--durations", type=Path, help="seconds by node id")
    run.add_argument("--time-limit-s", type=float, help="for one fault; default: by the durations")
    for command, do in ((record, _record), (draw, _draw), (run, _run)):
        command.set_defaults(do=do)
        command.add_argument("--root", type=Path, default=Path(__file__).parents[1])
        command.add_argument("--out", type=Path, required=True)
    for command in (record, run):
        command.add_argument("--python", type=Path, help="default: the checkout's .venv")
    return whole


def _python(options: argparse.Namespace) -> Path:
    # Not resolved: a virtual environment is known by its link.
    return Path(os.path.abspath(options.python or options.root / ".venv" / "bin" / "python"))


# --- record ---------------------------------------------------------------------------------------


def _record(options: argparse.Namespace) -> int:
    python, out = _python(options), options.out.resolve()
    parts = out.with_name(f"{out.name}.parts")
    parts.mkdir(exist_ok=True)
    asked = "import sysconfig, coverage; print(sysconfig.get_paths()['purelib'])"
    said = subprocess.run([python, "-c", asked], capture_output=True, text=True, check=True)
    hook = Path(said.stdout.strip()) / "zz_record_contexts.pth"
    hook.write_text(f"{_RECORDER}\n{_AT_START}\n")
    try:
        for group in ([], ["-m", "device"]):
            words = [*group, *options.words]
            _run_recorded(python, options.root, parts / out.name, _sources(options), words)
    finally:
        hook.unlink()
    _combine(python, parts, out)
    return 0


def _sources(options: argparse.Namespace) -> str:
    """Return patterns of the files whose lines are recorded."""
    if options.mutants is None:
        return str(options.root / "offload" / "*")
    files = {one["file"] for one in json.loads(options.mutants.read_text())["mutants"]}
    return os.pathsep.join(str(options.root / file) for file in sorted(files))


def _run_recorded(python: Path, root: Path, data: Path, sources: str, words: list[str]) -> None:
    """Run the tests with the recorder. Failures do not matter here: what was executed was."""
    environment = {**os.environ, "CONTEXTS_DATA": str(data), "CONTEXTS_SOURCES": sources}
    options = ["-p", "record_tests", "-p", "no:cacheprovider", "-q"]
    subprocess.run([str(python), "-m", "pytest", *options, *words], cwd=root, env=environment)


def _combine(python: Path, parts: Path, out: Path) -> None:
    durations = out.with_name(f"{out.name}.durations.json")
    seconds = json.loads(durations.read_text()) if durations.exists() else {}
    for part in parts.glob("*.durations"):
        seconds |= json.loads(part.read_text())
    durations.write_text(json.dumps(seconds, indent=0, sort_keys=True))
    for beside in [*parts.glob("*.durations"), *parts.glob("*.now")]:
        beside.unlink()
    command = [str(python), "-m", "coverage", "combine", "-q", "--append", f"--data-file={out}"]
    subprocess.run([*command, str(parts)], check=True)
    shutil.rmtree(parts)


# --- draw -----------------------------------------------------------------------------------------


def _draw(options: argparse.Namespace) -> int:
    candidates = sites(options.root)
    chosen = drawn(candidates, options.count, options.seed)
    _save(
        options.out,
        {
            "seed": options.seed,
            "drawn": "uniformly over all places and operators",
            "places": len(candidates),
            "places_by_operator": Counter(site.operator for site in candidates),
            "mutants": [site.as_json() for site in chosen],
        },
    )
    for number, site in enumerate(chosen, 1):
        print(f"{number}. {site.file} {site.function}: {site.operator}")
        print(f"   - {site.before}\n   + {site.after}")
    return 0


# --- run ------------------------------------------------------------------------------------------


def _run(options: argparse.Namespace) -> int:
    chosen = [Site(**one) for one in json.loads(options.mutants.read_text())["mutants"]]
    judge = Judge(
        options.root,
        _python(options),
        options.coverage,
        options.out.with_name(f"{options.out.name}.journal"),
        json.loads(options.durations.read_text()) if options.durations else {},
        options.time_limit_s,
    )
    results: list[dict[str, Any]] = []
    if options.out.exists():
        before = json.loads(options.out.read_text())
        results, judge.failing = before["results"], set(before["failing_without_a_fault"])
    for number, site in enumerate(chosen, 1):
        if any(one["mutant"] == site.as_json() for one in results):
            continue
        verdict = judge.judge(site)
        results.append({"mutant": site.as_json(), **asdict(verdict)})
        _save(options.out, _summary(results, judge))
        print(
            f"{number}/{len(chosen)} {verdict.outcome}: {site.file} {site.function}: "
            f"{site.before!r} -> {site.after!r} ({verdict.candidates} tests, "
            f"{verdict.cpu_s:.0f} s CPU){f' by {verdict.test}' if verdict.test else ''}",
            flush=True,
        )
    print({key: value for key, value in _summary(results, judge).items() if key != "results"})
    return 0


def _summary(results: list[dict[str, Any]], judge: Judge) -> dict[str, Any]:
    outcomes = Counter(one["outcome"] for one in results)
    decided = len(results) - outcomes[UNDECIDED]
    noticed = outcomes[KILLED] + outcomes[TIMED_OUT]
    return {
        "noticed": noticed,
        "of": decided,
        "score": round(noticed / decided, 3) if decided else None,
        "outcomes": outcomes,
        "cpu_s": round(sum(one["cpu_s"] for one in results), 1),
        "failing_without_a_fault": sorted(judge.failing),
        "results": results,
    }


def _save(path: Path, what: dict[str, Any]) -> None:
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(what, indent=1))
    beside.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    sys.exit(main())
