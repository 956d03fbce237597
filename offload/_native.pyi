"""The native core, as kernels/module.cpp defines it. Addresses are trusted: call through
offload.kernels.
"""

from typing import Any

STATS_BLOCK: int

class Update:
    def __init__(
        self,
        param: int,
        grad: int,
        state0: int,
        state1: int,
        out: int,
        grad_dtype: int,
        out_dtype: int,
        scale: float,
        count: int,
        tail_begin: int,
        threads: int,
        adopt: bool = False,
    ) -> None: ...

def isas() -> list[str]: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def adam(
    update: Update,
    lerp_weight: float,
    beta2: float,
    one_minus_beta2: float,
    bias2_sqrt: float,
    bias2_sqrt_inverse: float,
    eps: float,
    neg_step_size: float,
    decay: float,
    lerp_from_grad: bool,
    decoupled: bool,
    has_decay: bool,
    /,
) -> None: ...
def sgd(
    update: Update,
    neg_lr: float,
    decay: float,
    momentum: float,
    one_minus_dampening: float,
    has_decay: bool,
    has_momentum: bool,
    nesterov: bool,
    first: bool,
    /,
) -> None: ...
def adagrad(update: Update, lr: float, eps: float, decay: float, has_decay: bool, /) -> None: ...
def lion(
    update: Update,
    beta1: float,
    one_minus_beta1: float,
    beta2: float,
    one_minus_beta2: float,
    neg_lr: float,
    decay: float,
    /,
) -> None: ...
def block_sums(grad: int, dtype: int, count: int, sums: int, threads: int, /) -> None: ...
def cast(
    source: int, source_dtype: int, target: int, target_dtype: int, count: int, threads: int, /
) -> None: ...
def touch(param: int, grad: int, state0: int, state1: int, count: int, threads: int, /) -> None: ...
def crc32(data: Any, begin: int = 0, isa: str = "") -> int: ...
def populate(begin: int, end: int, page_bytes: int, advice: int, /) -> int: ...
def threads() -> int: ...
def set_threads(count: int) -> None: ...
def assume_forked() -> None: ...
def most_lanes() -> int: ...

class IoEngine:
    @property
    def piece_bytes(self) -> int: ...
    def submit(
        self,
        id: int,
        write: bool,
        fd: int,
        memory: int,
        bytes: int,
        offset: int,
        align: int,
        sums: int,
        priority: int,
    ) -> None: ...
    def promote(self, id: int, priority: int) -> None: ...
    def knows(self, id: int) -> bool: ...
    def reap(self, timeout_s: float) -> list[tuple[int, int, int]]: ...
    def late(self) -> list[int]: ...
    def in_flight(self) -> list[tuple[int, bool, int, int, float]]: ...
    def write_off(self, age_s: float, round_s: float) -> None: ...
    def inject(self, kind: int, code: int, nth: int, forever: bool, seed: int) -> None: ...
    def attempts(self) -> int: ...
    def stop(self, timeout_s: float) -> bool: ...

def thread_engine(depth: int, piece_bytes: int) -> IoEngine: ...
def uring_engine(
    depth: int, piece_bytes: int, memory: list[tuple[int, int]], files: list[int]
) -> tuple[IoEngine, list[str]]: ...
def probe_uring() -> int: ...
def checksum(memory: int, bytes: int, isa: str = "") -> int: ...
