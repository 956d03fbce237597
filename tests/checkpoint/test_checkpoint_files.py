"""Checkpoints are written and read: every byte, in any order, in bounded memory."""

from __future__ import annotations

import gc
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import KIB, SMALL, contents_of, fill, random_bytes, read, same, save, specs
from support.stores import nothing_left

from offload.checkpoint import shard as shard_module
from offload.checkpoint.format.directory import find_newest
from offload.checkpoint.reader import CheckpointReader
from offload.checkpoint.writer import CheckpointWriter
from offload.core.errors import ConfigError, CorruptionError, FormatError, StateError
from offload.storage.choose import ENGINES
from offload.storage.safetensors_header import TensorSpec


@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_saved_comes_back(
    tmp_path: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_IO", engine)
    contents = contents_of(1)
    with nothing_left():
        assert save(tmp_path / "a", contents) == tmp_path / "a"
        assert same(read(tmp_path / "a"), contents)
    assert os.listdir(tmp_path) == ["a"]
    assert sorted(os.listdir(tmp_path / "a")) == [
        "manifest.json",
        "model-00001.safetensors",
        "optimizer-00001.safetensors",
    ]
    with CheckpointReader(tmp_path / "a") as reader:
        assert reader.manifest.number == 1
        assert reader.manifest.fingerprint == "abc123"
        assert reader.manifest.values == {"extra": 7}


def test_pieces_in_any_order_from_many_threads(tmp_path: Path, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = [0, 1, 7, 4095, 4096, 4097, 12288, 100_001, 65536, 333_333, 2]
    tensors = {f"t{i}": random_bytes(n, i) for i, n in enumerate(sizes)}
    pieces = []
    for name, data in tensors.items():
        cuts = np.unique(np.append(rng.integers(0, data.nbytes + 1, 12), [0, data.nbytes]))
        pieces += [(name, int(a), int(b)) for a, b in itertools.pairwise(cuts)]
    rng.shuffle(pieces)
    with CheckpointWriter(tmp_path / "a", buffer_bytes=SMALL) as writer:
        shard = writer.open_shard("model", specs(tensors))

        def work(mine: list[tuple[str, int, int]]) -> None:
            for name, begin, end in mine:
                data = tensors[name][int(begin) : int(end)].copy()
                shard.write(name, int(begin), data)
                data[:] = 0xEE  # the buffer is the caller's again

        threads = [threading.Thread(target=work, args=(pieces[i::4],)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        writer.commit({}, "00", keep=1)
    assert same(read(tmp_path / "a"), {"model": tensors})


def test_long_writes_become_several_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_module, "PART_BYTES", 10_000)
    data = random_bytes(25_000, 3)
    with CheckpointWriter(tmp_path / "a", buffer_bytes=SMALL) as writer:
        shard = writer.open_shard("model", [TensorSpec("w", "U8", (25_000,))])
        shard.write("w", 12_000, torch.from_numpy(data[12_000:]))
        shard.write("w", 0, memoryview(data)[:12_000])
        writer.commit({}, "00")
    with CheckpointReader(tmp_path / "a") as reader:
        source = reader.tensor("model/w")
        assert [part.nbytes for part in source.parts] == [10_000, 2_000, 10_000, 3_000]
        assert (source.dtype, source.shape, source.nbytes) == (torch.uint8, (25_000,), 25_000)
        for begin, end in [(0, 25_000), (1, 24_999), (9_999, 10_001), (500, 500)]:
            target = torch.empty(end - begin, dtype=torch.uint8)
            source.read_into(begin, target)
            assert target.numpy().tobytes() == data[begin:end].tobytes()


def test_tensors_of_megabytes_go_through_few_buffers(tmp_path: Path) -> None:
    data = random_bytes(9_000_001, 5)
    small = random_bytes(100, 6)
    with CheckpointWriter(tmp_path / "a", buffer_bytes=1024 * KIB) as writer:
        shard = writer.open_shard("model", specs({"small": small, "large": data}))
        shard.write("large", 0, data)
        shard.write("small", 0, small)
        writer.commit({}, "00", keep=2)
    assert same(read(tmp_path / "a"), {"model": {"small": small, "large": data}})


def test_numbers_count_up_and_the_newest_is_found(tmp_path: Path) -> None:
    for number, name in enumerate(["c", "b", "a"], start=1):
        save(tmp_path / name, contents_of(number))
        assert find_newest(tmp_path) == tmp_path / name
        with CheckpointReader(tmp_path / name) as reader:
            assert reader.manifest.number == number


def test_misuse_is_told(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a", buffer_bytes=SMALL) as writer:
        shard = writer.open_shard(
            "model", [TensorSpec("w", "F32", (4,)), TensorSpec("v", "U8", ())]
        )
        data = np.zeros(16, dtype=np.uint8)
        with pytest.raises(ConfigError, match="has no tensor 'x'"):
            shard.write("x", 0, data)
        with pytest.raises(ConfigError, match="at most 16 bytes"):
            shard.write("w", 4, data)
        with pytest.raises(ConfigError, match="begin_bytes"):
            shard.write("w", -1, data)
        with pytest.raises(ConfigError, match="contiguous"):
            shard.write("w", 0, torch.zeros(4, 2)[:, 0])
        shard.write("w", 4, data[4:12])
        for begin, nbytes in [(0, 5), (11, 2), (4, 8), (0, 16), (6, 1)]:
            with pytest.raises(StateError, match="each comes once"):
                shard.write("w", begin, data[:nbytes])
        with pytest.raises(ConfigError, match="another shard"):
            writer.open_shard("model", [TensorSpec("w", "F32", (4,))])
        with pytest.raises(ConfigError, match="no other tensor"):
            writer.open_shard("model", [TensorSpec("z", "F32", (4,))] * 2)
        with pytest.raises(ConfigError, match="section"):
            writer.open_shard("../model", [])
        for keep in (0, -1, True, "3"):
            with pytest.raises(ConfigError, match="keep"):
                writer.commit({}, "00", keep=keep)  # type: ignore[arg-type]
        with pytest.raises(StateError, match="model/w: byte 0 of 16 was never written"):
            writer.commit({}, "00")
        with pytest.raises(StateError, match="abandoned"):
            shard.write("v", 0, data[:1])
        with pytest.raises(StateError, match="abandoned"):
            writer.open_shard("other", [])
        with pytest.raises(StateError, match="abandoned"):
            writer.commit({}, "00")
        writer.abandon()
    assert os.listdir(tmp_path) == []
    with pytest.raises(ConfigError, match="buffer_bytes"):
        CheckpointWriter(tmp_path / "a", buffer_bytes=SMALL - 1)
    assert os.listdir(tmp_path) == []


def test_a_writer_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    with nothing_left():
        writer = CheckpointWriter(tmp_path / "new" / "a")
        fill(writer, contents_of(1))
        assert len(os.listdir(tmp_path / "new")) == 1
        del writer
        gc.collect()
    assert os.listdir(tmp_path) == []


def test_a_saved_one_is_closed(tmp_path: Path) -> None:
    with nothing_left(), CheckpointWriter(tmp_path / "a") as writer:
        shard = writer.open_shard("model", [TensorSpec("w", "U8", (0,))])
        writer.commit({}, "00")
        with pytest.raises(StateError, match="is saved"):
            shard.write("w", 0, b"")
        with pytest.raises(StateError, match="saved"):
            writer.commit({}, "00")
        writer.abandon()
        assert os.listdir(tmp_path) == ["a"]
    assert read(tmp_path / "a")["model"]["w"].nbytes == 0


def test_every_flipped_byte_of_data_is_found(tmp_path: Path) -> None:
    contents = contents_of(4)
    save(tmp_path / "a", contents)
    file = tmp_path / "a" / "model-00001.safetensors"
    good = file.read_bytes()
    offset = 0
    for at in range(0, len(good), 97):
        bad = bytearray(good)
        bad[at] ^= 1 << at % 8
        file.write_bytes(bad)
        with CheckpointReader(tmp_path / "a") as reader:
            with pytest.raises(CorruptionError) as caught:
                reader.check()
            name = caught.value.tensor
            assert caught.value.file == str(file)
            if name is None:
                assert at < 4096 and "its header is not" in str(caught.value)
            else:
                (part,) = reader.tensor(name).parts
                assert part.offset <= at < part.offset + part.nbytes
                assert caught.value.offset_bytes == part.offset
                target = np.empty(part.nbytes, dtype=np.uint8)
                with pytest.raises(CorruptionError, match="not what was saved"):
                    reader.tensor(name).read_into(0, target)
                offset += 1
    assert offset > 100
    file.write_bytes(good[:-1])
    with pytest.raises(FormatError, match="expected"):
        CheckpointReader(tmp_path / "a")


def test_files_are_read_past_the_cache_and_waited_for(tmp_path: Path) -> None:
    """io_uring would answer EAGAIN again and again for files that are open with O_NONBLOCK."""
    data = random_bytes(600_000, 8)
    save(tmp_path / "a", {"model": {"w": data}})
    with CheckpointReader(tmp_path / "a") as reader:
        (file,) = reader._files.values()
        assert all(os.get_blocking(fd) for fd in reader._fds)
        ways = list(file.cut(file.nbytes - 600_000 + 1, 599_999))
        assert sum(nbytes for _, _, nbytes in ways) == 599_999
        if file.direct is not None:
            assert [way is file.direct for way, _, _ in ways] == [False, True, False]
            assert ways[1][1] % file.direct.align == ways[1][2] % file.direct.align == 0
