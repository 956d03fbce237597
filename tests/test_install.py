"""What `pip` makes of it: wheels with the native core, without it and a compiler, and an sdist."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run_pip_wheel(
    target: Path, *options: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q"]
    return subprocess.run(
        [*command, *options, "-w", target, ROOT],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **environment},
    )


def build_wheel(target: Path, **environment: str) -> zipfile.ZipFile:
    done = run_pip_wheel(target, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


def top_level(wheel: zipfile.ZipFile) -> set[str]:
    return {name.split("/")[0] for name in wheel.namelist() if ".dist-info" not in name}


def test_a_wheel_without_the_native_core_needs_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, OFFLOAD_NO_NATIVE="1", CC="/bin/false", CXX="/bin/false")
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".cpp", ".h"))]
    assert {"offload/kernels.py", "offload/py.typed"} <= set(wheel.namelist())
    assert top_level(wheel) == {"offload"}


def test_a_wheel_carries_the_native_core_and_nothing_beside_the_package(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path)
    assert not str(wheel.filename).endswith("-any.whl")
    assert len([name for name in wheel.namelist() if name.startswith("offload/_native.")]) == 2
    assert "offload/py.typed" in wheel.namelist(), "type checkers ignore our annotations without it"
    # A top-level module named `kernels` would break the users of the well-known package.
    assert top_level(wheel) == {"offload"}


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path) -> None:
    # A build directory of its own: another remembers the compiler that it was made with.
    build = ("-C", f"build-dir={tmp_path / 'build'}")
    done = run_pip_wheel(tmp_path, *build, CC="/bin/false", CXX="/bin/false")
    assert done.returncode != 0
    assert "OFFLOAD_NO_NATIVE=1 pip install" in done.stdout + done.stderr


def test_an_sdist_holds_what_tests_and_documents_need(tmp_path: Path) -> None:
    program = "import sys, scikit_build_core.build as b; b.build_sdist(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tables = {f"benchmarks/results/{path.name}" for path in ROOT.glob("benchmarks/results/*")}
    assert tables
    assert {*tables, "README.md", "LICENSE", "Makefile", "offload/py.typed"} <= names
    assert {"tests/conftest.py", "kernels/CMakeLists.txt", "docs/doctor.md"} <= names
    assert not [name for name in names if name.startswith((".venv", ".make", "build/"))]
