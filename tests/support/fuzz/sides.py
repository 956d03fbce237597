"""One run of a case: a training loop on plain torch, or the same loop offloaded.

Both do what an act says with the same statements; `Plain` and `Offloaded` differ only in how the
optimizer is made, and in how they save, load, move and close.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import offload
from offload.core.ticket import TicketState
from support.fuzz import optimizers
from support.fuzz.cases import Act, Case, Place
from support.fuzz.judge import Seen, gradients_of, parameters_of, state_of
from support.fuzz.models import Drawn, Trouble, batch, build, loss_of

ROOM = "64MiB"
_LEAST = re.compile(r"the least that works is (?:about )?([\d,]+)")

SAVE_S = 120.0  # a background save that takes longer hangs


class Side:
    """A model, its optimizer, and the rest of the state of a training loop."""

    model: Drawn
    optimizer: Any
    scheduler: Any = None
    scaler: Any = None

    def __init__(self, case: Case) -> None:
        self.case = case
        self.waiting: list[Tensor] = []  # losses whose backward is to come
        self.is_unscaled = False
        self.has_late = False

    def do(self, act: Act) -> Seen:
        method = getattr(self, f"do_{act.name.replace(' ', '_')}")
        found: Seen | None = method(act)
        return found or {}

    @property
    def stateful(self) -> dict[str, Any]:
        found = {"scheduler": self.scheduler, "scaler": self.scaler}
        return {name: value for name, value in found.items() if value is not None}

    def param(self, number: int) -> tuple[nn.Module, nn.Parameter]:
        """Return one of the parameters, and a module that has it."""
        found = [
            (module, param)
            for module in self.model.modules()
            for param in module.parameters(recurse=False)
        ]
        return found[number % len(found)]

    def make_scheduler(self) -> None:
        self.scheduler = LinearLR(self.optimizer, 0.1, 1.0, 5)

    def make_scaler(self) -> None:
        if self.case.loop.has_scaler:
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
            self.scaler.scale(torch.ones(()))  # so that it has a scale before its first loss

    @property
    def has_gradients(self) -> bool:
        groups = self.optimizer.param_groups
        return any(p.grad is not None for group in groups for p in group["params"])

    def seen_gradients(self) -> Seen:
        return gradients_of(self.model) if self.case.loop.looks else {}

    # --- the loop ---------------------------------------------------------------------------------

    def do_forward(self, act: Act) -> Seen:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=act.how == "autocast"):
            loss = loss_of(self.model, batch(self.case.model, act.number))
        self.waiting.append(loss)
        return {"loss": loss.detach().clone()}

    def do_backward(self, act: Act) -> Seen:
        if not self.waiting:
            return {}
        loss = self.waiting.pop()
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        if act.how == "twice":
            scaled.backward(retain_graph=True)
        scaled.backward()
        return self.seen_gradients()

    def do_step(self, act: Act) -> Seen:
        self.waiting.clear()  # their parameters change
        if self.scaler is None:
            self.optimizer.step()
        elif self.has_gradients:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.is_unscaled = False
        return {"norm": getattr(self.optimizer, "grad_norm", None), **self.seen_scale()}

    def seen_scale(self) -> Seen:
        return {} if self.scaler is None else {"scale": self.scaler.get_scale()}

    def do_closure(self, act: Act) -> Seen:
        self.waiting.clear()

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch(self.case.model, act.number))
            loss.backward()
            return loss

        return {"loss": self.optimizer.step(closure).detach().clone()}

    def do_schedule(self, act: Act) -> Seen:
        self.scheduler.step()
        return {"lr": [float(group["lr"]) for group in self.optimizer.param_groups]}

    def do_zero(self, act: Act) -> Seen:
        whose = self.model if act.how == "model" else self.optimizer
        whose.zero_grad(set_to_none=act.how != "zeros")
        return self.seen_gradients()

    def do_clip_norm(self, act: Act) -> Seen:
        self.unscale()
        is_any_empty = not all(param.numel() for param in self.model.parameters())
        # of which torch takes no largest element
        kind = math.inf if act.how == "inf" and not is_any_empty else 2.0
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), act.value, kind)
        return {"norm": norm.clone(), **self.seen_gradients()}

    def do_clip_value(self, act: Act) -> Seen:
        self.unscale()
        if any(p.grad is not None for p in self.model.parameters()):  # torch fails on none
            nn.utils.clip_grad_value_(self.model.parameters(), act.value)
        return self.seen_gradients()

    def unscale(self) -> None:
        if self.scaler is not None and not self.is_unscaled and self.has_gradients:
            self.scaler.unscale_(self.optimizer)
            self.is_unscaled = True

    def do_overflow(self, act: Act) -> None:
        with_grad = [p for p in self.model.parameters() if p.grad is not None and p.numel()]
        if with_grad and not self.is_unscaled:
            param = with_grad[act.number % len(with_grad)]
            assert param.grad is not None
            param.grad[(0,) * param.ndim] = math.inf

    def do_drop(self, act: Act) -> None:
        self.waiting.clear()

    def do_set_rate(self, act: Act) -> None:
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(act.value)
            else:
                group["lr"] = act.value

    def do_add_group(self, act: Act) -> None:
        if not self.has_late:
            group: dict[str, Any] = {"params": optimizers.late_params(self.case, self.model)}
            self.optimizer.add_param_group({**group, "lr": 0.02} if act.how else group)
            self.has_late = True
            if self.scheduler is not None:  # it knows as many groups as there were
                self.make_scheduler()

    # --- around it --------------------------------------------------------------------------------

    def do_evaluate(self, act: Act) -> Seen:
        mode = torch.inference_mode() if act.how == "inference" else torch.no_grad()
        self.model.train(not act.value)
        with mode:
            found = self.model(batch(self.case.model, act.number))
        self.model.train()
        return {"output": found.clone()}

    def do_layer(self, act: Act) -> Seen:
        """Run one layer by itself, outside of a run of the model."""
        layers = self.model.layers
        layer: Any = layers[act.number % len(layers)]
        if layer.spec.kind in ("again", "borrow"):
            return {}  # it has no parameters and is no unit: its run fetches no other unit's
        dtype = getattr(torch, self.case.model.dtype)
        x = torch.ones(2, 2, self.case.model.width, dtype=dtype, requires_grad=True)
        layer(x).float().square().sum().backward()
        return {"input's": None if x.grad is None else x.grad, **self.seen_gradients()}

    def do_look(self, act: Act) -> Seen:
        return parameters_of(self.model) | gradients_of(self.model) | state_of(self.optimizer)

    def do_state(self, act: Act) -> Seen:
        if act.how == "model":
            return {name: value.clone() for name, value in self.model.state_dict().items()}
        return state_of(self.optimizer)

    def do_edit(self, act: Act) -> None:
        self.waiting.clear()
        if act.how == "load":
            self.model.load_state_dict(build(self.case.model, act.number).state_dict())
            return
        module, param = self.param(act.number)
        with offload.resident(module), torch.no_grad():
            if act.how == "rebind":
                param.data = param.data * act.value
            else:
                (param.data if act.how == "data" else param).mul_(act.value)

    def do_edit_gradient(self, act: Act) -> Seen:
        _, param = self.param(act.number)
        if param.grad is not None:
            if act.how in ("scale", "data"):
                (param.grad.data if act.how == "data" else param.grad).mul_(act.value)
            else:
                param.grad = None if act.how == "none" else param.grad * act.value
        return self.seen_gradients()

    def do_freeze(self, act: Act) -> None:
        self.waiting.clear()
        module, param = self.param(act.number)
        if module is self.model.embedding or param is self.model.embedding.weight:
            return  # something has to be trained
        if act.how == "thaw" and self.may_thaw(act.number):
            param.requires_grad_(True)
        elif act.how != "thaw":
            param.requires_grad_(False)
            param.grad = None

    def may_thaw(self, number: int) -> bool:
        raise NotImplementedError

    def do_fail(self, act: Act) -> None:
        """Have a layer raise. The gradients made until then are dropped."""
        switch = self.model.switch
        switch.where, switch.when = int(act.value) % len(self.model.layers), act.how
        try:
            loss_of(self.model, batch(self.case.model, act.number)).backward()
        except Trouble:
            pass
        finally:
            switch.where = -1
        self.model.zero_grad()

    def begin_anew(self) -> None:
        """Drop graphs and gradients, as after an interrupt or before a move."""
        self.waiting.clear()
        self.model.zero_grad()
        if self.scaler is not None and self.is_unscaled:
            self.scaler.update()
            self.is_unscaled = False

    def thaw(self) -> None:
        """Undo all freezes since the model was built."""
        drawn = dict(build(self.case.model).named_parameters())
        for name, param in self.model.named_parameters():
            param.requires_grad_(drawn[name].requires_grad)

    def do_plain_step(self, act: Act) -> Seen:
        """Take a step with the plain optimizer, after `close`."""
        self.begin_anew()
        loss = loss_of(self.model, batch(self.case.model, act.number))
        loss.backward()
        if self.is_exact and not optimizers.has_momentum(self.case):
            self.optimizer.step()
        return {"loss": loss.detach().clone(), **parameters_of(self.model)}

    @property
    def is_exact(self) -> bool:
        """Whether a plain optimizer of torch's has the same bits."""
        halves = {"bfloat16", "float16"} & self.case.dtypes
        is_lion = self.case.optimizer.kind == "Lion"
        return not halves and not is_lion and self.case.loop.max_grad_norm is None


class Plain(Side):
    """The judge's side, in plain torch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.model = build(case.model)
        self.optimizer = optimizers.judge(case, self.model)
        self.thawable: set[int] = set()
        if case.loop.schedule != "none":
            self.make_scheduler()
        self.make_scaler()
        self.saved: Any = None

    def may_thaw(self, number: int) -> bool:
        return number in self.thawable

    def do_save(self, act: Act) -> None:
        self.saved = self.snapshot()

    def snapshot(self) -> Any:
        return copy.deepcopy(
            (
                self.model.state_dict(),
                self.optimizer.state_dict(),
                [each.state_dict() for each in self.stateful.values()],
                (torch.get_rng_state(), random.getstate(), numpy.random.get_state()),
            )
        )

    def do_load(self, act: Act) -> None:
        if self.saved is not None:
            self.restore(self.saved)

    def restore(self, saved: Any) -> None:
        self.waiting.clear()
        model, optimizer, others, (torchs, pythons, numpys) = copy.deepcopy(saved)
        self.model.load_state_dict(model)
        self.optimizer.load_state_dict(optimizer)
        for each, state in zip(self.stateful.values(), others, strict=True):
            each.load_state_dict(state)
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        numpy.random.set_state(numpys)

    def do_add_group(self, act: Act) -> None:
        super().do_add_group(act)
        self.saved = None

    def do_move(self, act: Act) -> None:
        self.begin_anew()
        self.thaw()
        if isinstance(self.optimizer, optimizers.Masters):
            self.optimizer.grad_norm = None

    def do_close(self, act: Act) -> Seen:
        self.waiting.clear()
        return parameters_of(self.model) | (state_of(self.optimizer) if self.is_exact else {})


class Offloaded(Side):
    """The offloaded side.

    folders: directories for swap files.
    checkpoints: a directory for saves.
    """

    def __init__(self, case: Case, folders: Sequence[Path], checkpoints: Path) -> None:
        super().__init__(case)
        self._folders, self._checkpoints = folders, checkpoints
        self.saves = 0
        self.saved: Path | None = None
        self._tickets: list[Any] = []
        self.build(case.place)

    def build(self, place: Place, seed: int = 5) -> None:
        """Build model and optimizer, and offload them as the place says."""
        self.place = place
        self.model = build(self.case.model, seed)
        self.optimizer = optimizers.build(self.case, self.model, self.has_late)
        if self.case.loop.schedule == "before":
            self.make_scheduler()
        self.put(place)
        if self.case.loop.schedule == "after":
            self.make_scheduler()
        self.make_scaler()
        modules = list(self.model.modules())
        params = [p for module in modules for p in module.parameters(recurse=False)]
        self._trained = {n for n, p in enumerate(params) if p.requires_grad}

    def put(self, place: Place) -> None:
        if place.mode == "wrap":
            offload.wrap(self.optimizer, **self.fields(place))
        elif place.mode == "prepare":
            depth = "auto" if place.depth < 0 else place.depth
            fields = {"prefetch_depth": depth, "activations": place.activations}
            offload.prepare(
                self.model, self.optimizer, device="cpu", **fields, **self.fields(place, **fields)
            )

    def fields(self, place: Place, **others: Any) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_grad_norm": self.case.loop.max_grad_norm}
        if not place.memory:
            return {"host_memory": ROOM, **fields}
        fields["nvme"] = self._folders[: place.directories]
        least = self.least_bytes(place, **fields, **others)
        return {"host_memory": math.ceil(least * place.memory), **fields}

    def least_bytes(self, place: Place, **fields: Any) -> int:
        try:
            if place.mode == "wrap":
                offload.plan(self.optimizer, host_memory=1, **fields)
            else:
                offload.plan(self.model, self.optimizer, device="cpu", host_memory=1, **fields)
        except offload.CapacityError as error:
            found = _LEAST.search(str(error))
            assert found, f"no least in: {error}"
            return int(found[1].replace(",", ""))
        return 4096

    def may_thaw(self, number: int) -> bool:
        """Return whether the parameter may be trained again.

        A prepared model has room only for those that were trained when it was prepared.
        """
        params = sum(1 for m in self.model.modules() for _ in m.parameters(recurse=False))
        return self.place.mode != "prepare" or number % params in self._trained

    def do_save(self, act: Act) -> None:
        self.saves += 1
        path = self._checkpoints / f"{self.saves}"
        found = offload.save(
            path,
            self.model,
            self.optimizer,
            extra={"number": self.saves},
            background=act.how == "background",
            **self.stateful,
        )
        if act.how == "background":
            self._tickets.append((found, path))
        else:
            assert found == path
        self.saved = path

    def settle(self) -> None:
        """Wait for the background saves, and check that they succeeded."""
        for ticket, path in self._tickets:
            if ticket.state is not TicketState.COLLECTED:  # by a wait that was interrupted
                assert ticket.wait(SAVE_S) == path
        self._tickets.clear()

    def do_load(self, act: Act) -> None:
        if self.saved is not None:
            self.waiting.clear()
            self.settle()
            self.load(self.saved)

    def load(self, path: Path) -> None:
        extra = offload.load(path, self.model, self.optimizer, **self.stateful)
        assert extra == {"number": int(path.name)}

    def do_add_group(self, act: Act) -> None:
        super().do_add_group(act)
        self.saved = None

    def do_move(self, act: Act) -> None:
        assert act.place is not None
        self.begin_anew()
        self.thaw()  # a prepared model has no room for the state of what is frozen
        saved = self.saved
        self.do_save(Act("save", how=act.how))
        path, self.saved = self.saved, saved
        assert path is not None
        self.settle()
        offload.close(self.model)
        offload.close(self.optimizer)
        self.build(act.place, seed=77)
        self.load(path)

    def do_close(self, act: Act) -> Seen:
        self.close(act.how)
        return parameters_of(self.model) | (state_of(self.optimizer) if self.is_exact else {})

    def close(self, how: str = "") -> None:
        self.waiting.clear()
        self.settle()
        if how == "optimizer" and self.place.mode == "wrap":
            self.optimizer.close()
        offload.close(self.model)
        offload.close(self.optimizer)
        self.place = Place("plain")
