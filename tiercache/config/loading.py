"""Loading of settings from a file, the environment and flags.

Each source is a layer, so that every value and every error can be traced to its source.
"""

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
from typing import Any, Final, get_args, get_origin

from pydantic import ValidationError

from tiercache.config.document import Key, dotted, table_at, table_of
from tiercache.config.models import Principal, Settings
from tiercache.errors import ConfigError

PREFIX: Final = "TIERCACHE_"
FILE_VARIABLE: Final = "TIERCACHE_CONFIG"
DEFAULT_FILE: Final = Path("/etc/tiercache/tiercache.toml")
NO_SETTINGS: Final = frozenset({FILE_VARIABLE, "TIERCACHE_STORE"})
"""Variables with the prefix that are no settings of the daemon.

The first is the path of the file. The second is the default of `--store` for the verbs of the terminal."""
_SERVICE_LINK: Final = re.compile(
    r"TIERCACHE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""Variables that Kubernetes sets in every pod if there is a service named tiercache or tiercache-...

They are ignored, because they are neither settings nor mistakes."""
_JSON: Final = re.compile(r'\{|\[\s*(["{\]]|$)')
"""Beginning of a JSON table or of a JSON list of strings or tables."""
_FILE_LIMIT: Final = 2**20
"""Maximum bytes of a configuration file."""
_NESTED: Final = "__"


class Origin(StrEnum):
    """Kind of source from which a value comes."""

    DEFAULT = "default"
    FILE = "file"
    ENVIRONMENT = "environment"
    FLAG = "flag"


@dataclass(frozen=True, slots=True)
class Layer:
    """Settings from one source: the file, the environment or the flags."""

    origin: Origin
    place: str
    """Path of the file, or the name of another source."""
    values: Mapping[str, Any]

    def gives(self, key: Key) -> bool:
        """Return whether this source has a value for `key`."""
        here: Any = self.values
        for part in key:
            try:
                here = here[part]
            except (LookupError, TypeError):
                return False
        return True

    def name_of(self, key: Key) -> str:
        """Return `key` as the user writes it in this source: as a key of the file, a variable or a flag."""
        if self.origin in (Origin.FILE, Origin.DEFAULT):
            return f"{self.place}: {_clean(dotted(key))}"
        names = [_clean(str(part)) for part in key]
        if self.origin is Origin.FLAG:
            return f"--{'-'.join(names).replace('_', '-')}"
        # An item of a list has no variable of its own, because the variable of the list holds all items.
        depth = next((n for n, part in enumerate(key) if isinstance(part, int)), len(key))
        variable = PREFIX + _NESTED.join(names[:depth]).upper()
        return f"{variable}, {_clean(dotted(key))}" if depth < len(key) else variable


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, together with their sources."""

    settings: Settings
    file: Path | None
    layers: tuple[Layer, ...]
    """Layers in rising precedence: the last layer that has a key gives the key's value."""

    def origin(self, key: Key) -> Origin:
        """Return the kind of source from which the value of `key` comes."""
        return next((layer.origin for layer in reversed(self.layers) if layer.gives(key)), Origin.DEFAULT)


def find_file(given: Path | None) -> Path | None:
    """Return the path of the file to read, or None.

    The path is `given`, else $TIERCACHE_CONFIG, else /etc/tiercache/tiercache.toml if that file exists.
    """
    named = given or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
    return named or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


def load(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings from `overrides`, the environment, `file` and the defaults, in falling precedence.

    `overrides` holds the values of flags; the value of a flag that was not given is None. Raises ConfigError
    for a mistake; its message is one sentence that names the source and the key.
    """
    return resolve(file, overrides).settings


def resolve(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """Return the same settings as `load`, together with the source of each value."""
    layers = (
        Layer(Origin.FILE, printable(file), _read(file) if file else {}),
        Layer(Origin.ENVIRONMENT, "the environment", _environment()),
        Layer(Origin.FLAG, "flags", _without_absent(overrides or {})),
    )
    merged: dict[str, Any] = {}
    for layer in layers:
        # Each layer is also checked alone, so that a mistake is found even if a later layer overrides it. A
        # required setting may be missing in one layer and present in another.
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
    """Return a path as text for messages: unprintable characters escaped, at most 4096 characters."""
    return _clean(str(path), max_chars=4096)


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as source:
            data = source.read(_FILE_LIMIT + 1)
        if len(data) > _FILE_LIMIT:
            raise ConfigError(
                f"{printable(file)} is larger than 1MiB, so it is not a configuration; name another file"
            )
        return tomllib.loads(data.decode())
    except FileNotFoundError as error:
        raise ConfigError(f"{printable(file)} does not exist; create it, or name another file") from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{printable(file)} cannot be read: {reason}; name a TOML file") from error
    except RecursionError as error:
        raise ConfigError(
            f"{printable(file)} is nested too deeply; settings have at most three levels"
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # TOMLDecodeError, or a number with more digits than Python converts
        raise ConfigError(f"{printable(file)} is not TOML: {_clean(str(error))}; correct it there") from error


def _environment() -> dict[str, Any]:
    """Return the settings in environment variables.

    Raises ConfigError for a misspelt name. Without this error, the variable would just have no effect.
    """
    values: dict[str, Any] = {}
    # In this order, TIERCACHE_LIMITS (a JSON table) comes before TIERCACHE_LIMITS__IDLE, which overrides it.
    for name, text in sorted(os.environ.items()):
        if name.startswith(PREFIX) and name not in NO_SETTINGS and not _SERVICE_LINK.fullmatch(name):
            *tables, last = key = _key_of(name)
            place: Any = values
            for part in tables:
                place = place.setdefault(part, {}) if isinstance(place, dict) else None
            if isinstance(place, dict):  # otherwise TIERCACHE_LIMITS is no table, and is refused as that
                place[last] = _decoded(name, key, text)
    return values


def _decoded(name: str, key: Key, text: str) -> Any:
    """Return the value of a variable: a text, or what JSON describes.

    Lists may be JSON, or separated by commas: TIERCACHE_LISTEN=127.0.0.1:7070,[::1]:7070. Where one text is
    possible instead of a list, a list must be JSON: TIERCACHE_STORAGE='["memory://", "file:///d"]'.
    """
    field = table_at(key[:-1]).model_fields.get(str(key[-1]))
    annotation = field and field.annotation
    kinds = {get_origin(one) for one in (annotation, *get_args(annotation))}
    if table_of(annotation) is None and not kinds & {tuple, frozenset}:
        return text
    text = text.strip()
    # _JSON distinguishes a JSON list from "[::1]:7070", which begins with a bracket as well.
    if _JSON.match(text):
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{name} is not JSON: {_clean(str(error))}; write a list with brackets and double quotes"
            ) from error
    if str in get_args(annotation):
        return text  # such as a URL, in which commas have a meaning
    return [part.strip() for part in text.split(",") if part.strip()]


def _key_of(name: str) -> Key:
    """Return the key of a variable; raises ConfigError if there is no such setting."""
    # TIERCACHE_LIMITS__IDLE is ("limits", "idle"). Only a setting in a table has such a nested name. The
    # settings in [[principals]] have none, because the variable TIERCACHE_PRINCIPALS holds the whole list.
    key = tuple(name.removeprefix(PREFIX).lower().split(_NESTED))
    field = Settings.model_fields.get(key[0])
    if (
        not name.isupper()
        or field is None
        or (len(key) > 1 and table_of(field.annotation) in (None, Principal))
    ):
        layer = Layer(Origin.ENVIRONMENT, "", {})
        raise ConfigError(f"{printable(Path(name))} names no setting{_suggestion(layer, key)}")
    return key


def _without_absent(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flags` without the flags that were not given (None), and without empty tables."""
    values = {
        name: _without_absent(value) if isinstance(value, Mapping) else value for name, value in flags.items()
    }
    return {name: value for name, value in values.items() if value is not None and value != {}}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two layers; the values in `above` win.

    Tables are merged key by key. Any other value, including a list, is replaced as a whole.
    """
    merged = dict(below)
    for name, value in above.items():
        mine = merged.get(name)
        merged[name] = _merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def _validated(layer: Layer, *, partial: bool = False) -> Settings | None:
    """Return the settings of a layer; raises ConfigError for the first mistake.

    With `partial`, required settings may be missing; if one is missing, the result is None.
    """
    try:
        return Settings.model_validate(layer.values)
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
        return ConfigError(f"{layer.name_of(key)} is missing; add it")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return ConfigError(f"{layer.name_of(key)} is not a table; give its settings one by one")
    reason = mistake.get("ctx", {}).get("error") or mistake["msg"]
    return ConfigError(f"{layer.name_of(key)}: {_clean(str(reason))}")


def _unknown(layer: Layer, key: Key) -> ConfigError:
    return ConfigError(f"{layer.name_of(key)} is not a setting{_suggestion(layer, key)}")


def _suggestion(layer: Layer, key: Key) -> str:
    """Return the end of a message, which suggests the setting that was probably meant.

    The unknown name is first changed to lower case, with _ for -. The message suggests a setting with this
    name in the same table, else in another table, else a setting with a similar name in the same table. If
    no setting fits, the message lists all settings of the table.
    """
    *parent, last = key
    wanted = str(last)[:64].lower().replace("-", "_")
    names = list(table_at(parent).model_fields)
    meant = [(*parent, wanted)] if wanted in names else []
    meant += [
        (table, wanted)
        for table in ("tls", "limits", "http", "events")
        if wanted in table_at([table]).model_fields
    ]
    meant += [(name,) for name in Settings.model_fields if name == wanted]
    meant += [(*parent, name) for name in get_close_matches(wanted, names, n=1)]
    if meant:
        return f"; did you mean {layer.name_of(meant[0]).removeprefix(f'{layer.place}: ')}?"
    return f"; the settings there are {', '.join(names)}"


def _clean(text: str, max_chars: int = 200) -> str:
    """Return text for one line of a message: escape unprintable characters, and cut after `max_chars`."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return line if len(line) <= max_chars else f"{line[:max_chars]}..."
