"""Settings as documents: what each is called and for, the JSON Schema of the file, and what a file with given settings says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from tiercache.config.models import Settings
from tiercache.config.quantities import size_text
from tiercache.config.toml import Key


def table_of(annotation: Any) -> type[BaseModel] | None:
    """The table that a setting is, or a list or a table of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for table in map(table_of, get_args(annotation)) if table), None)


def table_at(key: Sequence[str | int]) -> type[BaseModel]:
    """The table at a key: of the settings themselves, in a list (`principals`, 1), or one that a user named (`tenants`, `acme`)."""
    found: type[BaseModel] = Settings
    for part in key:
        if isinstance(part, str) and part in found.model_fields:
            found = table_of(found.model_fields[part].annotation) or found
    return found


def description(key: Key) -> str:
    """What the setting at a key is for."""
    *table, name = key
    field = table_at(table).model_fields.get(str(name))
    return (field and field.description) or ""


def document(settings: Settings) -> dict[str, Any]:
    """What a file with these settings says, in strings, numbers, booleans, lists and tables. It can be loaded again."""
    return _said(settings, settings.model_dump(mode="json"))


def effective(settings: Settings) -> dict[str, Any]:
    """As `document`, and with the values of settings that follow from others."""
    values = settings.model_dump(mode="json")
    values["sockets"] = str(settings.socket_directory)
    for name in ("client_bytes", "principal_bytes", "object_bytes"):
        values["limits"][name] = size_text(getattr(settings, name))
    return _said(settings, values)


def _said(settings: Settings, values: dict[str, Any]) -> dict[str, Any]:
    if settings.storage:
        del values["disk_bytes"]  # Of a store that is not used; together they are an error.
    said: dict[str, Any] = _without_none(values)
    return said


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def leaves(values: Mapping[str, Any], key: Key = ()) -> Iterator[tuple[Key, Any]]:
    """Every value that is no table, with its key."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*key, name))
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for n, item in enumerate(value):
                yield from leaves(item, (*key, name, n))
        else:
            yield (*key, name), value


def every_setting(table: type[BaseModel] = Settings, key: str = "") -> Iterator[tuple[str, Any, str]]:
    """All settings that there are: the name, the default as a file writes it, or None, and what it is for."""
    for name, field in table.model_fields.items():
        inner, listed = table_of(field.annotation), "[]" if get_origin(field.annotation) is tuple else ""
        named = ".NAME" if get_origin(field.annotation) is dict else listed
        if inner is None:
            yield f"{key}{name}", _default(table, name), field.description or ""
        else:
            yield from every_setting(inner, f"{key}{name}{named}.")


def schema() -> dict[str, Any]:
    """The JSON Schema of the file, for editors. It knows names, types and ranges, not what `rules` says."""
    made = Settings.model_json_schema()
    tables: list[type[BaseModel]] = [Settings]
    tables += [table for table in (table_of(field.annotation) for field in Settings.model_fields.values()) if table]
    contents: dict[str, Any] = {**made["$defs"], Settings.__name__: made}
    for table in tables:
        for name, setting in contents[table.__name__]["properties"].items():
            _tidy(setting, _default(table, name))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _default(table: type[BaseModel], name: str) -> Any:
    """The default of a setting as a file writes it; None for a table, and for what must be given or follows from other settings."""
    value = table.model_fields[name].get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined or table_of(type(value)):
        return None
    # Nothing else is looked at: a table that is made without validation may lack what must be given.
    return table.model_construct(**{name: value}).model_dump(mode="json", include={name})[name]


def _tidy(setting: dict[str, Any], default: Any) -> None:
    """TOML has no null, and a default is written as people write it."""
    for noise in ("title", "default"):
        setting.pop(noise, None)
    if default is not None:
        setting["default"] = default
    choices = [choice for choice in setting.pop("anyOf", []) if choice.get("type") != "null"]
    setting.update(choices[0] if len(choices) == 1 else {"anyOf": choices} if choices else {})
