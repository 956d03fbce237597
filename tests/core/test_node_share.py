"""How ranks share one machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.core import node_share
from offload.core.errors import ConfigError
from offload.core.node_share import NodeShare, divide, parse_cores, read_nodes

TWO_NODES = [list(range(8)), list(range(8, 16))]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("nodes", [[[0, 1]], TWO_NODES, [[0, 4, 1, 5], [2, 6, 3, 7]]])
def test_cores_are_shared_out_once(count: int, nodes: list[list[int]]) -> None:
    cores = sorted(core for node in nodes for core in node)
    portions = [divide(rank, count, nodes, True, "") for rank in range(count)]
    if count > len(cores):
        assert all(not p.cores and p.threads == 1 and "fewer" in p.why for p in portions)
        return
    taken = sorted(core for p in portions for core in p.cores)
    assert taken == sorted(set(taken)) and set(taken) <= set(cores)
    if count % len(nodes) == 0 or len(nodes) == 1:
        assert taken == cores
    assert all(p.cores and p.threads == len(p.cores) for p in portions)
    if count >= len(nodes):
        assert all(any(set(p.cores) <= set(node) for node in nodes) for p in portions)


def test_threads_of_a_core_stay_together() -> None:
    assert divide(0, 2, [[0, 4, 1, 5]], True, "").cores == (0, 4)
    assert divide(1, 2, [[0, 4, 1, 5]], True, "").cores == (1, 5)


def test_left_alone_where_somebody_else_has_bound_it_or_said_so() -> None:
    bound = divide(1, 2, [[3, 4]], False, "")
    assert (bound.cores, bound.threads) == ((), None) and "already bound" in str(bound)
    off = divide(1, 2, [[0, 1]], True, "0")
    assert (off.cores, off.threads) == ((), 1) and "OFFLOAD_BIND=0" in str(off)
    with pytest.raises(ConfigError, match="OFFLOAD_BIND: expected 0 or 1, got 'yes'"):
        divide(0, 2, [[0, 1]], True, "yes")


def test_parts() -> None:
    assert NodeShare(0, 3).part_of(16, 4) == 5
    assert NodeShare(0, 8).part_of(16, 4) == 4
    assert NodeShare().part_of(16, 4) == 16
    assert str(NodeShare()) == "alone on this machine"
    assert "bound to cores 0-1 of node 0" in str(divide(0, 2, [[0, 1, 2, 3]], True, ""))


def test_numbers_of_cores() -> None:
    assert parse_cores("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cores("") == [] and parse_cores("x") == []


def test_nodes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "sys/devices/system"
    files = {"cpu/online": "0-3", "node/node0/cpulist": "0,2", "node/node1/cpulist": "1,3"}
    for core, number in enumerate([1, 0, 0, 1]):
        files[f"cpu/cpu{core}/topology/core_id"] = str(number)
    for name, text in files.items():
        (system / name).parent.mkdir(parents=True, exist_ok=True)
        (system / name).write_text(text)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert read_nodes(tmp_path) == ([[2, 0], [1, 3]], True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 2})
    assert read_nodes(tmp_path) == ([[2, 0]], False)


def test_this_machine_has_some() -> None:
    nodes, _ = read_nodes()
    assert nodes and all(nodes)


def test_alone_takes_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_share, "_bind", lambda _: pytest.fail("no core is to be bound"))
    assert (
        node_share.take_share(0, 1, lambda _: pytest.fail("no thread is to go"))
        == node_share.current()
        == NodeShare()
    )
