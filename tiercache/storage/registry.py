"""Functions that open a store from a URL or a section of the configuration.

    memory://?capacity=64MiB
    ["memory://?capacity=1GiB", "file:///var/lib/tiercache?capacity=200GiB"]     a chain of tiers
    file:///var/lib/tiercache?capacity=200GiB&durability=process
    {"type": "file", "path": "/var/lib/tiercache", "capacity": "200GiB"}

Each backend has an entry point in the group `tiercache.storage_backends`. Another package can therefore add a
backend without a change to tiercache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Final

from tiercache.config.urls import section_of
from tiercache.entries import entries, load
from tiercache.errors import ConfigError, MissingExtraError
from tiercache.storage.base import Capabilities, StorageBackend, StoreContext
from tiercache.storage.env import Env
from tiercache.storage.shares import Shares
from tiercache_distribution import DISTRIBUTION

GROUP: Final = "tiercache.storage_backends"
"""Group of the entry points of backends; the name of an entry point is the storage type."""


Spec = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]
"""A store: a URL, a section of the configuration, or a list of those for a chain of tiers, fastest first."""


def spec_of(urls: Sequence[str]) -> Spec:
    """Return the spec for a list of URLs. One URL names one store; several URLs name a chain of stores."""
    return urls[0] if len(urls) == 1 else urls


def open_backend(spec: Spec, *, env: Env | None = None) -> StorageBackend:
    """Open the store that `spec` describes.

    Raises ConfigError for a bad spec, StorageError if the store cannot be opened.

    A URL names a store, a list of URLs a chain of tiers, the fastest first:

        >>> with open_backend("memory://?capacity=64MiB") as store:
        ...     store.usage().capacity_bytes
        67108864
        >>> with open_backend(["memory://?capacity=16MiB", "memory://?capacity=1GiB&tier_name=far"]) as chain:
        ...     [tier.name for tier in chain.usage().tiers]
        ['memory', 'far']
    """
    kind, section = _parts(spec)
    return kind.from_config(section, StoreContext(env or Env()))


def check_backend(spec: Spec, *, env: Env | None = None) -> None:
    """Raise ConfigError if `open_backend` would refuse a setting in `spec`; open and create nothing.

    Raises UnavailableError if a store's place cannot be looked at; a chain of tiers only logs that.
    """
    kind, section = _parts(spec)
    kind.check_config(section, StoreContext(env or Env()))


def check_shares(spec: Spec, shares: Shares) -> None:
    """Raise ConfigError if the store that `spec` describes cannot keep these shares; open nothing."""
    kind, section = _parts(spec)
    kind.check_shares(section, shares)


def backend_type(spec: Spec) -> type[StorageBackend]:
    """Return the class of the store that `spec` describes; raises ConfigError if there is none."""
    return _parts(spec)[0]


def capabilities_of(spec: Spec) -> Capabilities:
    """Return what the store that `spec` describes is capable of, as far as its settings tell; open nothing.

    Raises ConfigError for a bad spec.
    """
    kind, section = _parts(spec)
    return kind.capabilities_of(section)


def _parts(spec: Spec) -> tuple[type[StorageBackend], dict[str, Any]]:
    section: dict[str, Any]
    if isinstance(spec, str):
        section = section_of(spec)
    elif isinstance(spec, Mapping):
        section = dict(spec)
    else:
        section = {"type": "chain", "tiers": list(spec)}
    kind = section.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"storage {spec!r} has no type; give it one of {', '.join(entries(GROUP))}")
    return _load(kind), section


def _has_extra(found: EntryPoint) -> bool:
    """Return whether this backend is part of tiercache and needs the extra of the same name."""
    dist = found.dist
    if dist is None or dist.name != DISTRIBUTION:
        return False
    return found.name in (dist.metadata.get_all("Provides-Extra") or ())


def _load(kind: str) -> type[StorageBackend]:
    known = entries(GROUP)
    if (found := known.get(kind)) is None:
        raise ConfigError(
            f"storage type {kind!r} is unknown; use one of {', '.join(known)}, or install the package that"
            " has it"
        )
    try:
        backend = load(found, f"storage type {kind!r}")
    except ConfigError as error:
        if isinstance(missing := error.__cause__, ModuleNotFoundError) and _has_extra(found):
            raise MissingExtraError(f"storage type {kind!r}", kind, missing) from missing
        raise
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        raise ConfigError(
            f"storage type {kind!r} is {found.value}, which is not a StorageBackend; fix its entry point"
        )
    return backend
