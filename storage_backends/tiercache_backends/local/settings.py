"""The settings that local stores have in common, from text to values. Each parser raises ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tiercache.config import parse_size
from tiercache.errors import ConfigError
from tiercache.storage.base import StoreContext
from tiercache.storage.checksum import Seal
from tiercache.storage.registry import settings_of

Parser = Callable[[Any], Any]


def local_settings(kind: str, section: Mapping[str, Any], context: StoreContext, example: str, **more: Parser) -> dict[str, Any]:
    """The values of a local store's section: path, capacity, durability, `seal` (from mac_key, where given) and those parsed by `more`."""
    if "address" in section:
        raise ConfigError(
            f"'{kind}://{section['address']}...' names a host; write three slashes and the whole path, as in {example.partition('?')[0]}"
        )
    parsers = {"path": absolute_path, "capacity": capacity_of, "durability": one_of("process", "power"), "mac_key": absolute_path, **more}
    values = settings_of(kind, section, parsers)
    for name in ("path", "capacity"):
        if name not in values:
            raise ConfigError(f"storage type {kind!r} needs {name!r}, as in {example}")
    if "mac_key" in values:
        values["seal"] = Seal.from_file(context.env, values.pop("mac_key"))
    return values


def capacity_of(value: Any) -> int | None:
    """Bytes; None for "kept": the store must be there, and opens with what it has, whatever that is."""
    return None if value == "kept" else parse_size(value)


def absolute_path(value: Any) -> str:
    """A path from the root."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise ConfigError(f"{value!r} is not an absolute path; write it like /var/lib/tiercache")
    return value


def one_of(*choices: str) -> Parser:
    """One of a few words."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ConfigError(f"{value!r} is not possible; use {' or '.join(map(repr, choices))}")
        return str(value)

    return parse


def between(least: int, most: int, what: str) -> Parser:
    """A whole number of `what`."""

    def parse(value: Any) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
            raise ConfigError(f"{value!r} is not a number of {what}; use {least} to {most}")
        return int(text)

    return parse
