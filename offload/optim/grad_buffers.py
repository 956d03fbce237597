"""Gradient buffers: host memory for the gradients of device parameters, filled during backward.

Every gradient has a buffer. When autograd has accumulated into the gradient, its download begins on
a side stream. At `step()` it is in host memory, and is used if no code has changed the gradient
since. Clipping and unscaling between backward and step do change it. Then it is downloaded again,
and from the next step on only once, at `step()`. With `release` the gradient leaves the device for
good: `param.grad` becomes None, and the gradients of later backward passes are added in host
memory.

Autograd calls `arrived` from its own threads, while no step runs.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from offload.core.metrics import Metrics
from offload.core.tensors import flat, in_order_of
from offload.device.device import DeviceTransfer, Mark
from offload.optim.recipe import Record
from offload.optim.staging import DeviceStaging, HostSum, StagedSums, equal_parts

_AS_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class _Likeness:
    """A fingerprint of a gradient, to find out whether it has changed. Its version misses writes
    through `.data`, so two sums are taken as well: one of its bits, which any change of one element
    changes, and one of its values weighted by their places, which shows a change of all signs or of
    places. The sums are on the device.
    """

    grad: TensorWeakRef
    version: int
    sums: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, grad: Tensor) -> _Likeness:
        return cls(TensorWeakRef(grad), grad._version, _sums(grad))

    def is_of(self, grad: Tensor) -> bool:
        """Return whether `grad` is the same tensor in the same version; does not compare sums."""
        return self.grad() is grad and self.version == grad._version


@dataclass(eq=False, kw_only=True)
class GradBuffer(HostSum):
    """The buffer of one parameter's gradient. `memory`: flat, in the order of the parameter's; its
    bytes mean nothing unless there is a likeness or `is_held`.
    """

    record: Record
    likeness: _Likeness | None = None  # not None: a copy of `param.grad` as autograd left it
    is_held: bool = False  # the only copy of the gradient; `param.grad` is None
    calls: int = 0  # calls of `arrived` since the last step
    usual_calls: int = 1  # the same in the step before
    was_released: bool = False  # `param.grad` is None only because `release` moved it here


class GradBuffers:
    """The gradient buffers of one optimizer.

    memory: that of each buffer, by the parameter's number. verdicts: a byte of host memory for each
    parameter, for the result of comparisons on a device. release: take gradients off the device.
    staging_buffers: an addend passes through them on its way to its gradient buffer.
    """

    def __init__(
        self,
        records: Sequence[Record],
        memory: Mapping[int, Tensor],
        verdicts: Tensor,
        transfers: Mapping[torch.device, DeviceTransfer],
        metrics: Metrics,
        release: bool,
        staging_buffers: DeviceStaging,
    ) -> None:
        self.by_number = {
            number: GradBuffer(record=records[number], memory=one) for number, one in memory.items()
        }
        self._verdicts = verdicts
        self._transfers = transfers
        self._metrics = metrics
        self._release = release
        # One is added while the other is in flight.
        self._sums = StagedSums(staging_buffers.borrow, staging_buffers.give_back, most=2)
        self._part_bytes = staging_buffers.buffer_bytes
        self._comes_early = True  # until gradients turn out to be changed after backward
        self._lock = threading.Lock()  # autograd runs one thread per device

    # --- during backward --------------------------------------------------------------------------

    def arrived(self, number: int) -> None:
        """Note that autograd has accumulated into a parameter's gradient, on this thread's current
        stream, and begin its download if that is due. Called by autograd's threads.
        """
        buffer = self.by_number[number]
        with self._lock:
            buffer.calls += 1
            grad = buffer.record.param.grad
            if grad is None or not _is_plain(grad, buffer.record):
                return  # the step reports what is wrong with it
            if self._release:
                self._take_away(buffer, grad)
            elif self._comes_early and buffer.calls >= buffer.usual_calls:
                self._copy(buffer, grad)

    def _copy(self, buffer: GradBuffer, grad: Tensor) -> None:
        """Begin the download. If autograd accumulates again while it is in flight, its bytes are of
        two ages; the next download, which is ordered behind it, replaces them.
        """
        assert not buffer.is_held, "its gradient was taken away"
        buffer.likeness = _Likeness.of(grad)
        self._read(buffer, in_order_of(grad.detach(), buffer.record.param), self._mark(buffer))
        self._metrics.count("gradients_early_bytes", buffer.memory.nbytes)

    def _take_away(self, buffer: GradBuffer, grad: Tensor) -> None:
        if buffer.is_held:
            self._add(buffer, grad)
        else:
            self._read(buffer, in_order_of(grad.detach(), buffer.record.param), None)
            buffer.is_held = True
        buffer.record.param.grad = None
        buffer.was_released = True
        self._metrics.count("gradients_early_bytes", buffer.memory.nbytes)

    def _read(self, buffer: GradBuffer, source: Tensor, after: Mark | None) -> None:
        """Begin the download of a flat gradient. after: None is now, on the current stream, which
        made the gradient; only then its device memory need not be held until the copy has ended.
        """
        transfer = self._transfers[source.device]
        buffer.ticket = transfer.read(source, buffer.memory, buffer.record.name, after)

    def _mark(self, buffer: GradBuffer) -> Mark:
        return self._transfers[buffer.record.device].mark()

    def _add(self, buffer: GradBuffer, grad: Tensor) -> None:
        """Begin to download the gradient to staging buffers, from where it is added."""
        source = in_order_of(grad.detach(), buffer.record.param)
        parts = equal_parts(source.numel(), self._part_bytes // source.element_size())
        transfer = self._transfers[source.device]
        self._sums.add(
            buffer.add, source, parts, lambda s, h: transfer.read(s, h, buffer.record.name), buffer
        )

    # --- at the step ------------------------------------------------------------------------------

    def held(self) -> dict[int, Tensor]:
        """Return the gradients whose only copy is here, by parameter. Waits for pending addends."""
        with self._lock:
            self._sums.finish()
            return {
                number: buffer.memory
                for number, buffer in self.by_number.items()
                if buffer.is_held and buffer.record.param.grad is None
            }

    def settle(self, number: int) -> Tensor:
        """Wait until a parameter's gradient is in its buffer; return the buffer's memory."""
        self.by_number[number].settle()
        return self.by_number[number].memory

    def fetch(self, grads: Mapping[int, Tensor]) -> None:
        """Begin the download of the gradients that were not copied during backward, or of all if
        one that was copied has changed since. Those on devices are flat; those in host memory are
        skipped.
        """
        there = [self.by_number[n] for n in grads if n in self.by_number and not grads[n].is_cpu]
        changed = self._changed([buffer for buffer in there if buffer.likeness is not None])
        if changed:
            self._comes_early = False
            self._metrics.fall_back(
                "gradients while backward runs",
                "something changes them afterwards (clipping, unscaling), so they are copied at "
                "step(); max_grad_norm clips within the update and lets them come early",
            )
        for buffer in there:
            if buffer.likeness is None or changed:  # code that writes to one writes to others
                self._read(buffer, grads[buffer.record.number], self._mark(buffer))
                self._metrics.count("gradients_late_bytes", buffer.memory.nbytes)

    def _changed(self, grad_buffers: Iterable[GradBuffer]) -> list[GradBuffer]:
        """Return the buffers whose parameter's gradient has changed since it was copied."""
        changed = []
        alike: dict[torch.device, list[GradBuffer]] = {}
        for buffer in grad_buffers:
            grad = buffer.record.param.grad
            assert grad is not None and buffer.likeness is not None
            if buffer.likeness.is_of(grad):
                alike.setdefault(grad.device, []).append(buffer)
            else:
                changed.append(buffer)
        for device, group in alike.items():
            same = self._compare(device, group)
            changed += [buffer for buffer, is_same in zip(group, same, strict=True) if not is_same]
        return changed

    def _compare(self, device: torch.device, grad_buffers: Sequence[GradBuffer]) -> list[bool]:
        """Return, for each gradient, whether its sums are what they were. The CPU waits for the
        device.
        """
        then: list[Tensor] = []
        now: list[Tensor] = []
        for buffer in grad_buffers:
            assert buffer.record.param.grad is not None and buffer.likeness is not None
            then += buffer.likeness.sums
            now += _sums(buffer.record.param.grad)
        same = (torch.stack(then) == torch.stack(now)).view(-1, 2).all(dim=1).to(torch.uint8)
        transfer, verdicts = self._transfers[device], self._verdicts[: len(grad_buffers)]
        transfer.read(same, verdicts, "whether gradients have changed", transfer.mark()).wait()
        return [bool(verdict) for verdict in verdicts.tolist()]

    def end_step(self) -> None:
        """End the step, which has used up the gradients here: drop the contents of all buffers."""
        for buffer in self.by_number.values():
            buffer.usual_calls, buffer.calls = max(buffer.calls, 1), 0
        self.forget()

    def zero_grad(self, set_to_none: bool) -> None:
        """Do to the gradients whose only copy is here what the optimizer's `zero_grad` does to
        others: drop them, or set them to zero, also those that a step has used up.
        """
        self.forget()
        for number, buffer in self.by_number.items():
            if set_to_none:
                buffer.was_released = False
            elif buffer.was_released and buffer.record.param.grad is None:
                self.settle(number).zero_()
                buffer.is_held = True

    def forget(self) -> None:
        """Drop the contents of all buffers."""
        with self._lock:
            self._sums.finish()
            for buffer in self.by_number.values():
                buffer.is_held, buffer.likeness = False, None

    def close(self) -> None:
        """Restore `param.grad` from the gradients whose only copy is here, and drop the rest."""
        for number, memory in self.held().items():
            self.settle(number)
            param = self.by_number[number].record.param
            grad = torch.empty_like(param, requires_grad=False)
            flat(grad).copy_(memory)
            param.grad = grad
        self.forget()


def _sums(grad: Tensor) -> tuple[Tensor, Tensor]:
    """Sum the bits, and the weighted values (returned as bits, so that NaN equals NaN)."""
    grad = grad.detach()
    bits = grad.view(_AS_BITS[grad.element_size()]).sum(dtype=torch.int64)
    # The gradient of two classes is (a, -a): a plain sum would not show a change of all signs.
    matrix = grad.flatten(1) if grad.dim() > 1 else grad.reshape(1, -1)
    rows, columns = (_weights(size, grad) for size in matrix.shape)
    with torch.autocast(grad.device.type, enabled=False):  # the same in backward and at the step
        values = (matrix @ columns) @ rows
    return bits, values.float().view(torch.int32).to(torch.int64)


def _weights(size: int, like: Tensor) -> Tensor:
    """Make pseudo-random numbers between 1 and 3, the same ones each time."""
    places = torch.arange(1, size + 1, device=like.device, dtype=torch.float32)
    return places.mul_(12.9898).sin_().mul_(43758.547).frac_().add_(2.0).to(like.dtype)


def _is_plain(grad: Tensor, record: Record) -> bool:
    """Return whether a gradient can be copied bit for bit. Refuses subclasses of `Tensor`, which
    may hold more than they show.
    """
    if type(grad) is not Tensor or grad.layout != torch.strided or grad.is_neg():
        return False
    return grad.dtype == record.dtype and grad.device == record.device
