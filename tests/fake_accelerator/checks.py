"""The list of small checks of the device; ``run_checks`` runs them in one process."""

from __future__ import annotations

from collections.abc import Callable

from . import DeviceModule

Check = Callable[[DeviceModule], None]
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Add a check to the list. It gets the device, set up as asked, with nothing allocated."""
    CHECKS[function.__name__] = function
    return function


def raises(kind: type[BaseException], text: str, action: Callable[[], object]) -> None:
    try:
        action()
    except kind as error:
        assert text in str(error), f"{text!r} is not in {error}"
        return
    raise AssertionError(f"no {kind.__name__}")
