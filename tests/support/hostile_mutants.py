"""Manifests and headers with changes that a fuzzer would make and a person would not: every byte
flipped, thousands of changes to the structure. `python hostile_mutants.py ROOT SEED COUNT PATTERNS`
judges them and prints JSON. PATTERNS: by how many bit patterns each byte is changed.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from offload.checkpoint.format.manifest import MANIFEST, Manifest
from offload.checkpoint.format.verify import verify
from support.formats import MODEL, put_manifest, write_checkpoint
from support.hostile_watch import Watch, judge, limit_memory, outcome, warm_up

SHARD = "model-00001.safetensors"
SHARDS = {SHARD: MODEL}
PATTERNS = (0x01, 0x04, 0x20, 0x80, 0xFF)
STRANGE: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    7,
    4095,
    2**31,
    2**32,
    2**53 + 1,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**25,
    0.5,
    -0.0,
    1e300,
    "",
    "..",
    "/",
    "/etc/passwd",
    "../x",
    "a\0b",
    "\ud800",
    "x" * 300,
    "F32",
    "manifest.json",
    SHARD,
    "sha256",
    [],
    {},
    [[]],
    [0, 0, 0, 0],
    {"tensor": "model/layer.bias"},
    {"tuple": []},
    {"": None},
    [[[[[[[[[[]]]]]]]]]],
]


# --- changes to a tree ----------------------------------------------------------------------------


def places(tree: Any) -> list[tuple[Any, Any]]:
    """List every container of a tree, with every key or index in it."""
    found: list[tuple[Any, Any]] = []
    stack = [tree]
    while stack:
        node = stack.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node))
        for key in keys:
            found.append((node, key))
            if isinstance(node[key], dict | list):
                stack.append(node[key])
    return found


def change(tree: Any, draw: random.Random) -> None:
    found = places(tree)
    if not found:
        return
    node, key = draw.choice(found)
    kind = draw.randrange(8)
    value = node[key]
    if kind == 0:
        node[key] = copy.deepcopy(draw.choice(STRANGE))
    elif kind == 1:
        del node[key]
    elif kind == 2:
        other, place = draw.choice(found)
        node[key] = copy.deepcopy(other[place])
    elif kind == 3 and type(value) is int:
        node[key] = draw.choice([value + 1, value - 1, value * 2, -value, value ^ 1 << 20])
    elif kind == 4 and type(value) is str:
        at = draw.randrange(len(value) + 1)
        node[key] = value[:at] + draw.choice(["/", "\0", "x", "ä", "0", "\n"]) + value[at + 1 :]
    elif kind == 5 and isinstance(node, list):
        node.insert(draw.randrange(len(node) + 1), copy.deepcopy(value))
    elif kind == 6 and isinstance(node, list):
        draw.shuffle(node)
    elif isinstance(node, dict):
        node[draw.choice(["", "more", "name", "tensor", str(key).upper()])] = value


def change_text(text: bytes, draw: random.Random) -> bytes:
    """Cut, repeat or spoil some bytes."""
    a, b = sorted(draw.randrange(len(text) + 1) for _ in range(2))
    b = min(b, a + draw.choice([1, 5, 40]))
    piece = text[a:b]
    put = draw.choice(
        [b"", piece * 2, piece[::-1], draw.randbytes(len(piece)), b"[" * 50, b"9" * 50]
    )
    return text[:a] + put + text[b:]


def sealed(body: bytes) -> bytes:
    return body + b',"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode()


def mutate_manifest(good: dict[str, Any], draw: random.Random) -> bytes:
    tree = copy.deepcopy(good)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        change(tree, draw)
    body = json.dumps(tree, separators=(",", ":")).encode()[:-1]
    return sealed(change_text(body, draw) if draw.random() < 0.2 else body)


def mutate_header(good: dict[str, Any], draw: random.Random) -> bytes:
    tree = copy.deepcopy(good)
    for _ in range(draw.choice([1, 1, 2])):
        change(tree, draw)
    text = json.dumps(tree, separators=(",", ":")).encode()
    text = change_text(text, draw) if draw.random() < 0.2 else text
    return struct.pack("<Q", 4088) + text.ljust(4088)[:4088]


# --- judging --------------------------------------------------------------------------------------


class Judges:
    def __init__(self, path: Path, watch: Watch, patterns: int) -> None:
        self.path, self.watch = path, watch
        self.patterns = patterns  # how many each byte is changed by
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.manifest = (path / MANIFEST).read_bytes()
        self.shard = (path / SHARD).read_bytes()

    def say(self, kind: str, result: str, is_right: bool, what: object) -> None:
        self.counts[f"{kind}: {result}"] += 1
        if self.watch.problems or not is_right:
            self.wrong.append(f"{kind} {what!a}: {result}; {self.watch.problems[:3]}")
            self.watch.problems.clear()

    def patterns_at(self, offset: int) -> list[int]:
        """Return the bit patterns to try at an offset; five neighbours together try all of them."""
        turned = offset % len(PATTERNS)
        return [*PATTERNS[turned:], *PATTERNS[:turned]][: self.patterns]

    def flip_manifest(self) -> None:
        """Flip bits of the manifest as damage does, and as an attacker does, who corrects the
        digest.
        """
        end = self.manifest.rindex(b",")
        for offset in range(len(self.manifest)):
            for pattern in self.patterns_at(offset):
                bad = bytearray(self.manifest)
                bad[offset] ^= pattern
                with self.watch.armed():
                    result = outcome(lambda bad=bad: Manifest.parse(bytes(bad)))
                self.say("flip", result, result != "ok", (offset, pattern))
            bad = bytearray(self.manifest)
            bad[offset] ^= PATTERNS[offset % len(PATTERNS)]
            if offset < end:
                with self.watch.armed():
                    result = outcome(lambda bad=bad: parse_twice(sealed(bytes(bad[:end]))))
                self.say("sealed flip", result, True, offset)

    def flip_header(self) -> None:
        last = self.shard.index(b"  ")
        for offset in range(4096):
            for pattern in self.patterns_at(offset)[: self.patterns if offset <= last else 1]:
                self.judge_header(bytes([self.shard[offset] ^ pattern]), offset, "header flip")

    def judge_header(self, piece: bytes, offset: int, kind: str) -> None:
        with (self.path / SHARD).open("r+b") as file:
            file.seek(offset)
            file.write(piece)
        is_changed = piece != self.shard[offset : offset + len(piece)]
        with self.watch.armed():
            result = outcome(lambda: verify(self.path))
        self.say(kind, result, (result == "damaged") == is_changed, (offset, piece[:300]))
        with (self.path / SHARD).open("r+b") as file:
            file.write(self.shard[:4096])

    def mutate(self, draw: random.Random, count: int) -> None:
        manifest = json.loads(self.manifest)
        del manifest["sha256"]
        header = json.loads(self.shard[8:4096])
        for number in range(count):
            if number % 4 == 3:
                self.judge_header(mutate_header(header, draw), 0, "header mutant")
            else:
                self.judge_manifest(mutate_manifest(manifest, draw))

    def judge_manifest(self, text: bytes) -> None:
        with self.watch.armed():
            result = outcome(lambda: parse_twice(text))
        self.say("mutant", result, True, text)
        if result != "ok":
            return
        put_manifest(self.path, text)
        with self.watch.armed():
            found = judge(self.path)
        # What a manifest says of tensors cannot have changed unseen.
        is_right = found["verify"] == "damaged" or (
            set(found.values()) == {"ok"} and tensors_of(text) == tensors_of(self.manifest)
        )
        self.say("sound mutant", found["verify"], is_right, text)
        put_manifest(self.path, self.manifest)


def tensors_of(text: bytes) -> dict[str, tuple[Any, ...]]:
    found = Manifest.parse(text).tensors
    return {name: (t.dtype, t.shape, t.parts[0].offset, t.nbytes) for name, t in found.items()}


def parse_twice(text: bytes) -> None:
    """Parse a manifest; if it is sound, check that it is the same once written and parsed again."""
    found = Manifest.parse(text)
    assert Manifest.parse(found.to_bytes()) == found


def main(root: Path, seed: int, count: int, patterns: int) -> None:
    outside = root / "outside"
    write_checkpoint(outside)
    path = root / "in" / "a"
    write_checkpoint(
        path, shards=SHARDS, values={"optimizer": {"dict": {"step": 7}}, "extra": None}
    )
    warm_up(path)
    judges = Judges(path, Watch(root, outside), patterns)
    limit_memory(128 << 20)
    judges.flip_manifest()
    judges.flip_header()
    judges.mutate(random.Random(seed), count)
    assert judge(path)["verify"] == "ok"
    sizes = {
        "manifest": len(judges.manifest),
        "digest": len(judges.manifest.rsplit(b",", 1)[1]) + 1,
    }
    print(json.dumps({"counts": judges.counts, "wrong": judges.wrong[:20], "sizes": sizes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
