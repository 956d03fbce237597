"""Other systems than Linux: macOS, imitated as far as Python sees it, and Windows."""

from __future__ import annotations

import subprocess
import sys

MAC = """
import mmap, os, platform, sys, tempfile
import torch, torch._dynamo
from torch import nn

# What Python lacks there, and the native core.
sys.platform = "darwin"
platform.system = lambda: "Darwin"
for module, names in (
    (os, "O_DIRECT O_TMPFILE posix_fallocate posix_fadvise fdatasync sched_getaffinity "
         "sched_setaffinity memfd_create eventfd splice copy_file_range pidfd_open"),
    (mmap, "MADV_HUGEPAGE MADV_DONTFORK MADV_POPULATE_READ MADV_POPULATE_WRITE MAP_POPULATE"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


class NoNative:
    def find_spec(self, name, path=None, target=None):
        if name == "offload._native":
            raise ImportError("no native core here")


sys.meta_path.insert(0, NoNative())
import offload


def train(kind, directory):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(40)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    if kind == "wrap":
        offload.wrap(optimizer, host_memory="600KiB", nvme=directory)
    if kind == "prepare":
        model, optimizer = offload.prepare(
            model, optimizer, host_memory="900KiB", nvme=directory
        )
    for step in range(3):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    if kind != "plain":
        told = offload.report(optimizer)
        assert told.disk_engine == "aiofiles" and told.disk_read_bytes > 0
        assert "I/O engine io_uring" in told.fallbacks
        offload.save(f"{directory}/{kind}", model, optimizer)
        offload.load(f"{directory}/{kind}", model, optimizer)
        offload.close(model if kind == "prepare" else optimizer)
    return [param.detach().clone() for param in model.parameters()]


with tempfile.TemporaryDirectory() as directory:
    plain = train("plain", directory)
    for kind in ("wrap", "prepare"):
        assert all(map(torch.equal, plain, train(kind, directory))), kind
print("the same bits")
"""


def test_a_mac_as_python_sees_it_trains_to_the_bits_on_the_reference_path() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MAC], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0 and "the same bits" in done.stdout, done.stderr


def test_windows_is_told_to_use_wsl2() -> None:
    code = "import sys; sys.platform = 'win32'; import offload"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "ImportError: offload: Windows" in done.stderr and "WSL2" in done.stderr
