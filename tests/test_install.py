"""What `pip` and `make` do: wheels with and without the native core, an sdist, environments."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path

import pytest

import offload

ROOT = Path(__file__).parent.parent


def run_backend(
    hook: str, target: Path, *settings: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run what pip runs to build (PEP 517), without pip, which takes as long again."""
    program = (
        "import sys, scikit_build_core.build as backend\n"
        "hook, target, *settings = sys.argv[1:]\n"
        "getattr(backend, hook)(target, dict(one.split('=') for one in settings))"
    )
    return subprocess.run(
        [sys.executable, "-c", program, hook, target, *settings],
        capture_output=True,
        text=True,
        timeout=250,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def build_wheel(target: Path, **environment: str) -> zipfile.ZipFile:
    done = run_backend("build_wheel", target, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = target.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build the wheel for the Python at hand, once, from the objects of `make` where they fit."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def top_level(wheel: zipfile.ZipFile) -> set[str]:
    return {name.split("/")[0] for name in wheel.namelist() if ".dist-info" not in name}


def run_tool(module: str, *arguments: str) -> str:
    """Return what a tool of the `wheel` extra prints; skip the test where it is missing."""
    pytest.importorskip(module, reason=f"needs {module}: pip install -e '.[wheel]'")
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_wheel_without_the_native_core_needs_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, OFFLOAD_NO_NATIVE="1", CC="/bin/false", CXX="/bin/false")
    assert str(wheel.filename).endswith("-py3-none-any.whl")
    assert not [name for name in wheel.namelist() if name.endswith((".so", ".cpp", ".h"))]
    assert {"offload/kernels/calls.py", "offload/py.typed"} <= set(wheel.namelist())
    assert top_level(wheel) == {"offload"}


def test_a_wheel_carries_the_native_core_and_nothing_beside_the_package(
    wheel: zipfile.ZipFile,
) -> None:
    natives = [name for name in wheel.namelist() if name.startswith("offload/_native.")]
    assert len(natives) == 2
    # A text of the engine on io_uring, which headers of an old kernel leave out without an error.
    assert any(b"mmap of the ring" in wheel.read(name) for name in natives)
    assert "offload/py.typed" in wheel.namelist(), "type checkers ignore our annotations without it"
    page = ROOT / "offload" / "tools" / "html_report"
    parts = {f"offload/tools/html_report/{file.name}" for file in page.glob("*.*")}
    assert {"one.html", "two.html", "page.css", "page.js"} <= {file.name for file in page.iterdir()}
    assert parts <= set(wheel.namelist()), "`offload report` reads them"
    # A top-level module named `kernels` would break the users of the well-known package.
    assert top_level(wheel) == {"offload"}


def test_a_wheel_is_for_one_python_before_the_stable_abi_and_for_all_from_it_on(
    wheel: zipfile.ZipFile,
) -> None:
    path = Path(str(wheel.filename))
    tag = "-".join(path.stem.split("-")[2:4])
    if sys.version_info < (3, 12):
        assert tag == "cp{0}{1}-cp{0}{1}".format(*sys.version_info)
        return
    assert tag == "cp312-abi3"
    assert "offload/_native.abi3.so" in wheel.namelist(), "tagged abi3, and for one Python alone"
    (audits,) = json.loads(run_tool("abi3audit", "--report", str(path)))["specs"].values()
    assert [one["result"]["is_abi3_baseline_compatible"] for one in audits["wheel"]] == [True]


def test_a_wheel_needs_the_libraries_of_every_linux_alone(wheel: zipfile.ZipFile) -> None:
    found = json.loads(run_tool("auditwheel", "show", "--json", str(wheel.filename)))
    assert found["overall_tag"].startswith("manylinux_2_")
    assert found["external_libs"] == {}
    assert not found["unsupported_isa"], "code for newer CPUs must be chosen at run time"


# Ten steps in plain torch and with state on disk, in what the wheel has installed.
TRAINING = """
import sys
import torch
import offload
from offload import _native, kernels

assert offload.__file__.startswith(sys.prefix) and _native.__file__.startswith(sys.prefix)
assert kernels.native_error() is None


def train(directory):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if directory:
        offload.wrap(optimizer, host_memory="256KiB", nvme=directory)
    for step in range(10):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if directory:
        assert offload.report(optimizer).disk_read_bytes > 0
        offload.close(optimizer)
    return list(model.parameters())


assert all(map(torch.equal, train(None), train(sys.argv[1])))
print("the same bits")
"""


def test_an_installed_wheel_trains_to_the_bits(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """In an environment that knows nothing of this checkout. What we depend on is seen through a
    path file, which does not run the path files over there: not that of an editable install.
    """
    python = make_environment(tmp_path / "environment") / "bin" / "python"
    install = ("install", "-q", "--no-deps", "--no-index", "--no-compile")
    run_there(sys.executable, "-m", "pip", "--python", python, *install, str(wheel.filename))
    (packages,) = (tmp_path / "environment").glob("lib/python3*/site-packages")
    seen = [path for path in sys.path if Path(path).name.endswith("-packages")]
    (packages / "dependencies.pth").write_text("\n".join(seen))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run_there(python, "-I", "-c", TRAINING, elsewhere) == "the same bits\n"
    command = python.parent / "offload"
    assert run_there(command, "--version", cwd=elsewhere) == f"offload {offload.__version__}\n"


def run_there(*command: str | Path, cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, cwd=cwd, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_without_a_compiler_the_error_says_what_to_do(tmp_path: Path) -> None:
    # A build directory of its own: another remembers the compiler that it was made with.
    build = f"build-dir={tmp_path / 'build'}"
    done = run_backend("build_wheel", tmp_path, build, CC="/bin/false", CXX="/bin/false")
    assert done.returncode != 0
    assert "OFFLOAD_NO_NATIVE=1 pip install" in done.stdout + done.stderr


def test_an_sdist_holds_what_tests_and_documents_need(tmp_path: Path) -> None:
    done = run_backend("build_sdist", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tables = {f"benchmarks/results/{path.name}" for path in ROOT.glob("benchmarks/results/*")}
    assert tables
    assert {*tables, "README.md", "LICENSE", "Makefile", "offload/py.typed"} <= names
    assert {"tests/conftest.py", "kernels/CMakeLists.txt", "docs/doctor.md"} <= names
    assert {".github/workflows/ci.yml", ".pre-commit-config.yaml", "CITATION.cff"} <= names
    assert not [name for name in names if name.startswith((".venv", ".make", "build/"))]


# --- make ----------------------------------------------------------------------------------------


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make what make looks at, below a path with a space; pip and torch are stand-ins."""
    checkout = tmp_path / "check out"
    (checkout / "kernels").mkdir(parents=True)
    (checkout / "kernels" / "thread_team.cpp").touch()
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
    os.utime(checkout / "kernels" / "thread_team.cpp", (later, later))
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
