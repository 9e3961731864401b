"""Parsers of the settings that local stores have in common. Each raises ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from mmap import MAP_PRIVATE, mmap
from typing import Any

from tiercache.config import parse_size
from tiercache.core import Outcome
from tiercache.errors import ConfigError
from tiercache.storage.base import SetItem, StoreContext, storable
from tiercache.storage.checksum import MacKey
from tiercache.storage.registry import settings_of
from tiercache_backends.local.directory import MAX_CAPACITY

Parser = Callable[[Any], Any]


def local_settings(
    kind: str, section: Mapping[str, Any], context: StoreContext, example: str, **more: Parser
) -> dict[str, Any]:
    """Return the values of a local store's section: path, capacity, access, durability, mac_key and `more`.

    The section must have `path` and `capacity`. Other settings that it lacks are not in the result. The
    section gives mac_key as the path of a file, and the result has the `MacKey` that was read from this file.
    `example`: a valid URL, for error messages. Raises ConfigError.
    """
    if "address" in section:
        raise ConfigError(
            f"'{kind}://{section['address']}...' names a host; write three slashes and the whole path, as in"
            f" {example.partition('?')[0]}"
        )
    parsers = {
        "path": absolute_path, "capacity": capacity_of, "access": one_of("read", "write"),
        "durability": one_of("process", "power"),
        "mac_key": absolute_path, **more,
    }  # fmt: skip
    values = settings_of(kind, section, parsers)
    for name in ("path", "capacity"):
        if name not in values:
            raise ConfigError(f"storage type {kind!r} needs {name!r}, as in {example}")
    if "mac_key" in values:
        values["mac_key"] = MacKey.from_file(context.env, values.pop("mac_key"))
    return values


def capacity_of(value: Any) -> int | None:
    """Return a capacity in bytes; None for "kept".

    With "kept", the store must exist already, and keeps its capacity.
    """
    return None if value == "kept" else parse_size(value)


def check_capacity(capacity: int | None, mapped: int, min_bytes: int = 0) -> None:
    """Raise ConfigError for a capacity that is too small or cannot be mapped on this machine.

    `capacity`: in bytes; None is always accepted. `mapped`: number of bytes that the store will map.
    `min_bytes`: minimum of `capacity`.
    """
    if capacity is None:
        return
    if capacity < min_bytes:
        raise ConfigError(
            f"a store cannot work in a capacity of {capacity} bytes; set capacity to {min_bytes} or more"
        )
    try:
        if capacity <= MAX_CAPACITY:
            # A mapping without access rights takes address space, but no memory.
            mmap(-1, max(1, mapped), flags=MAP_PRIVATE, prot=0).close()
            return
    except (OSError, OverflowError):
        pass
    raise ConfigError(
        f"a capacity of {capacity} bytes is more than can be mapped here; give the size of the disk, or less"
    )


def opens_read_only(access: str, capacity: int | None) -> bool:
    """Return whether to open the store for reading only.

    The answer is True if `capacity` is None ("kept") and `access` is not "write". Raises ConfigError for
    "read" with a capacity.
    """
    if access == "read" and capacity is not None:
        raise ConfigError(
            "access=read changes nothing, not even the capacity; give capacity=kept, or omit access"
        )
    return capacity is None and access != "write"


def refused(items: Sequence[SetItem], held: Sequence[bool]) -> list[Outcome]:
    """Return the outcomes of a set into a read-only store; `held` says which items are stored.

    A stored object is a HIT. Other objects are THROTTLED, because a controller does not count THROTTLED as a
    fault, and may try again with its next commit. A malformed item is an ERROR.
    """
    verdicts = (Outcome.HIT if there else Outcome.THROTTLED for there in held)
    return [
        verdict if storable(item) else Outcome.ERROR for item, verdict in zip(items, verdicts, strict=True)
    ]


def absolute_path(value: Any) -> str:
    """Return `value` if it is an absolute path; raise ConfigError otherwise."""
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


def between(low: int, high: int, what: str) -> Parser:
    """Return a parser of a whole number from `low` to `high`, both included.

    `what`: the unit, for the error message.
    """

    def parse(value: Any) -> int:
        text = str(value)
        if not (text.isascii() and text.isdigit() and len(text) < 10 and low <= int(text) <= high):
            raise ConfigError(f"{value!r} is not a number of {what}; use {low} to {high}")
        return int(text)

    return parse
