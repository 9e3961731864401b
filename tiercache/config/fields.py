"""Types of settings: conversion of a value from a file, a variable or a flag, with a sentence for each value that does not fit.

The functions here check every value before pydantic sees it, so that messages are tiercache's own and a boolean never passes for a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

from tiercache.config.addresses import parse_address
from tiercache.config.quantities import duration_text, parse_duration, parse_size, shown, size_text
from tiercache.config.urls import section_of
from tiercache.core import Verb
from tiercache.errors import ConfigError

_LARGEST_SIZE: Final = 2**60
_LONGEST: Final = 366 * 86400.0
_MESSAGE_LIMIT: Final = 2**31 - 1
"""Largest message in bytes: gRPC counts them in a signed 32-bit number."""
_WORDS: Final = {word: value for value, words in ((True, "true yes on 1"), (False, "false no off 0")) for word in words.split()}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAMESPACE: Final = re.compile(r"(?:[0-9a-f]{2}){1,64}")
"""Hex digits of a namespace, which in a store has 1 to 64 bytes.

An identity has 32 of them, and a tenant's mark adds 16 in the form in which the store holds them.
"""


def _size(least: int = 0, most: int = _LARGEST_SIZE) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        size = parse_size(value)
        if not least <= size <= most:
            raise ConfigError(f"{shown(value)} is not possible; use {size_text(least)} to {size_text(most)}")
        return size

    return parse


def _duration(value: Any) -> float:
    seconds = parse_duration(value)
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(f"{shown(value)} is not possible; use more than 0 and at most {duration_text(_LONGEST)}")
    return seconds


def _whole(least: int, most: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value) else value
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise ConfigError(f"{shown(value)} is not possible; use a whole number from {least} to {most}")
        return number

    return parse


def _flag(value: Any) -> bool:
    known = value if isinstance(value, bool) else _WORDS.get(value.lower()) if isinstance(value, str) else None
    if known is None:
        raise ConfigError(f"{shown(value)} is neither true nor false")
    return known


def _text(value: Any) -> str:
    # Unprintable characters could rewrite a line of a log or of a terminal.
    if not isinstance(value, str) or not value.isprintable() or len(value) > 4096:
        raise ConfigError(f"{shown(value)} is not a line of text; write printable characters in quotes")
    return value


def _path(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else value
    # The message does not repeat the value: it is a secret if the token itself was written into token_file.
    if not isinstance(text, str) or not text.isprintable() or not text.startswith("/"):
        raise ConfigError("this is not an absolute path; write it from the root, like /var/lib/tiercache")
    return text


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(f"{shown(value)} is not a name; use up to 64 letters, digits and ._@- and start with a letter or digit")
    return value


def _subject(value: Any) -> str:
    text = _text(value)
    if not text or " " in text or "*" in text:
        raise ConfigError(
            f"{shown(value)} is not a subject alternative name; it is compared as a whole: write it like worker-1.example or spiffe://..."
        )
    return text


def _namespace(value: Any) -> str:
    text = value.lower() if isinstance(value, str) else ""
    if text != "*" and not _NAMESPACE.fullmatch(text):
        raise ConfigError(
            f'{shown(value)} is not a namespace; write all its hex digits, as `tiercache ls -o json` prints them, or "*" for all'
        )
    return text


def _namespaces(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or ("*" in value and len(value) > 1) or len(set(value)) < len(value):
        raise ConfigError('one or more namespaces are needed, each once; "*" is all of them and stands alone')
    return value


def _verb(value: Any) -> Any:
    if value not in tuple(Verb):
        raise ConfigError(f"{shown(value)} is not a verb; use {', '.join(Verb)}")
    return value


def _verbs(value: frozenset[Verb]) -> frozenset[Verb]:
    if not value:
        raise ConfigError(f"a principal without verbs can do nothing; use some of {', '.join(Verb)}")
    return value


def _storage(value: Any) -> str:
    text = _text(value)
    scheme, _, rest = text.partition("://")
    if "@" in rest.partition("/")[0]:
        raise ConfigError(f"a user or password in a {scheme}:// URL would be shown and logged; take it out")
    if text:
        section_of(text)
    return text


def _list(value: Any) -> Any:
    if not isinstance(value, list | tuple | set | frozenset):
        raise ConfigError(f"{shown(value)} is not a list; put it into brackets, as in [{shown(value)}]")
    return value


def _schema(kind: str, *examples: object, **more: object) -> WithJsonSchema:
    return WithJsonSchema({"type": kind, **({"examples": list(examples)} if examples else {}), **more})


_SIZE_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTPkmgtp][Ii]?)?[Bb]?\s*$"}, {"type": "integer", "minimum": 0}]}
)
_DURATION_SCHEMA: Final = WithJsonSchema(
    {"anyOf": [{"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(us|ms|s|min|m|h|d)?\s*$"}, {"type": "number", "exclusiveMinimum": 0}]}
)
_AS_SIZE: Final = PlainSerializer(size_text, when_used="json")
_AS_DURATION: Final = PlainSerializer(duration_text, when_used="json")
_AS_SORTED: Final = PlainSerializer(lambda verbs: [verb for verb in Verb if verb in verbs], when_used="json")

Listed: Final = BeforeValidator(_list)

Size = Annotated[int, BeforeValidator(_size()), _AS_SIZE, _SIZE_SCHEMA]
DiskBytes = Annotated[int, BeforeValidator(_size(least=4 * 2**20)), _AS_SIZE, _SIZE_SCHEMA]
HostBytes = Annotated[int, BeforeValidator(_size(least=32 * 2**20)), _AS_SIZE, _SIZE_SCHEMA]
ObjectBytes = Annotated[int, BeforeValidator(_size(least=4096)), _AS_SIZE, _SIZE_SCHEMA]
MessageBytes = Annotated[int, BeforeValidator(_size(least=3 * 2**19, most=_MESSAGE_LIMIT)), _AS_SIZE, _SIZE_SCHEMA]
Duration = Annotated[float, BeforeValidator(_duration), _AS_DURATION, _DURATION_SCHEMA]
Count = Annotated[int, BeforeValidator(_whole(1, 2**20)), _schema("integer", minimum=1, maximum=2**20)]
UserId = Annotated[int, BeforeValidator(_whole(0, 2**32 - 2)), _schema("integer", minimum=0, maximum=2**32 - 2)]
Flag = Annotated[bool, BeforeValidator(_flag)]
AbsolutePath = Annotated[Path, BeforeValidator(_path), _schema("string", pattern="^/")]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_name), _schema("string", pattern=f"^{_NAME.pattern}$")]
Subject = Annotated[str, BeforeValidator(_subject), _schema("string", "worker-1.example", "spiffe://example/worker-1")]
StorageUrl = Annotated[str, BeforeValidator(_storage), _schema("string", "lmdb:///var/lib/tiercache?capacity=64GiB")]
Listen = Annotated[
    str, BeforeValidator(lambda value: str(parse_address(value))), _schema("string", "127.0.0.1:7070", "[::1]:7070", pattern=":[0-9]{1,5}$")
]
ListenOrNone = Annotated[str, BeforeValidator(lambda value: str(parse_address(value)) if value != "" else "")]
Listens = Annotated[tuple[Listen, ...], Listed]
Namespace = Annotated[str, BeforeValidator(_namespace), _schema("string", "*", pattern="^(\\*|([0-9a-fA-F]{2}){1,64})$")]
Namespaces = Annotated[tuple[Namespace, ...], Listed, AfterValidator(_namespaces)]
Verbs = Annotated[frozenset[Annotated[Verb, BeforeValidator(_verb)]], Listed, AfterValidator(_verbs), _AS_SORTED]
