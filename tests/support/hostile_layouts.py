"""Directories that an attacker has made to lead a reader astray: `LAYOUTS`, each a function that
spoils a whole checkpoint. `python hostile_layouts.py ROOT` judges them all and prints JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.checkpoint.format.manifest import MANIFEST
from offload.core.strict_json import printable
from support.formats import put_manifest, write_checkpoint
from support.hostile_watch import Watch, judge, limit_memory, warm_up

SHARD, OTHER = "model-00001.safetensors", "model-00002.safetensors"
TIB = 1 << 40
Spoil = Callable[[Path], object]
LAYOUTS: dict[str, Spoil] = {}
# Changes that are no damage: readers never look at them.
HARMLESS: dict[str, Spoil] = {}


def layout(act: Spoil) -> Spoil:
    LAYOUTS[act.__name__] = act
    return act


def harmless(act: Spoil) -> Spoil:
    HARMLESS[act.__name__] = act
    return act


def outside(path: Path) -> Path:
    return path.parents[1] / "outside"


# --- another thing in the place of a file ---------------------------------------------------------


def put_instead(name: str, kind: str) -> Spoil:
    def act(path: Path) -> None:
        file = path / name
        file.rename(path.parent / ".away")
        away = outside(path) / name  # a good one, so that only its place is wrong
        makers: dict[str, Callable[[], object]] = {
            "link inside": lambda: (
                (path / "x").write_bytes(away.read_bytes()) and file.symlink_to("x")
            ),
            "link outside": lambda: file.symlink_to(away),
            "dangling link": lambda: file.symlink_to("nowhere"),
            "link to itself": lambda: file.symlink_to(name),
            "magic link": lambda: file.symlink_to("/proc/self/exe"),
            "hard link": lambda: file.hardlink_to(path.parent / ".away"),
            "pipe": lambda: os.mkfifo(file),
            "socket": lambda: bind(file),
            "directory": lambda: file.mkdir(),
            "device": lambda: make_device(file, stat.S_IFCHR, os.makedev(1, 5)),
            "disk": lambda: make_device(file, stat.S_IFBLK, os.makedev(7, 0)),
            "nothing": lambda: None,
            "empty file": lambda: file.write_bytes(b""),
            "zeros": lambda: (file.write_bytes(b""), os.truncate(file, 4376)),
            "huge hole": lambda: (file.write_bytes(b""), os.truncate(file, TIB)),
        }
        makers[kind]()

    act.__name__ = f"{kind} for {name}"
    return act


def bind(file: Path) -> None:
    here = os.getcwd()
    os.chdir(file.parent)  # a socket's path may not be long
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(file.name)
    os.chdir(here)


def make_device(file: Path, kind: int, number: int) -> None:
    if os.geteuid() == 0:
        os.mknod(file, kind | 0o600, number)
    else:  # the nearest that a user without privileges can make
        file.symlink_to("/dev/zero")


KINDS = [
    "link inside",
    "link outside",
    "dangling link",
    "link to itself",
    "magic link",
    "hard link",
    "pipe",
    "socket",
    "directory",
    "device",
    "disk",
    "empty file",
    "zeros",
    "huge hole",
]
for _name, _kinds in {SHARD: [*KINDS, "nothing"], MANIFEST: KINDS}.items():
    for _kind in _kinds:
        layout(put_instead(_name, _kind))


@layout
def a_shard_is_one_byte_shorter(path: Path) -> None:
    os.truncate(path / SHARD, (path / SHARD).stat().st_size - 1)


@layout
def a_shard_is_one_byte_longer(path: Path) -> None:
    os.truncate(path / SHARD, (path / SHARD).stat().st_size + 1)


@layout
def shards_have_changed_places(path: Path) -> None:
    (path / SHARD).rename(path / "x")
    (path / OTHER).rename(path / SHARD)
    (path / "x").rename(path / OTHER)


@layout
def a_shard_has_two_names_inside(path: Path) -> None:
    (path / "again").hardlink_to(path / SHARD)


# --- manifests with a digest that is right --------------------------------------------------------


def seal(path: Path, text: bytes) -> None:
    """Write a manifest with a digest that is right. text: a document in braces, without digest."""
    body = text[:-1]
    put_manifest(path, body + b',"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode())


def document(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / MANIFEST).read_bytes())
    del found["sha256"]
    return found


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> None:
    def act(path: Path) -> None:
        found = document(path)
        change(found)
        seal(path, json.dumps(found, separators=(",", ":")).encode())

    act.__name__ = name
    layout(act)


def swap_text(name: str, old: bytes, new: bytes) -> None:
    def act(path: Path) -> None:
        text = json.dumps(document(path), separators=(",", ":")).encode()
        assert old in text, old
        seal(path, text.replace(old, new, 1))

    act.__name__ = name
    layout(act)


NAMES = {
    "dots": "..",
    "one dot": ".",
    "no name": "",
    "absolute": "/etc/passwd",
    "absolute shard": "/model-00001.safetensors",
    "way up": "../../outside/model-00001.safetensors",
    "way down": "sub/model-00001.safetensors",
    "back slash": "..\\model-00001.safetensors",
    "NUL": "model-00001.safetensors\0",
    "NUL inside": "model-00001\0.safetensors",
    "line end": "model-00001.safetensors\n",
    "300 letters": "model-" + "0" * 282 + ".safetensors",
    "hidden": ".model-00001.safetensors",
    "the manifest": MANIFEST,
    "wide digits": "model-\uff100001.safetensors",
    "surrogate": "model-\ud800.safetensors",
    "escape": "\x1b[31mmodel-00001.safetensors",
    "a number": 5,
    "a list": ["model-00001.safetensors"],
    "twice": OTHER,
}
for _what, _text in NAMES.items():
    edit(f"file name: {_what}", lambda found, text=_text: found["files"][0].update(name=text))


def part(found: dict[str, Any], index: int = 0) -> list[Any]:
    first: list[Any] = found["tensors"][index]["parts"][0]
    return first


for _place, _what in enumerate(["file", "offset", "nbytes", "crc32"]):
    for _number in (-1, 2**31, 2**63, 2**64, 10**30, 1.5, 1e300, True, None, "1", [1]):
        edit(
            f"{_what} of a part: {_number}",
            lambda found, place=_place, n=_number: part(found).__setitem__(place, n),
        )
edit("offset in the header", lambda found: part(found).__setitem__(1, 8))
edit("one byte further", lambda found: part(found).__setitem__(1, 4097))
edit("the next tensor's bytes", lambda found: part(found, 1).__setitem__(1, 4096))
edit("another tensor's parts", lambda found: found["tensors"][1].update(found["tensors"][0]))
edit("parts in another order", lambda found: found["tensors"][0]["parts"].reverse())
edit("no parts", lambda found: found["tensors"][0].update(parts=[]))
edit("a part too many", lambda found: found["tensors"][0]["parts"].append([0, 4356, 0, 0]))
edit("a part twice", lambda found: found["tensors"][0]["parts"].append(part(found)))
edit("parts in two files", lambda found: found["tensors"][0]["parts"][1].__setitem__(0, 1))
edit("a tensor is missing", lambda found: found["tensors"].pop(0))
edit("a huge shape", lambda found: found["tensors"][0].update(shape=[2**62] * 60))
edit("a huge empty shape", lambda found: found["tensors"][0].update(shape=[2**62, 0]))
edit("a negative shape", lambda found: found["tensors"][0].update(shape=[-5, -13]))
edit("another section", lambda found: found["tensors"][0].update(name="other/layer.weight"))
edit("a name without end", lambda found: found["tensors"][0].update(name="model/" + "x" * 9999))
edit("files of no bytes", lambda found: found["files"][0].update(nbytes=0))
edit("no files", lambda found: found.update(files=[]))
edit("unknown key", lambda found: found.update(more=1))
edit("key is missing", lambda found: found.pop("created_s"))
edit("a number without end", lambda found: found.update(number=2**60))
edit(
    "values of a tensor that is not there", lambda found: found["values"].update(a={"tensor": "b"})
)
edit("values of a class", lambda found: found["values"].update(a={"object": "os.system"}))
edit("values as code", lambda found: found["values"].update(a={"eval": "exit(3)"}))
swap_text("number is NaN", b'"created_s":1800000000', b'"created_s":NaN')
swap_text("number is infinite", b'"created_s":1800000000', b'"created_s":1e999')
swap_text("endless digits", b'"created_s":1800000000', b'"created_s":' + b"9" * 1_000_000)
swap_text("a key twice", b'"created_s":1800000000', b'"created_s":1,"created_s":1')
swap_text("not ASCII", b'"extra":null', '"extra":"ä"'.encode())
swap_text("deep lists", b'"extra":null', b'"extra":' + b"[" * 100_000 + b"]" * 100_000)
swap_text("deep objects", b'"extra":null', b'"extra":' + b'{"tuple":[' * 90 + b"]}" * 90)
swap_text("unclosed lists", b'"extra":null', b'"extra":' + b"[" * 1_000_000)
swap_text("escaped quotes", b'"extra":null', b'"extra":"' + b'\\"' * 1_000_000)
swap_text("many lists", b'"extra":null', b'"extra":[' + b"[]," * 5_000_000 + b"[]]")
swap_text("many values", b'"extra":null', b'"extra":[' + b"0," * 1_200_000 + b"0]")
swap_text("spaces at the beginning", b'{"format"', b' {"format"')


@layout
def a_manifest_in_utf_16(path: Path) -> None:
    put_manifest(path, (path / MANIFEST).read_text().encode("utf-16"))


@layout
def a_manifest_with_a_mark_in_front(path: Path) -> None:
    put_manifest(path, b"\xef\xbb\xbf" + (path / MANIFEST).read_bytes())


@layout
def a_manifest_and_more(path: Path) -> None:
    put_manifest(path, (path / MANIFEST).read_bytes() * 2)


# --- headers --------------------------------------------------------------------------------------


def put_header(name: str, make: Callable[[bytes], bytes]) -> None:
    """Add a layout with another header, which `make` makes from the good first 4096 bytes."""

    def act(path: Path) -> None:
        data = (path / SHARD).read_bytes()
        header = make(data[:4096])
        assert len(header) == 4096 and header != data[:4096]
        (path / SHARD).write_bytes(header + data[4096:])

    act.__name__ = name
    layout(act)


def with_text(text: bytes) -> bytes:
    return struct.pack("<Q", 4088) + text.ljust(4088)


for _length in (0, 2, 4087, 4089, 100_000_001, 2**63, 2**64 - 1):
    put_header(f"header of {_length} bytes", lambda h, n=_length: struct.pack("<Q", n) + h[8:])
put_header("header without end", lambda h: with_text(b'{"' + b"x" * 4000))
put_header("deep header", lambda h: with_text(b'{"a":' + b"[" * 4000))
put_header("header is a list", lambda h: with_text(b"[]"))
put_header("empty header", lambda h: with_text(b"{}"))
put_header("header twice", lambda h: with_text(h[8:].rstrip() + b"{}"))
put_header("header of zeros", lambda h: bytes(4096))
put_header("overlap in the header", lambda h: h.replace(b"[260,280]", b"[240,260]"))
put_header("behind the end", lambda h: h.replace(b"[260,280]", b"[960,980]"))
put_header("a name twice", lambda h: h.replace(b"layer.weight", b"layer.bias", 1).ljust(4096))
put_header("tabs for spaces", lambda h: h.replace(b"  ", b"\t\t"))


# --- what else may lie there ----------------------------------------------------------------------


@harmless
def foreign_things(path: Path) -> None:
    (path / "model-00003.safetensors").symlink_to(outside(path) / SHARD)
    (path / "latest").symlink_to("/")
    os.mkfifo(path / "pipe")
    (path / "folder").mkdir()
    (path / "x\x1b[31m\n").write_bytes(b"")
    (Path(os.fsdecode(os.fsencode(path) + b"/\xff\xfe"))).write_bytes(b"")
    (path / ("n" * 255)).write_bytes(b"")


@harmless
def neighbours_that_claim_to_be_newer(path: Path) -> None:
    write_checkpoint(outside(path).parent / "elsewhere" / "z", number=90)
    (path.parent / "link").symlink_to(outside(path).parent / "elsewhere" / "z")
    write_checkpoint(path.parent / ".hidden", number=91)
    os.mkfifo(path.parent / "pipe")
    (path.parent / "file").write_bytes(b"")
    (path.parent / "loop").symlink_to("loop")
    torn = path.parent / "torn\x1b[31m"
    write_checkpoint(torn, number=92)
    (torn / SHARD).unlink()
    piped = path.parent / "piped"
    piped.mkdir()
    os.mkfifo(piped / MANIFEST)


def main(root: Path) -> None:
    away = root / "outside"
    write_checkpoint(away)
    (away / "passwd").write_bytes(b"secret")
    first = root / "first" / "a"
    write_checkpoint(first)
    warm_up(first)
    watch = Watch(root, away)
    limit_memory(256 << 20)
    found: dict[str, Any] = {}
    for number, (name, spoil) in enumerate({**LAYOUTS, **HARMLESS}.items()):
        path = root / f"{number}" / "a"
        write_checkpoint(path)
        spoil(path)
        with watch.armed():
            found[printable(name)] = judge(path)
        if watch.problems:
            found[printable(name)]["problems"] = "; ".join(watch.problems[:3])
            watch.problems.clear()
        shutil.rmtree(path.parent)
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
