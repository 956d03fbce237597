"""The errors that `offload` raises on purpose.

All derive from `OffloadError`, so that one `except` catches every error of the engine. A message
names the operation that failed and its object, what was expected and what was got, and what to do
about it. This file imports nothing.
"""

from __future__ import annotations


class OffloadError(Exception):
    """The base class of all errors of this package."""


class ConfigError(OffloadError, ValueError):
    """An argument, a field or an environment variable that is not acceptable.

    Raised before anything is changed.
    """


class CapacityError(OffloadError):
    """A byte budget that is too small for what it must hold. The message has the arithmetic."""


class StateError(OffloadError, RuntimeError):
    """A call that the object's state does not allow: it is closed, poisoned, or used after fork."""


class FormatError(OffloadError):
    """A file that is not in the expected format: damaged, hostile, or of another version."""


class StoreError(OffloadError, OSError):
    """An operation on swapped bytes that the drive or the system refused."""

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
    """An operation that did not end by its deadline. Its buffer is quarantined, not reused."""


class CorruptionError(StoreError):
    """A read from the drive that returned other bytes than were written."""


class TorchVersionWarning(UserWarning):
    """A version of torch whose update was not compared bit by bit with the engine's; given once."""


def reason(error: BaseException) -> str:
    """Describe an error for a message: its type and its text, which an interrupt does not have."""
    if isinstance(error, KeyboardInterrupt) and not str(error):
        return "KeyboardInterrupt (Ctrl-C)"
    text = str(error).strip()
    return (
        f"{type(error).__name__}: {text}" if text else f"{type(error).__name__}, without a message"
    )


def kind_of(name: str) -> type[OffloadError]:
    """Return the error class called `name`, which another rank has raised, so that a program can
    handle the error in the same way on all ranks. `StateError` if `name` is no class of this file.
    """
    kind = globals().get(name)
    is_ours = isinstance(kind, type) and issubclass(kind, OffloadError)
    return kind if is_ours else StateError  # type: ignore[return-value]
