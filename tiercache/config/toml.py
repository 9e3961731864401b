"""TOML writer; tomllib reads its output back as the same strings, whole numbers, booleans, lists and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Key = tuple[str | int, ...]
"""Path of a value: names of tables and positions in lists."""

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def lines(table: Mapping[str, Any], note: Callable[[Key], str] = lambda key: "", key: Key = ()) -> Iterator[str]:
    """Yield the lines of a document; `note` returns a comment for the value at a key, or an empty string."""
    inner = {name: value for name, value in table.items() if isinstance(value, Mapping) or _is_tables(value)}
    for name, value in table.items():
        if name not in inner:
            remark = note((*key, name))
            yield f"{_name(name)} = {_value(value)}" + (f"  # {remark}" if remark else "")
    for name, value in inner.items():
        if isinstance(value, Mapping):
            yield from ("", f"[{_header((*key, name))}]")
            yield from lines(value, note, (*key, name))
            continue
        for n, item in enumerate(value):
            yield from ("", f"[[{_header((*key, name))}]]")
            yield from lines(item, note, (*key, name, n))


def dotted(key: Sequence[str | int]) -> str:
    """Return a key as users write it, such as principals[1].token_file."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{_name(part)}" for part in key)
    return "".join(parts).removeprefix(".")


def _header(key: Key) -> str:
    return ".".join(_name(part) for part in key if isinstance(part, str))


def _is_tables(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _value(value: Any) -> str:
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, bool | int):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_name(name)} = {_value(item)}" for name, item in value.items()) + "}"
    assert isinstance(value, list), value
    return "[" + ", ".join(map(_value, value)) + "]"


def _text(text: str) -> str:
    # JSON escapes all that TOML requires except DEL. ensure_ascii would write surrogate pairs, which TOML lacks.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
