"""Every error that `offload` raises on purpose.

All derive from `OffloadError`, so that one `except` catches what the engine has to say. A message
names what failed, which one, what was got and expected, and what to do about it. This file imports
nothing.
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of all errors of this package."""


class ConfigError(OffloadError, ValueError):
    """What the caller asked for is not acceptable: an argument, a field, an environment variable.

    Raised before anything is changed.
    """


class CapacityError(OffloadError):
    """A byte budget is too small for what must be held in it. Carries the arithmetic in its
    message.
    """


class StateError(OffloadError, RuntimeError):
    """The object is not in a state in which this can be done: closed, poisoned, used after fork."""


class FormatError(OffloadError):
    """A file is not what it should be: damaged, hostile, or of another version."""


class StoreError(OffloadError, OSError):
    """The disk or the system refused an operation on swapped bytes."""

    def __init__(
        self,
        message: str,
        *,
        errno: int | None = None,
        operation: str | None = None,
        file: str | None = None,
        offset_bytes: int | None = None,
        tensor: str | None = None,
    ) -> None:
        super().__init__(message)
        self.errno = errno
        self.operation = operation
        self.file = file
        self.offset_bytes = offset_bytes
        self.tensor = tensor


class StoreTimeout(StoreError):
    """An operation did not end within its deadline. Its buffer is quarantined, not reused."""


class CorruptionError(StoreError):
    """Bytes came back from the disk that are not the bytes that were written."""


class TorchVersionWarning(UserWarning):
    """Nobody has compared this version of torch with ours, bit by bit; given once."""


def reason(error: BaseException) -> str:
    """What an error is and says, for messages; an interrupt says nothing by itself."""
    if isinstance(error, KeyboardInterrupt) and not str(error):
        return "KeyboardInterrupt (Ctrl-C)"
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}, without a word"


def kind_of(name: str) -> type[OffloadError]:
    """The error of that name, which another rank has raised: what a program does about it, it does
    on all ranks. `StateError` where it is none of ours.
    """
    kind = globals().get(name)
    is_ours = isinstance(kind, type) and issubclass(kind, OffloadError)
    return kind if is_ours else StateError  # type: ignore[return-value]
