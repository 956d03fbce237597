"""What `pip` makes of it: a wheel with the native core, and one without that needs no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def build_wheel(target: Path, **environment: str) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    done = subprocess.run(
        [*command, "-w", target, ROOT],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


def top_level(wheel: zipfile.ZipFile) -> set[str]:
    return {name.split("/")[0] for name in wheel.namelist() if ".dist-info" not in name}


def test_a_wheel_without_the_native_core_needs_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, OFFLOAD_NO_NATIVE="1", CC="/bin/false", CXX="/bin/false")
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".cpp", ".h"))]
    assert "offload/kernels.py" in wheel.namelist()
    assert top_level(wheel) == {"offload"}


def test_a_wheel_carries_the_native_core_and_nothing_beside_the_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert not str(wheel.filename).endswith("-any.whl")
    assert len([name for name in wheel.namelist() if name.startswith("offload/_native.")]) == 2
    # A top-level module named `kernels` would break the users of the well-known package.
    assert top_level(wheel) == {"offload"}
