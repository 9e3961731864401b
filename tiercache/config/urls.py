"""Storage URLs: from a path or an address and settings to a URL, and from a URL to the section of a configuration that it stands for.

    storage_url("file", Path("my store #1"), capacity="200GiB")    file:///current/directory/my%20store%20%231?capacity=200GiB
    section_of("grpc://node7:7070?tls=true")                       {"type": "grpc", "address": "node7:7070", "tls": "true"}

A path stands for itself byte for byte: what a URL gives a meaning to (# ? % &) is escaped, what is not UTF-8 as well.
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
    """The URL of a store of type `kind` in the directory `path`, made absolute, or at `address`, host:port. `section_of` undoes it."""
    where = f"{kind}://{address}{_escaped(os.path.abspath(path)) if path else ''}"
    return where + "?" * bool(settings) + "&".join(f"{name}={_escaped(str(value))}" for name, value in settings.items())


def section_of(url: str) -> dict[str, Any]:
    """The section that a storage URL stands for: `type`, `address` (what follows //) and `path` where present, and the query's settings.

    Raises ConfigError for what is no URL, or could be meant in two ways.
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
    """What gRPC calls the unix socket at `path`: it reads a URL there. Raises ConfigError for a comma, at which it parts addresses."""
    if "," in os.fspath(path):
        raise ConfigError(f"{shown(os.fspath(path))} has a comma, with which no client finds a unix socket; name another directory")
    return f"unix:{_escaped(os.fspath(path))}"


def _named(url: str) -> str:
    # What follows the question mark may hold a secret.
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
