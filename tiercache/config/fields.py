"""Kinds of values that only settings of the daemon have."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from tiercache.config.urls import parse_address, section_of
from tiercache.core import Verb
from tiercache.errors import ConfigError
from tiercache.settings import LINE, PATH, Kind, matching
from tiercache.text import shown

_NAMESPACE: Final = re.compile(r"(?:[0-9a-f]{2}){1,64}")
"""Pattern of a namespace, written as the hex digits of its 1 to 64 bytes.

The usual namespace has 32 bytes: the digest of a model's identity. If the caller belongs to a tenant, the
daemon appends 16 bytes that mark the namespace as this tenant's.
"""
_URL_SCHEMA: Final = {"type": "string", "examples": ["lmdb:///var/lib/tiercache?capacity=64GiB"]}


def _file(value: Any) -> str:
    text = PATH.parse(str(value) if isinstance(value, Path) else value)
    return str(text) if text.isprintable() else str(PATH.parse(None))


def _host(value: Any) -> str:
    if isinstance(value, str) and ":" not in value:
        with suppress(ConfigError):
            return parse_address(f"{value}:0").host.lower()
    raise ConfigError(f"{shown(value)} is not the name of a host; write it without a port")


def _subject(value: Any) -> str:
    text = str(LINE.parse(value))
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


def check_namespaces(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the namespaces of a principal; raises ConfigError if they contradict each other."""
    if not value or ("*" in value and len(value) > 1) or len(set(value)) < len(value):
        raise ConfigError('give one or more different namespaces, or only "*" for all')
    return value


def _verb(value: Any) -> Any:
    if value not in tuple(Verb):
        raise ConfigError(f"{shown(value)} is not a verb; use {', '.join(Verb)}")
    return value


def check_verbs(value: frozenset[Verb]) -> frozenset[Verb]:
    """Return the verbs of a principal; raises ConfigError if there is none."""
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
    text = str(LINE.parse(value))
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


def _listen(value: Any) -> str:
    return str(parse_address(value))


def _text(*examples: str, **more: str) -> dict[str, Any]:
    return {"type": "string", "examples": list(examples), **more}


LIST: Final = Kind(_list)
FILE: Final = Kind(_file, schema=PATH.schema)
NAME: Final = matching(
    "[A-Za-z0-9][A-Za-z0-9._@-]{0,63}",
    "is not a name; use up to 64 letters, digits and ._@- and start with a letter or digit",
)
SUBJECT: Final = Kind(_subject, schema=_text("worker-1.example", "spiffe://example/worker-1"))
STORAGE: Final = Kind(
    _storage, schema={"anyOf": [_URL_SCHEMA, {"type": "array", "items": _URL_SCHEMA, "minItems": 1}]}
)
LISTEN: Final = Kind(_listen, schema=_text("127.0.0.1:7070", "[::1]:7070", pattern=":[0-9]{1,5}$"))
LISTEN_OR_NONE: Final = Kind(lambda value: "" if value == "" else _listen(value))
HOST: Final = Kind(_host, schema=_text("cache-1.example"))
NAMESPACE: Final = Kind(_namespace, schema=_text("*", pattern="^(\\*|([0-9a-fA-F]{2}){1,64})$"))
VERB: Final = Kind(_verb)
VERBS: Final = Kind(_list, lambda verbs: [verb for verb in Verb if verb in verbs])
