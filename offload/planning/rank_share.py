"""The share of one rank where several share an optimizer's state: what it holds and sends. Pure
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.core.config import format_size


@dataclass(frozen=True)
class RankShare:
    """The part of one rank where several share the state (stage 1) and the gradients, too (stage
    2).

    buffers: for values on their way over the network. buffer_bytes: of each in host memory.
    device_buffer_bytes: of each on the device, where the parameters are on one. grad_bytes: of this
    rank's slices of the reduced gradients. param_bytes: of all parameters that are shared, and
    gathered after each update.
    """

    stage: int
    rank: int
    count: int
    buffers: int
    buffer_bytes: int
    grad_bytes: int
    param_bytes: int
    device_buffer_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        return self.buffers * self.buffer_bytes + self.grad_bytes

    @property
    def step_sent_bytes(self) -> int:
        """The bytes that this rank sends for one step, beside a few messages: new parameters, and
        in stage 2 the gradients of one backward pass.
        """
        return self.stage * self.param_bytes * (self.count - 1) // self.count

    def __str__(self) -> str:
        kept = "state" if self.stage == 1 else "state and gradients"
        return (
            f"rank {self.rank} of {self.count}, stage {self.stage}: 1/{self.count} of {kept} here; "
            f"{format_size(self.step_sent_bytes)} sent each step, through {self.buffers} buffers "
            f"of {self._size_of_buffers()}"
        )

    def _size_of_buffers(self) -> str:
        if not self.device_buffer_bytes:
            return format_size(self.buffer_bytes)
        also = f" and {format_size(self.buffer_bytes)} in host memory" if self.buffer_bytes else ""
        return f"{format_size(self.device_buffer_bytes)} on the device{also}"
