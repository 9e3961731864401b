"""Markup built from parts: any part that is not `Html` is text, and is escaped."""

from __future__ import annotations

import html
import unicodedata
from typing import Final

_LEAVES: Final = frozenset({"path", "line", "rect", "circle", "use", "meta", "link", "br"})
_BIDIRECTIONAL: Final = frozenset({"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"})


class Html(str):
    """Finished markup, made only by `element`, `join` and `text`."""

    __slots__ = ()


Part = str | Html | None
"""Content of an element: markup, text, or nothing."""


def text(value: str) -> Html:
    """Return `value` escaped, to be shown as text.

    Control characters, halves of surrogate pairs and characters that change the direction of writing become U+FFFD: a name in a trace may
    contain them.
    """
    shown = "".join("\ufffd" if _unreadable(character) else character for character in value)
    return Html(html.escape(shown, quote=True))


def element(name: str, /, *parts: Part, **attributes: str | float | None) -> Html:
    """Return one element. Attributes: `class_` is class, `aria_label` is aria-label; None leaves one out; numbers keep one decimal."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"' for key, value in attributes.items() if value is not None)
    if name in _LEAVES:
        return Html(f"<{name}{said}/>")
    return Html(f"<{name}{said}>{join(*parts)}</{name}>")


def join(*parts: Part) -> Html:
    """Concatenate parts; those that are text are escaped."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts if part is not None))


def coordinate(value: float) -> str:
    """Write a number for an SVG attribute in as few characters as one decimal takes."""
    return f"{value:.1f}".removesuffix(".0")


def _value(value: str | float) -> str:
    return text(value) if isinstance(value, str) else coordinate(value)


def _unreadable(character: str) -> bool:
    # Nearly all characters are printable ASCII, which need no lookup in the Unicode tables.
    if " " <= character <= "~":
        return False
    return unicodedata.category(character) in {"Cc", "Cs"} or unicodedata.bidirectional(character) in _BIDIRECTIONAL
