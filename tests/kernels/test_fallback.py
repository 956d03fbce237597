"""Without the native core everything still works, in plain torch, and says so."""

from __future__ import annotations

import functools
import json
import subprocess
import sys

import pytest

from offload import kernels
from offload.core.errors import ConfigError

HIDE = "import sys; sys.modules['offload._native'] = None\n"  # makes `import offload._native` fail

WORK = """
import torch
from offload import kernels
from offload.kernels import rules
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


FORKS = """
import json, os, sys, traceback
import torch
answers = []
for code, environment in json.loads(sys.argv[1]):
    out, err = os.memfd_create("out"), os.memfd_create("err")
    pid = os.fork()
    if pid == 0:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.update(environment)
        status = 1
        try:
            exec(code, {"__name__": "__main__"})
            status = 0
        except SystemExit as error:
            status = error.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    answers.append([status, *(os.pread(file, 1 << 20, 0).decode() for file in (out, err))])
print(json.dumps(answers))
"""


@functools.cache
def answers() -> dict[str, subprocess.CompletedProcess[str]]:
    """Run each of these jobs in a process of its own, before which only torch was imported."""
    doctor = HIDE + "from offload.tools.cli import main; sys.exit(main(['doctor', '--json']))"
    jobs = {"hidden": (HIDE + WORK, {}), "doctor": (doctor, {})}
    for isa in (*kernels.available_isas(), "avx1024"):
        jobs[isa] = (WORK, {"OFFLOAD_ISA": isa})
    done = subprocess.run(
        [sys.executable, "-c", FORKS, json.dumps(list(jobs.values()))],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return {
        name: subprocess.CompletedProcess(name, *answer)
        for name, answer in zip(jobs, json.loads(done.stdout), strict=True)
    }


def test_plain_torch_takes_over_with_the_same_bits() -> None:
    done = answers()["hidden"]
    assert done.returncode == 0, done.stderr
    isa, reason = done.stdout.strip().split(" | ")
    assert isa == "reference"
    assert "the native core is missing" in reason
    assert "compiler" in reason


def test_doctor_says_so() -> None:
    done = answers()["doctor"]
    assert done.returncode == 0, done.stderr
    (row,) = (r for r in json.loads(done.stdout)["rows"] if r["name"] == "native core")
    assert row["status"] == "degraded"
    assert "the native core is missing" in json.dumps(row)


@pytest.mark.parametrize("isa", kernels.available_isas())
def test_the_environment_forces_an_instruction_set(isa: str) -> None:
    done = answers()[isa]
    assert done.stdout.split(" | ")[0] == isa, done.stderr


def test_an_unknown_instruction_set_is_an_error_that_lists_what_there_is() -> None:
    done = answers()["avx1024"]
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
    code = "import sys, offload; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
