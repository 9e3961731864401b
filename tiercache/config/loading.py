"""Loading of settings from a file, the environment and flags, in layers, so that each error and value can be traced to its source."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, SettingsError

from tiercache.config.document import table_at, table_of
from tiercache.config.models import Principal, Settings
from tiercache.config.toml import Key, dotted
from tiercache.errors import ConfigError

PREFIX: Final = "TIERCACHE_"
FILE_VARIABLE: Final = "TIERCACHE_CONFIG"
DEFAULT_FILE: Final = Path("/etc/tiercache/tiercache.toml")
NO_SETTINGS: Final = frozenset({FILE_VARIABLE, "TIERCACHE_STORE"})
"""Variables with the prefix of settings that are not settings: the path of the file, and a variable of other verbs."""
_SERVICE_LINK: Final = re.compile(r"TIERCACHE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)")
"""Variables that Kubernetes puts into every pod near a service called tiercache or tiercache-...

They are neither settings nor a mistake, so they are ignored.
"""
_JSON: Final = re.compile(r'\{|\[\s*(["{\]]|$)')
_FILE_LIMIT: Final = 2**20
_NESTED: Final = "__"


class Origin(StrEnum):
    """Kind of place that a value comes from."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings that one place gives: the file, the environment or the flags."""

    origin: Origin
    place: str
    """Path of the file, or words for another place."""
    values: Mapping[str, Any]

    def says(self, key: Key) -> bool:
        """Return whether this place gives a value for `key`."""
        here: Any = self.values
        for part in key:
            try:
                here = here[part]
            except (LookupError, TypeError):
                return False
        return True

    def call(self, key: Key) -> str:
        """Return the name that a user knows `key` by at this place: a key of the file, a variable or a flag."""
        if self.origin in (Origin.FILE, Origin.DEFAULT):
            return f"{self.place}: {_clean(dotted(key))}"
        names = [_clean(str(part)) for part in key]
        if self.origin is Origin.FLAG:
            return f"--{'-'.join(names).replace('_', '-')}"
        # An item of a list has no variable of its own: it came as JSON in the variable of the list.
        depth = next((n for n, part in enumerate(key) if isinstance(part, int)), len(key))
        variable = PREFIX + _NESTED.join(names[:depth]).upper()
        return f"{variable}, {_clean(dotted(key))}" if depth < len(key) else variable


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings together with the places that they came from."""

    settings: Settings
    file: Path | None
    layers: tuple[Layer, ...]
    """Layers in rising precedence: the last one that has a value for a key counts."""

    def origin(self, key: Key) -> Origin:
        """Return the kind of place that the value of `key` comes from."""
        return next((layer.origin for layer in reversed(self.layers) if layer.says(key)), Origin.DEFAULT)


def find_file(given: Path | None) -> Path | None:
    """Return the path of the file to read: `given`, else $TIERCACHE_CONFIG, else the file in /etc if it exists, else None."""
    named = given or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
    return named or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


def load(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings from, in falling precedence, `overrides`, the environment, `file` and the defaults.

    `overrides` are flags; None stands for a flag that was not given. Raises ConfigError, in one sentence that names the file and the key,
    for anything that cannot be served as written.
    """
    return resolve(file, overrides).settings


def resolve(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """Return the settings like `load`, together with the place that each value comes from."""
    layers = (
        Layer(Origin.FILE, printable(file), _read(file) if file else {}),
        Layer(Origin.ENVIRONMENT, "the environment", _environment()),
        Layer(Origin.FLAG, "flags", _given(overrides or {})),
    )
    merged: dict[str, Any] = {}
    for layer in layers:
        # Check each layer alone first, so that an overridden mistake is found too. A missing setting may stand in another layer.
        _validated(layer, partial=True)
        merged = _merge(merged, layer.values)
    where = " with ".join(layer.place for layer in layers if layer.values) or "defaults"
    settings = _validated(Layer(Origin.DEFAULT, where, merged))
    assert settings is not None
    try:
        return Loaded(settings.check(), file, layers)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def printable(path: Path | None) -> str:
    """Return a path in the form in which messages show it: unprintable characters escaped, at most 4096 characters."""
    return _clean(str(path), most=4096)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as source:
            data = source.read(_FILE_LIMIT + 1)
        if len(data) > _FILE_LIMIT:
            raise ConfigError(f"{printable(file)} is larger than 1MiB, which is no configuration; name another file")
        return tomllib.loads(data.decode())
    except FileNotFoundError as error:
        raise ConfigError(f"{printable(file)} does not exist; create it, or name another file") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{printable(file)} cannot be read: {reason}; name a TOML file") from error
    except RecursionError as error:
        raise ConfigError(f"{printable(file)} is nested too deeply; no setting needs more than three levels") from error
    except ConfigError:
        raise
    except ValueError as error:  # TOMLDecodeError, or a number with more digits than Python converts
        raise ConfigError(f"{printable(file)} is not TOML: {_clean(str(error))}; fix it there") from error


def _environment() -> dict[str, Any]:
    """Return the settings that variables give; raises ConfigError for a misspelt name, which would otherwise have no effect."""
    variables: dict[str, str] = {}
    for name, value in os.environ.items():
        if name.startswith(PREFIX) and name not in NO_SETTINGS and not _SERVICE_LINK.fullmatch(name):
            _known_variable(name)
            variables[name.lower()] = value
    source = _Environment(Settings, case_sensitive=False, env_prefix=PREFIX, env_nested_delimiter=_NESTED)
    source.env_vars = variables
    try:
        return source()
    except SettingsError as error:
        raise ConfigError(_clean(str(error.__cause__ or error))) from error


class _Environment(EnvSettingsSource):
    """Source of settings in variables; accepts lists as JSON or with commas: TIERCACHE_LISTEN=127.0.0.1:7070,[::1]:7070."""

    def decode_complex_value(self, field_name: str, field: FieldInfo, value: Any) -> Any:
        text = str(value).strip()
        # _JSON tells a JSON list from "[::1]:7070", which begins with a bracket as well.
        if not _JSON.match(text):
            return [part.strip() for part in text.split(",") if part.strip()]
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{PREFIX}{field_name.upper()} is not JSON: {error}; write a list with brackets and double quotes") from error


def _known_variable(name: str) -> None:
    key = tuple(name.removeprefix(PREFIX).lower().split(_NESTED))
    field = Settings.model_fields.get(key[0])
    if not name.isupper() or field is None or (len(key) > 1 and table_of(field.annotation) in (None, Principal)):
        layer = Layer(Origin.ENVIRONMENT, "", {})
        raise ConfigError(f"{printable(Path(name))} names no setting{_suggestion(layer, key)}")


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flags` without those that were not given (None), and without tables that are empty then."""
    values = {name: _given(value) if isinstance(value, Mapping) else value for name, value in flags.items()}
    return {name: value for name, value in values.items() if value is not None and value != {}}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two layers: tables key by key; any other value, lists included, is replaced as a whole by the one in `above`."""
    merged = dict(below)
    for name, value in above.items():
        mine = merged.get(name)
        merged[name] = _merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def _validated(layer: Layer, *, partial: bool = False) -> Settings | None:
    """Return the settings of a layer; None if it is `partial` and a required setting is missing.

    Raises ConfigError for the first mistake.
    """
    for name in layer.values:
        # Reject unknown names before pydantic-settings sees them: it takes arguments of its own, such as _env_file.
        if name not in Settings.model_fields:
            raise _unknown(layer, (name,))
    try:
        return Settings(**layer.values)
    except ValidationError as error:
        for mistake in error.errors(include_url=False, include_input=False):
            if not (partial and mistake["type"] == "missing"):
                raise _sentence(layer, mistake) from None
    return None


def _sentence(layer: Layer, mistake: Mapping[str, Any]) -> ConfigError:
    kind = mistake["type"]
    key: Key = tuple(part for part in mistake["loc"] if part != "[key]")
    if kind == "extra_forbidden":
        return _unknown(layer, key)
    if kind == "missing":
        return ConfigError(f"{layer.call(key)} is missing; add it")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return ConfigError(f"{layer.call(key)} is not a table; give its settings one by one")
    reason = mistake.get("ctx", {}).get("error") or mistake["msg"]
    return ConfigError(f"{layer.call(key)}: {_clean(str(reason))}")


def _unknown(layer: Layer, key: Key) -> ConfigError:
    return ConfigError(f"{layer.call(key)} is not a setting{_suggestion(layer, key)}")


def _suggestion(layer: Layer, key: Key) -> str:
    """Return the end of a message that names the setting that was probably meant.

    Tries the same table, tables and settings that have this exact name, then a similar name in the same table; lists the whole table if
    nothing fits.
    """
    *parent, last = key
    wanted = str(last)[:64].lower().replace("-", "_")
    names = list(table_at(parent).model_fields)
    meant = [(*parent, wanted)] if wanted in names else []
    meant += [(table, wanted) for table in ("tls", "limits", "metrics") if wanted in table_at([table]).model_fields]
    meant += [(name,) for name in Settings.model_fields if name == wanted]
    meant += [(*parent, name) for name in get_close_matches(wanted, names, n=1)]
    if meant:
        return f"; did you mean {layer.call(meant[0]).removeprefix(f'{layer.place}: ')}?"
    return f"; what can be set there: {', '.join(names)}"


def _clean(text: str, most: int = 200) -> str:
    """Return foreign text made safe for one line of a message: unprintable characters escaped, cut after `most` characters."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return line if len(line) <= most else f"{line[:most]}..."
