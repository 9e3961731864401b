"""Settings that local stores have in common, and what they mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from mmap import MAP_PRIVATE, mmap
from typing import Any, Final

from tiercache.core import Outcome
from tiercache.errors import ConfigError
from tiercache.settings import PATH, Kind, one_of, read_values
from tiercache.storage.base import SetItem, StoreContext, storable
from tiercache.storage.checksum import MacKey
from tiercache.text import parse_size
from tiercache_backends.local.directory import MAX_CAPACITY

_KINDS: Final = {
    "path": PATH,
    # "kept": the store must exist already, and keeps its capacity.
    "capacity": Kind(lambda value: None if value == "kept" else parse_size(value)),
    "access": one_of("read", "write"),
    "durability": one_of("process", "power"),
    "mac_key": PATH,
}


def local_settings(
    kind: str, section: Mapping[str, Any], context: StoreContext, example: str, **more: Kind
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
    values = read_values(f"storage type {kind!r}", section, {**_KINDS, **more})
    for name in ("path", "capacity"):
        if name not in values:
            raise ConfigError(f"storage type {kind!r} needs {name!r}, as in {example}")
    if "mac_key" in values:
        values["mac_key"] = MacKey.from_file(context.env, values.pop("mac_key"))
    return values


def given_capacity(section: Mapping[str, Any]) -> int:
    """Return the capacity in a section, in bytes; 0 if it has none, or keeps that of the store."""
    given = section.get("capacity", "kept")
    return 0 if given == "kept" else parse_size(given)


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
