"""Loading of settings from a file and flags."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import ValidationError

from tiercache.config.document import Key, dotted, table_at
from tiercache.config.models import Settings
from tiercache.errors import ConfigError

FILE_VARIABLE: Final = "TIERCACHE_CONFIG"
DEFAULT_FILE: Final = Path("/etc/tiercache/tiercache.toml")
_FILE_LIMIT: Final = 2**20
"""Maximum bytes of a configuration file."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings, together with the file from which they come."""

    settings: Settings
    file: Path | None
    values: Mapping[str, Any]
    """Values in the file."""

    def origin(self, key: Key) -> Literal["file", "default"]:
        """Return where the value of `key` comes from, if no flag gives it."""
        return "file" if _gives(self.values, key) else "default"


def find_file(given: Path | None) -> Path | None:
    """Return the path of the file to read, or None.

    The path is `given`, else $TIERCACHE_CONFIG, else /etc/tiercache/tiercache.toml if that file exists.
    """
    named = given or (Path(os.environ[FILE_VARIABLE]) if os.environ.get(FILE_VARIABLE) else None)
    return named or (DEFAULT_FILE if DEFAULT_FILE.exists() else None)


def load(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings from `overrides`, `file` and the defaults, in falling precedence.

    `overrides` holds the values of flags; the value of a flag that was not given is None. Raises ConfigError
    for a mistake; its message is one sentence that names the source and the key.
    """
    return resolve(file, overrides).settings


def resolve(file: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Loaded:
    """Return the same settings as `load`, together with what the file has."""
    values, flags = _read(file) if file else {}, _without_absent(overrides or {})
    places = [printable(file)] * bool(file) + ["flags"] * bool(flags) or ["defaults"]
    try:
        settings = Settings.model_validate(_merge(values, flags))
    except ValidationError as error:
        # A misspelt setting says more than that the right one is missing.
        found = error.errors(include_url=False, include_input=False)
        mistake = min(found, key=lambda one: one["type"] == "missing")
        raise _sentence(places[0], flags, mistake) from None
    try:
        return Loaded(settings.check(), file, values)
    except ConfigError as error:
        raise ConfigError(f"{' with '.join(places)}: {error}") from error


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


def _without_absent(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return `flags` without the flags that were not given (None), and without empty tables."""
    values = {
        name: _without_absent(value) if isinstance(value, Mapping) else value for name, value in flags.items()
    }
    return {name: value for name, value in values.items() if value is not None and value != {}}


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two sources; the values in `above` win.

    Tables are merged key by key. Any other value, including a list, is replaced as a whole.
    """
    merged = dict(below)
    for name, value in above.items():
        mine = merged.get(name)
        merged[name] = _merge(mine, value) if isinstance(mine, dict) and isinstance(value, dict) else value
    return merged


def _gives(values: Any, key: Sequence[str | int]) -> bool:
    """Return whether these tables and lists have a value for `key`."""
    for part in key:
        try:
            values = values[part]
        except (LookupError, TypeError):
            return False
    return True


def _sentence(place: str, flags: Mapping[str, Any], mistake: Mapping[str, Any]) -> ConfigError:
    """Return the error for a mistake in a flag, or else in the file or the defaults (`place`)."""
    kind = mistake["type"]
    key: Key = tuple(part for part in mistake["loc"] if part != "[key]")
    name = f"{place}: {_clean(dotted(key))}"
    if _gives(flags, key):
        name = f"--{'-'.join(_clean(str(part)) for part in key).replace('_', '-')}"
    if kind == "extra_forbidden":
        return ConfigError(f"{name} is not a setting{_suggestion(key)}")
    if kind == "missing":
        return ConfigError(f"{name} is missing; add it")
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return ConfigError(f"{name} is not a table; give its settings one by one")
    reason = mistake.get("ctx", {}).get("error") or mistake["msg"]
    return ConfigError(f"{name}: {_clean(str(reason))}")


def _suggestion(key: Key) -> str:
    """Return the end of a message, which suggests the setting that was probably meant.

    The unknown name is first changed to lower case, with _ for -. The message suggests a setting with this
    name in the same table, else in another table, else a setting with a similar name in the same table. If
    no setting fits, the message lists all settings of the table.
    """
    *parent, last = key
    wanted = str(last)[:64].lower().replace("-", "_")
    names = list(table_at(parent).model_fields)
    tables: list[Key] = [tuple(parent), ("tls",), ("limits",), ("http",), ("events",), ()]
    meant: list[Key] = [(*table, wanted) for table in tables if wanted in table_at(table).model_fields]
    meant += [(*parent, name) for name in get_close_matches(wanted, names, n=1)]
    if meant:
        return f"; did you mean {dotted(meant[0])}?"
    return f"; the settings there are {', '.join(names)}"


def _clean(text: str, max_chars: int = 200) -> str:
    """Return text for one line of a message: escape unprintable characters, and cut after `max_chars`."""
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return line if len(line) <= max_chars else f"{line[:max_chars]}..."
