"""The differences between a checkpoint and what it is loaded into, by name."""

from __future__ import annotations

from offload.core.errors import ConfigError

_SHOWN = 20


class Differences:
    """A collection of differences, reported together. what: both sides, for the message."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._missing: list[str] = []
        self._extra: list[str] = []
        self._other: list[str] = []

    def missing(self, name: str) -> None:
        """Note a name that is here, but was not saved."""
        self._missing.append(name)

    def extra(self, name: str) -> None:
        """Note a name that was saved, but is not here."""
        self._extra.append(name)

    def other(self, name: str, how: str) -> None:
        """Note a name that is on both sides, and how the two differ."""
        self._other.append(f"{name} ({how})")

    def check(self) -> None:
        """Raise a `ConfigError` if there are any; it names 20 of each kind, and counts all."""
        parts = [
            _listed("not in the checkpoint", self._missing),
            _listed("only in the checkpoint", self._extra),
            _listed("different", self._other),
        ]
        told = "; ".join(part for part in parts if part)
        if told:
            raise ConfigError(
                f"{self._what}: they do not fit together, and nothing was changed: {told}"
            )


def _listed(what: str, names: list[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{what} ({len(names)}): {', '.join(names[:_SHOWN])}{rest}"
