"""The settings that an engine's configuration gives to a plug-in of tiercache, and the store that they name.

Both plug-ins (SGLang's and vLLM's) take the same settings, as keys of the JSON that the engine passes on:

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
"""The text in a URL that the rank of the process replaces."""
# Ends of error messages, by the type of the validation error.
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
    """The settings that the module's docstring lists, checked."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    storage: Annotated[list[str], BeforeValidator(_listed), Field(min_length=1, max_length=1)]
    revision: Annotated[Name, Field(min_length=1)]
    """Other weights under the same name must never hit, and no engine says which weights it has loaded."""
    quantization: Name = ""
    kv_dtype: Name = ""
    state_dtype: Name = ""
    tenant: Name = ""

    def identity(self, model: str, kv_dtype: str, page_size: int) -> Identity:
        """Return the identity of what an engine caches; `kv_dtype` is the dtype that the engine tells, used if the settings name none."""
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
        """Whether every rank has a store of its own."""
        return RANK in self.storage[0]

    def open(self, rank: str, ranks: int) -> StorageBackend:
        """Open the store for process `rank`, one of `ranks` processes.

        Raises ConfigError if the processes cannot share it, StorageError if it cannot be opened.
        """
        store = open_backend(self.storage[0].replace(RANK, rank))
        if ranks > 1 and not self.per_rank and not store.capabilities.shared:
            store.close()
            raise ConfigError(
                f"storage {self.storage[0]!r} can be opened by one process at a time, and this engine has several; "
                f"use lmdb://, the grpc:// address of a daemon, or {RANK} in the path for a store per rank"
            )
        return store


def settings_of(place: str, given: Mapping[str, Any]) -> StoreSettings:
    """Return the checked settings of a plug-in.

    Raises ConfigError, one sentence that begins with `place`, for a setting that is missing, unknown or wrong.
    """
    try:
        return StoreSettings.model_validate(dict(given))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "settings"
        known = ", ".join(StoreSettings.model_fields)
        what = _SENTENCES.get(first["type"], f"is wrong: {first['msg']}")
        raise ConfigError(f"{place}: {where} {what}; the settings are {known}") from error
