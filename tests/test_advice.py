"""Every action that a message suggests exists: commands parse, options and keywords are taken.

Read from the syntax tree: all texts of the package that are no docstrings, with what is put into
them as `{}`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import offload
from offload.core.ticket import Ticket
from offload.integrations.progress_line import Progress
from offload.optim import opening
from offload.optim.optimizer import OffloadOptimizer
from offload.params import prepare_plan
from offload.telemetry.report import Report
from offload.tools.cli import COMMANDS, make_parser

pytestmark = pytest.mark.quick
ROOT = Path(offload.__file__).parent
FIELDS = {field.name for field in dataclasses.fields(offload.Config)}
REFUSED = {"wrap": set(opening._UNBUILT), "prepare": set(prepare_plan._UNBUILT)}

# Which calls can raise what a file says, by the beginning of its path; the longest counts. Other
# files: both wrap and prepare.
RAISED_BY = {
    "params/": ("prepare",),
    "planning/shares": ("prepare",),
    "planning/sharding": ("prepare",),
    "planning/training": ("prepare",),
    "device/buffer": ("prepare",),  # wrap has no budget on a device
    "tools/forecast/": ("prepare",),
    "tools/cli/tune": ("prepare",),  # what it says to change in the program
    "tools/tune/": ("prepare",),
    "optim/sharded_coordinator": ("wrap",),
    "optim/reducer": ("wrap",),
    "optim/grad_buffers": ("wrap",),
    "optim/opening": ("wrap",),
    "optim/buckets": ("wrap",),
    "optim/choose": ("wrap",),  # what it says to prepare names wrap
    "storage/weights": ("prepare",),
    "storage/safetensors_file": ("prepare",),
}
# Functions, of torch and of ours, whose keywords messages name; by the call as they write it.
OTHERS: dict[str, Any] = {
    "nn.Embedding": nn.Embedding,
    "backward": torch.Tensor.backward,
    "torch.load": torch.load,
    "p.grad.redistribute": DTensor.redistribute,
    "init_process_group": torch.distributed.init_process_group,
    "offload.wrap": offload.wrap,
    "wrap": offload.wrap,
    "offload.prepare": offload.prepare,
    "offload.progress": offload.progress,
    "save_on_signal": offload.save_on_signal,
}


class Text(NamedTuple):
    file: str
    line: int
    text: str


@cache
def texts() -> list[Text]:
    return [found for path in sorted(ROOT.rglob("*.py")) for found in _texts_in(path)]


def _texts_in(path: Path) -> list[Text]:
    tree = ast.parse(path.read_text())
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    file = path.relative_to(ROOT).as_posix()
    found, inside = [], set()
    for node in ast.walk(tree):  # outer ones first
        if id(node) in docs or id(node) in inside or not _is_text(node):
            continue
        inside |= {id(inner) for inner in ast.walk(node)}
        found.append(Text(file, node.lineno, _text_of(node)))  # type: ignore[attr-defined]
    return found


def _is_text(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Add) and (_is_text(node.left) or _is_text(node.right))
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def _text_of(node: ast.AST) -> str:
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(map(_text_of, values))
        case ast.BinOp(left=left, right=right):
            return _text_of(left) + _text_of(right)
        case ast.IfExp(body=body, orelse=orelse):
            return _text_of(body) + _text_of(orelse)
    return "{}"


def raised_by(file: str) -> tuple[str, ...]:
    known = [name for name in RAISED_BY if file.startswith(name)]
    return RAISED_BY[max(known, key=len)] if known else ("wrap", "prepare")


def matches(pattern: str) -> Iterator[tuple[Text, re.Match[str]]]:
    for found in texts():
        for match in re.finditer(pattern, found.text):
            yield found, match


# --- commands -------------------------------------------------------------------------------------

STAND_INS = {"{}": "update", "DIRECTORY": "/tmp", "DIR": "/tmp", "MODEL": "7B"}


def test_every_command_that_is_suggested_parses(capsys: pytest.CaptureFixture[str]) -> None:
    seen = 0
    for found, match in matches(r"`(offload [a-z][^`]*)`"):
        words = [STAND_INS.get(word, word) for word in shlex.split(match[1])[1:]]
        try:
            make_parser().parse_args(words)
        except SystemExit as end:
            assert end.code == 0, (found, capsys.readouterr().err)
        seen += 1
    assert seen > 10


@cache
def options_of(command: str) -> set[str]:
    parser = make_parser()
    subparsers: Any = next(a for a in parser._actions if hasattr(a, "choices") and a.choices)
    return {word for a in subparsers.choices[command]._actions for word in a.option_strings}


def commands_of(file: str) -> list[str]:
    """List the commands whose options a file speaks of."""
    places = {
        "tools/forecast/": "plan",
        "tools/bench/": "bench",
        "tools/html_report/": "report",
        "tools/selftest/": "selftest",
        "tools/tune/": "tune",
    }
    places |= {f"tools/cli/{command}": command for command in COMMANDS}
    places |= {"tools/tune/loop": ""}  # has a parser of its own
    known = [command for place, command in places.items() if file.startswith(place)]
    return known or list(COMMANDS)


# Of other programs: docker, Slurm, torchrun, wsl, and what stands for the user's own.
FOREIGN = {
    "--config",
    "--cpus",
    "--cpus-per-task",
    "--cpuset-cpus",
    "--device",
    "--force-reinstall",
    "--gpus",
    "--install",
    "--memory",
    "--nproc-per-node",
    "--security-opt",
    "--shm-size",
    "--ulimit",
}


def test_every_option_that_is_named_is_one_of_its_command() -> None:
    seen = 0
    for found, match in matches(r"`[^`]*`|(?<![\w-])(--[a-z][a-z-]+)"):
        if match[1] is None:  # a command, which is parsed above
            continue
        commands = commands_of(found.file)
        known = {option for c in commands if c for option in options_of(c)}
        known |= {"--help", "--version"} | FOREIGN
        assert "" in commands or match[1] in known, (found, match[1])
        seen += 1
    assert seen > 30


# --- keywords -------------------------------------------------------------------------------------


def takes(function: Any, keyword: str) -> bool:
    parameters = inspect.signature(function).parameters.values()
    if keyword in {p.name for p in parameters}:
        return True
    name = getattr(function, "__name__", "")
    return name in REFUSED and keyword in FIELDS - REFUSED[name]


def messages() -> Iterator[Text]:
    """Yield the texts that are messages: those with a space, which no key and no name has."""
    for found in texts():
        if " " in found.text and not found.file.startswith(
            ("tools/html_report/", "tools/selftest/")
        ):
            yield found


# Told of what the user has already given to torch, not to us.
OF_OBJECTS = {"differentiable=True", "assign=True"}


def test_every_keyword_that_is_suggested_is_taken_by_the_call_that_suggests_it() -> None:
    seen = 0
    for found in messages():
        for match in re.finditer(
            r"(?<![\w.{])([a-z_]+)=(True|False|\.\.\.|\"[a-z]+\")", found.text
        ):
            seen += 1
            keyword, before = match[1], found.text[: match.start()]
            call = re.search(r"([\w.]+)\([^()]*$", before)
            if match[0] in OF_OBJECTS:
                continue
            if call is not None and call[1] in OTHERS:
                assert takes(OTHERS[call[1]], keyword), (found, match[0])
                continue
            for name in raised_by(found.file):
                assert takes(getattr(offload, name), keyword), (found, match[0], name)
    assert seen > 20


def test_every_field_that_is_named_is_one_that_the_call_takes() -> None:
    seen = 0
    verbs = "raise|lower|give|keep more in|leave out|set"
    for found in messages():
        for match in re.finditer(rf"\b(?:{verbs}) ({'|'.join(FIELDS)})\b", found.text):
            seen += 1
            for name in raised_by(found.file):
                assert match[1] not in REFUSED[name], (found, match[0], name)
    assert seen > 20


# --- names ----------------------------------------------------------------------------------------


def test_every_name_of_the_package_that_is_suggested_is_public() -> None:
    seen = 0
    for found in messages():
        for match in re.finditer(r"(?<![\w./])offload\.([A-Za-z_]+)", found.text):
            seen += 1
            is_there = (ROOT / match[1]).is_dir() or (ROOT / f"{match[1]}.py").exists()
            assert match[1] in offload.__all__ or is_there, (found, match[0])
    assert seen > 10


HOLDERS = (
    offload,
    OffloadOptimizer,
    nn.Module,
    torch.Tensor,
    DTensor,
    Progress,
    Report,
    offload.save_on_signal,
    Ticket,
)
# Methods of the user's own, or of torch where they belong to no class of the above.
OWN = {
    "inference_mode",
    "reset_parameters",
    "offload_example",
    "init_process_group",
    "no_sync",
    "get_optimizer_state_dict",
}


def test_every_method_that_is_suggested_is_there() -> None:
    seen = 0
    for found in messages():
        for match in re.finditer(r"(?<![\w])\.?([a-z_]{3,})\(\)", found.text):
            seen += 1
            name = match[1]
            assert name in OWN or any(hasattr(h, name) for h in HOLDERS), (found, name)
    assert seen > 20


INSIDE = ("store's capacity", "release snapshots", "open another writer", "open_shard")


def test_nothing_is_suggested_that_only_we_can_do() -> None:
    for found in messages():
        for words in INSIDE:
            if found.file.startswith("checkpoint/"):
                continue  # errors of our own calls among ourselves
            assert words not in found.text, (found, words)


def test_where_both_calls_may_be_meant_both_are_named() -> None:
    """`wrap it again` is no help to a user who has prepared a model."""
    for found in messages():
        if set(raised_by(found.file)) == {"wrap", "prepare"}:
            match = re.search(r"\b(wrap|prepare)( \w+){0,3} again|and wrap that", found.text)
            assert match is None or "wrap or prepare" in found.text, (found, match)
