"""Parsers of the settings that local stores have in common. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from mmap import MAP_PRIVATE, mmap
from typing import Any

from tiercache.config import parse_size
from tiercache.core import Outcome
from tiercache.errors import ConfigError
from tiercache.storage.base import SetItem, StoreContext, storable
from tiercache.storage.checksum import Seal
from tiercache.storage.registry import settings_of
from tiercache_backends.local.directory import LARGEST_CAPACITY

Parser = Callable[[Any], Any]


def local_settings(kind: str, section: Mapping[str, Any], context: StoreContext, example: str, **more: Parser) -> dict[str, Any]:
    """Return the values of a local store's section: path, capacity, access, durability, `seal` and those that `more` parses.

    Only settings that are given are in it, and `path` and `capacity` must be; `seal` is made from the file that mac_key names.
    """
    if "address" in section:
        raise ConfigError(
            f"'{kind}://{section['address']}...' names a host; write three slashes and the whole path, as in {example.partition('?')[0]}"
        )
    parsers = {
        "path": absolute_path, "capacity": capacity_of, "access": one_of("read", "write"), "durability": one_of("process", "power"),
        "mac_key": absolute_path, **more,
    }  # fmt: skip
    values = settings_of(kind, section, parsers)
    for name in ("path", "capacity"):
        if name not in values:
            raise ConfigError(f"storage type {kind!r} needs {name!r}, as in {example}")
    if "mac_key" in values:
        values["seal"] = Seal.from_file(context.env, values.pop("mac_key"))
    return values


def capacity_of(value: Any) -> int | None:
    """Return a capacity in bytes; None for "kept": the store must exist already, and keeps the capacity that it has."""
    return None if value == "kept" else parse_size(value)


def check_capacity(capacity: int | None, mapped: int, least: int = 0) -> None:
    """Raise ConfigError for a capacity in bytes below `least`, or for one whose `mapped` bytes cannot be mapped on this machine."""
    if capacity is None:
        return
    if capacity < least:
        raise ConfigError(f"a store cannot work in a capacity of {capacity} bytes; set capacity to {least} or more")
    try:
        if capacity <= LARGEST_CAPACITY:
            mmap(-1, max(1, mapped), flags=MAP_PRIVATE, prot=0).close()
            return
    except (OSError, OverflowError):
        pass
    raise ConfigError(f"a capacity of {capacity} bytes is more than can be mapped here; give the size of the disk, or less")


def looks(access: str, capacity: int | None) -> bool:
    """Return whether to open the store read-only: if its capacity is "kept" (None), unless `access` is "write". Raises ConfigError."""
    if access == "read" and capacity is not None:
        raise ConfigError("access=read changes nothing, and so takes no other capacity than kept; give capacity=kept, or leave access away")
    return capacity is None and access != "write"


def refused(items: Sequence[SetItem], held: Sequence[bool]) -> list[Outcome]:
    """Return the outcomes of a set into a read-only store that has the items where `held` is true; see `wrappers.ReadOnly`."""
    verdicts = (Outcome.HIT if there else Outcome.THROTTLED for there in held)
    return [verdict if storable(item) else Outcome.ERROR for item, verdict in zip(items, verdicts, strict=True)]


def absolute_path(value: Any) -> str:
    """Return `value` if it is an absolute path; raises ConfigError otherwise."""
    if not isinstance(value, str) or not value.startswith("/"):
        raise ConfigError(f"{value!r} is not an absolute path; write it like /var/lib/tiercache")
    return value


def one_of(*choices: str) -> Parser:
    """Return a parser that accepts one of these words."""

    def parse(value: Any) -> str:
        if value not in choices:
            raise ConfigError(f"{value!r} is not possible; use {' or '.join(map(repr, choices))}")
        return str(value)

    return parse


def between(least: int, most: int, what: str) -> Parser:
    """Return a parser of a whole number from `least` to `most`, both included. `what`: the unit, for the error message."""

    def parse(value: Any) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10 and least <= int(text) <= most):
            raise ConfigError(f"{value!r} is not a number of {what}; use {least} to {most}")
        return int(text)

    return parse
