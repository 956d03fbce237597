"""Safetensors files: what is right is read to the bit, what is wrong is refused."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import bits
from torch import Tensor

from offload.core.errors import ConfigError, CorruptionError, FormatError, StateError, StoreError
from offload.core.format_limits import MOST_HEADER_BYTES
from offload.core.metrics import Metrics
from offload.storage import direct_file
from offload.storage.choose import ENGINES, open_engine
from offload.storage.engine import Fault, FaultKind
from offload.storage.safetensors_file import DTYPES, SafetensorsFile
from offload.storage.weights import INDEX, SINGLE, FileRange, WeightBlock, WeightBlocks, Weights

pytestmark = pytest.mark.timeout(60)


def written(path: Path, header: Any, data: bytes = b"", claimed: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + data)
    return path


def entry(begin: int, end: int, dtype: str = "U8", shape: Any = None) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": [end - begin] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def read(file: SafetensorsFile, name: str) -> bytes:
    found = file.entries[name]
    memory = bytearray(found.nbytes)
    file.read_into(found.offset, memory)
    return bytes(memory)


# --- the reader -----------------------------------------------------------------------------------


def test_bytes_of_all_types_as_the_safetensors_package_writes_them(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for kind, dtype in DTYPES.items():
        raw = torch.randint(0, 2, (6 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
        raw = raw if dtype == torch.bool else raw * 77
        tensors[f"{kind} ä"] = raw.view(dtype).view(2, 3)
    tensors |= {"empty": torch.empty(0, 5), "scalar": torch.tensor(3.0)}
    save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "all.safetensors")
    assert file.metadata == {"format": "pt"} and file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        found = file.entries[name]
        assert (found.dtype, found.shape) == (tensor.dtype, tuple(tensor.shape))
        assert read(file, name) == bits(tensor).numpy().tobytes()
    file.close()
    file.close()


WRONG: dict[str, tuple[Any, int]] = {
    "no JSON": (b"{nonsense", 0),
    "a list": (b"[]", 0),
    "not UTF-8": (b'{"\xff": 1}', 0),
    "a NaN": (b'{"a": NaN}', 0),
    "deep": (b'{"a":' + b"[" * 100_000, 0),
    "endless number": (b'{"a": ' + b"9" * 10_000 + b"}", 0),
    "twice": (b'{"a": %b, "a": %b}' % ((json.dumps(entry(0, 4)).encode(),) * 2), 4),
    "twice inside": (b'{"a":{"dtype":"U8","dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
    "lone surrogate": (b'{"\\ud800":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}', 4),
    "metadata": ({"__metadata__": {"a": 1}}, 0),
    "metadata list": ({"__metadata__": []}, 0),
    "no dict": ({"a": 3}, 0),
    "field missing": ({"a": {"dtype": "U8", "shape": [4]}}, 4),
    "field too many": ({"a": {**entry(0, 4), "more": 1}}, 4),
    "unknown type": ({"a": entry(0, 4, "Q4")}, 4),
    "type no text": ({"a": entry(0, 4, 3)}, 4),  # type: ignore[arg-type]
    "negative size": ({"a": entry(0, 4, shape=[-4])}, 4),
    "boolean size": ({"a": entry(0, 1, shape=[True])}, 1),
    "size no number": ({"a": entry(0, 4, shape=[4.0])}, 4),
    "huge size": ({"a": entry(0, 4, shape=[2**63])}, 4),
    "huge product": ({"a": entry(0, 4, shape=[2**62] * 60)}, 4),
    "zero of huge": ({"a": entry(0, 4, shape=[0, 2**62])}, 4),
    "too many sizes": ({"a": entry(0, 1, shape=[1] * 65)}, 1),
    "size and bytes differ": ({"a": entry(0, 4, "F32", [2])}, 4),
    "reversed": ({"a": entry(4, 0, shape=[0])}, 4),
    "three offsets": ({"a": {**entry(0, 4), "data_offsets": [0, 2, 4]}}, 4),
    "behind the end": ({"a": entry(0, 8)}, 4),
    "far behind the end": ({"a": entry(2**62, 2**62 + 4)}, 4),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, 6),
    "the same bytes": ({"a": entry(0, 4), "b": entry(0, 4)}, 4),
    "hole": ({"a": entry(0, 4), "b": entry(6, 8)}, 8),
    "not all used": ({"a": entry(0, 4)}, 5),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_is_refused(what: str, tmp_path: Path) -> None:
    header, nbytes = WRONG[what]
    path = written(tmp_path / "wrong.safetensors", header, bytes(nbytes))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(FormatError, match=r"wrong\.safetensors") as refused:
        SafetensorsFile(path)
    assert len(str(refused.value)) < 2000
    assert len(os.listdir("/proc/self/fd")) == before, "files stay open"


def test_lengths_are_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    for claimed in (3, MOST_HEADER_BYTES + 1, 2**63, 2**64 - 1):
        with pytest.raises(FormatError, match=r"claims|JSON"):
            SafetensorsFile(written(path, {}, claimed=claimed))
    for nbytes in (0, 1, 7, 8):
        path.write_bytes(bytes(nbytes))
        with pytest.raises(FormatError):
            SafetensorsFile(path)
    with pytest.raises(StoreError, match="No such file"):
        SafetensorsFile(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="something else"):
        SafetensorsFile(tmp_path / "pipe")


def test_damaged_headers_are_refused_or_sound(tmp_path: Path) -> None:
    """Bytes of a good file changed, taken out and put in: an error of ours, or tensors that lie
    within the file, one behind the other.
    """
    draw = random.Random(3)
    header = {"__metadata__": {"a": "b"}, "x": entry(0, 24, "F32", [2, 3]), "y": entry(24, 30)}
    good = written(tmp_path / "good", header, bytes(range(30))).read_bytes()
    path, refused = tmp_path / "bad", 0
    for _ in range(600):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 3)):
            place = draw.randrange(len(bad))
            how = draw.randrange(3)
            if how == 0:
                bad[place] = draw.choice(b'{}[]",:0123456789-e \xff') if place > 7 else place
            elif how == 1:
                del bad[place : place + draw.randint(1, 9)]
            else:
                bad[place:place] = draw.choice([b"9", b"-", b'"x"', b"[", b",", b"\0"])
        path.write_bytes(bad)
        try:
            file = SafetensorsFile(path)
        except FormatError:
            refused += 1
            continue
        end = None
        for found in file.entries.values():
            assert end in (None, found.offset)
            end = found.offset + found.nbytes
        assert end in (None, len(bad))
        file.close()
    assert 300 < refused < 600


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {"a": entry(0, 4)}, b"abcd")
    file = SafetensorsFile(path)
    file.check_unchanged()
    os.utime(path, ns=(1, 1))
    with pytest.raises(StoreError, match="has changed while it was in use") as changed:
        file.check_unchanged("a")
    assert changed.value.tensor == "a" and changed.value.file == str(path)
    os.truncate(path, path.stat().st_size - 2)
    with pytest.raises(StoreError, match="cut short"):
        read(file, "a")
    file.close()


# --- directories ----------------------------------------------------------------------------------


def shards(folder: Path, **places: Any) -> Path:
    written(folder / "one", {"a": entry(0, 2), "b": entry(2, 4)}, b"aabb")
    written(folder / "two", {"c": entry(0, 2)}, b"cc")
    index = {"metadata": {"total_size": 6}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_a_directory_with_shards_or_one_file(tmp_path: Path) -> None:
    weights = Weights(shards(tmp_path, a="one", b="one", c="two"))
    assert {name: read(file, name) for name, (file, _) in weights.entries.items()} == {
        "a": b"aa", "b": b"bb", "c": b"cc",
    }  # fmt: skip
    assert [file.path.name for file in weights.files] == ["one", "two"]
    weights.close()
    written(tmp_path / SINGLE, {"d": entry(0, 1)}, b"d")
    single = Weights(str(tmp_path))
    assert list(single.entries) == ["d"]
    single.close()


def test_indexes_that_lie_are_refused(tmp_path: Path) -> None:
    written(tmp_path.parent / "outside", {"a": entry(0, 2)}, b"xx")
    for place in ("../outside", str(tmp_path.parent / "outside"), "", ".", "..", "x/y", "a\0", 3):
        with pytest.raises(FormatError, match="the name of a file beside it"):
            Weights(shards(tmp_path, a=place))
    with pytest.raises(FormatError, match="that their files do not have: z"):
        Weights(shards(tmp_path, a="one", z="two"))
    with pytest.raises(StoreError, match="No such file"):
        Weights(shards(tmp_path, a="three"))
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": "one", "a": "one"}}'):
        (tmp_path / INDEX).write_text(text)
        with pytest.raises(FormatError, match=INDEX):
            Weights(tmp_path)
    (tmp_path / INDEX).unlink()
    with pytest.raises(ConfigError, match="has neither"):
        Weights(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        Weights(tmp_path / "none")
    with pytest.raises(ConfigError, match="expected a path, got int"):
        Weights(3)  # type: ignore[arg-type]


# --- originals ------------------------------------------------------------------------------------

SIZES = (5, 4096, 300_000, 1 << 20, (2 << 20) + 77)


@pytest.fixture(params=ENGINES)
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Make a file of several tensors, an engine, and a block of all of them, in reversed order."""
    generator = torch.Generator().manual_seed(2)
    header, data, begin = {}, b"", 0
    for number, nbytes in enumerate(SIZES):
        values = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        data += values.numpy().tobytes()
        header[str(number)] = entry(begin, begin + nbytes)
        begin += nbytes
    weights = Weights(written(tmp_path / "x.safetensors", header, data))
    metrics = Metrics()
    try:
        engine = open_engine([], metrics=metrics, name=request.param, timeout_s=10)
    except ConfigError as error:  # a kernel without rings
        pytest.skip(str(error))
    files = WeightBlocks(weights, metrics, engine)
    pieces, begin = [], 0
    for number in reversed(range(len(SIZES))):
        file, found = weights.entries[str(number)]
        pieces.append(FileRange(file, found.offset, begin, found.nbytes))
        begin += -(-found.nbytes // 64) * 64
    memory = torch.zeros(begin, dtype=torch.uint8)
    yield files.original("the block", pieces), memory, data, engine
    engine.close()
    files.close()


def expect(memory: Tensor, data: bytes) -> None:
    begin, end = 0, len(data)
    for nbytes in reversed(SIZES):
        assert memory[begin : begin + nbytes].numpy().tobytes() == data[end - nbytes : end]
        begin, end = begin + -(-nbytes // 64) * 64, end - nbytes


def test_a_block_is_put_together_from_pieces(opened: Any) -> None:
    original, memory, data, _ = opened
    for _ in range(3):
        memory.zero_()
        original.read(memory).wait()
        expect(memory, data)
    extents = [(offset, n, file.align) for file, offset, _, n in original._extents]
    if any(align > 1 for _, _, align in extents):  # as far as the drive allows
        for offset, nbytes, align in extents:
            assert offset % align == nbytes % align == 0
        direct = sum(nbytes for _, nbytes, align in extents if align > 1)
        assert direct > sum(SIZES) - 5 - 4096 - 6 * 4096


def test_other_bytes_than_at_first_are_noticed(opened: Any) -> None:
    original, memory, _, engine = opened
    original.read(memory).wait()
    engine.inject(Fault(FaultKind.FLIP, nth=2, seed=12345))
    with pytest.raises(CorruptionError, match="other bytes than when it was read first"):
        original.read(memory).wait()
    engine.inject(Fault(FaultKind.NONE))
    path = Path(original._files[0].path)
    then = path.stat()
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\0\1\2")
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))  # as if nothing had happened
    with pytest.raises(CorruptionError):
        original.read(memory).wait()


def test_a_file_cut_short_is_a_store_error(opened: Any) -> None:
    original, memory, _, _ = opened
    original.read(memory).wait()
    path = original._files[0].path
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(StoreError, match="has changed while it was in use"):
        original.read(memory).wait()


def test_a_file_that_changes_during_a_read_is_noticed(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, memory, _, _ = opened
    file = original._files[0]
    seen: list[int] = []
    real = file.check_unchanged

    def second_time(tensor: str | None = None) -> None:
        seen.append(1)
        if len(seen) == 2:
            os.utime(file.path, ns=(1, 1))
        real(tensor)

    monkeypatch.setattr(file, "check_unchanged", second_time)
    with pytest.raises(StoreError, match="has changed while it was in use"):
        original.read(memory).wait()


def test_where_there_is_no_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsFile, "_open_direct", lambda self, fds: None)
    monkeypatch.setattr(direct_file, "DIRECT_BYTES", 4)
    path = written(tmp_path / "x", {"a": entry(0, 8)}, b"abcdefgh")
    metrics = Metrics()
    files = WeightBlocks(Weights(path), metrics)
    assert "page cache" in dict(metrics.snapshot().fallbacks)[f"weights {path}"]
    file, found = files.weights.entries["a"]
    original: WeightBlock = files.original("a", [FileRange(file, found.offset, 0, 8)])
    memory = torch.zeros(8, dtype=torch.uint8)
    original.read(memory).wait()
    assert memory.numpy().tobytes() == b"abcdefgh"
    files.close()
    weights = Weights(path)
    with pytest.raises(StateError, match="strict"):
        WeightBlocks(weights, Metrics(strict=True))
    assert weights.files[0]._fds == []
