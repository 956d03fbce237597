"""`offload verify`: whole checkpoints are found whole, and no changed byte stays unseen."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pty
import random
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.formats import MODEL, put_manifest, write_checkpoint

from offload.checkpoint.format import verify as verify_module
from offload.checkpoint.format.manifest import MANIFEST
from offload.checkpoint.format.verify import Verdict, verify
from offload.core import format_limits
from offload.core.errors import ConfigError, StoreError
from offload.storage.safetensors_header import TensorSpec, build_header
from offload.tools import cli

pytestmark = pytest.mark.timeout(60)

SHARD = "model-00001.safetensors"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "a")
    return tmp_path / "a"


def flip(file: Path, offset: int, mask: int = 1) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= mask
    file.write_bytes(data)


def reseal(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and make its digest right again."""
    found = json.loads((path / MANIFEST).read_bytes())
    del found["sha256"]
    change(found)
    body = json.dumps(found, separators=(",", ":")).encode()[:-1]
    put_manifest(path, body + b',"sha256":"%b"}\n' % hashlib.sha256(body).hexdigest().encode())


def damage(path: Path) -> str:
    findings = verify(path)
    assert not findings.is_whole and findings.damages >= len(findings.damage) > 0
    return "\n".join(findings.damage)


# --- what is found --------------------------------------------------------------------------------


def test_a_whole_checkpoint_is_whole(path: Path) -> None:
    told: list[tuple[int, int]] = []
    findings = verify(path, lambda done, total: told.append((done, total)))
    nbytes = sum(f.stat().st_size for f in path.iterdir() if f.name != MANIFEST)
    assert findings.is_whole and findings.damage == [] and findings.foreign == []
    assert findings.checked_bytes == nbytes, "every byte"
    assert told[0] == (0, nbytes) and told[-1] == (nbytes, nbytes) and told == sorted(told)


def test_no_changed_byte_stays_unseen(path: Path) -> None:
    """Bytes of all files, in manifest, headers, the spaces behind them and data alike. The manifest
    and one header have every byte changed in test_hostile_checkpoints.
    """
    draw = random.Random(5)
    for file in sorted(path.iterdir()):
        good = file.read_bytes()
        offsets = draw.sample(range(len(good)), 80) + list(range(4090, min(len(good), 4110)))
        for offset in offsets:
            bad = bytearray(good)
            bad[offset] ^= 1 << draw.randrange(8)
            file.write_bytes(bad)
            assert not verify(path).is_whole, (file.name, offset)
        file.write_bytes(good)
    assert verify(path).is_whole


def test_damage_is_named(path: Path) -> None:
    flip(path / SHARD, 4096 + 150)
    found = damage(path)
    assert f"{path}/{SHARD}: 'model/layer.weight': the 100 bytes at 4196 have the CRC-32" in found
    flip(path / SHARD, 4096 + 262)
    flip(path / SHARD, 12)
    findings = verify(path)
    assert findings.damages == 3, findings.damage


def test_damage_is_counted_but_kept_only_so_far(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "MOST_FINDINGS", 3)
    file = path / "other-00001.safetensors"
    file.write_bytes(file.read_bytes()[:4096] + bytes(1000))
    findings = verify(path)
    assert (findings.damages, len(findings.damage)) == (10, 3)


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def act(path: Path) -> None:
        (path / SHARD).rename(path.parent / "moved")
        make(path / SHARD)

    return act


LAYOUTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: (path / SHARD).unlink(), "No such file"),
    "longer": (lambda path: os.truncate(path / SHARD, 9000), "has 9000 bytes, expected 4376"),
    "shorter": (lambda path: os.truncate(path / SHARD, 4375), "has 4375 bytes"),
    "empty": (lambda path: os.truncate(path / SHARD, 0), "has 0 bytes"),
    "link": (replace_by(lambda file: file.symlink_to("../moved")), "a symbolic link"),
    "two names": (lambda path: (path.parent / "x").hardlink_to(path / SHARD), "2 hard links"),
    "pipe": (replace_by(os.mkfifo), "a pipe"),
    "directory": (replace_by(lambda file: file.mkdir()), "a directory"),
    "swapped": (
        lambda path: os.replace(path / "model-00002.safetensors", path / SHARD),
        "has 41.. bytes, expected 4376",
    ),
}


@pytest.mark.parametrize("what", LAYOUTS)
def test_files_are_what_they_should_be(what: str, path: Path) -> None:
    act, message = LAYOUTS[what]
    act(path)
    found = damage(path)
    assert re.search(message, found), found


def test_tensors_in_other_places_are_seen(path: Path) -> None:
    """The header is right in itself, but its tensors are not those of the manifest."""
    for specs in (
        (MODEL[0]._replace(name="layer.other"), MODEL[1]),
        (MODEL[0]._replace(shape=(13, 5)), MODEL[1]),
        (MODEL[0]._replace(dtype="I32"), MODEL[1]),
        (MODEL[1], MODEL[0]),
        (TensorSpec("layer.weight", "U8", (280,)),),
    ):
        header, _ = build_header(specs)
        good = (path / SHARD).read_bytes()
        (path / SHARD).write_bytes(header + good[4096:])
        assert "its header has" in damage(path)
        (path / SHARD).write_bytes(good)


def test_other_headers_of_the_same_tensors_are_seen(path: Path) -> None:
    good = (path / SHARD).read_bytes()
    header, _ = build_header(MODEL[:2], {"format": "np"})
    (path / SHARD).write_bytes(header + good[4096:])
    assert "not written as it should be" in damage(path)
    (path / SHARD).write_bytes(
        good[:8] + good[8:4096].replace(b'{"', b'{ "', 1)[:4088] + good[4096:]
    )
    assert "not written as it should be" in damage(path)


def test_foreign_files_are_told_and_are_no_damage(path: Path) -> None:
    (path / "notes.txt").write_text("")
    (path / ".hidden").write_text("")
    (path / "model-00009.safetensors").symlink_to("/etc/passwd")
    os.mkfifo(path / "pipe")
    findings = verify(path)
    assert findings.is_whole
    assert findings.foreign == [".hidden", "model-00009.safetensors", "notes.txt", "pipe"]


def test_another_version_is_not_damage(path: Path) -> None:
    reseal(path, lambda found: found.update(version=2))
    with pytest.raises(ConfigError, match="has version 2 of the format, expected 1"):
        verify(path)
    flip(path / MANIFEST, 500)
    assert "sha256" in damage(path)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, path: Path) -> None:
    for wrong in (tmp_path / "none", path / SHARD, path / SHARD / "x"):
        with pytest.raises(ConfigError, match="expected the directory of a checkpoint"):
            verify(wrong)
    with pytest.raises(ConfigError, match=r"has no manifest.json.*checkpoints below it: \['a'\]"):
        verify(tmp_path)


def test_errors_of_the_disk_are_damage_and_our_own_trouble_is_not(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.preadv

    def broken(number: int) -> Callable[..., int]:
        def preadv(fd: int, buffers: Any, offset: int) -> int:
            if offset == 4096 + 100 and os.readlink(f"/proc/self/fd/{fd}").endswith(SHARD):
                raise OSError(number, os.strerror(number))
            return read(fd, buffers, offset)

        return preadv

    monkeypatch.setattr("offload.checkpoint.format.directory.os.preadv", broken(errno.EIO))
    findings = verify(path)
    assert findings.damages == 1 and "cannot read it: Input/output error" in findings.damage[0]
    monkeypatch.setattr("offload.checkpoint.format.directory.os.preadv", broken(errno.ENOMEM))
    with pytest.raises(StoreError) as refused:
        verify(path)
    assert refused.value.errno == errno.ENOMEM and refused.value.offset_bytes == 4196


def test_little_memory_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.formats.PART_BYTES", format_limits.MOST_PART_BYTES)
    shards = {SHARD: (TensorSpec("x", "U8", (80 << 20,)),)}
    write_checkpoint(tmp_path / "a", shards=shards, values={})
    tracemalloc.start()
    try:
        assert verify(tmp_path / "a").is_whole
        assert tracemalloc.get_traced_memory()[1] < 6 << 20
    finally:
        tracemalloc.stop()


# --- the command ----------------------------------------------------------------------------------


def test_exit_codes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", str(path)]) == 0
    printed = capsys.readouterr()
    assert (
        printed.out == (f"{path}: whole: number 1, 9 tensors in 4 files, 17.8 KiB checked\n")
        and not printed.err
    )
    flip(path / SHARD, 4100)
    assert cli.main(["verify", str(path)]) == 1
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{path}: damaged: {path}/{SHARD}: 'model/layer.weight'")
    assert printed.out.count("\n") == 1 and not printed.err
    assert cli.main(["verify", str(path.parent)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("offload: error: ")
    assert cli.main(["verify", str(path), "/nowhere"]) == 2, "the worst of all"
    with pytest.raises(SystemExit) as leaving:
        cli.main(["verify"])
    assert leaving.value.code == 2


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(path.parent / "b")
    flip(path.parent / "b" / SHARD, 4100)
    paths = [path, path.parent / "b", path.parent]
    assert cli.main(["verify", *map(str, paths), "--json"]) == 2
    printed = capsys.readouterr()
    whole, damaged, other = json.loads(printed.out)["checkpoints"]
    assert (whole["path"], whole["whole"], whole["tensors"]) == (str(path), True, 9)
    assert (damaged["whole"], damaged["damages"]) == (False, 1) and SHARD in damaged["damage"][0]
    assert other["whole"] is None and other["error"] in printed.err


def test_much_damage_is_told_in_few_lines(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = path / "other-00001.safetensors"
    file.write_bytes(file.read_bytes()[:4096] + bytes(1000))
    flip(path / SHARD, 4100)
    (path / "no\x1b[31mte").write_text("")
    assert cli.main(["verify", str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and lines[10].endswith("and 1 places more")
    assert lines[11].endswith(r"not looked at: 'no\x1b[31mte'")


def run_verify(
    path: Path, before: str = "pass", **options: Any
) -> subprocess.CompletedProcess[str]:
    program = (
        f"import sys; {before}; from offload.tools.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, "verify", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        **options,
    )


def test_it_needs_neither_torch_nor_numpy(path: Path, tmp_path: Path) -> None:
    gone = "sys.modules['torch'] = sys.modules['numpy'] = sys.modules['psutil'] = None"
    done = run_verify(path, before=gone)
    assert (done.returncode, done.stderr) == (0, ""), done
    (tmp_path / "broken" / "torch").mkdir(parents=True)
    (tmp_path / "broken" / "torch" / "__init__.py").write_text("raise OSError('libtorch.so')")
    done = run_verify(path, env={**os.environ, "PYTHONPATH": str(tmp_path / "broken")})
    assert (done.returncode, done.stderr) == (0, "")
    flip(path / SHARD, 4100)
    assert run_verify(path, before=gone).returncode == 1
    assert run_verify(path / "none", before=gone).returncode == 2
    looked = (
        "import atexit; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"
    )
    assert run_verify(path, before=looked).stderr == "False\n", "it does not even try"


def test_a_terminal_gets_a_line_that_goes_away(path: Path) -> None:
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "offload", "verify", str(path)],
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=60,
        )
        shown = os.read(ours, 100_000).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0 and b"whole" in done.stdout
    assert shown.startswith("\r  0% of 17.8 KiB, ") and shown.endswith(" \r")
    assert "\n" not in shown


def test_findings_without_manifest_are_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.truncate(path / MANIFEST, 100)
    findings = verify(path)
    assert isinstance(findings, Verdict) and findings.manifest is None
    assert cli.main(["verify", str(path)]) == 1
    assert "is it cut off?" in capsys.readouterr().out
