"""The settings that local stores have in common, from text to values. Each parser raises ConfigError."""

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
    """The values of a local store's section: path, capacity, durability, `seal` (from mac_key, where given) and those parsed by `more`."""
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
    """Bytes; None for "kept": the store must be there, and opens with what it has, whatever that is."""
    return None if value == "kept" else parse_size(value)


def check_capacity(capacity: int | None, mapped: int, least: int = 0) -> None:
    """Raise ConfigError for a capacity below `least`, or of which `mapped` bytes are more than this machine can address."""
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
    """Is the store to be looked at only? That is how one opens whose capacity is "kept", unless `access` is "write"."""
    if access == "read" and capacity is not None:
        raise ConfigError("access=read changes nothing, and so takes no other capacity than kept; give capacity=kept, or leave access away")
    return capacity is None and access != "write"


def refused(items: Sequence[SetItem], held: Sequence[bool]) -> list[Outcome]:
    """The outcomes of a set into a store that is only looked at; see `wrappers.ReadOnly`."""
    verdicts = (Outcome.HIT if there else Outcome.THROTTLED for there in held)
    return [verdict if storable(item) else Outcome.ERROR for item, verdict in zip(items, verdicts, strict=True)]


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
