"""What an engine's configuration says to a plug-in of ours, and the store that this names.

Both plug-ins take the same settings, as keys of the JSON that the engine hands on:

    storage         a URL, or a list of one, such as "file:///var/lib/tiercache?capacity=200GiB"; "{rank}" in it becomes this process's rank
    revision        of the weights: a commit, a digest, a date
    quantization    of the weights, where one is chosen at the start of the engine
    kv_dtype        of the KV, where the engine does not tell
    state_dtype     of recurrent states, where the engine does not tell
    tenant          whose cache it is; caches of different tenants never meet
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tiercache.errors import ConfigError
from tiercache.keys import Identity
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend

RANK: Final = "{rank}"
_SENTENCES: Final = {
    "missing": "is missing",
    "extra_forbidden": "is not a setting",
    "string_too_short": "is empty",
    "too_short": "names no store",
    "too_long": "names several stores, and chains of stores are not there yet",
}


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Name = Annotated[str, Field(max_length=512)]


class StoreSettings(BaseModel):
    """The settings above. Thread safety: immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    storage: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1, max_length=1)]
    revision: Annotated[Name, Field(min_length=1)]
    """Other weights under the same name must never hit, and no engine says which weights it has loaded."""
    quantization: Name = ""
    kv_dtype: Name = ""
    state_dtype: Name = ""
    tenant: Name = ""

    def identity(self, model: str, kv_dtype: str, page_size: int) -> Identity:
        """That of what an engine caches; `kv_dtype` is what the engine tells of it."""
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

    @property
    def per_rank(self) -> bool:
        """Does every rank have a store of its own?"""
        return RANK in self.storage[0]

    def open(self, rank: str, ranks: int) -> StorageBackend:
        """Open the store for one of `ranks` processes. Raises ConfigError where they cannot share it, or StorageError."""
        store = open_backend(self.storage[0].replace(RANK, rank))
        if ranks > 1 and not self.per_rank and not store.capabilities.shared:
            store.close()
            raise ConfigError(
                f"storage {self.storage[0]!r} can be opened by one process at a time, and this engine has several; "
                f"use lmdb://, the grpc:// address of a daemon, or {RANK} in the path for a store per rank"
            )
        return store


def settings_of(place: str, given: Mapping[str, Any]) -> StoreSettings:
    """The settings of a plug-in. Raises ConfigError, one sentence that begins with `place`, for one that is missing, unknown or wrong."""
    try:
        return StoreSettings.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        known = ", ".join(StoreSettings.model_fields)
        what = _SENTENCES.get(first["type"], f"is wrong: {first['msg']}")
        raise ConfigError(f"{place}: {where} {what}; the settings are {known}") from error
