"""The division of one machine among its ranks: cores, threads, the I/O depth of drives, and memory
without a budget.

A single process has all of it. With `count` processes on one machine each gets its own cores, whole
ones and of one NUMA node if possible, as many threads as it has cores, and its part of the
operations in flight on a drive. A process that the user has bound to some cores already (taskset,
numactl, torchrun --numa-binding) is not bound again; OFFLOAD_BIND=0 turns the binding off.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from offload.core.errors import ConfigError
from offload.core.host_facts import ROOT, read_int, read_text
from offload.core.log import LOG

BIND = "OFFLOAD_BIND"


@dataclass(frozen=True)
class NodeShare:
    """The share of a machine that one of its processes has.

    rank, count: this process among those on the machine. cores: the cores it is bound to; empty:
    not bound. threads: the most for updates; None: unchanged. why: the reason why it is bound, or
    is not, in words.
    """

    rank: int = 0
    count: int = 1
    cores: tuple[int, ...] = ()
    threads: int | None = None
    why: str = "alone on this machine"

    def part_of(self, most: int, least: int = 1) -> int:
        """Return this process's part of `most` units of a machine-wide resource without a budget,
        but at least `least`.
        """
        return max(least, most // self.count)

    def __str__(self) -> str:
        if self.count == 1:
            return self.why
        parts = [f"{self.count} ranks on this machine", self.why]
        if self.threads is not None:
            parts.append(f"threads for updates {self.threads}")
        return ", ".join(parts)


_current = NodeShare()


def current() -> NodeShare:
    """Return the share that this process has settled on."""
    return _current


def take_share(rank: int, count: int, limit_threads: Callable[[int], None]) -> NodeShare:
    """Take the share of process `rank` of `count` on this machine; bind all threads to its cores.

    The first call with more than one process settles it for good. limit_threads: called with the
    most threads for updates, if the share sets that.
    """
    global _current
    if _current.count == 1 and count > 1:
        nodes, is_whole = read_nodes()
        _current = divide(rank, count, nodes, is_whole, os.environ.get(BIND, ""))
        _bind(_current)
        if _current.threads is not None:
            limit_threads(_current.threads)
        LOG.info("%s", _current)
    return _current


def _bind(portion: NodeShare) -> None:
    if portion.cores:
        for task in Path("/proc/self/task").iterdir():
            with suppress(OSError):  # the thread has just ended
                os.sched_setaffinity(int(task.name), portion.cores)


def divide(
    rank: int, count: int, nodes: Sequence[Sequence[int]], is_whole: bool, wanted: str
) -> NodeShare:
    """Compute the share of process `rank` of `count`.

    nodes: the cores of each NUMA node that this process may use, hardware threads of one physical
    core adjacent. is_whole: they are all cores of the machine. wanted: the value of OFFLOAD_BIND,
    "0", "1" or empty.
    """
    assert 0 <= rank < count, (rank, count)
    if wanted not in ("", "0", "1"):
        raise ConfigError(f"{BIND}: expected 0 or 1, got {wanted!r}")
    cores = sum(map(len, nodes))
    threads = max(1, cores // count)
    if wanted == "0":
        return NodeShare(rank, count, (), threads, f"not bound to cores: {BIND}=0")
    if not is_whole:  # which other processes use these cores cannot be known
        return NodeShare(rank, count, (), None, f"already bound to {cores} cores")
    if cores < count:
        return NodeShare(rank, count, (), 1, f"not bound: {cores} cores are fewer than ranks")
    own = _own_cores(rank, count, nodes)
    node = [str(n) for n, each in enumerate(nodes) if set(each) & set(own)]
    why = f"bound to cores {_spans(own)} of node {' and '.join(node)}"
    return NodeShare(rank, count, own, len(own), why)


def _own_cores(rank: int, count: int, nodes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Choose cores of one NUMA node if every node has a core for each of its ranks, else of all."""
    node = rank * len(nodes) // count
    there = [other for other in range(count) if other * len(nodes) // count == node]
    if all(len(each) >= -(-count // len(nodes)) for each in nodes):
        return _part(nodes[node], there.index(rank), len(there))
    return _part([core for each in nodes for core in each], rank, count)


def _part(cores: Sequence[int], index: int, count: int) -> tuple[int, ...]:
    return tuple(sorted(cores[len(cores) * index // count : len(cores) * (index + 1) // count]))


def read_nodes(root: Path = ROOT) -> tuple[list[list[int]], bool]:
    """Read the cores of each NUMA node that this process may use, and whether they are all online
    cores. Hardware threads of one physical core are adjacent.
    """
    allowed = os.sched_getaffinity(0)
    online = parse_cores(read_text(root / "sys/devices/system/cpu/online") or "") or sorted(allowed)
    directory = root / "sys/devices/system/node"
    names = sorted(directory.glob("node[0-9]*"), key=lambda path: int(path.name[4:]))
    nodes = [parse_cores(read_text(path / "cpulist") or "") for path in names] or [online]

    def place(core: int) -> tuple[int, int, int]:
        topology = root / f"sys/devices/system/cpu/cpu{core}/topology"
        package = read_int(topology / "physical_package_id")
        return package or 0, read_int(topology / "core_id") or 0, core

    found = [sorted((c for c in node if c in allowed), key=place) for node in nodes]
    return [node for node in found if node], set(online) <= allowed


def parse_cores(text: str) -> list[int]:
    """Parse a list of numbers as the kernel writes it: 0-3,8,10-11."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last.isdigit() or not last):
            found += range(int(first), int(last or first) + 1)
    return found


def _spans(cores: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for core in cores:
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
