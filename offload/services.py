"""What a prepared model does for whoever treats it as a plain one.

`state_dict`, `load_state_dict` and `to` are called module by module, as torch does it; around each
module's own part its parameters are in memory. So models larger than memory can be saved, loaded
and handed to a trainer that moves them to the device they are for.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload.errors import ConfigError, StateError
from offload.hooks import Interception, intercept
from offload.metrics import Metrics
from offload.modes import outside_inference_mode
from offload.store.mapped import mapped_tensor
from offload.tiers.residency import Residency
from offload.units import Unit


class Services:
    """Of one prepared model. directories: where tensors that are handed out may be, when they do
    not fit in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        residency: Residency,
        unit_of: Mapping[nn.Parameter, Unit],
        directories: Sequence[Path],
        metrics: Metrics,
    ) -> None:
        self._metrics = metrics
        self._residency = residency
        self._unit_of = unit_of
        self._directories = directories
        self._device = residency.device
        self._saved: tuple[Any, dict[Tensor, Tensor]] = (lambda: None, {})
        self._interceptions: list[Interception] = [intercept(model, "parameters", _own)]
        for module in model.modules():
            self._interceptions += [
                intercept(module, "_save_to_state_dict", self._save),
                intercept(module, "_load_from_state_dict", self._load),
                intercept(module, "_apply", self._apply),
                intercept(module, "__reduce_ex__", _refuse_copy),
            ]

    def close(self) -> None:
        for interception in self._interceptions:
            interception.remove()
        self._interceptions = []

    def like(self, values: Tensor) -> Tensor:
        """Host memory outside of the budget for a tensor of the same shape and type; on a file
        where the model does not fit in memory.
        """
        if self._fits:
            return torch.empty_like(values, device="cpu")
        return self._mapped(values.shape, values.stride(), values.dtype)

    @property
    def _fits(self) -> bool:
        return not self._directories or self._residency.has_room_for_all

    def _mapped(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return mapped_tensor(self._directories, shape, stride, dtype, self._metrics)

    def rooms(self) -> Callable[[Tensor], Tensor]:
        """As `like`, for all parameters, with the files made now: where there is no room for one,
        nothing has changed yet.
        """
        ready: dict[tuple[Any, ...], list[Tensor]] = {}
        units = [] if self._fits else list({u.number: u for u in self._unit_of.values()}.values())
        for member in (member for unit in units for member in unit.members):
            key = member.shape, member.stride, member.dtype
            ready.setdefault(key, []).append(self._mapped(*key))

        def take(values: Tensor) -> Tensor:
            found = ready.get((values.shape, values.stride(), values.dtype))
            return found.pop() if found else self.like(values)

        return take

    def _units(self, module: nn.Module) -> list[Unit]:
        own = [
            self._unit_of[p]
            for p in module._parameters.values()
            if p is not None and p in self._unit_of
        ]
        return list({unit.number: unit for unit in own}.values())

    # --- what torch does with a module ------------------------------------------------------------

    @outside_inference_mode
    def _save(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,
    ) -> None:
        """Copies, unless everything is in memory for good: then the tensors themselves, as of a
        plain model.
        """
        if keep_vars:
            original(destination, prefix, keep_vars)
            return
        with self._residency.in_host(self._units(module), only_looks=True):
            original(destination, prefix, keep_vars)
            if self._residency.never_drops:
                return
            for name, param in module._parameters.items():
                if param is not None and prefix + name in destination:
                    destination[prefix + name] = self._copy(param, destination)

    def _copy(self, param: Tensor, destination: dict[str, Any]) -> Tensor:
        """One for each parameter, also where several names have it."""
        saved_to, copies = self._saved
        if saved_to() is not destination:
            copies = {}
            if isinstance(destination, OrderedDict):  # others cannot be remembered
                self._saved = weakref.ref(destination, lambda _: copies.clear()), copies
        if param not in copies:
            values = param.detach()
            copies[param] = self.like(values).copy_(values)
        return copies[param]

    @outside_inference_mode
    def _load(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        *rest: Any,
    ) -> None:
        units = self._units(module)
        if units and local_metadata.get("assign_to_params_buffers", False):
            raise ConfigError(
                "load_state_dict: assign=True would put other parameters in the place of prepared "
                "ones; leave it out, and the values are copied"
            )
        with self._residency.in_host(units):
            for unit in units:
                self._residency.changed(self._residency.blocks[unit.number])
            original(state_dict, prefix, local_metadata, *rest)

    def _apply(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        function: Callable[[Tensor], Tensor],
        recurse: bool = True,
    ) -> nn.Module:
        """Buffers as torch does it; for parameters it must not change anything."""
        params = [p for p in module.parameters(recurse=recurse) if p in self._unit_of]
        for dtype in dict.fromkeys(param.dtype for param in params):
            sample = torch.empty(1, dtype=dtype, device=self._device)
            with torch.no_grad():
                result = function(sample)
            is_shared = result.is_cpu and result.is_shared()  # type: ignore[no-untyped-call]
            if result is not sample or is_shared:  # on a GPU it always is
                raise ConfigError(
                    f"model: its parameters stay {dtype} on {self._device}, where they were "
                    "prepared for; .to(...), .half(), .share_memory() and the like cannot change "
                    "that: offload.close(model) first, or prepare it that way"
                )
        for inner in module.modules() if recurse else [module]:
            for name, buffer in inner._buffers.items():
                if buffer is not None:
                    inner._buffers[name] = function(buffer)
        return module


def _own(
    module: nn.Module, original: Callable[..., Iterator[nn.Parameter]], *args: Any, **kwargs: Any
) -> Iterator[nn.Parameter]:
    """Its parameters; but not for `DataParallel`, which is about to copy all of them to all devices
    at once. That asks for them before it does anything else, and gives no other sign.
    """
    caller = sys._getframe(1)
    if caller.f_code is nn.DataParallel.forward.__code__:
        around: Any = caller.f_locals["self"]  # a frame that was asked keeps its variables
        if len(around.device_ids) > 1:
            refuse_data_parallel(around.device_ids)
    return original(*args, **kwargs)


def refuse_data_parallel(device_ids: Sequence[int]) -> NoReturn:
    raise ConfigError(
        f"model: is in nn.DataParallel over devices {list(device_ids)}, which copies all "
        "parameters to all of them in every pass; start the program with CUDA_VISIBLE_DEVICES=0 to "
        "train on one (Hugging Face's Trainer puts every model into DataParallel where it "
        "sees several), or with torchrun --nproc-per-node=N to train on all"
    )


def _refuse_copy(module: nn.Module, *_: object) -> None:
    """What `copy` and `pickle` ask for."""
    raise StateError(
        f"{type(module).__name__}: a module of a prepared model cannot be copied or pickled; take "
        "its state_dict(), or copy tensors inside `with offload.resident(module):`"
    )
