"""A model and its optimizer as a workload that has never run, and the smallest budgets for it.

Which tier its bytes would be in is decided by `simulation.arrangement`, which plans as the engine
does; the smallest budgets are found by a search that calls the engine's division of host memory
(`planning.shares`). Nothing is allocated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import nn

from offload.core.config import format_size
from offload.core.errors import CapacityError
from offload.optim.choose import choose_recipe
from offload.optim.records import make_records, spec_of
from offload.params.device_gradients import staging_bytes
from offload.params.gradients import place_bytes
from offload.planning.layout import ELEMENT_BYTES, MASTER, ParamSpec
from offload.planning.planner import Plan, least_arena_bytes, least_spill_bytes, make_plan
from offload.planning.profile import Profile
from offload.planning.shares import DEVICE_SPARE_BYTES, UnitSizes, on_device_bytes, share_out_sizes
from offload.planning.unit import Unit, enclosing
from offload.telemetry.run_file import ParamFact, UnitFact
from offload.tools.forecast.footprint import Cost, Footprint, make_optimizer
from offload.tools.forecast.machines import flops_of
from offload.tools.forecast.workload import Workload, WorkloadUse

_PAGE = 4096
_EXACT = 1e-3  # of the smallest budget: the search ends within this share
_LAYERS_HERE = 2  # whose activations are on the device while the others are offloaded


@dataclass(frozen=True)
class ModelCost:
    """The cost of a model's training, before any budget. specs: of all parameters of the optimizer.
    on_device: the model runs on a device.
    """

    footprint: Footprint
    specs: tuple[ParamSpec, ...]
    on_device: bool

    @staticmethod
    def of(footprint: Footprint, optimizer: str, on_device: bool) -> ModelCost:
        """Combine the footprint with an optimizer, one of `forecast_request.OPTIMIZERS`."""
        made = make_optimizer(optimizer, footprint.model)
        records = make_records(made, choose_recipe(made, elementwise=False), made.state)
        unit_of = {m.param: unit.number for unit in footprint.units for m in unit.members}
        specs = tuple(spec_of(record, unit_of[record.param]) for record in records)  # type: ignore[index]
        return ModelCost(footprint, specs, on_device)

    def workload(self, machine: Profile) -> Workload:
        """Make the workload for a machine: it says how long each use computes there."""
        footprint = self.footprint
        return Workload(
            title=footprint.name,
            units=self._unit_facts(),
            params=tuple(ParamFact.of(spec) for spec in self.specs if spec.fields),
            uses=tuple(self._use(cost, machine) for cost in footprint.uses),
            between_s=0.0,
            activation_bytes=footprint.activation_bytes,
            logits_bytes=footprint.logits_bytes,
            flops=float(footprint.flops),
            tokens=footprint.tokens,
            dtype=footprint.dtype,
            device="device" if self.on_device else "cpu",
        )

    def _use(self, cost: Cost, machine: Profile) -> WorkloadUse:
        """Compute the seconds of a use: matrix products at the profile's FLOP/s, the rest, on the
        CPU, at the speed of memory. On a device the rest is left out: memory there is so much
        faster that the published speeds leave room for it.
        """
        flops_per_s = flops_of(machine, self.footprint.dtype)
        seconds = cost.flops / flops_per_s if flops_per_s else 0.0
        if not self.on_device and machine.memory_bytes_per_s:
            seconds += cost.moved_bytes / machine.memory_bytes_per_s
        return WorkloadUse(cost.phase, cost.unit, seconds)

    def _unit_facts(self) -> tuple[UnitFact, ...]:
        kept = enclosing(self.units)
        return tuple(
            UnitFact(u.name, u.nbytes, u.needs, u.number in kept, not u.nbytes) for u in self.units
        )

    # --- sizes ------------------------------------------------------------------------------------

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.footprint.units

    @cached_property
    def param_bytes(self) -> int:
        """The bytes of all blocks."""
        return sum(unit.nbytes for unit in self.units)

    @cached_property
    def grad_bytes(self) -> int:
        return sum(self._gradients)

    @cached_property
    def state_bytes(self) -> int:
        return self._whole_state.state_bytes

    @cached_property
    def _whole_state(self) -> Plan:
        return make_plan(self.specs, None, has_disk=False)

    @cached_property
    def _trained(self) -> list[nn.Parameter]:
        members = [member.param for unit in self.units for member in unit.members]
        return [param for param in dict.fromkeys(members) if param.requires_grad]

    @cached_property
    def _gradients(self) -> list[int]:
        return [place_bytes(param) for param in self._trained]

    @property
    def checkpoint_bytes(self) -> int:
        """The bytes of one checkpoint: parameters in their own dtypes, all optimizer state in fp32,
        and the model's buffers.
        """
        fields = sum(spec.numel * len(spec.fields) for spec in self.specs)
        return self.footprint.param_bytes + 4 * fields + self.footprint.buffer_bytes

    @property
    def passing_bytes(self) -> int:
        """The bytes of activations and logits where the model runs, at the largest moment."""
        return self.activations_here_bytes + self.footprint.logits_bytes

    @property
    def activations_here_bytes(self) -> int:
        """The bytes of activations where the model runs. On a device from which they are
        offloaded, only some layers' are there at once.
        """
        footprint = self.footprint
        if footprint.activations == "offload" and self.on_device:
            return min(footprint.activation_bytes, _LAYERS_HERE * footprint.layer_bytes)
        return footprint.activation_bytes

    @property
    def recompute_note(self) -> str | None:
        """Why recompute has no effect, if it was requested and finds no layer; otherwise None."""
        footprint = self.footprint
        if footprint.activations != "recompute" or footprint.recomputed_layers:
            return None
        return (
            'activations="recompute" finds no layer to run again: none is in a list of layers; '
            "checkpoint them in the model itself"
        )

    @property
    def plain_bytes(self) -> int:
        """The bytes that torch alone would need in one place: for everything, with the same
        precision.
        """
        footprint = self.footprint
        kept = footprint.activation_bytes + footprint.logits_bytes + footprint.buffer_bytes
        return self.param_bytes + self.grad_bytes + self.state_bytes + kept

    # --- budgets ----------------------------------------------------------------------------------

    @property
    def device_parts(self) -> dict[str, int]:
        """The least bytes that must be on the device at once, by what they are for."""
        return {
            "one unit at a time": self._sizes.least_device_bytes,
            "buffers": on_device_bytes(self.footprint.buffer_bytes) + DEVICE_SPARE_BYTES,
            "activations": self.activations_here_bytes,
            "logits and what passes": self.footprint.logits_bytes,
        }

    def check_device(self, device_bytes: int) -> None:
        """Raise `CapacityError` if not even one unit at a time works within the budget."""
        needed = sum(self.device_parts.values())
        if needed <= device_bytes:
            return
        each = ", ".join(f"{name} {format_size(n)}" for name, n in self.device_parts.items())
        is_recomputed = self.footprint.activations == "recompute"
        note = self.recompute_note
        raise CapacityError(
            f"device_memory: {format_size(device_bytes)} ({device_bytes} bytes) are allowed; "
            f"{each} need {format_size(needed)} ({needed} bytes); raise device_memory, or take a "
            "smaller batch or shorter texts"
            + ("" if is_recomputed else ', or activations="recompute"')
            + (f"; {note}" if note else "")
        )

    def least_device_bytes(self) -> int:
        return smallest(self._works_on_device, 2 * sum(self.device_parts.values()))

    def _works_on_device(self, device_bytes: int) -> bool:
        try:
            self.check_device(device_bytes)
        except CapacityError:
            return False
        return True

    def least_host_bytes(self, has_disk: bool) -> int:
        """Find the smallest host memory that works."""
        staging = staging_bytes(self._trained) if self.on_device else 0
        whole = self.param_bytes + self.grad_bytes + self._whole_state.arena_bytes + staging
        most = 2 * whole + _PAGE * (len(self.units) + len(self.specs) + 4)
        return smallest(lambda nbytes: self._works(nbytes, has_disk, staging), most)

    def _works(self, host_bytes: int, has_disk: bool, staging: int) -> bool:
        try:
            share_out_sizes(
                self._sizes,
                self._gradients,
                self._whole_state.arena_bytes,
                host_bytes,
                has_disk,
                self.footprint.activations == "offload",
                staging,
                self._least_state_bytes,
                self._least_spill_bytes,
            )
        except CapacityError:
            return False
        return True

    @cached_property
    def _least_spill_bytes(self) -> int:
        itemsizes = [2 if MASTER in spec.fields else ELEMENT_BYTES for spec in self.specs]
        return least_spill_bytes(self.specs, itemsizes)

    @cached_property
    def _sizes(self) -> UnitSizes:
        return UnitSizes.of(self.units)

    @cached_property
    def _least_state_bytes(self) -> int:
        """The least host memory for optimizer state, in chunks as small as they get."""
        return least_arena_bytes(self.specs)


def smallest(works: Callable[[int], bool], most: int) -> int:
    """Find the least number of bytes that works, to a thousandth and in whole pages, provided that
    all larger numbers work. most: a number that works.
    """
    low, high = 0, most
    while high - low > max(_PAGE, int(high * _EXACT)):
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return -(-high // _PAGE) * _PAGE
