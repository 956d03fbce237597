"""The methods of a prepared model that torch or user code calls as on an ordinary model, and its
buffers.

`state_dict`, `load_state_dict` and `to` run module by module, as in torch; while a module's own
part runs, its parameters are in memory. So a model larger than memory can be saved, loaded, and
handed to a trainer that moves it to its device.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from offload.core.errors import ConfigError, OffloadError, StateError
from offload.core.metrics import Metrics
from offload.core.tensors import outside_inference_mode
from offload.optim.consistency import clear_frames
from offload.params.hooks import Interception
from offload.params.residency import Residency
from offload.planning.unit import Unit
from offload.storage.files import BLOCK_BYTES
from offload.storage.handout import Handout, Outgoing


class ReplacedModelMethods:
    """The replaced methods of one prepared model's modules.

    directories: where tensors that are handed out are put if they do not fit in memory. tell_age:
    warns if some parameters have taken a step that others have not.
    """

    def __init__(
        self,
        model: nn.Module,
        residency: Residency,
        unit_of: Mapping[Tensor, Unit],
        directories: Sequence[Path],
        metrics: Metrics,
        tell_age: Callable[[], None],
    ) -> None:
        self._metrics = metrics
        self._tell_age = tell_age
        self._residency = residency
        self._unit_of = unit_of
        self._directories = directories
        self._device = residency.tier.device
        self._saved: tuple[Any, dict[Tensor, Tensor]] = (lambda: None, {})
        self._now = threading.local()  # .handout: of the state_dict() that runs in this thread
        self._interceptions = [Interception(model, "parameters", _own)]
        for module in model.modules():
            self._interceptions += [
                Interception(module, "state_dict", self._state_dict),
                Interception(module, "_save_to_state_dict", self._save),
                Interception(module, "_load_from_state_dict", self._load),
                Interception(module, "_apply", self._apply),
                Interception(module, "__reduce_ex__", _refuse_copy),
            ]

    def close(self) -> None:
        for interception in self._interceptions:
            interception.remove()
        self._interceptions = []

    def _open_handout(self, is_written_first: bool = False) -> Handout:
        """Open a place for tensors that are handed out: host memory outside of the budget, or files
        if the model does not fit in memory.
        """
        fits = self._residency.cache.has_room_for_all
        blocks = sum(-(-m.nbytes // BLOCK_BYTES) for unit in self._all for m in unit.members)
        return Handout(
            () if fits else self._directories,
            self._metrics,
            is_written_first=is_written_first,
            expected_bytes=blocks * BLOCK_BYTES,
        )

    @property
    def _all(self) -> list[Unit]:
        return list({unit.number: unit for unit in self._unit_of.values()}.values())

    @contextmanager
    def rooms(self, is_first: bool) -> Iterator[Callable[[Tensor], Outgoing]]:
        """Yield a function that allocates the place of a parameter or gradient that goes back to
        the user's code.

        is_first: allocate the places of all parameters now, write them, and map their files, so
        that a failure comes before anything has changed.
        """
        ready: dict[tuple[Any, ...], list[Outgoing]] = {}
        with self._open_handout(is_written_first=is_first) as handout:
            for key in self._returning() if is_first else ():
                ready.setdefault(key, []).append(handout.room(*key))
            handout.sync()
            for place in (place for each in ready.values() for place in each):
                _ = place.tensor

            def take(values: Tensor) -> Outgoing:
                key = values.shape, values.stride(), values.dtype
                found = ready.get(key)
                return found.pop() if found else handout.room(*key)

            yield take

    def _returning(self) -> Iterator[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
        """Yield shape, strides and type of each parameter that goes back to host memory."""
        for unit in self._all:
            if self._residency.blocks[unit.number].is_here:
                for member in unit.members:
                    if self._residency.original_device_of(member.param).type == "cpu":
                        yield member.shape, member.stride, member.dtype

    def _units(self, module: nn.Module) -> list[Unit]:
        own = [
            self._unit_of[p]
            for p in module._parameters.values()
            if p is not None and p in self._unit_of
        ]
        return list({unit.number: unit for unit in own}.values())

    # --- replaced methods of nn.Module ------------------------------------------------------------

    def _state_dict(
        self, module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call the original; when it returns, all tensors it hands out are in memory or synced to
        the drive.
        """
        if self._handout is not None:  # called by the state_dict() of a module around this one
            return original(*args, **kwargs)
        self._tell_age()
        try:
            with self._handing_out():
                return original(*args, **kwargs)
        except OffloadError as error:
            clear_frames(error)  # they hold the memory that the next call needs
            raise

    @property
    def _handout(self) -> Handout | None:
        return getattr(self._now, "handout", None)

    @contextmanager
    def _handing_out(self) -> Iterator[None]:
        with self._open_handout() as handout:
            self._now.handout = handout
            try:
                yield
            finally:
                self._now.handout = None
            handout.finish()

    @outside_inference_mode
    def _save(
        self,
        module: nn.Module,
        original: Callable[..., Any],
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,
    ) -> None:
        """Put copies of the module's parameters into `destination`. If all parameters are in memory
        for good, put the parameters' own tensors, as an ordinary model does.
        """
        if keep_vars:
            original(destination, prefix, keep_vars)
            return
        with self._residency.in_host(self._units(module), only_looks=True):
            try:
                original(destination, prefix, keep_vars)
                if not self._residency.tier.never_drops:
                    self._copy_all(module, destination, prefix)
            except BaseException:  # its traceback would keep the memory that other units need
                for name in module._parameters:
                    destination.pop(prefix + name, None)
                raise

    def _copy_all(self, module: nn.Module, destination: dict[str, Any], prefix: str) -> None:
        """Replace the module's parameters in `destination` by copies."""
        with nullcontext() if self._handout is not None else self._handing_out():
            for name, param in module._parameters.items():
                if param is not None and prefix + name in destination:
                    destination[prefix + name] = self._copy(param, destination)

    def _copy(self, param: Tensor, destination: dict[str, Any]) -> Tensor:
        """Return the copy of a parameter: one copy, even if the parameter has several names."""
        assert self._handout is not None, "begun before"
        saved_to, copies = self._saved
        if saved_to() is not destination:
            copies = {}
            if isinstance(destination, OrderedDict):  # a plain dict has no weak references
                self._saved = weakref.ref(destination, lambda _: copies.clear()), copies
        if param not in copies:
            values = param.detach()
            stride = torch.empty_like(values, device="meta").stride()  # those of a dense tensor
            place = self._handout.room(values.shape, stride, values.dtype)
            place.fill(values)
            copies[param] = place.tensor
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
        """Apply `function` to the buffers, as torch does. Raise `ConfigError` if it would change
        parameters.
        """
        params = [p for p in module.parameters(recurse=recurse) if p in self._unit_of]
        for dtype in dict.fromkeys(param.dtype for param in params):
            sample = torch.empty(1, dtype=dtype, device=self._device)
            with torch.no_grad():
                result = function(sample)
            is_shared = result.is_cpu and result.is_shared()  # type: ignore[no-untyped-call]
            if result is not sample or is_shared:  # is_shared() of a GPU tensor is always true
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
    """Return an iterator over the module's parameters; refuse if `DataParallel` asks for them.

    `DataParallel` would copy all parameters to all devices at once. It asks for the parameters
    before it does anything else, and gives no other sign.
    """
    caller = sys._getframe(1)
    if caller.f_code is nn.DataParallel.forward.__code__:
        around: Any = caller.f_locals["self"]  # reading f_locals keeps the frame's variables alive
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
    """Refuse `copy` and `pickle`, which call `__reduce_ex__`."""
    raise StateError(
        f"{type(module).__name__}: a module of a prepared model cannot be copied or pickled; take "
        "its state_dict(), or copy tensors inside `with offload.resident(module):`"
    )


# --- buffers --------------------------------------------------------------------------------------


class ModelBuffers:
    """The buffers of a model (running means, for example), which are moved to the device that it
    computes on until `return_to_model`. They are small, and written in every run, so they are never
    evicted.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._original_devices: dict[tuple[nn.Module, str], torch.device] = {}
        moved: dict[Tensor, Tensor] = {}  # several modules may share a buffer
        for module, name, buffer in buffers_of(model):
            if buffer.device != device:
                self._original_devices[module, name] = buffer.device
                if buffer not in moved:
                    moved[buffer] = buffer.to(device)
                module._buffers[name] = moved[buffer]

    def return_to_model(self) -> None:
        """Move the buffers back to their original devices. Idempotent."""
        moved: dict[Tensor, Tensor] = {}
        for (module, name), original_device in self._original_devices.items():
            buffer = module._buffers.get(name)
            if buffer is not None:
                if buffer not in moved:
                    moved[buffer] = buffer.to(original_device)
                module._buffers[name] = moved[buffer]
        self._original_devices = {}


def buffer_bytes(model: nn.Module) -> int:
    distinct = {buffer: buffer.nbytes for _, _, buffer in buffers_of(model)}
    return sum(distinct.values())


def buffers_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Yield each buffer with its module and its name there."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer
