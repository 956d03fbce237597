"""Without the native core everything still works, in plain torch, and says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from offload import kernels
from offload.errors import ConfigError

HIDE = "import sys; sys.modules['offload._native'] = None\n"  # makes `import offload._native` fail

WORK = """
import torch
from offload import kernels, rules
torch.manual_seed(1)
p = torch.nn.Parameter(torch.randn(1003))
mine, m, v = p.detach().clone(), torch.zeros(1003), torch.zeros(1003)
optimizer = torch.optim.AdamW([p], lr=1e-2, fused=True)
for step in (1, 2, 3):
    p.grad = torch.randn(1003)
    optimizer.step()
    rule = rules.Adam.at(
        step, lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True
    )
    kernels.update(rule, mine, p.grad, m, v)
assert torch.equal(mine, p.detach())
print(kernels.isa(), "|", kernels.native_error())
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


def test_plain_torch_takes_over_with_the_same_bits() -> None:
    done = run(HIDE + WORK)
    assert done.returncode == 0, done.stderr
    isa, reason = done.stdout.strip().split(" | ")
    assert isa == "reference"
    assert "the native core is not there" in reason
    assert "compiler" in reason


def test_doctor_says_so() -> None:
    code = HIDE + "from offload.cli import main; sys.exit(main(['doctor', '--json']))"
    done = run(code)
    assert done.returncode == 0, done.stderr
    (row,) = (r for r in json.loads(done.stdout)["rows"] if r["name"] == "native core")
    assert row["status"] == "degraded"
    assert "the native core is not there" in json.dumps(row)


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_the_environment_forces_an_instruction_set(isa: str) -> None:
    done = run(WORK, OFFLOAD_ISA=isa)
    assert done.stdout.split(" | ")[0] == isa, done.stderr


def test_an_unknown_instruction_set_is_an_error_that_lists_what_there_is() -> None:
    done = run(WORK, OFFLOAD_ISA="avx1024")
    assert done.returncode != 0
    assert "OFFLOAD_ISA: instruction set 'avx1024' is not available here, only" in done.stderr
    assert "reference" in done.stderr


def test_a_forced_set_must_exist_and_the_old_one_comes_back() -> None:
    before = kernels.isa()
    with (
        pytest.raises(ConfigError, match="forced_isa: instruction set 'sse9'"),
        kernels.forced_isa("sse9"),
    ):
        pass
    with kernels.forced_isa("reference"):
        assert kernels.native_error() == "OFFLOAD_ISA=reference asks for plain torch"
    assert kernels.isa() == before


def test_importing_offload_does_not_import_torch() -> None:
    done = run("import sys, offload; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
