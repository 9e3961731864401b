"""Settings as documents: names and descriptions, the JSON Schema of the file, and the contents of a file with given settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tiercache.config.models import Settings
from tiercache.config.quantities import size_text
from tiercache.config.toml import Key


def table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the table that an annotation is, or is a list or a mapping of; None if it contains no table."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for table in map(table_of, get_args(annotation)) if table), None)


def table_at(key: Sequence[str | int]) -> type[BaseModel]:
    """Return the model of the table at a key: the settings themselves, a table, an item of a list, or a table that a user named."""
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
    """Return the contents of a file with these settings, as strings, numbers, booleans, lists and tables.

    Written as TOML, it can be loaded again.
    """
    return _said(settings, settings.model_dump(mode="json"))


def effective(settings: Settings) -> dict[str, Any]:
    """Return the same as `document`, with the values of settings that follow from others filled in."""
    values = settings.model_dump(mode="json")
    values["sockets"] = str(settings.socket_directory)
    for name in ("client_bytes", "principal_bytes", "object_bytes"):
        values["limits"][name] = size_text(getattr(settings, name))
    return _said(settings, values)


def _said(settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    if settings.storage:
        del values["disk_bytes"]  # belongs to the file store, which is not used; giving both is an error
    said: dict[str, Any] = _without_none(values)
    return said


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


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
    """Yield all possible settings: the name, the default as a file writes it (or None), and the description."""
    for name, field in table.model_fields.items():
        inner, listed = table_of(field.annotation), "[]" if get_origin(field.annotation) is tuple else ""
        named = ".NAME" if get_origin(field.annotation) is dict else listed
        if inner is None:
            yield f"{key}{name}", _default(table, name), field.description or ""
        else:
            yield from every_setting(inner, f"{key}{name}{named}.")


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the file, for editors. It covers names, types and ranges, but not what `rules` checks."""
    made = Settings.model_json_schema()
    tables: list[type[BaseModel]] = [Settings]
    tables += [table for table in (table_of(field.annotation) for field in Settings.model_fields.values()) if table]
    contents: dict[str, Any] = {**made["$defs"], Settings.__name__: made}
    for table in tables:
        for name, setting in contents[table.__name__]["properties"].items():
            _tidy(setting, _default(table, name))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _default(table: type[BaseModel], name: str) -> Any:
    """Return the default of a setting as a file writes it; None for a table, a required setting, or one that follows from others."""
    value = table.model_fields[name].get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or table_of(type(value)):
        return None
    # Dump this setting only: a table built without validation may lack required settings.
    return table.model_construct(**{name: value}).model_dump(mode="json", include={name})[name]


def _tidy(setting: dict[str, Any], default: Any) -> None:
    """Adapt a setting's schema in place: drop null, which TOML lacks, and the title, and write the default as in a file."""
    for noise in ("title", "default"):
        setting.pop(noise, None)
    if default is not None:
        setting["default"] = default
    choices = [choice for choice in setting.pop("anyOf", []) if choice.get("type") != "null"]
    setting.update(choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {})
