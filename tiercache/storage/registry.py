"""Functions that open a store from a URL or a section of the configuration.

    memory://?capacity=64MiB
    file:///var/lib/tiercache?capacity=200GiB&durability=process
    {"type": "file", "path": "/var/lib/tiercache", "capacity": "200GiB"}

Backends are found by the entry-point group `tiercache.storage_backends`: a third party adds one without touching this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, Final

from tiercache.config.urls import section_of
from tiercache.errors import ConfigError
from tiercache.storage.base import StorageBackend, StoreContext
from tiercache.storage.env import Env

GROUP: Final = "tiercache.storage_backends"


def open_backend(spec: str | Mapping[str, Any], *, env: Env | None = None) -> StorageBackend:
    """Open the store that `spec` describes. Raises ConfigError for a bad spec, StorageError if the store cannot be opened."""
    kind, section = _parts(spec)
    return kind.from_config(section, StoreContext(env or Env()))


def check_backend(spec: str | Mapping[str, Any], *, env: Env | None = None) -> None:
    """Raise ConfigError for a spec whose contents `open_backend` would refuse. Opens and makes nothing."""
    kind, section = _parts(spec)
    kind.check_config(section, StoreContext(env or Env()))


def settings_of(kind: str, section: Mapping[str, Any], parsers: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Return the values of a backend's section, each through its parser. Raises ConfigError for a setting that is unknown or malformed."""
    for name in section:
        if name not in parsers:
            raise ConfigError(f"storage type {kind!r} has no setting {name!r}; it has {', '.join(sorted(parsers))}")
    values: dict[str, Any] = {}
    for name, value in section.items():
        try:
            values[name] = parsers[name](value)
        except ConfigError as error:
            raise ConfigError(f"storage type {kind!r}, setting {name!r}: {error}") from error
    return values


def _parts(spec: str | Mapping[str, Any]) -> tuple[type[StorageBackend], dict[str, Any]]:
    section = section_of(spec) if isinstance(spec, str) else dict(spec)
    kind = section.pop("type", None)
    if not isinstance(kind, str):
        raise ConfigError(f"storage {spec!r} has no type; give it one of {', '.join(_known())}")
    return _load(kind), section


def _known() -> list[str]:
    return sorted({e.name for e in entry_points(group=GROUP)})


def _load(kind: str) -> type[StorageBackend]:
    found = list(entry_points(group=GROUP, name=kind))
    if not found:
        raise ConfigError(f"storage type {kind!r} is unknown; use one of {', '.join(_known())}, or install the package that has it")
    try:
        backend = found[0].load()
    except ImportError as error:
        raise ConfigError(f"storage type {kind!r} needs a package that is not installed ({error}); install its extra") from error
    if not (isinstance(backend, type) and issubclass(backend, StorageBackend)):
        raise ConfigError(f"storage type {kind!r} is {found[0].value}, which is not a StorageBackend; fix its entry point")
    return backend
