"""Compiles the extension, once per torch, compiler and source; as a program: only that."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "fake_accelerator"

# Two units that take about as long as each other, for two cores. Most of the time goes into torch's
# headers, so a unit reads them once for several files.
UNITS = (
    ("stream", "memory", "host", "view", "generator", "guard", "copy"),
    ("kernel", "tensor", "autocast", "bindings"),
)


def _command() -> list[str]:
    """Return the compiler and its flags, which are part of the cache's key."""
    flags = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden"]
    flags += ["-Wall", "-Werror=return-type"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [f"-isystem{path}" for path in cpp_extension.include_paths()]
    flags += [f"-isystem{sysconfig.get_paths()['include']}", f"-I{HERE}"]
    return flags


def _key(command: list[str]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([command[0], "--version"], capture_output=True, check=True, timeout=60)
    for part in (torch.__version__, str(UNITS), str(command)):
        digest.update(part.encode() + b"\0")
    digest.update(version.stdout)
    for path in sorted(HERE.glob("*.cpp")) + sorted(HERE.glob("*.h")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(directory: Path, command: list[str], target: Path) -> None:
    """Compile the units at the same time and link them. The library appears whole or not at all."""
    running = []
    for number, files in enumerate(UNITS):
        unit = directory / f"unit{number}.cpp"
        unit.write_text("".join(f'#include "{HERE / file}.cpp"\n' for file in files))
        job = [*command, "-c", str(unit), "-o", str(unit.with_suffix(".o"))]
        pipe = subprocess.PIPE
        running.append(subprocess.Popen(job, stdout=pipe, stderr=subprocess.STDOUT, text=True))
    for job in running:
        output, _ = job.communicate(timeout=900)
        if job.returncode != 0:
            raise RuntimeError(f"the fake accelerator could not be compiled:\n{output}")
    part = target.with_suffix(".part")
    link = [command[0], "-shared", "-o", str(part)]
    link += [str(directory / f"unit{number}.o") for number in range(len(UNITS))]
    for path in cpp_extension.library_paths():
        link += [f"-L{path}", f"-Wl,-rpath,{path}"]
    link += ["-lc10", "-ltorch_cpu", "-ltorch"]
    done = subprocess.run(link, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"the fake accelerator could not be linked:\n{done.stderr}")
    part.rename(target)


def library() -> Path:
    """Return the path of the compiled extension, built if need be. Several processes may call it at
    once.
    """
    command = _command()
    directory = CACHE / _key(command)
    target = directory / "fake_accelerator.so"
    if not target.exists():
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(directory, command, target)
    return target


if __name__ == "__main__":
    library()
