"""Rules that settings must obey together, and warnings about risky ones. Pure: opens no file and resolves no name."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from tiercache.config.quantities import size_text
from tiercache.config.urls import unix_target
from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.config.addresses import Address
    from tiercache.config.models import Principal, Settings

SOCKETS: Final = ("grpc.sock", "attach.sock")
_NAMESPACE_DIGITS: Final = (64, 96)
_KEY_BYTES: Final = 256
"""Largest size in bytes of one object's description in a message."""
_SOCKET_PATH: Final = 107
"""Bytes of `sun_path` (unix(7)) without the terminating zero."""


def check(settings: Settings) -> None:
    """Raise ConfigError if two settings contradict each other or open the daemon to other machines without protection.

    `insecure_bind` and `metrics.public` permit the latter.
    """
    for rule in (_storage, _sizes, _tls, _principals, _addresses, _exposure, _sockets, _metrics):
        rule(settings)


def warnings(settings: Settings) -> Iterator[str]:
    """Yield warnings about settings that work as written, but may not be what was meant."""
    tcp = settings.addresses
    exposed = [address for address in tcp if not address.loopback]
    if exposed and not _authenticated(settings):
        yield f"whoever reaches {_all(exposed)} may read and change the cache (insecure_bind)"
    elif exposed and _tokens(settings) and not settings.tls:
        yield f"tokens travel in clear to {_all(exposed)} (insecure_bind)"
    elif settings.insecure_bind:
        yield "insecure_bind is set, but nothing needs it; take it out before something does"
    if tcp and settings.tls and settings.tls.client_ca and not _known_callers(settings):
        yield "every certificate that tls.client_ca signed may read and change the cache: no principal has a san"
    if len(tcp) > len(exposed) and not _authenticated(settings):
        yield f"every user of this machine can call {_all(a for a in tcp if a.loopback)}; the unix sockets know who calls"
    if settings.metrics.address and not settings.metrics.address.loopback:
        yield f"whoever reaches {settings.metrics.address} can read the metrics (metrics.public)"
    for principal in settings.principals:
        if principal.uid is not None and not settings.unix:
            yield f"principal {principal.name} is known by a uid, which only the unix sockets tell, and unix is false"
        for name in principal.namespaces:
            if name != "*" and len(name) not in _NAMESPACE_DIGITS:
                yield f"principal {principal.name}: namespace {name} has {len(name)} digits; a model's have 64, or 96 with a tenant's mark"
        if principal.san is not None and not tcp:
            yield f"principal {principal.name} is known by a certificate, and no TCP address is served"
    for tenant in sorted(settings.tenants.keys() - {principal.tenant for principal in settings.principals}):
        yield f"no principal belongs to tenant {tenant}"


def _storage(settings: Settings) -> None:
    if settings.storage and "disk_bytes" in settings.model_fields_set:
        raise ConfigError(
            "storage and disk_bytes contradict: disk_bytes is of the store in directory; write ?capacity=... in storage instead"
        )


def _sizes(settings: Settings) -> None:
    limits = settings.limits
    sizes = [
        ("limits.object_bytes", settings.object_bytes, limits.object_bytes),
        ("limits.client_bytes", settings.client_bytes, limits.client_bytes),
        ("limits.principal_bytes", settings.principal_bytes, limits.principal_bytes),
        ("half of host_bytes", settings.payload_bytes, settings.payload_bytes),
    ]
    pairs = [(small, large) for n, small in enumerate(sizes) for large in sizes[n + 1 :]]
    for (small, size, given), (large, bound, bounding) in pairs:
        # A default follows from the settings that were given, so only a pair that was given can contradict itself.
        if given is not None and bounding is not None and size > bound:
            raise ConfigError(f"{small} ({size_text(size)}) is more than {large} ({size_text(bound)}); lower the one or raise the other")
    if limits.keys_per_batch * _KEY_BYTES > limits.message_bytes:
        raise ConfigError(
            f"limits.keys_per_batch ({limits.keys_per_batch}) can make replies larger than limits.message_bytes"
            f" ({size_text(limits.message_bytes)}); lower the one or raise the other"
        )
    if limits.message_bytes > settings.client_bytes:
        raise ConfigError(
            f"limits.message_bytes ({size_text(limits.message_bytes)}) is more than one client may have in flight,"
            f" limits.client_bytes ({size_text(settings.client_bytes)}); lower the one or raise the other"
        )


def _tls(settings: Settings) -> None:
    tls = settings.tls
    if tls is None:
        return
    for one, other in (("certificate", "key"), ("key", "certificate"), ("client_ca", "certificate")):
        if getattr(tls, one) and not getattr(tls, other):
            raise ConfigError(f"tls.{one} is given without tls.{other}; give both, or take out [tls]")
    if not tls.certificate:
        raise ConfigError("[tls] is empty; give tls.certificate and tls.key, or take it out")


def _principals(settings: Settings) -> None:
    principals = settings.principals
    _once("name", (principal.name for principal in principals))
    _once("uid", (str(principal.uid) for principal in principals if principal.uid is not None))
    # Compare in lower case: host names do not depend on case.
    _once("san", (principal.san.lower() for principal in principals if principal.san is not None))
    _once("token_file", (os.path.normpath(principal.token_file) for principal in principals if principal.token_file is not None))
    for n, principal in enumerate(principals):
        if principal.tenant and principal.tenant not in settings.tenants:
            raise ConfigError(
                f"principals[{n}].tenant: there is no tenant {principal.tenant!r}; add [tenants.{principal.tenant}] with its salt_file"
            )
        if principal.san is not None:
            _known_by_certificate(settings, n, principal)


def _known_by_certificate(settings: Settings, n: int, principal: Principal) -> None:
    for setting in ("certificate", "client_ca"):
        if settings.tls is None or not getattr(settings.tls, setting):
            raise ConfigError(f"principals[{n}].san: {principal.name} is known by a certificate, which needs tls.{setting}; add it")


def _once(what: str, values: Iterator[str]) -> None:
    for value, count in Counter(values).items():
        if count > 1:
            raise ConfigError(f"principals: {count} have the {what} {value}; each needs its own")


def _addresses(settings: Settings) -> None:
    addresses = [*settings.addresses, *([settings.metrics.address] if settings.metrics.address else [])]
    for address, count in Counter(map(str, (address for address in addresses if address.port))).items():
        if count > 1:
            raise ConfigError(f"listen: {address} is given {count} times, metrics.listen included; give each its own port")
    if not settings.unix and not settings.listen:
        raise ConfigError("there is nothing to serve: unix is false and listen is empty; set unix = true or give an address")


def _exposure(settings: Settings) -> None:
    exposed = [address for address in settings.addresses if not address.loopback]
    if not exposed or settings.insecure_bind:
        return
    where = f"listen: other machines can reach {_all(exposed)}"
    if not settings.tls and _tokens(settings):
        raise ConfigError(f"{where}, where tokens would travel in clear; give tls.certificate and tls.key, or listen on 127.0.0.1")
    if not settings.tls or not _authenticated(settings):
        raise ConfigError(
            f"{where} without authentication; give [tls] with a client_ca or principals with a token_file, listen on 127.0.0.1,"
            " or set insecure_bind = true"
        )


def _sockets(settings: Settings) -> None:
    if settings.unix:
        try:
            unix_target(settings.socket_directory)
        except ConfigError as error:
            raise ConfigError(f"sockets: {error}") from error
    longest = max(len(os.fsencode(settings.socket_directory / name)) for name in SOCKETS)
    if settings.unix and longest > _SOCKET_PATH:
        raise ConfigError(
            f"sockets: a path in {settings.socket_directory} would take {longest} bytes, and the path of a unix socket has at most"
            f" {_SOCKET_PATH}; set sockets to a shorter directory, such as /run/tiercache"
        )


def _metrics(settings: Settings) -> None:
    address = settings.metrics.address
    if address and not address.loopback and not settings.metrics.public:
        raise ConfigError(f"metrics.listen: other machines can reach {address}; listen on 127.0.0.1 or set metrics.public = true")


def _tokens(settings: Settings) -> bool:
    return any(principal.token_file is not None for principal in settings.principals)


def _authenticated(settings: Settings) -> bool:
    """Return whether callers over TCP have to authenticate, by a token or a client certificate."""
    return _tokens(settings) or bool(settings.tls and settings.tls.client_ca)


def _known_callers(settings: Settings) -> bool:
    """Return whether callers over TCP are told apart: whether a principal has a token or a certificate."""
    return any(principal.uid is None for principal in settings.principals)


def _all(addresses: Iterable[Address]) -> str:
    return ", ".join(map(str, addresses))
