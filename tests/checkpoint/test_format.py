"""The checkpoint format: headers, manifests, values and directories, there and back."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import struct
import subprocess
import sys
import warnings
from collections import Counter, OrderedDict, namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.formats import write_checkpoint

from offload.checkpoint.format import values
from offload.checkpoint.format.directory import (
    CheckpointDirectory,
    check_name,
    find_newest,
    list_numbers,
)
from offload.checkpoint.format.manifest import MANIFEST, CheckedPart, Manifest, SavedTensor
from offload.core import format_limits
from offload.core.errors import ConfigError, CorruptionError, FormatError, StoreError
from offload.core.strict_json import parse_json
from offload.storage.safetensors_file import DTYPES
from offload.storage.safetensors_header import (
    SIZES,
    TensorSpec,
    build_header,
    parse_header,
    parse_length,
)

pytestmark = pytest.mark.timeout(60)


# --- JSON -----------------------------------------------------------------------------------------


def test_json_is_bounded_before_it_is_parsed() -> None:
    deepest = b"[" * format_limits.MOST_DEPTH + b"]" * format_limits.MOST_DEPTH
    assert parse_json(deepest) is not None
    assert parse_json(b'{"a":"' + b"[" * 10_000 + b'\\"' + b"9" * 10_000 + b'\\\\"}')
    for wrong in (
        b"[" + deepest + b"]",
        b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b"[" + b"9" * (format_limits.MOST_DIGITS + 1) + b"]",
        b'["' + b'\\"' * 2_000_000,
        b'{"a":1,"a":2}',
        b"[NaN]",
        b"[-Infinity]",
        b'"\xff"',
        b"[1,]",
    ):
        with pytest.raises(FormatError, match="expected JSON in UTF-8") as refused:
            parse_json(wrong)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7, 64])
def test_bounds_do_not_depend_on_how_the_text_is_cut(
    piece_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.core.strict_json._PIECE_BYTES", piece_bytes)
    longest = b"1" * format_limits.MOST_DIGITS
    inside = b"[" * 300 + b'\\"' + b"9" * 300 + b"\\\\"
    deepest = b"[" * format_limits.MOST_DEPTH + b"]" * format_limits.MOST_DEPTH
    good = b'{"a":"' + inside + b'","b":[' + longest + b',"' + inside + b'",' + longest + b"]}"
    assert parse_json(good)["b"][0] == int(longest)
    assert parse_json(b'{"' + inside + b'":' + deepest[1:-1] + b"}")
    for wrong in (
        good.replace(longest + b"]", longest + b"1]"),
        good.replace(b"[" + longest, b"[1" + longest),
        b'{"' + inside + b'":' + deepest + b"}",
    ):
        with pytest.raises(FormatError, match=r"more than \d+ (digits|lists)"):
            parse_json(wrong)


def test_json_has_a_bounded_number_of_containers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.core.strict_json.MOST_CONTAINERS", 100)
    assert len(parse_json(b"[" + b"[]," * 98 + b"[]]")) == 99
    with pytest.raises(FormatError, match="more than 100 lists"):
        parse_json(b"[" + b"{}," * 99 + b"[]]")


# --- headers --------------------------------------------------------------------------------------


def test_types_and_their_sizes_are_those_of_torch() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == dict(SIZES)


def test_headers_are_read_by_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors import safe_open

    specs = [TensorSpec(f"{kind} ä", kind, (2, 3)) for kind in SIZES]
    specs += [TensorSpec("empty", "F32", (0, 5)), TensorSpec("scalar", "F32", ())]
    specs.sort(key=lambda spec: -SIZES[spec.dtype])
    header, places = build_header(specs)
    assert len(header) == 4096
    path = tmp_path / "x.safetensors"
    path.write_bytes(header + bytes(sum(spec.nbytes for spec in specs)))
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == {spec.name for spec in specs}
        for spec in specs:
            tensor = file.get_tensor(spec.name)
            assert (tensor.dtype, tuple(tensor.shape)) == (DTYPES[spec.dtype], spec.shape)
    assert all(place.offset >= 4096 for place in places.values())


@pytest.mark.parametrize("count", [0, 1, 30, 200])
def test_headers_there_and_back(count: int) -> None:
    specs = [TensorSpec(f"t.{i}", "BF16", (i, 3)) for i in range(count)]
    header, places = build_header(specs, align=512)
    nbytes = sum(spec.nbytes for spec in specs)
    length = parse_length(header[:8], len(header) + nbytes)
    assert len(header) == 8 + length and len(header) % 512 == 0
    found, metadata = parse_header(header[8:], nbytes, len(header))
    assert (found, metadata) == (places, {"format": "pt"})
    assert list(found) == list(places), "in the order of their bytes"


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("x", "Q4", (1,)),
        TensorSpec("x", "F32", (-1,)),
        TensorSpec("x", "F32", (True,)),
        TensorSpec("x", "F32", (1,) * 65),
        TensorSpec("\ud800", "F32", (1,)),
        TensorSpec("__metadata__", "F32", (1,)),
        TensorSpec("twice", "F32", (1,)),
        TensorSpec("huge", "F32", (2**61,)),
    ],
)
def test_headers_that_could_not_be_read_are_not_written(spec: TensorSpec) -> None:
    with pytest.raises(FormatError):
        build_header([TensorSpec("twice", "F32", (1,)), spec])


# --- values ---------------------------------------------------------------------------------------

NAN = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
TREES: list[Any] = [
    None,
    True,
    [1, 1.0, -0.0, 5e-324, 1.7976931348623157e308, 2**63 - 1, -(2**63)],
    [2**63, -(2**63) - 1, 2**4000, math.inf, -math.inf],
    ["", "ä\0\x1b[31m\u2028", "\ud800 lone", "x" * 1000],
    [b"", b"\0\xff" * 50],
    ((), (1, (2, [])), []),
    {"a": {"b": {}}, "dict": 1, "tuple": (1,), "": None},
    {1: "one", "1": "text", 2.5: (), -7: {0: 1}, 2**70: 1, "\udc80": 2},
    {False: 0, "x": True},
    OrderedDict([("b", 1), ("a", 2)]),
    Counter({3: 2, 8: 1}),
]


def same(a: Any, b: Any) -> bool:
    """Return whether both are equal in value and type all the way down, and in order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    return struct.pack("d", a) == struct.pack("d", b) if isinstance(a, float) else a == b


def never(leaf: Any) -> Any:
    raise AssertionError(leaf)


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_values_there_and_back(tree: Any) -> None:
    coded = values.encode(tree, never)
    text = json.dumps(coded, allow_nan=False)
    assert text.isascii()
    assert same(values.decode(parse_json(text.encode()), never), tree)


def test_bits_of_a_nan_are_kept() -> None:
    back = values.decode(values.encode(NAN, never), never)
    assert struct.pack(">d", back).hex() == "fff8000000000123"


def test_tensors_are_saved_by_name() -> None:
    saved: dict[str, torch.Tensor] = {}

    def put(leaf: Any) -> str | None:
        if not isinstance(leaf, torch.Tensor):
            return None
        name = f"other/{len(saved)}"
        saved[name] = leaf
        return name

    tree = {"a": [torch.ones(3)], 5: (torch.zeros(2), 1)}
    coded = values.encode(tree, put)
    assert coded == {
        "items": [
            ["a", [{"tensor": "other/0"}]],
            [5, {"tuple": [{"tensor": "other/1"}, 1]}],
        ]
    }
    back = values.decode(coded, saved.__getitem__)
    assert back["a"][0] is tree["a"][0] and back[5][0] is tree[5][0]


def test_subclasses_come_back_plain() -> None:
    class Text(str):
        def __str__(self) -> str:
            return "other"

    assert same(values.decode(values.encode([Text("a")], never), never), ["a"])
    assert same(values.decode(values.encode(torch.Size([2]), never), never), (2,))


def test_what_cannot_be_saved_is_named() -> None:
    point = namedtuple("point", "x y")
    circle: list[Any] = []
    circle.append(circle)
    wrong: list[tuple[Any, str]] = [
        ({"a": [1, {2: object()}]}, r"\['a'\]\[1\]\[2\]: cannot be saved: .* got builtins.object"),
        ({"f": len}, r"\['f'\]: .*builtin_function_or_method"),
        ({"s": {1, 2}}, r"\['s'\]: .*builtins.set"),
        ([point(1, 2)], r"\[0\]: .*with names; use a dict"),
        ({(1, 2): 3}, r"expected texts and numbers as keys, got tuple"),
        ({None: 3}, r"keys, got NoneType"),
        (circle, r"does it hold itself"),
        ([2 ** (8 * format_limits.MOST_INT_BYTES)], r"\[0\]: .*whole number"),
    ]
    for tree, message in wrong:
        with pytest.raises(ConfigError, match=message):
            values.encode(tree, lambda leaf: None)


def test_trees_are_as_deep_as_the_manifest_can_hold() -> None:
    tree: Any = {1: 1}
    for _ in range(format_limits.MOST_TREE_DEPTH - 1):
        tree = {1: tree}
    text = json.dumps({"values": {"extra": values.encode(tree, never)}}).encode()
    assert same(values.decode(parse_json(text)["values"]["extra"], never), tree)
    with pytest.raises(ConfigError, match="within each other"):
        values.encode([tree], never)


WRONG_VALUES: list[Any] = [
    {},
    {"tuple": [], "dict": {}},
    {"set": []},
    {"tuple": 3},
    {"dict": []},
    {"items": {}},
    {"items": [[1]]},
    {"items": [[1, 2], [1, 3]]},
    {"items": [[1, 2], [1.0, 3]]},
    {"items": [[None, 2]]},
    {"items": [[[], 2]]},
    {"items": [[{"tuple": []}, 2]]},
    {"items": [[{"bytes": ""}, 2]]},
    {"counter": 3},
    {"bytes": "a"},
    {"bytes": "ä"},
    {"bytes": "YQ==\n"},
    {"bytes": 3},
    {"int": "12"},
    {"int": "0x"},
    {"int": "0xf\n"},
    {"int": 3},
    {"int": "0x1" + "0" * 9000},
    {"float": "inf"},
    {"float": "7FF0000000000000"},
    {"float": 1.0},
    {"text": "f"},
    {"text": "ff"},
    {"text": None},
    {"tensor": 3},
    {"tensor": ["a"]},
    1e400,
    2**64,
    "\ud800",
    {"dict": {"\ud800": 1}},
]


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=range(len(WRONG_VALUES)))
def test_wrong_values_are_refused(wrong: Any) -> None:
    for tree in (wrong, [1, wrong], {"tuple": [wrong]}):
        with pytest.raises(FormatError, match="values:"):
            values.decode(tree, never)


def test_the_number_and_depth_of_values_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MOST_TREE_NODES", 100)
    values.decode([0] * 99, never)
    for wrong in ([0] * 100, [[0] * 60, [0] * 60]):
        with pytest.raises(FormatError, match="at most 100"):
            values.decode(wrong, never)
        with pytest.raises(ConfigError, match="at most 100"):
            values.encode(wrong, never)
    deep: Any = 0
    for _ in range(format_limits.MOST_TREE_DEPTH + 1):
        deep = [deep]
    with pytest.raises(FormatError, match="within each other"):
        values.decode(deep, never)


# --- manifests ------------------------------------------------------------------------------------


def test_manifests_there_and_back(tmp_path: Path) -> None:
    manifest = write_checkpoint(tmp_path / "a", number=41)
    text = (tmp_path / "a" / MANIFEST).read_bytes()
    found = Manifest.parse(text)
    assert found == manifest and found.to_bytes() == text
    tensor = found.tensors["optimizer/layer.weight/exp_avg"]
    assert (tensor.section, tensor.key) == ("optimizer", "layer.weight/exp_avg")
    assert tensor.nbytes == 5 * 13 * 4 and len(tensor.parts) == 3
    assert found.tensors["model/empty"].parts[0].nbytes == 0
    json.loads(text)


def test_a_changed_manifest_is_corrupt(tmp_path: Path) -> None:
    text = write_checkpoint(tmp_path / "a").to_bytes()
    with pytest.raises(CorruptionError, match="sha256"):
        Manifest.parse(text.replace(b'"lr":0.001', b'"lr":0.002'))
    for cut in (0, 1, 50, len(text) - 1):
        with pytest.raises(FormatError, match="cut off"):
            Manifest.parse(text[:cut])


def test_another_version_is_named(tmp_path: Path) -> None:
    import hashlib

    text = write_checkpoint(tmp_path / "a").to_bytes()
    body = text[: text.rindex(b",")].replace(b'"version":1', b'"version":2')
    digest = hashlib.sha256(body).hexdigest().encode()
    with pytest.raises(FormatError, match="has version 2 of the format, expected 1"):
        Manifest.parse(body + b',"sha256":"' + digest + b'"}\n')


def tensor(name: str, *parts: CheckedPart, shape: tuple[int, ...] = (8,)) -> SavedTensor:
    return SavedTensor(name, "U8", shape, parts)


FILE = "model-00001.safetensors"


@pytest.mark.parametrize(
    ("saved", "files", "message"),
    [
        ([tensor("model/a", CheckedPart(FILE, 64, 8, 0))], {FILE: 73}, "end at 72"),
        ([tensor("model/a", CheckedPart(FILE, 64, 8, 0))], {FILE: 64}, "end at 72"),
        ([tensor("model/a", CheckedPart(FILE, 64, 8, 0))], {}, "file of its section"),
        ([tensor("other/a", CheckedPart(FILE, 64, 8, 0))], {FILE: 72}, "file of its section"),
        ([tensor("model/a")], {FILE: 72}, "no parts"),
        ([tensor("model/a", CheckedPart(FILE, 64, 4, 0))], {FILE: 68}, "parts have 4"),
        (
            [tensor("model/a", CheckedPart(FILE, 64, 4, 0), CheckedPart(FILE, 68, 8, 0))],
            {FILE: 76},
            "have 12",
        ),
        (
            [tensor("model/a", CheckedPart(FILE, 64, 4, 0), CheckedPart(FILE, 69, 4, 0))],
            {FILE: 73},
            "at 68",
        ),
        (
            [tensor("model/a", CheckedPart(FILE, 64, 4, 0), CheckedPart(FILE, 64, 4, 0))],
            {FILE: 68},
            "at 68",
        ),
        (
            [tensor("model/a", CheckedPart(FILE, 64, 8, 0), CheckedPart(FILE, 72, 0, 0))],
            {FILE: 72},
            "nbytes",
        ),
        ([tensor("model/a", CheckedPart(FILE, -8, 8, 0))], {FILE: 72}, "offset"),
        ([tensor("model/a", CheckedPart(FILE, 64, 8, -1))], {FILE: 72}, "crc32"),
        ([tensor("model/a", CheckedPart(FILE, 64, 8, 2**32))], {FILE: 72}, "crc32"),
        ([tensor("model/a", CheckedPart(FILE, 64, 8, 0))], {FILE: -1}, "whole number"),
        (
            [tensor("model/a", CheckedPart("../x-00001.safetensors", 64, 8, 0))],
            {FILE: 72},
            "section",
        ),
        ([tensor("a", CheckedPart(FILE, 64, 8, 0))], {FILE: 72}, "section, / and a name"),
        (
            [tensor("model/" + "a" * 5000, CheckedPart(FILE, 64, 8, 0))],
            {FILE: 72},
            "letters at most",
        ),
        ([], {"../x-00001.safetensors": 72}, "expected names such as"),
        ([], {"manifest.json": 72}, "expected names such as"),
        ([], {FILE + "\n": 72}, "expected names such as"),
        (
            [
                tensor("model/a", CheckedPart(FILE, 64, 8, 0)),
                tensor("model/b", CheckedPart(FILE, 68, 8, 0)),
            ],
            {FILE: 76},
            "begins at 68 .*expected 72",
        ),
        (
            [
                tensor("model/a", CheckedPart(FILE, 64, 8, 0)),
                tensor("model/b", CheckedPart(FILE, 80, 8, 0)),
            ],
            {FILE: 88},
            "begins at 80 .*expected 72",
        ),
        (
            [tensor("model/a", CheckedPart(FILE, 64, 65 << 20, 0), shape=(65 << 20,))],
            {FILE: 64 + (65 << 20)},
            "nbytes of a part",
        ),
    ],
)
def test_manifests_that_are_not_sound_are_neither_written_nor_read(
    saved: list[SavedTensor], files: dict[str, int], message: str
) -> None:
    manifest = Manifest(1, 0, "ab", files, {t.name: t for t in saved}, {})
    with pytest.raises(FormatError, match=message):
        manifest.to_bytes()


@pytest.mark.parametrize(
    "changed",
    [
        {"number": 0},
        {"number": True},
        {"number": 2**60},
        {"created_s": -1},
        {"created_s": 1.5},
        {"fingerprint": "xyz"},
        {"fingerprint": ""},
        {"fingerprint": "a" * 1000},
        {"values": {"extra": {"tensor": "other/none"}}},
        {"values": {"extra": object()}},
        {"values": {"extra": {"set": []}}},
        {"values": []},
    ],
)
def test_fields_of_a_manifest_are_checked(changed: dict[str, Any]) -> None:
    manifest = Manifest(1, 0, "ab", {}, {}, {})
    assert Manifest.parse(manifest.to_bytes()) == manifest
    with pytest.raises(FormatError):
        replace(manifest, **changed).to_bytes()


# --- directories ----------------------------------------------------------------------------------


def test_names_have_no_way_out() -> None:
    for name in ("model-00001.safetensors", "manifest.json", "A_b-1", "a" * 200):
        assert check_name(name) == name
    for name in (
        "",
        ".",
        "..",
        ".hidden",
        "a/b",
        "/a",
        "../a",
        "a\0",
        "a\n",
        "ä",
        "a" * 201,
        "a b",
    ):
        with pytest.raises(FormatError, match="expected the name of a file"):
            check_name(name)


def test_only_plain_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "good").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("good")
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "one").write_bytes(b"")
    os.link(tmp_path / "one", tmp_path / "two")
    before = len(os.listdir("/proc/self/fd"))
    with CheckpointDirectory(tmp_path) as directory:
        with directory.opened("good") as fd:
            assert os.read(fd, 9) == b"abc" and not os.get_inheritable(fd)
        assert directory.size("good") == 3
        for name, message in {
            "link": "a symbolic link",
            "folder": "a directory",
            "pipe": "a pipe",
            "one": "2 hard links",
            "none": "No such file",
            "..": "expected the name",
        }.items():
            for act in (directory.open, directory.size):
                with pytest.raises(FormatError, match=message):
                    act(name)
    directory.close()
    assert len(os.listdir("/proc/self/fd")) == before, "files stay open"
    with pytest.raises(StoreError, match="No such file"):
        CheckpointDirectory(tmp_path / "none")


def test_a_link_that_comes_between_look_and_open_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    good = tmp_path / "in" / "good"
    good.parent.mkdir()
    good.write_bytes(b"abc")
    look = os.stat

    def swap(path: Any, **options: Any) -> os.stat_result:
        found = look(path, **options)
        if path == "good":
            good.unlink()
            good.symlink_to(tmp_path / "secret")
        return found

    monkeypatch.setattr("offload.checkpoint.format.directory.os.stat", swap)
    with (
        CheckpointDirectory(tmp_path / "in") as directory,
        pytest.raises(FormatError, match="symbolic link"),
    ):
        directory.open("good")


def test_the_newest_whole_checkpoint_is_found(tmp_path: Path) -> None:
    for name, number in {"c": 1, "a": 2, "b": 3, "d": 5, "e": 6, "f": 7, "h": 8, ".g": 9}.items():
        write_checkpoint(tmp_path / name, number)
    (tmp_path / "d" / "model-00002.safetensors").unlink()
    os.truncate(tmp_path / "e" / "other-00001.safetensors", 4096)
    with (tmp_path / "f" / MANIFEST).open("r+b") as file:
        file.seek(1000)
        file.write(b"#")
    with (tmp_path / "h" / MANIFEST).open("r+b") as file:  # it has no readable number any more
        file.write(b"[")
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "bare").mkdir()
    write_checkpoint(tmp_path / ".elsewhere" / "x", 20)
    (tmp_path / "link").symlink_to(tmp_path / ".elsewhere" / "x")
    with CheckpointDirectory(tmp_path) as directory:
        numbers = list_numbers(directory)
    assert numbers == {"a": 2, "b": 3, "c": 1, "d": 5, "e": 6, "f": 7}
    with pytest.warns(UserWarning, match="passed over") as warned:
        assert find_newest(tmp_path) == tmp_path / "b"
    assert find_newest(tmp_path / "c") == tmp_path / "c"
    assert find_newest(tmp_path / "link") == tmp_path / "link", "the caller's own link"
    said = [str(each.message) for each in warned]
    assert len(said) == 4 and all(any(f"/{n}/" in text for text in said) for n in "defh")


def test_what_the_system_refuses_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that cannot be opened may be the newest: an older one would be taken in its
    place.
    """
    for name, number in {"a": 1, "b": 2}.items():
        write_checkpoint(tmp_path / name, number)
    own_open, own_pread = os.open, os.pread
    for code in (errno.EACCES, errno.EIO, errno.EMFILE):
        for name in ("b", MANIFEST, "pread"):

            def refuse(
                path: Any, *args: Any, of: str = name, number: int = code, **more: Any
            ) -> int:
                if str(path) == of and more.get("dir_fd") is not None:
                    raise OSError(number, os.strerror(number))
                return own_open(path, *args, **more)

            def pread(*args: Any, number: int = code) -> bytes:
                raise OSError(number, os.strerror(number))

            with monkeypatch.context() as patched:
                patched.setattr(os, "open", refuse)
                if name == "pread":
                    patched.setattr(os, "pread", pread)
                with pytest.raises(StoreError, match="see that it is there") as caught:
                    find_newest(tmp_path)
            assert caught.value.errno == code
    assert os.pread is own_pread and find_newest(tmp_path) == tmp_path / "b"


def test_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "file").write_bytes(b"")
    for path in (tmp_path, tmp_path / "bare", tmp_path / "none", tmp_path / "file"):
        with pytest.raises(ConfigError):
            find_newest(path)
    write_checkpoint(tmp_path / "a")
    (tmp_path / "a" / "model-00002.safetensors").unlink()
    for path in (tmp_path, tmp_path / "a"):
        with warnings.catch_warnings(), pytest.raises(FormatError, match="model-00002"):
            warnings.simplefilter("ignore")
            find_newest(path)


# --- without torch --------------------------------------------------------------------------------


def test_nothing_here_needs_torch_or_numpy(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "a")
    program = (
        "import sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
        "from offload.checkpoint.format import directory, manifest, values, verify\n"
        "from offload.storage import safetensors_header\n"
        f"print(directory.find_newest({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == str(tmp_path / "a"), done.stderr


# --- the document ---------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"


def run_document(path: Path, name: str) -> subprocess.CompletedProcess[str]:
    (program,) = re.findall(r"^```py\n(.*?)^```", DOCUMENT.read_text(), re.M | re.S)
    assert len([line for line in program.splitlines() if line]) == 10
    assert "offload" not in program
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", program, str(path), name],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_program_in_the_document_reads_and_checks_a_tensor(tmp_path: Path) -> None:
    saved = write_checkpoint(tmp_path / "a").tensors["model/layer.weight"]
    file = tmp_path / "a" / "model-00001.safetensors"
    begin = file.read_bytes()[saved.parts[0].offset :][:16].hex()
    done = run_document(tmp_path / "a", "model/layer.weight")
    assert done.stdout == f"F32 [5, 13] 260 bytes: {begin}\n", done.stderr
    assert run_document(tmp_path / "a", "model/empty").returncode == 0
    with file.open("r+b") as spoilt:
        spoilt.seek(saved.parts[1].offset)
        spoilt.write(b"#")
    done = run_document(tmp_path / "a", "model/layer.weight")
    assert done.returncode == 1
    assert f"model/layer.weight: damaged at {saved.parts[1].offset}" in done.stderr


def test_the_document_tells_the_limits_and_types() -> None:
    text = " ".join(DOCUMENT.read_text().split())
    for limit in (
        f"more than {format_limits.MOST_MANIFEST_BYTES >> 20} MiB",
        f"more than {format_limits.MOST_HEADER_BYTES:,} bytes",
        f"more than {format_limits.MOST_TENSORS:,} tensors, {format_limits.MOST_PARTS:,} parts, "
        f"{format_limits.MOST_FILES:,} files or {format_limits.MOST_TREE_NODES:,} values",
        f"JSON more than {format_limits.MOST_DEPTH} deep, "
        f"values more than {format_limits.MOST_TREE_DEPTH} deep",
        f"names of more than {format_limits.MOST_NAME_CHARS:,} letters",
        f"at most {format_limits.MOST_PART_BYTES >> 20} MiB",
        ", ".join(f"`{name}`" for name in SIZES),
    ):
        assert limit in text, limit
