"""With any default device and type that a program has set, host tensors are in host memory, and
have the type that they are meant to have.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.bits import assert_same_tensors
from torch import Tensor, nn
from torch.utils._device import _device_constructors

import offload
from offload.checkpoint.tensors import StridedState
from offload.core.errors import CapacityError

PACKAGE = Path(offload.__file__).parent
FACTORIES = {function.__name__ for function in _device_constructors()}
OF_ONE_TYPE = {"randint", "randperm", "tril_indices", "triu_indices"}  # 64-bit numbers
WIDTH = 8


def factories() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Call(func=ast.Attribute(ast.Name("torch"), name)) if name in FACTORIES:
                    yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node


def test_every_factory_names_its_device_and_type() -> None:
    wrong, count = [], 0
    for place, call in factories():
        count += 1
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        device, name = given.get("device"), call.func.attr  # type: ignore[attr-defined]
        if device is None:
            wrong.append(f"{place}: torch.{name} without a device")
            continue
        is_meta = isinstance(device, ast.Constant) and device.value == "meta"  # only its shape
        is_whole = name == "tensor" and "count" in ast.unparse(call.args[0])  # bools and ints
        if not ("dtype" in given or is_meta or is_whole or name in OF_ONE_TYPE):
            wrong.append(f"{place}: torch.{name} without a dtype")
    assert count > 50 and not wrong, "\n".join(wrong)


@pytest.fixture(params=["meta", "bfloat16"])
def default(request: pytest.FixtureRequest) -> Iterator[None]:
    """Set a default as programs for GPUs do. The meta device has no values: code that computes
    there fails.
    """
    dtype = torch.get_default_dtype()
    if request.param == "meta":
        torch.set_default_device("meta")
    else:
        torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


def made() -> tuple[nn.Module, list[Tensor]]:
    """Make a model and its batches before the program sets its defaults."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    return model, [torch.randn(3, WIDTH) for _ in range(4)]


MODEL, BATCHES = made()


def fit(model: nn.Module, optimizer: Any) -> list[Tensor]:
    seen = []
    for number, x in enumerate(BATCHES):
        for _ in range(1 + number % 2):
            model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            seen.append(model(x))
    return seen


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def expected() -> list[Tensor]:
    model = copy.deepcopy(MODEL)
    return fit(model, adamw(model))


EXPECTED = expected()


def test_training_has_the_same_bits(default: None, tmp_path: Path) -> None:
    """Within the least of memory, so that everything moves; saved, loaded, and closed."""
    model = copy.deepcopy(MODEL)
    optimizer = adamw(model)
    with pytest.raises(CapacityError, match="the least that works") as refused:
        offload.prepare(model, optimizer, device="cpu", host_memory=4096, nvme=tmp_path)
    least = int(str(refused.value).split("about ")[1].split()[0])
    offload.prepare(model, optimizer, device="cpu", host_memory=least, nvme=tmp_path)
    assert_same_tensors(fit(model, optimizer), EXPECTED)
    with offload.resident(model[0]):
        assert all(p.is_cpu and p.dtype == torch.float32 for p in model[0].parameters())
    state = optimizer.state_dict()["state"][0]
    assert all(value.is_cpu and value.dtype == torch.float32 for value in state.values())
    offload.save(tmp_path / "saved", model, optimizer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fit(model, optimizer)
    offload.load(tmp_path / "saved", model, optimizer)
    assert_same_tensors(list(model.state_dict().values()), list(before.values()))
    offload.close(model)


def test_wrapped_optimizers_count_their_steps(default: None, tmp_path: Path) -> None:
    """A 16-bit number cannot count beyond 256."""
    model = copy.deepcopy(MODEL)
    optimizer: Any = offload.wrap(adamw(model))
    assert_same_tensors(fit(model, optimizer), EXPECTED)
    state = optimizer.state_dict()
    for one in state["state"].values():
        one["step"] = torch.full((), 1001.0, dtype=torch.float32, device="cpu")
    optimizer.load_state_dict(state)
    steps = [one["step"] for one in optimizer.state_dict()["state"].values()]
    assert {(float(step), step.dtype) for step in steps} == {(1001.0, torch.float32)}
    optimizer.close()


def test_weights_of_another_type_are_cast_in_host_memory(default: None, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    values = {name: value.to(torch.float16) for name, value in MODEL.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    model = copy.deepcopy(MODEL).to("meta")
    offload.prepare(model, device="cpu", weights=tmp_path)
    found = model.state_dict()
    assert_same_tensors([found[n] for n in values], [v.float() for v in values.values()])
    offload.close(model)


def test_state_of_another_order_is_gathered_in_its_own_type(default: None) -> None:
    """The state of channels_last parameters, shared by ranks."""
    own = torch.arange(24, dtype=torch.float32, device="cpu") / 7  # not in 16 bits
    shape = (2, 3, 2, 2)
    known = {"number": 0, "own": (0, 24), "own_range": (0, 24), "shape": shape}
    record: Any = type("R", (), known)()
    record.stride = (12, 1, 6, 3)
    held: Any = type("H", (), {"record": record, "fields": ["exp_avg"]})()
    scattered = StridedState([held])
    scattered.add(0, "exp_avg", 0, own)
    team: Any = type("T", (), {"count": 1, "rank": 0, "bring_together": lambda _, mine: [mine]})()
    found = [values for _, _, values in scattered.gathered(team)]
    in_order = own.as_strided(record.shape, record.stride).contiguous().view(-1)
    assert_same_tensors(found, [in_order])
