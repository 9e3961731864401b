"""Validated reading of an untrusted model config.

The methods return only values that have the expected type and lie within their bounds. For any other value
they raise ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from tiercache.errors import ConfigError
from tiercache.text import shown

MAX_SIZE: Final = 1 << 24
"""Maximum accepted width, head count or number of experts of a model."""
MAX_LAYERS: Final = 1024
"""Maximum accepted number of layers, of entries of a list, and of characters of a text."""


class Fields:
    """The fields of one config mapping. A field that is null counts as missing, as for Hugging Face.

    A field may have several names; all of those that are present must have the same value. The methods that
    read a field raise ConfigError if the field is malformed, or if it is missing and has no default.

    Thread safety: any thread, while nobody changes the mapping.
    """

    def __init__(self, values: Mapping[str, Any], label: str) -> None:
        self.label = label
        """Name of the config in error messages."""
        self._values = values

    def error(self, problem: str) -> ConfigError:
        """Return a ConfigError about this config, for the caller to raise."""
        return ConfigError(f"{self.label}: {problem}")

    def has(self, name: str) -> bool:
        """Return whether the field is present and not null."""
        return self._values.get(name) is not None

    def switched_on(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` whose fields are present and neither null, false nor zero."""
        return [name for name in names if self._values.get(name) not in (None, False, 0)]

    def count(self, *names: str, least: int = 1, most: int = MAX_SIZE, default: int | None = None) -> int:
        """Return a whole number in [least, most]; `default` if no such field is present."""
        found = self._found(names)
        if found is None:
            if default is None:
                raise self._missing(names)
            return default
        name, value = found
        return self._whole(f"{name} is", value, least, most)

    def counts(self, name: str, *, least: int = 0, most: int = MAX_SIZE) -> list[int]:
        """Return a list of whole numbers in [least, most]."""
        return [self._whole(f"{name} holds", value, least, most) for value in self._listed(name)]

    def number(self, name: str, *, most: float = MAX_SIZE) -> float:
        """Return a finite number above 0 and at most `most`."""
        value = self._required(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(f"{name} is {shown(value)}; a number is needed")
        if not 0 < value <= most or not math.isfinite(value):
            raise self.error(f"{name} is {shown(value)}; a number above 0 and at most {most} is needed")
        return float(value)

    def flag(self, name: str, *, default: bool | None = None) -> bool:
        """Return a field that is true or false; `default` if it is not present."""
        if default is not None and not self.has(name):
            return default
        value = self._required(name)
        if not isinstance(value, bool):
            raise self.error(f"{name} is {shown(value)}; true or false is needed")
        return value

    def text(self, *names: str, default: str | None = None, most: int = MAX_LAYERS) -> str:
        """Return a string of at most `most` characters; `default` if no such field is present."""
        found = self._found(names)
        if found is None:
            if default is None:
                raise self._missing(names)
            return default
        name, value = found
        if not isinstance(value, str) or len(value) > most:
            raise self.error(f"{name} is {shown(value)}; a string of at most {most} characters is needed")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings."""
        found = self._listed(name)
        for value in found:
            if not isinstance(value, str):
                raise self.error(f"{name} holds {shown(value)}; strings are needed")
        return found

    def inner(self, name: str) -> Fields:
        """Return the fields of a mapping inside this one."""
        value = self._required(name)
        if not isinstance(value, Mapping):
            raise self.error(f"{name} is {shown(value)}; an object is needed")
        return Fields(value, f"{self.label}, {name}")

    def is_text(self, name: str, text: str) -> bool:
        """Return whether the field is exactly this string, such as `auto` in place of a number."""
        value = self._values.get(name)
        return isinstance(value, str) and value == text

    def _missing(self, names: Sequence[str]) -> ConfigError:
        return self.error(
            f"{' or '.join(names)} is missing, and without it the model's cost cannot be derived"
        )

    def _required(self, name: str) -> Any:
        if not self.has(name):
            raise self._missing((name,))
        return self._values[name]

    def _found(self, names: Sequence[str]) -> tuple[str, Any] | None:
        """Return the first of `names` that is present, with its value; None if no name is present.

        Raises ConfigError if two names have different values.
        """
        present = [(name, self._values[name]) for name in names if self.has(name)]
        if not present:
            return None
        first, value = present[0]
        for name, other in present[1:]:
            if type(other) is not type(value) or (isinstance(value, int | str) and other != value):
                raise self.error(
                    f"{first} is {shown(value)} but {name} is {shown(other)}; they must be the same"
                )
        return first, value

    def _listed(self, name: str) -> list[Any]:
        value = self._required(name)
        if not isinstance(value, list | tuple) or len(value) > MAX_LAYERS:
            raise self.error(f"{name} is {shown(value)}; a list of at most {MAX_LAYERS} entries is needed")
        return list(value)

    def _whole(self, what: str, value: object, least: int, most: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(f"{what} {shown(value)}; a whole number is needed")
        if not least <= value <= most:
            raise self.error(f"{what} {shown(value)}; it must be from {least} to {most}")
        return value
