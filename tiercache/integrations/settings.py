"""Settings that an engine's configuration gives to a plug-in of tiercache, and the store that they name.

The plug-ins for SGLang and vLLM take the same settings, as keys of the JSON that the engine passes on:

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

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tiercache.errors import ConfigError
from tiercache.keys import Identity
from tiercache.models.profile import profile_named
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.registry import capabilities_of, open_backend, spec_of

RANK: Final = "{rank}"
"""Text in a URL that is replaced by the rank of the process."""
# Ends of error messages, by the type of pydantic's validation error.
_SENTENCES: Final = {
    "missing": "is missing",
    "extra_forbidden": "is not a setting",
    "string_too_short": "is empty",
    "too_short": "names no store",
}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(max_length=512)]


class StoreSettings(BaseModel):
    """Validated settings; the module's docstring describes each setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    storage: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1)]
    revision: Annotated[Name, Field(min_length=1)]
    """Name of the weights; required, because engines do not report which weights they have loaded."""
    quantization: Name = ""
    kv_dtype: Name = ""
    state_dtype: Name = ""
    tenant: Name = ""
    profile: Name = ""

    def identity(self, model: str, kv_dtype: str, page_size: int) -> Identity:
        """Return the identity of an engine's cache.

        `kv_dtype`: the dtype that the engine reports, which is used if the settings name no dtype.
        """
        return Identity(
            model=model,
            revision=self.revision,
            weights_dtype="",
            kv_dtype=self.kv_dtype or kv_dtype,
            state_dtype=self.state_dtype,
            page_size=page_size,
            quantization=self.quantization,
            tenant=self.tenant,
        )

    def record(self, identity: Identity, *, states: bool = False) -> NamespaceRecord:
        """Return the record of the engine's namespace, with the FLOPs of its model if they are known.

        Raises ConfigError for a profile that there is not.
        """
        profile = profile_named(self.profile) if self.profile else None
        beside = Path(identity.model, "config.json")
        if profile is None:
            # A name that is no directory on this machine, or a model whose costs are not known.
            with suppress(ConfigError, OSError, ValueError):
                profile = profile_named(str(beside)) if beside.is_file() else None
        return NamespaceRecord.priced(identity, profile, states=states)

    @property
    def per_rank(self) -> bool:
        """Whether no rank can read what another rank has stored."""
        return all(RANK in url for url in self.storage)

    def open(self, rank: str, ranks: int) -> StorageBackend:
        """Open the store for process `rank`, one of `ranks` processes.

        Raises ConfigError if the processes cannot share the store, StorageError if it cannot be opened.
        """
        for url in self.storage:
            if ranks > 1 and RANK not in url and not capabilities_of(url).shared:
                raise ConfigError(
                    f"storage {url!r} can be opened by one process at a time, and this engine has several;"
                    f" use lmdb://, the grpc:// address of a daemon, or {RANK} in the path for a store per"
                    " rank"
                )
        return open_backend(spec_of([url.replace(RANK, rank) for url in self.storage]))


def settings_of(place: str, given: Mapping[str, Any]) -> StoreSettings:
    """Return the checked settings of a plug-in.

    Raises ConfigError for a setting that is missing, unknown or wrong. The error's text begins with `place`.
    """
    try:
        return StoreSettings.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        known = ", ".join(StoreSettings.model_fields)
        what = _SENTENCES.get(first["type"], f"is wrong: {first['msg']}")
        raise ConfigError(f"{place}: {where} {what}; the settings are {known}") from error
