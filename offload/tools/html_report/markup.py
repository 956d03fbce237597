"""HTML that cannot be made without escaping.

`tag` and `join` make `Html` and escape every other text that goes into them. An f-string of `Html`
is plain text again and is escaped once more: it looks wrong, but is never dangerous.
"""

from __future__ import annotations

import html
from collections.abc import Iterable

from offload.core.strict_json import printable

_VOID = frozenset({"meta", "link", "rect", "input"})


class Html(str):
    """A string of markup that goes into a page unescaped."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Escape untrusted text. Invisible characters (controls, marks that turn the direction of
    writing, lone surrogates) are spelled out.
    """
    if isinstance(text, Html):
        return text
    return Html(html.escape("\n".join(map(printable, text.split("\n"))), quote=True))


def join(parts: Iterable[str]) -> Html:
    return Html("".join(map(escape, parts)))


def tag(name: str, /, *children: str, **attributes: str | float | bool | None) -> Html:
    """Make an element. Underscores in attribute names become hyphens, one at the end is dropped
    (`class_`). None and False: no such attribute; True: one without a value.
    """
    written = "".join(
        _attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items()
    )
    if name in _VOID:
        assert not children, name
        return Html(f"<{name}{written}/>")  # in SVG an element without the slash has children
    return Html(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: str | float | bool | None) -> str:
    if value is None or value is False:
        return ""
    return f" {key}" if value is True else f' {key}="{escape(str(value))}"'
