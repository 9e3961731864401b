"""Settings: the kinds of values that they can have, and tables of settings that a section gives.

A kind reads a value as a user writes it, and writes it back. It is part of the annotation of a setting, whose
docstring below describes the setting:

    @dataclass(frozen=True, kw_only=True)
    class Settings:
        address: Annotated[str, LINE]
        pack: Annotated[int, size(1 << 16, 256 << 20)] = 16 << 20
        \"\"\"Bytes of objects after which a set begins another pack.\"\"\"

    read_section(Settings, "storage type 's3'", {"address": "cache", "pack": "8MiB"})

The sections of stores, tiers and plug-ins are read into such dataclasses. The daemon's file is read by
pydantic into models with the same kinds in their annotations. So a range and its sentence are the same
wherever a setting can be given. Importing this module needs no other package.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_type_hints

from tiercache.errors import ConfigError
from tiercache.text import exact_duration, exact_size, parse_duration, parse_size, shown

T = TypeVar("T")

LARGEST_SIZE: Final = 2**60
"""Maximum of all sizes, in bytes."""
LONGEST: Final = 366 * 86400.0
"""Maximum of all durations, in seconds."""
_WORDS: Final = {
    word: value
    for value, words in ((True, "true yes on 1"), (False, "false no off 0"))
    for word in words.split()
}


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """Kind of a setting's value, for the annotation of the setting."""

    parse: Callable[[Any], Any]
    """Function that returns the value that a user has written, or raises ConfigError with the range."""
    text: Callable[[Any], Any] | None = None
    """Function that writes a value so that `parse` returns it again; None: the value is written as it is."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        """Let pydantic validate what `parse` returns, and write a value as `text` does."""
        from pydantic_core import core_schema

        written = self.text and core_schema.plain_serializer_function_ser_schema(self.text, when_used="json")
        return core_schema.no_info_before_validator_function(
            self.parse, handler(source), serialization=written
        )


def size(low: int = 0, high: int = LARGEST_SIZE, *, or_zero: bool = False, multiple: int = 1) -> Kind:
    """Return the kind of sizes in bytes, such as "64GiB", from `low` to `high`, or 0 if that is allowed.

    A size is rounded down to a multiple of `multiple`.
    """

    def parse(value: Any) -> int:
        found = parse_size(value) // multiple * multiple
        if not (low <= found <= high or (or_zero and not found)):
            raise ConfigError(
                f"{shown(value)} is not possible; use {exact_size(low)} to {exact_size(high)}"
                + ", or 0" * or_zero
            )
        return found

    return Kind(parse, exact_size)


def duration(low: float | None = None, high: float = LONGEST) -> Kind:
    """Return the kind of durations in seconds, such as "250ms", from `low` (None: more than 0) to `high`."""
    bounds = "more than 0 and at most" if low is None else f"{exact_duration(low)} to"

    def parse(value: Any) -> float:
        seconds = parse_duration(value)
        if not (seconds > 0 if low is None else seconds >= low) or seconds > high:
            raise ConfigError(f"{shown(value)} is not possible; use {bounds} {exact_duration(high)}")
        return seconds

    return Kind(parse, exact_duration)


def whole(low: int, high: int, unit: str = "") -> Kind:
    """Return the kind of whole numbers, of `unit`, from `low` to `high`."""

    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value) else value
        if isinstance(number, bool) or not isinstance(number, int) or not low <= number <= high:
            of_unit = f" of {unit}" if unit else ""
            raise ConfigError(
                f"{shown(value)} is not possible; use a whole number{of_unit} from {low} to {high}"
            )
        return number

    return Kind(parse)


def one_of(*words: T) -> Kind:
    """Return the kind of these words, or of the members of an enumeration of words; case is ignored."""
    known = {str(word).lower(): word for word in words}
    *others, last = map(str, words)

    def parse(value: Any) -> T:
        found = known.get(value.lower()) if isinstance(value, str) else None
        if found is None:
            raise ConfigError(f"{shown(value)} is not possible; use {', '.join(others)} or {last}")
        return found

    return Kind(parse, str)


def matching(pattern: str, sentence: str) -> Kind:
    """Return the kind of texts of a pattern; `sentence` is the message for others, without its subject."""
    compiled = re.compile(pattern)

    def parse(value: Any) -> str:
        if not isinstance(value, str) or not compiled.fullmatch(value):
            raise ConfigError(f"{shown(value)} {sentence}")
        return value

    return Kind(parse)


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    raise ConfigError(f"{shown(value)} is neither true nor false")


def _line(value: Any) -> str:
    # Unprintable characters could rewrite a line of a log or of a terminal.
    if not isinstance(value, str) or not value.isprintable() or len(value) > 4096:
        raise ConfigError(f"{shown(value)} is not a line of text; write printable characters in quotes")
    return value


def _path(value: Any) -> str:
    # The message does not repeat the value, because a user may have given a secret itself as its file.
    if not isinstance(value, str) or not value.startswith("/"):
        raise ConfigError("this is not an absolute path; write it from the root, like /var/lib/tiercache")
    return value


FLAG: Final = Kind(_flag)
LINE: Final = Kind(_line)
PATH: Final = Kind(_path)


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """Mark in an annotation: the name of a setting in sections, if it is not that of the attribute."""

    name: str


LIVE: Final = object()
"""Mark in an annotation of a setting that can change while its owner is open."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting of a table."""

    attribute: str
    kind: Kind
    is_required: bool
    is_live: bool


def settings_in(table: type) -> Mapping[str, Setting]:
    """Return the settings of a dataclass by their names in sections; attributes without a kind are none."""
    found: dict[str, Setting] = {}
    hints = get_type_hints(table, include_extras=True)
    for field in dataclasses.fields(table):
        marks = getattr(hints[field.name], "__metadata__", ())
        name = next((mark.name for mark in marks if isinstance(mark, Named)), field.name)
        for mark in marks:
            if isinstance(mark, Kind):
                is_required = field.default is field.default_factory is dataclasses.MISSING
                found[name] = Setting(field.name, mark, is_required, LIVE in marks)
    return found


def read_values(
    owner: str, section: Mapping[str, Any], kinds: Mapping[str, Kind], prefix: str = ""
) -> dict[str, Any]:
    """Return the values of a section, each read by the kind of the same name.

    `owner`: whose settings these are, for messages. `prefix`: beginning of all names in messages. Raises
    ConfigError for a setting that is unknown or wrong.
    """
    values: dict[str, Any] = {}
    for name, value in section.items():
        if name not in kinds:
            known = ", ".join(prefix + one for one in sorted(kinds))
            raise ConfigError(f"{owner} has no setting {prefix + name!r}; it has {known}")
        try:
            values[name] = kinds[name].parse(value)
        except ConfigError as error:
            raise ConfigError(f"{owner}, setting {prefix + name!r}: {error}") from error
    return values


def read_attributes(table: type, owner: str, section: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a section by the attributes of a table; raises ConfigError as `read_values`."""
    known = settings_in(table)
    values = read_values(owner, section, {name: one.kind for name, one in known.items()}, prefix)
    return {known[name].attribute: value for name, value in values.items()}


def read_section(table: type[T], owner: str, section: Mapping[str, Any], example: str = "") -> T:
    """Return the table that a section gives.

    `example`: a section that is possible, for messages. Raises ConfigError as `read_values`, for a setting
    that is missing, and what the table itself raises.
    """
    for name, setting in settings_in(table).items():
        if setting.is_required and name not in section:
            raise ConfigError(f"{owner} needs {name!r}" + (f", as in {example}" if example else ""))
    return table(**read_attributes(table, owner, section))
