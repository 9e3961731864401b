"""TOML, written: what tomllib reads back as the same strings, whole numbers, booleans, lists and tables."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

Key = tuple[str | int, ...]
"""Where a value is: names of tables and places in lists."""

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def lines(table: Mapping[str, Any], note: Callable[[Key], str] = lambda key: "", key: Key = ()) -> Iterator[str]:
    """The lines of a document; `note` gives a comment for the value at a key, or nothing."""
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
    """A key as people write it: principals[1].token_file."""
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
    # JSON escapes what TOML wants escaped, but for DEL. Not to ASCII: TOML has no surrogate pairs.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
