"""Storage URLs: from a path or an address and settings to a URL, and from a URL to the configuration section that it stands for.

    storage_url("file", Path("my store #1"), capacity="200GiB")    file:///current/directory/my%20store%20%231?capacity=200GiB
    section_of("grpc://node7:7070?tls=true")                       {"type": "grpc", "address": "node7:7070", "tls": "true"}

Paths are kept byte for byte: characters with a meaning in URLs (# ? % &) are escaped, and so are bytes that are not UTF-8.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final
from urllib.parse import quote, unquote_to_bytes

from tiercache.config.quantities import shown
from tiercache.errors import ConfigError

_FORM: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", re.DOTALL)
_LOOSE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


def storage_url(kind: str, path: str | os.PathLike[str] = "", *, address: str = "", **settings: object) -> str:
    """Return the URL of a store of type `kind` in the directory `path`, made absolute, or at `address` (host:port).

    `section_of` is the inverse.
    """
    where = f"{kind}://{address}{_escaped(os.path.abspath(path)) if path else ''}"
    return where + "?" * bool(settings) + "&".join(f"{name}={_escaped(str(value))}" for name, value in settings.items())


def section_of(url: str) -> dict[str, Any]:
    """Return the section that a storage URL stands for.

    It has `type`, `address` (the text that follows //) and `path`, the latter two where present, and the settings of the query. Raises
    ConfigError for a text that is not a URL or is ambiguous.
    """
    match = _FORM.fullmatch(url)
    if match is None:
        raise ConfigError(f"storage {_named(url)} is not a URL; write type://..., such as file:///var/lib/tiercache?capacity=200GiB")
    kind, address, path, query, fragment = match.groups()
    if fragment is not None:
        raise ConfigError(f"storage {_named(url)} has a #, which ends a URL; write %23 where a name has one")
    if not all(c.isprintable() or "\udc80" <= c <= "\udcff" for c in url):
        raise ConfigError(f"storage {_named(url)} has characters that cannot be printed; write them as % and two hex digits")
    section: dict[str, Any] = {"type": kind.lower()}
    if address:
        section["address"] = address
    if path:
        section["path"] = _plain(path, url)
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if (name := _plain(name, url)) in section:
            raise ConfigError(f"storage {_named(url)} gives {name!r} twice; keep one")
        section[name] = _plain(value, url)
    return section


def unix_target(path: str | os.PathLike[str]) -> str:
    """Return gRPC's name for the unix socket at `path`; gRPC reads it as a URL, so the path is escaped.

    Raises ConfigError for a comma, at which gRPC separates addresses.
    """
    if "," in os.fspath(path):
        raise ConfigError(f"{shown(os.fspath(path))} has a comma, with which no client finds a unix socket; name another directory")
    return f"unix:{_escaped(os.fspath(path))}"


def _named(url: str) -> str:
    # Messages leave out the query: it may hold a secret.
    return shown(url.partition("?")[0])


def _escaped(text: str) -> str:
    return quote(os.fsencode(text), safe="/:,")


def _plain(text: str, url: str) -> str:
    if _LOOSE.search(text):
        raise ConfigError(f"storage {_named(url)} has a % without two hex digits behind it; write %25 where a name has one")
    found = os.fsdecode(unquote_to_bytes(os.fsencode(text)))
    if "\0" in found:
        raise ConfigError(f"storage {_named(url)} has %00, which no name can hold; take it out")
    return found
