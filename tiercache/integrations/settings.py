"""Settings that an engine's configuration gives to a plug-in of tiercache, and the store that they name.

The plug-ins for SGLang, vLLM and LMCache take the same settings, as keys of the JSON that each passes on:

    storage         a URL such as "file:///var/lib/tiercache?capacity=200GiB", or a list of URLs for a chain
                    of tiers, the fastest first; the rank of the process replaces "{rank}" in each URL
    revision        name of the weights: a commit, a digest or a date
    quantization    quantization of the weights, if it is chosen when the engine starts
    kv_dtype        dtype of the KV, if the engine does not report it
    state_dtype     dtype of recurrent states, if the engine does not report it
    tenant          owner of the cache; caches of different tenants share nothing
    profile         model profile, or path of a config.json, by which a daemon's account (`tiercache report`)
                    counts saved FLOPs; by default the config.json in the engine's directory of the model
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from tiercache.errors import ConfigError
from tiercache.events.settings import EventSettings
from tiercache.keys import Identity
from tiercache.models.profile import ModelProfile, profile_named
from tiercache.settings import FLAG, Kind, matching, read_section
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.registry import capabilities_of, open_backend, spec_of
from tiercache.text import shown

RANK: Final = "{rank}"
"""Text in a URL that is replaced by the rank of the process."""
_NAME: Final = matching("(?s:.{0,512})", "is no text of at most 512 characters")
_POLICY: Final = matching("(?s:.{1,200})", "is no name of an eviction policy")
_REVISION: Final = matching("(?s:.{1,512})", "is no revision; write a commit, a digest or a date")


def _read_urls(value: Any) -> Sequence[str]:
    urls = [value] if isinstance(value, str) else value
    if not isinstance(urls, list) or not urls or not all(isinstance(url, str) for url in urls):
        raise ConfigError(f"{shown(value)} names no store; write a URL, or a list of URLs")
    return urls


def read_events(given: Any) -> EventSettings | None:
    """Return the settings of the table `events`; None for no events.

    Raises ConfigError for a setting that is missing, unknown or wrong.
    """
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ConfigError("events is not a table; give its settings one by one")
    return read_section(EventSettings, "events", given)


def of_rank(settings: EventSettings | None, rank: int) -> EventSettings | None:
    """Return the settings of one of several ranks or replicas, whose ports are that far on; None for None.

    Raises ConfigError if there are not as many ports.
    """
    if settings is None or not rank:
        return settings
    return replace(settings, endpoint=_moved(settings.endpoint, rank), replay=_moved(settings.replay, rank))


def _moved(endpoint: str, rank: int) -> str:
    host, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://"):
        return f"{host}:{int(port) + rank}" if int(port) else endpoint
    return endpoint and f"{endpoint}-{rank}"


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Settings of a cache that has tiercache's index, beside those of its store."""

    policy: Annotated[str, _POLICY] = "hvd"
    """Eviction policy: hvd, lru, or that of another package."""
    profile: Annotated[str, _NAME] = ""
    """Model profile, or path of a config.json, by which policies weigh; default: that of the model."""
    load_or_recompute: Annotated[bool, FLAG] = True
    """Whether one rank computes tokens that would take longer to load, by the speeds measured so far."""
    events: Annotated[EventSettings | None, Kind(read_events)] = None
    """Publisher of KV events of device, host and store; each rank has addresses of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Settings that have been checked; the module's docstring describes each setting.

    Each plug-in adds settings of its own to this table, and reads it with `read_section`.
    """

    storage: Annotated[Sequence[str], Kind(_read_urls)]
    revision: Annotated[str, _REVISION]
    """Name of the weights; required, because engines do not report which weights they have loaded."""
    quantization: Annotated[str, _NAME] = ""
    kv_dtype: Annotated[str, _NAME] = ""
    state_dtype: Annotated[str, _NAME] = ""
    tenant: Annotated[str, _NAME] = ""
    profile: Annotated[str, _NAME] = ""

    def identity(self, model: str, kv_dtype: str, page_size: int) -> Identity:
        """Return the identity of an engine's cache.

        `kv_dtype`: the dtype that the engine reports, which is used if the settings name no dtype.
        """
        dtype = self.kv_dtype or kv_dtype
        return Identity(
            model, self.revision, weights_dtype="", kv_dtype=dtype, state_dtype=self.state_dtype,
            page_size=page_size, quantization=self.quantization, tenant=self.tenant,
        )  # fmt: skip

    def record(self, identity: Identity, *, states: bool = False) -> NamespaceRecord:
        """Return the record of the engine's namespace, with the FLOPs of its model if they are known.

        Raises ConfigError for a profile that there is not.
        """
        return NamespaceRecord.priced(identity, profile_for(self.profile, identity.model), states=states)

    @property
    def per_rank(self) -> bool:
        """Whether no rank can read what another rank has stored."""
        return all(RANK in url for url in self.storage)

    def open(self, rank: str, ranks: int, *, chained: bool = False) -> StorageBackend:
        """Open the store for process `rank`, one of `ranks` processes.

        `chained`: one URL makes a chain of one tier, whose calls have deadlines. Raises ConfigError if the
        processes cannot share the store, StorageError if it cannot be opened.
        """
        for url in self.storage:
            if ranks > 1 and RANK not in url and not capabilities_of(url).shared:
                raise ConfigError(
                    f"storage {url!r} can be opened by one process at a time, and this engine has several;"
                    f" use lmdb://, the grpc:// address of a daemon, or {RANK} in the path for a store per"
                    " rank"
                )
        urls = [url.replace(RANK, rank) for url in self.storage]
        return open_backend(urls if chained else spec_of(urls))


def profile_for(name: str, model: str) -> ModelProfile | None:
    """Return the profile of this name or path, or without one that of the `config.json` beside the model.

    Returns None for a model that is no directory on this machine, or whose costs are not known. Raises
    ConfigError for a profile that there is not.
    """
    if name:
        return profile_named(name)
    beside = Path(model, "config.json")
    with suppress(ConfigError, OSError, ValueError):
        return profile_named(str(beside)) if beside.is_file() else None
    return None
