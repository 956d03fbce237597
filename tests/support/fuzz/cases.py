"""A case of the fuzzer as pure data: a model, an optimizer, a loop, a place, and a list of acts.

`draw(seed)` makes one, without torch and without the engine, so that anything can run it: the
runner here, or a simulation. A failure is printed by `to_json` and replayed by `from_json`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

NATIVE = ("AdamW", "Adam", "SGD", "Adagrad", "Lion")
FUSED = NATIVE[:4]  # torch has them with `fused=True`
GENERIC = ("RMSprop", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD", "AMSGrad")
HALVES = ("bfloat16", "float16")


@dataclass(frozen=True)
class Layer:
    """One layer of the model; `models.py` says what the kinds are.

    size: hidden width, rank or number of experts. target: the layer that is used once more, or
    whose weight is borrowed. dtype: its own; "" for that of the model. again: checkpointed by the
    model, "reentrant" or "plain".
    """

    kind: str
    size: int = 3
    target: int = 0
    is_frozen: bool = False
    dropout: float = 0.0
    dtype: str = ""
    again: str = ""


@dataclass(frozen=True)
class Model:
    """The model of a case.

    segments: `checkpoint_sequential` over the layers in so many segments; 0: without.
    """

    layers: tuple[Layer, ...]
    width: int = 4
    words: int = 7
    dtype: str = "float32"
    is_tied: bool = False
    is_sequential: bool = False
    is_transposed: bool = False
    segments: int = 0


@dataclass(frozen=True)
class Optimizer:
    """The optimizer of a case.

    groups: number of parameter groups, to which the parameters are dealt out.
    late: number of last parameters that are in no group, and are added by `add_param_group`.
    """

    kind: str
    settings: tuple[tuple[str, Any], ...] = ()
    groups: int = 1
    late: int = 0
    has_tensor_lr: bool = False


@dataclass(frozen=True)
class Loop:
    """The settings of the loop that hold for all acts.

    schedule: the scheduler: "none", or made "before" or "after" the optimizer is offloaded.
    """

    schedule: str = "none"
    max_grad_norm: float | None = None
    has_scaler: bool = False
    threads: int = 1
    looks: bool = False  # reads gradients after each backward, for which the engine may fetch them


@dataclass(frozen=True)
class Place:
    """The budgets and settings that the model and the optimizer are offloaded with.

    mode: "plain", "wrap" or "prepare".
    memory: host memory as a multiple of the least that works; 0: enough for all, and no directory.
    """

    mode: str
    memory: float = 0.0
    chunk_numel: int = 1024
    large_bytes: int = 2048
    directories: int = 1
    depth: int = -1  # of the prefetch; -1: "auto"
    activations: str = "keep"


@dataclass(frozen=True)
class Act:
    """One statement of the loop, or an event such as Ctrl-C; `sides.py` has a `do_...` of its name,
    or `runner.py` handles it.
    """

    name: str
    number: int = 0
    how: str = ""
    value: float = 0.0
    place: Place | None = None


@dataclass(frozen=True)
class Case:
    seed: int
    model: Model
    optimizer: Optimizer
    loop: Loop
    place: Place
    acts: tuple[Act, ...]

    @property
    def dtypes(self) -> set[str]:
        own = {layer.dtype for layer in self.model.layers if layer.dtype}
        return {self.model.dtype} | own

    @property
    def places(self) -> list[Place]:
        return [self.place, *(act.place for act in self.acts if act.place is not None)]


def to_json(case: Case) -> str:
    """Return the case as JSON, without fields that have their default."""
    return json.dumps(_plain(case), separators=(",", ":"))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    if not hasattr(value, "__dataclass_fields__"):
        return value
    fields = value.__dataclass_fields__
    return {
        name: _plain(getattr(value, name))
        for name in fields
        if getattr(value, name) != fields[name].default
    }


def from_json(text: str) -> Case:
    found = json.loads(text)
    model = found["model"]
    layers = tuple(Layer(**layer) for layer in model.pop("layers"))
    optimizer = found["optimizer"]
    settings = tuple((name, _frozen(value)) for name, value in optimizer.pop("settings", ()))
    return Case(
        seed=found["seed"],
        model=Model(layers=layers, **model),
        optimizer=Optimizer(settings=settings, **optimizer),
        loop=Loop(**found["loop"]),
        place=Place(**found["place"]),
        acts=tuple(_act(act) for act in found["acts"]),
    )


def _act(found: dict[str, Any]) -> Act:
    place = found.pop("place", None)
    return Act(**found, place=None if place is None else Place(**place))


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def as_dict(case: Case) -> dict[str, Any]:
    return asdict(case)


# --- drawing --------------------------------------------------------------------------------------


def draw(seed: int) -> Case:
    """Draw the case of a seed; always the same one."""
    return _Draw(seed).case()


class _Draw:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(f"case {seed}")
        self.has_let_go = False  # a place so far does not keep activations

    def chance(self, share: float) -> bool:
        return self.rng.random() < share

    def case(self) -> Case:
        model = self.model()
        optimizer = self.optimizer(model)
        modes = ["wrap"] if model.is_transposed or optimizer.late else ["wrap", "prepare"]
        if "prepare" in modes:
            modes.append("prepare")  # has more to it
        self.modes = modes
        self.is_generic = optimizer.kind in GENERIC
        # Cases of which a plain optimizer has the same bits, so that an act may move to it.
        halves = {model.dtype, *(layer.dtype for layer in model.layers)} & set(HALVES)
        has_momentum = optimizer.kind == "SGD" and dict(optimizer.settings)["momentum"]
        self.has_plain = optimizer.kind in FUSED and not halves and not has_momentum
        loop = self.loop(halves)
        # With a scaler torch's fused ones leave other gradients and states when they skip a step.
        self.has_plain = self.has_plain and loop.max_grad_norm is None and not loop.has_scaler
        case = Case(self.seed, model, optimizer, loop, self.place(), ())
        return replace(case, acts=tuple(self.acts(case)))

    # --- the model --------------------------------------------------------------------------------

    def model(self) -> Model:
        rng = self.rng
        dtype = rng.choice(["float32"] * 5 + ["bfloat16"] * 2 + ["float16"])
        count = rng.choice([1, 2, 3, 3, 4, 5])
        is_mixed = self.chance(0.1)
        layers = tuple(self.layer(number, is_mixed) for number in range(count))
        is_sequential = self.chance(0.3)
        return Model(
            layers=layers,
            width=rng.choice([1, 2, 3, 4, 5, 7, 8, 11, 16]),
            words=rng.choice([3, 7, 17]),
            dtype=dtype,
            is_tied=self.chance(0.3),
            is_sequential=is_sequential,
            is_transposed=self.chance(0.05),
            segments=rng.choice([0, 0, 2]) if is_sequential and count > 1 else 0,
        )

    def layer(self, number: int, is_mixed: bool) -> Layer:
        rng = self.rng
        kinds = ["linear", "mlp", "mlp", "mlp", "attention", "norm", "batch", "experts", "branch"]
        kinds += ["nested", "adapter", "scale", "nothing", "never", "conv"]
        if number:
            kinds += ["again", "borrow"]
        kind = rng.choice(kinds)
        return Layer(
            kind=kind,
            size=rng.choice([1, 2, 3, 5, 8, 13]),
            target=rng.randrange(number) if number else 0,
            is_frozen=self.chance(0.1),
            dropout=0.3 if self.chance(0.15) else 0.0,
            dtype=rng.choice(["float32", "bfloat16"]) if is_mixed and self.chance(0.5) else "",
            again=rng.choice(["reentrant", "plain"]) if self.chance(0.1) else "",
        )

    # --- the optimizer ----------------------------------------------------------------------------

    def optimizer(self, model: Model) -> Optimizer:
        rng = self.rng
        kind = rng.choice(GENERIC) if self.chance(0.2) else rng.choice(("AdamW", *NATIVE))
        settings = getattr(self, f"settings_of_{kind.lower()}", self.no_settings)()
        settings["lr"] = rng.choice([1e-3, 1e-2, 0.1])
        return Optimizer(
            kind=kind,
            settings=tuple(sorted(settings.items())),
            groups=rng.choice([1, 1, 2, 3]),
            late=rng.choice([1, 2]) if self.chance(0.08) else 0,
            has_tensor_lr=kind in ("Adam", "AdamW") and self.chance(0.15),
        )

    def no_settings(self) -> dict[str, Any]:
        return {}

    def settings_of_adamw(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "betas": rng.choice([(0.9, 0.999), (0.4, 0.95), (0.0, 0.9)]),
            "eps": rng.choice([1e-8, 1e-4]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "maximize": self.chance(0.1),
        }

    settings_of_adam = settings_of_adamw
    settings_of_amsgrad = settings_of_adamw

    def settings_of_sgd(self) -> dict[str, Any]:
        rng = self.rng
        momentum = rng.choice([0.0, 0.9])
        nesterov = momentum > 0 and self.chance(0.4)
        return {
            "momentum": momentum,
            "nesterov": nesterov,
            "dampening": 0.0 if nesterov else rng.choice([0.0, 0.3]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "maximize": self.chance(0.1),
        }

    def settings_of_adagrad(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "lr_decay": rng.choice([0.0, 0.01]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "initial_accumulator_value": rng.choice([0.0, 0.5]),
        }

    def settings_of_lion(self) -> dict[str, Any]:
        rng = self.rng
        return {
            "betas": rng.choice([(0.9, 0.99), (0.5, 0.9)]),
            "weight_decay": rng.choice([0.0, 0.1]),
            "maximize": self.chance(0.1),
        }

    def settings_of_rmsprop(self) -> dict[str, Any]:
        rng = self.rng
        return {"momentum": rng.choice([0.0, 0.9]), "centered": self.chance(0.5)}

    # --- the loop and where it is -----------------------------------------------------------------

    def loop(self, halves: set[str]) -> Loop:
        rng = self.rng
        return Loop(
            schedule=rng.choice(["none", "none", "before", "after"]),
            max_grad_norm=rng.choice([0.05, 1.0]) if self.chance(0.15) else None,
            # torch's scaler refuses fp16 gradients
            has_scaler="float16" not in halves and self.chance(0.15),
            threads=rng.choice([1, 1, 2]),
            looks=self.chance(0.5),
        )

    def place(self, may_be_plain: bool = False) -> Place:
        rng = self.rng
        modes = self.modes + (["plain"] if may_be_plain and self.has_plain else [])
        mode = rng.choice(modes)
        memory = rng.choice([0.0, 1.0, 1.0, 1.02, 1.3, 2.0, 4.0])
        is_prepared = mode == "prepare"
        acts = ["keep", "keep", "recompute", "offload"] if memory else ["keep", "recompute"]
        found = Place(
            mode=mode,
            memory=0.0 if mode == "plain" else memory,
            # torch's own code has other bits in the last elements of each slice, so none is cut.
            chunk_numel=1 << 16 if self.is_generic else rng.choice([64, 80, 256, 1024, 4096]),
            large_bytes=rng.choice([64, 512, 2048]),
            directories=rng.choice([1, 1, 2]),
            depth=rng.choice([-1, -1, 0, 1, 3]) if is_prepared else -1,
            activations=rng.choice(acts) if is_prepared else "keep",
        )
        self.has_let_go |= found.activations != "keep"
        return found

    # --- acts -------------------------------------------------------------------------------------

    def acts(self, case: Case) -> Iterator[Act]:
        """Draw a loop as users write it, with other acts between some of its statements."""
        self.number = 0
        disturbed = self.rng.choice([0.0, 0.15, 0.15, 0.35])
        for _ in range(self.rng.choice([1, 2, 2, 3, 3, 4])):
            for act in self.iteration(case):
                yield act
                if self.chance(disturbed):
                    yield self.other(case)
        yield Act("look")
        if self.chance(0.5):
            yield Act("close", how=self.rng.choice(["model", "optimizer"]))
            if self.chance(0.5):
                yield Act("plain step", self.rng.randrange(100))

    def next(self) -> int:
        self.number += 1
        return self.number

    def may_cast(self, model: Model) -> bool:
        """Return whether the model may run under autocast and keep its bits.

        docs/limits.md: where activations are not kept, by the engine or by the model itself, a
        weight that is used again is cast anew under autocast, and its gradients have other bits.
        """
        runs_again = self.has_let_go or model.segments or any(a.again for a in model.layers)
        return not runs_again or all(a.kind not in ("again", "borrow") for a in model.layers)

    def iteration(self, case: Case) -> Iterator[Act]:
        rng = self.rng
        for _ in range(rng.choice([1, 1, 1, 2, 3])):
            is_cast = case.model.dtype == "float32" and self.chance(0.05)
            how = "autocast" if is_cast and self.may_cast(case.model) else ""
            yield Act("forward", self.next(), how)
            yield Act("backward", how="twice" if self.chance(0.04) else "")
        if self.chance(0.25):
            yield Act("clip norm", value=rng.choice([1e-3, 0.1, 10.0]), how=rng.choice(["", "inf"]))
        if self.chance(0.08):
            yield Act("clip value", value=rng.choice([1e-3, 0.1]))
        if self.chance(0.06):
            yield Act("closure", self.next())
        elif case.loop.has_scaler and self.chance(0.3):
            yield Act("overflow", rng.randrange(20))
        if self.chance(0.97):
            yield Act("step")
        if case.loop.schedule != "none":
            yield Act("schedule")
        if self.chance(0.95):
            how = rng.choice(["none", "none", "zeros", "model"])
            yield Act("zero", how=how)

    def other(self, case: Case) -> Act:
        rng = self.rng
        found = [self.evaluate, self.evaluate, self.edit, self.edit_gradient, self.fail, self.fail]
        found += [self.state, self.save, self.save, self.load, self.interrupt, self.interrupt]
        found += [self.look, self.layer_alone, self.drop, self.swap, self.set_rate, self.freeze]
        if self.chance(0.12):
            return self.move(case)
        if case.optimizer.late and self.chance(0.4):
            how = rng.choice(["", "other"])
            # A rate that is a tensor is one with the default, until the groups are loaded.
            return Act("add group", how="other" if case.optimizer.has_tensor_lr else how)
        return rng.choice(found)()

    def evaluate(self) -> Act:
        how = self.rng.choice(["no_grad", "inference", "inference"])
        return Act("evaluate", self.next(), how, value=self.rng.choice([0.0, 1.0]))

    def edit(self) -> Act:
        how = self.rng.choice(["in place", "data", "rebind", "load"])
        return Act("edit", self.rng.randrange(20), how, value=self.rng.choice([0.5, 1.25]))

    def edit_gradient(self) -> Act:
        how = self.rng.choice(["scale", "scale", "replace", "none", "data"])
        return Act("edit gradient", self.rng.randrange(20), how, value=0.75)

    def fail(self) -> Act:
        how = self.rng.choice(["forward", "backward"])
        return Act("fail", self.next(), how, value=float(self.rng.randrange(5)))

    def state(self) -> Act:
        return Act("state", how=self.rng.choice(["model", "optimizer"]))

    def save(self) -> Act:
        return Act("save", how=self.rng.choice(["", "background"]))

    def load(self) -> Act:
        return Act("load")

    def interrupt(self) -> Act:
        rng = self.rng
        what = rng.choice(["step", "step", "save", "background", "load", "backward", "evaluate"])
        return Act("interrupt", int(10 ** rng.uniform(0, 4.3)), what, value=float(self.next()))

    def look(self) -> Act:
        return Act("look")

    def layer_alone(self) -> Act:
        return Act("layer", self.rng.randrange(5))

    def drop(self) -> Act:
        return Act("drop")

    def swap(self) -> Act:
        return Act("swap")

    def set_rate(self) -> Act:
        return Act("set rate", value=self.rng.choice([0.0, 1e-3, 0.05]))

    def freeze(self) -> Act:
        return Act("freeze", self.rng.randrange(20), self.rng.choice(["", "", "thaw"]))

    def move(self, case: Case) -> Act:
        return Act("move", place=self.place(may_be_plain=True))
