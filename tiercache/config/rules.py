"""Kinds of values that only settings of the daemon have, rules between settings, and warnings about them.

This module opens no file and resolves no host name.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tiercache.config.urls import check_sockets, parse_address, section_of
from tiercache.core import Verb
from tiercache.errors import ConfigError
from tiercache.events.settings import check_endpoint
from tiercache.settings import LINE, PATH, Kind, matching, one_of
from tiercache.text import exact_size, shown

if TYPE_CHECKING:
    from tiercache.config.models import Principal, Settings
    from tiercache.config.urls import Address

_NAMESPACE_DIGITS: Final = (64, 96)
"""Hex digits of a model's namespace, without and with the mark of a tenant."""
_KEY_BYTES: Final = 256
"""Maximum size in bytes of one object's description in a message."""


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


def check_namespaces(value: tuple[str, ...]) -> tuple[str, ...]:
    """Return the namespaces of a principal in lower case; raises ConfigError for a contradiction."""
    value = tuple(text.lower() for text in value)
    if not value or ("*" in value and len(value) > 1) or len(set(value)) < len(value):
        raise ConfigError('give one or more different namespaces, or only "*" for all')
    return value


def check_verbs(value: frozenset[Verb]) -> frozenset[Verb]:
    """Return the verbs of a principal; raises ConfigError if there is none."""
    if not value:
        raise ConfigError(f"a principal without verbs can do nothing; use some of {', '.join(Verb)}")
    return value


def _store_urls(value: Any) -> str | tuple[str, ...]:
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


LIST: Final = Kind(_list)
FILE: Final = Kind(_file)
NAME: Final = matching(
    "[A-Za-z0-9][A-Za-z0-9._@-]{0,63}",
    "is not a name; use up to 64 letters, digits and ._@- and start with a letter or digit",
)
SUBJECT: Final = Kind(_subject)
STORAGE: Final = Kind(_store_urls)
LISTEN: Final = Kind(_listen)
LISTEN_OR_NONE: Final = Kind(lambda value: "" if value == "" else _listen(value))
HOST: Final = Kind(_host)
NAMESPACE: Final = matching(
    r"\*|(?:[0-9a-fA-F]{2}){1,64}",
    'is not a namespace; write all its hex digits, as `tiercache ls -o json` prints them, or "*" for all',
)
"""Kind of a namespace, written as the hex digits of its 1 to 64 bytes.

The usual namespace has 32 bytes: the digest of a model's identity. If the caller belongs to a tenant, the
daemon appends 16 bytes that mark the namespace as this tenant's.
"""
VERB: Final = one_of(*Verb)
VERBS: Final = Kind(_list, lambda verbs: [verb for verb in Verb if verb in verbs])


def check(settings: Settings) -> None:
    """Raise ConfigError if settings contradict each other, or expose the daemon without protection.

    The settings `insecure_bind`, `http.public` and `events.public` allow an address that other machines
    can reach although nothing protects it.
    """
    rules = (
        _storage, _sizes, _tls, _principals, _tenants, _addresses, _exposure, _sockets, _http, _events,
        _score,
    )  # fmt: skip
    for rule in rules:
        rule(settings)


def warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings about settings that are valid, but perhaps not intended."""
    tcp = settings.addresses
    exposed = [address for address in tcp if not address.loopback]
    if is_exposed(settings):
        yield f"every client that reaches {_listed(exposed)} may read and change the cache (insecure_bind)"
    elif exposed and _tokens(settings) and not settings.tls:
        yield f"tokens travel unencrypted to {_listed(exposed)} (insecure_bind)"
    elif settings.insecure_bind:
        yield (
            "insecure_bind is set, but no address needs it; remove it, or it will also allow an address that"
            " you add later"
        )
    told_apart = any(principal.uid is None for principal in settings.principals)  # by token or certificate
    if tcp and settings.tls and settings.tls.client_ca and not told_apart:
        yield (
            "every client with a certificate that tls.client_ca has signed may read and change the cache,"
            " because no principal has a san"
        )
    if len(tcp) > len(exposed) and not _authenticated(settings):
        yield (
            f"every user of this machine can call {_listed(a for a in tcp if a.loopback)}; only the"
            " unix sockets identify the user"
        )
    if settings.http.address:
        if settings.http.public and not settings.http.address.loopback:
            yield f"everyone who reaches {settings.http.address} can read metrics and status (http.public)"
        elif not settings.http.public and not _someone_observes(settings):
            yield (
                f"nobody can read the metrics at {settings.http.address}; give a principal with a token_file"
                " the verb observe, or set http.public = true"
            )
    if settings.events.public:
        yield "every client that reaches the addresses of events can read them (events.public)"
    for principal in settings.principals:
        if principal.uid is not None and not settings.unix:
            yield (
                f"principal {principal.name} is recognised by a uid, which only the unix sockets"
                " report, and unix is false"
            )
        for name in principal.namespaces:
            if name != "*" and len(name) not in _NAMESPACE_DIGITS:
                yield (
                    f"principal {principal.name}: namespace {name} has {len(name)} digits; a model's"
                    " namespace has 64, or 96 with a tenant's mark"
                )
        if principal.san is not None and not tcp:
            yield f"principal {principal.name} is recognised by a certificate, and no TCP address is served"
    for tenant in sorted(settings.tenants.keys() - {principal.tenant for principal in settings.principals}):
        yield f"no principal belongs to tenant {tenant}"


def _storage(settings: Settings) -> None:
    if settings.storage and "disk_bytes" in settings.model_fields_set:
        raise ConfigError(
            "storage and disk_bytes cannot both be given: disk_bytes is the capacity of the default"
            " store; add ?capacity=... to storage instead"
        )


def _sizes(settings: Settings) -> None:
    limits = settings.limits
    if settings.object_bytes > settings.payload_bytes:
        raise ConfigError(
            f"limits.object_bytes ({exact_size(settings.object_bytes)}) is more than half of host_bytes"
            f" ({exact_size(settings.payload_bytes)}); lower the first or raise the second"
        )
    if limits.keys_per_batch * _KEY_BYTES > limits.message_bytes:
        raise ConfigError(
            f"limits.keys_per_batch ({limits.keys_per_batch}) can make replies larger than"
            f" limits.message_bytes ({exact_size(limits.message_bytes)}); lower the first or raise the second"
        )
    if limits.message_bytes > settings.client_bytes:
        raise ConfigError(
            f"limits.message_bytes ({exact_size(limits.message_bytes)}) is more than one client may hold"
            f" ({exact_size(settings.client_bytes)}, an eighth of host_bytes); lower the first or raise"
            " host_bytes"
        )


def _tls(settings: Settings) -> None:
    tls = settings.tls
    if tls is None:
        return
    for one, other in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
        if getattr(tls, one) and not getattr(tls, other):
            raise ConfigError(f"tls.{one} is given without tls.{other}; give both, or remove [tls]")
    if not tls.certificate:
        raise ConfigError("[tls] is empty; give tls.certificate and tls.key, or remove it")


def _principals(settings: Settings) -> None:
    principals = settings.principals
    _require_unique("name", (principal.name for principal in principals))
    _require_unique("uid", (str(principal.uid) for principal in principals if principal.uid is not None))
    # Names are compared in lower case, because host names do not depend on case.
    _require_unique("san", (principal.san.lower() for principal in principals if principal.san is not None))
    _require_unique(
        "token_file",
        (
            os.path.normpath(principal.token_file)
            for principal in principals
            if principal.token_file is not None
        ),
    )
    for n, principal in enumerate(principals):
        if principal.tenant and principal.tenant not in settings.tenants:
            raise ConfigError(
                f"principals[{n}].tenant: there is no tenant {principal.tenant!r}; add"
                f" [tenants.{principal.tenant}] with its salt_file"
            )
        if principal.san is not None:
            _known_by_certificate(settings, n, principal)


def _tenants(settings: Settings) -> None:
    for name, tenant in settings.tenants.items():
        if tenant.quota is not None and tenant.guarantee > tenant.quota:
            raise ConfigError(
                f"tenants.{name}: guarantee ({exact_size(tenant.guarantee)}) is more than quota"
                f" ({exact_size(tenant.quota)}); lower the first or raise the second"
            )


def _known_by_certificate(settings: Settings, n: int, principal: Principal) -> None:
    for setting in ("certificate", "client_ca"):
        if settings.tls is None or not getattr(settings.tls, setting):
            raise ConfigError(
                f"principals[{n}].san: {principal.name} is recognised by a certificate, which needs"
                f" tls.{setting}; add it"
            )


def _require_unique(what: str, values: Iterator[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ConfigError(
                f"principals: {count} of them have the {what} {value}; give each a different {what}"
            )


def _addresses(settings: Settings) -> None:
    addresses = [*settings.addresses]
    if settings.http.address:
        addresses.append(settings.http.address)
    if settings.data_port:
        hosts = {address.host: address for address in settings.addresses}
        addresses += [replace(address, port=settings.data_port) for address in hosts.values()]
    # Port 0 stands for any free port, so an address with it may be repeated.
    for address, count in Counter(str(address) for address in addresses if address.port).items():
        if count > 1:
            raise ConfigError(
                f"listen: {address} is given {count} times (http.listen and data_port count too); give"
                " different ports"
            )
    if not settings.unix and not settings.listen:
        raise ConfigError(
            "there is nothing to serve: unix is false and listen is empty; set unix = true or give an address"
        )


def _exposure(settings: Settings) -> None:
    exposed = [address for address in settings.addresses if not address.loopback]
    if not exposed or settings.insecure_bind:
        return
    where = f"listen: other machines can reach {_listed(exposed)}"
    if not settings.tls and _tokens(settings):
        raise ConfigError(
            f"{where}, and tokens would travel unencrypted; give tls.certificate and tls.key, or listen on"
            " 127.0.0.1"
        )
    if not settings.tls or not _authenticated(settings):
        raise ConfigError(
            f"{where} without authentication; give [tls] with a client_ca or principals with a token_file,"
            " listen on 127.0.0.1, or set insecure_bind = true"
        )


def _sockets(settings: Settings) -> None:
    try:  # also without `unix`: those of gRPC lie there too
        check_sockets(settings.socket_directory)
    except ConfigError as error:
        raise ConfigError(f"sockets: {error}") from error


def _http(settings: Settings) -> None:
    address = settings.http.address
    if not address or address.loopback or settings.http.public:
        return
    if not settings.tls or not _authenticated(settings):
        raise ConfigError(
            f"http.listen: other machines can reach {address}, without TLS and authentication; listen on"
            " 127.0.0.1, give [tls] with a client_ca or principals with a token_file, or set"
            " http.public = true"
        )


def _events(settings: Settings) -> None:
    try:
        _ = settings.events.publisher
    except ConfigError as error:
        raise ConfigError(f"events: {error}") from error


def _score(settings: Settings) -> None:
    if settings.score.workers and settings.http.address is None:
        raise ConfigError("score.workers are told at /score of the HTTP port; give http.listen")
    for name, ranks in settings.score.workers.items():
        if not ranks or not all(rank.endpoint and rank.replay for rank in ranks):
            raise ConfigError(f"score.workers.{name}: give endpoint and replay of each rank, of one at least")
        for address in (address for rank in ranks for address in (rank.endpoint, rank.replay)):
            check_endpoint(address, public=True)


def is_exposed(settings: Settings) -> bool:
    """Return whether a client on another machine can call without credentials."""
    return not _authenticated(settings) and any(not address.loopback for address in settings.addresses)


def _tokens(settings: Settings) -> bool:
    return any(principal.token_file is not None for principal in settings.principals)


def _authenticated(settings: Settings) -> bool:
    """Return whether callers over TCP must show a token or a client certificate."""
    return _tokens(settings) or bool(settings.tls and settings.tls.client_ca)


def _someone_observes(settings: Settings) -> bool:
    """Return whether a caller over TCP may know the figures of the whole daemon."""
    callers = [principal for principal in settings.principals if principal.uid is None]
    return any(
        not principal.tenant
        and "*" in principal.namespaces
        and (not settings.tenants or not principal.verbs.isdisjoint((Verb.OBSERVE, Verb.ADMIN)))
        for principal in callers
    ) or (not callers and not settings.tenants)


def _listed(addresses: Iterable[Address]) -> str:
    return ", ".join(map(str, addresses))
