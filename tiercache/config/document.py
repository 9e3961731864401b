"""Settings as documents: their names, values and descriptions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

import tomli_w
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tiercache.config.models import Settings

Key = tuple[str | int, ...]
"""Path of a value: names of tables and positions in lists."""


def table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of the table in an annotation, or None if the annotation has no table.

    The annotation may be that of a table itself, or of a list or mapping of tables.
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for table in map(table_of, get_args(annotation)) if table), None)


def table_at(key: Sequence[str | int]) -> type[BaseModel]:
    """Return the model of the table at a key.

    The table may be the settings themselves, a table in them, an item of a list of tables, or a table with a
    name that the user has chosen.
    """
    found: type[BaseModel] = Settings
    for part in key:
        if isinstance(part, str) and part in found.model_fields:
            found = table_of(found.model_fields[part].annotation) or found
    return found


def description(key: Key) -> str:
    """Return the description of the setting at a key; empty if there is none."""
    *table, name = key
    field = table_at(table).model_fields.get(str(name))
    return (field and field.description) or ""


def document(settings: Settings) -> dict[str, Any]:
    """Return the settings as strings, numbers, booleans, lists and tables.

    A TOML file with these values can be loaded again.
    """
    values = settings.model_dump(mode="json", exclude_none=True)
    if settings.storage:
        del values["disk_bytes"]  # for the default store only; a file with both settings is an error
    return values


def effective(settings: Settings) -> dict[str, Any]:
    """Return the settings as `document` does, and also the defaults that follow from other settings."""
    limits = settings.limits.model_copy(update={"object_bytes": settings.object_bytes})
    return document(settings.model_copy(update={"sockets": settings.socket_directory, "limits": limits}))


def leaves(values: Mapping[str, Any], key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Yield every value that is not a table, with its key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*key, name))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for n, item in enumerate(value):
                yield from leaves(item, (*key, name, n))
        else:
            yield (*key, name), value


def every_setting(table: type[BaseModel] = Settings, key: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield all possible settings as (name, default, description).

    The default is as a file would give it, or None.
    """
    for name, field in table.model_fields.items():
        inner = table_of(field.annotation)
        if inner is None:
            yield f"{key}{name}", _default(table, name), field.description or ""
            continue
        # Names of inner settings: limits.idle, principals[].uid, tenants.NAME.salt_file.
        several = get_origin(field.annotation)
        place = "[]" if several is tuple else ".NAME" if several is dict else ""
        yield from every_setting(inner, f"{key}{name}{place}.")


def _default(table: type[BaseModel], name: str) -> Any:
    """Return the default of a setting as a file would give it.

    Returns None for a table, for a required setting, and for a setting whose default follows from others.
    """
    value = table.model_fields[name].get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or table_of(type(value)):
        return None
    # Only this setting is dumped, because a table built without validation may lack required settings.
    return table.model_construct(**{name: value}).model_dump(mode="json", include={name})[name]


def dotted(key: Sequence[str | int]) -> str:
    """Return a key as users write it, such as principals[1].token_file; TOML says which names are quoted."""
    names = (part if isinstance(part, int) else tomli_w.dumps({part: 0}).rpartition(" = ")[0] for part in key)
    parts = (f"[{name}]" if isinstance(name, int) else f".{name}" for name in names)
    return "".join(parts).removeprefix(".")
