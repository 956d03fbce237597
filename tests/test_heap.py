"""Freed memory stays with the process, so that every step need not fault it in again."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from offload import heap

# 40 MiB: on the heap, for none of it is larger than glibc's own threshold.
SCRIPT = """
import resource, sys
import torch
import offload
from offload.heap import keep_freed_memory

optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(8))])
if "wrap" in sys.argv:
    offload.wrap(optimizer)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def work():
    held = [torch.ones(1 << 20) for _ in range(10)]
    del held

for _ in range(4):
    work()
before = faults()
for _ in range(5):
    work()
print(faults() - before, keep_freed_memory())
"""


def run(tmp_path: Path, *arguments: str, **variables: str) -> tuple[int, bool]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=120, env=clean | variables
    )
    faults, kept = done.stdout.split()
    return int(faults), kept == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="glibc is Linux's")
def test_wrapping_keeps_what_is_freed(tmp_path: Path) -> None:
    faults, kept = run(tmp_path, "wrap")
    plain, _ = run(tmp_path)
    assert kept and faults < 1000 and faults <= plain  # of 5 x 10 Ki pages


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "4"), ("GLIBC_TUNABLES", "glibc.malloc.arena_max=4")],
)
def test_whoever_has_set_glibc_is_left_alone(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[object] = []
    monkeypatch.setattr(heap.ctypes, "CDLL", called.append)
    monkeypatch.setenv(name, value)
    assert not heap.keep_freed_memory.__wrapped__() and not called
