"""What `pip` and `make` do: wheels with and without the native core, an sdist, environments."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

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


# --- make ----------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What make looks at, below a path with a space; pip and torch are stand-ins."""
    checkout = tmp_path / "check out"
    (checkout / "kernels").mkdir(parents=True)
    (checkout / "kernels" / "crew.cpp").touch()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, checkout)
    fakes = tmp_path / "fakes"
    (fakes / "pip").mkdir(parents=True)
    (fakes / "pip" / "__main__.py").write_text(
        "import sys\nwith open('pip.log', 'a') as log:\n    print(sys.prefix, file=log)\n"
    )
    (fakes / "torch.py").write_text("__version__ = '2.13.0'")
    monkeypatch.setenv("PYTHONPATH", str(fakes))
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON"):  # we may run below make ourselves
        monkeypatch.delenv(name, raising=False)
    return checkout


def make_environment(path: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True, timeout=60)
    return path


def run_make(checkout: Path, *arguments: str, code: int = 0) -> str:
    done = subprocess.run(
        ["make", *arguments], capture_output=True, text=True, timeout=60, cwd=checkout
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def pip_calls(checkout: Path) -> list[str]:
    return (checkout / "pip.log").read_text().splitlines()


def test_make_sets_up_once_and_again_after_a_change(checkout: Path, tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "an environment")
    chosen = f"PYTHON={environment / 'bin' / 'python'}"
    run_make(checkout, "setup", chosen)
    assert pip_calls(checkout) == [str(environment)] * 3
    run_make(checkout, "setup", chosen)
    assert len(pip_calls(checkout)) == 3
    later = time.time() + 10
    os.utime(checkout / "kernels" / "crew.cpp", (later, later))
    run_make(checkout, "setup", chosen)
    assert len(pip_calls(checkout)) == 4


def test_make_knows_environments_apart(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.environ["PATH"]
    environments = [make_environment(tmp_path / name) for name in ("one", "two")]
    for environment in environments:
        monkeypatch.setenv("PATH", f"{environment / 'bin'}{os.pathsep}{path}")
        run_make(checkout, "setup", "PYTHON=python")
    assert pip_calls(checkout) == [str(one) for one in environments for _ in range(3)]


def test_make_takes_python_from_its_command_line_only(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON", "/usr/bin/env")
    shown = run_make(checkout, "--dry-run", "setup")
    assert "python3 -m venv .venv" in shown
    assert "/usr/bin/env" not in shown
    shown = run_make(checkout, "setup", "PYTHON=/no/python", code=2)
    assert "PYTHON=/no/python does not run; give the path of a Python 3.11 or later" in shown
