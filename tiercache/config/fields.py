"""Types of settings, which convert values from a file, a variable or a flag, and reject wrong values.

The functions of this module check every value before pydantic does. So the error messages are tiercache's
own, and a boolean is never accepted as a number.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, PlainSerializer, WithJsonSchema

from tiercache.config.addresses import parse_address
from tiercache.config.urls import section_of
from tiercache.core import Verb
from tiercache.errors import ConfigError
from tiercache.text import exact_duration, exact_size, parse_duration, parse_size, shown

_LARGEST_SIZE: Final = 2**60
"""Maximum of all sizes, in bytes."""
_LONGEST: Final = 366 * 86400.0
"""Maximum of all durations, in seconds."""
_MESSAGE_LIMIT: Final = 2**31 - 1
"""Maximum size of a message in bytes; gRPC keeps this size in a signed 32-bit number."""
_WORDS: Final = {
    word: value
    for value, words in ((True, "true yes on 1"), (False, "false no off 0"))
    for word in words.split()
}
LEVELS: Final = ("debug", "info", "warning", "error")
"""Levels of the log."""
FORMATS: Final = ("text", "json")
"""Formats of the log."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAMESPACE: Final = re.compile(r"(?:[0-9a-f]{2}){1,64}")
"""Pattern of a namespace, written as the hex digits of its 1 to 64 bytes.

The usual namespace has 32 bytes: the digest of a model's identity. If the caller belongs to a tenant, the
daemon appends 16 bytes that mark the namespace as this tenant's.
"""


def _size(minimum: int = 0, maximum: int = _LARGEST_SIZE) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        size = parse_size(value)
        if not minimum <= size <= maximum:
            raise ConfigError(
                f"{shown(value)} is not possible; use {exact_size(minimum)} to {exact_size(maximum)}"
            )
        return size

    return parse


def _duration(value: Any) -> float:
    seconds = parse_duration(value)
    if not 0 < seconds <= _LONGEST:
        raise ConfigError(
            f"{shown(value)} is not possible; use more than 0 and at most {exact_duration(_LONGEST)}"
        )
    return seconds


def _whole(minimum: int, maximum: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        number = int(value) if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value) else value
        if isinstance(number, bool) or not isinstance(number, int) or not minimum <= number <= maximum:
            raise ConfigError(
                f"{shown(value)} is not possible; use a whole number from {minimum} to {maximum}"
            )
        return number

    return parse


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    raise ConfigError(f"{shown(value)} is neither true nor false")


def _text(value: Any) -> str:
    # Unprintable characters could rewrite a line of a log or of a terminal.
    if not isinstance(value, str) or not value.isprintable() or len(value) > 4096:
        raise ConfigError(f"{shown(value)} is not a line of text; write printable characters in quotes")
    return value


def _path(value: Any) -> str:
    text = str(value) if isinstance(value, Path) else value
    # The message does not repeat the value, because a user may have given the token itself as token_file.
    if not isinstance(text, str) or not text.isprintable() or not text.startswith("/"):
        raise ConfigError("this is not an absolute path; write it from the root, like /var/lib/tiercache")
    return text


def _name(value: Any) -> str:
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ConfigError(
            f"{shown(value)} is not a name; use up to 64 letters, digits and ._@- and start with a letter or"
            " digit"
        )
    return value


def _host(value: Any) -> str:
    if isinstance(value, str) and ":" not in value:
        with suppress(ConfigError):
            return parse_address(f"{value}:0").host.lower()
    raise ConfigError(f"{shown(value)} is not the name of a host; write it without a port")


def _subject(value: Any) -> str:
    text = _text(value)
    if not text or " " in text or "*" in text:
        raise ConfigError(
            f"{shown(value)} is not a subject alternative name; write the complete name, such as"
            " worker-1.example or spiffe://..."
        )
    return text


def _namespace(value: Any) -> str:
    text = value.lower() if isinstance(value, str) else ""
    if text != "*" and not _NAMESPACE.fullmatch(text):
        raise ConfigError(
            f"{shown(value)} is not a namespace; write all its hex digits, as `tiercache ls -o json` prints"
            ' them, or "*" for all'
        )
    return text


def _namespaces(value: tuple[str, ...]) -> tuple[str, ...]:
    if not value or ("*" in value and len(value) > 1) or len(set(value)) < len(value):
        raise ConfigError('give one or more different namespaces, or only "*" for all')
    return value


def _choice(words: tuple[str, ...]) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = value.lower() if isinstance(value, str) else value
        if text not in words:
            raise ConfigError(f"{shown(value)} is not possible; use {', '.join(words)}")
        return str(text)

    return parse


def _verb(value: Any) -> Any:
    if value not in tuple(Verb):
        raise ConfigError(f"{shown(value)} is not a verb; use {', '.join(Verb)}")
    return value


def _verbs(value: frozenset[Verb]) -> frozenset[Verb]:
    if not value:
        raise ConfigError(f"a principal without verbs can do nothing; use some of {', '.join(Verb)}")
    return value


def _storage(value: Any) -> str | tuple[str, ...]:
    """Return the URL of a store, or the URLs of the tiers of a chain."""
    if not isinstance(value, list | tuple):
        return _url(value)
    if not value or "" in value:
        raise ConfigError("a tier has no URL; list the URL of each tier, the fastest first, or one URL alone")
    return tuple(_url(item) for item in value)


def _url(value: Any) -> str:
    text = _text(value)
    scheme, _, rest = text.partition("://")
    if "@" in rest.partition("/")[0]:
        raise ConfigError(f"a user or password in a {scheme}:// URL would be shown and logged; remove it")
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
    {
        "anyOf": [
            {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*([KMGTPkmgtp][Ii]?)?[Bb]?\s*$"},
            {"type": "integer", "minimum": 0},
        ]
    }
)
_DURATION_SCHEMA: Final = WithJsonSchema(
    {
        "anyOf": [
            {"type": "string", "pattern": r"^\s*\d+(\.\d+)?\s*(us|ms|s|min|m|h|d)?\s*$"},
            {"type": "number", "exclusiveMinimum": 0},
        ]
    }
)
_AS_SIZE: Final = PlainSerializer(exact_size, when_used="json")
_AS_DURATION: Final = PlainSerializer(exact_duration, when_used="json")
_AS_SORTED: Final = PlainSerializer(lambda verbs: [verb for verb in Verb if verb in verbs], when_used="json")

Listed: Final = BeforeValidator(_list)

Size = Annotated[int, BeforeValidator(_size()), _AS_SIZE, _SIZE_SCHEMA]
DiskBytes = Annotated[int, BeforeValidator(_size(minimum=4 * 2**20)), _AS_SIZE, _SIZE_SCHEMA]
HostBytes = Annotated[int, BeforeValidator(_size(minimum=32 * 2**20)), _AS_SIZE, _SIZE_SCHEMA]
AuditBytes = Annotated[int, BeforeValidator(_size(minimum=64 * 2**10)), _AS_SIZE, _SIZE_SCHEMA]
ObjectBytes = Annotated[int, BeforeValidator(_size(minimum=4096)), _AS_SIZE, _SIZE_SCHEMA]
# The minimum of a message is 1.5 MiB.
MessageBytes = Annotated[
    int, BeforeValidator(_size(minimum=3 * 2**19, maximum=_MESSAGE_LIMIT)), _AS_SIZE, _SIZE_SCHEMA
]
Duration = Annotated[float, BeforeValidator(_duration), _AS_DURATION, _DURATION_SCHEMA]
Count = Annotated[int, BeforeValidator(_whole(1, 2**20)), _schema("integer", minimum=1, maximum=2**20)]
Port = Annotated[int, BeforeValidator(_whole(0, 65535)), _schema("integer", minimum=0, maximum=65535)]
# The user id 2**32 - 1 is -1 as a uid_t; system calls use it for "no user".
UserId = Annotated[
    int, BeforeValidator(_whole(0, 2**32 - 2)), _schema("integer", minimum=0, maximum=2**32 - 2)
]
Flag = Annotated[bool, BeforeValidator(_flag)]
Level = Annotated[str, BeforeValidator(_choice(LEVELS)), _schema("string", enum=list(LEVELS))]
LogFormat = Annotated[str, BeforeValidator(_choice(FORMATS)), _schema("string", enum=list(FORMATS))]
AbsolutePath = Annotated[Path, BeforeValidator(_path), _schema("string", pattern="^/")]
Text = Annotated[str, BeforeValidator(_text)]
Name = Annotated[str, BeforeValidator(_name), _schema("string", pattern=f"^{_NAME.pattern}$")]
Subject = Annotated[
    str, BeforeValidator(_subject), _schema("string", "worker-1.example", "spiffe://example/worker-1")
]
_URL_SCHEMA: Final = {"type": "string", "examples": ["lmdb:///var/lib/tiercache?capacity=64GiB"]}
StorageUrls = Annotated[
    str | tuple[str, ...],
    BeforeValidator(_storage),
    WithJsonSchema({"anyOf": [_URL_SCHEMA, {"type": "array", "items": _URL_SCHEMA, "minItems": 1}]}),
]
Listen = Annotated[
    str,
    BeforeValidator(lambda value: str(parse_address(value))),
    _schema("string", "127.0.0.1:7070", "[::1]:7070", pattern=":[0-9]{1,5}$"),
]
ListenOrNone = Annotated[str, BeforeValidator(lambda value: str(parse_address(value)) if value != "" else "")]
Listens = Annotated[tuple[Listen, ...], Listed]
HostName = Annotated[str, BeforeValidator(_host), _schema("string", "cache-1.example")]
HostNames = Annotated[tuple[HostName, ...], Listed]
Namespace = Annotated[
    str, BeforeValidator(_namespace), _schema("string", "*", pattern="^(\\*|([0-9a-fA-F]{2}){1,64})$")
]
Namespaces = Annotated[tuple[Namespace, ...], Listed, AfterValidator(_namespaces)]
Verbs = Annotated[
    frozenset[Annotated[Verb, BeforeValidator(_verb)]], Listed, AfterValidator(_verbs), _AS_SORTED
]
