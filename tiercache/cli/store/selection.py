"""Selection of objects by the operator's verbs: options, namespaces by their labels, keys by their digits.

The verbs share these options, and the filter that they describe.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

import typer

from tiercache.cli.terminal import SHORTER, clean
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.text import parse_duration

KEY_DIGITS: Final = 64
"""Hex digits of a page key. An object's key (layout and page key) has twice as many."""
_CANDIDATES: Final = 8
"""Maximum number of matches that an error message lists."""
_HEX: Final = frozenset("0123456789abcdef")


class Namespaces:
    """The namespaces that are registered in a store, with their labels.

    Thread safety: one thread.
    """

    def __init__(self, records: Mapping[bytes, Mapping[str, str | int]]) -> None:
        self.records = records

    @classmethod
    def of(cls, store: StorageBackend) -> Namespaces:
        """Return the namespaces that are registered in a store."""
        return cls({record.namespace: record.identity for record in store.namespaces()})

    def identity(self, namespace: bytes) -> Mapping[str, str | int]:
        """Return the identity of a namespace (model, revision, tenant, page size, ...).

        The identity is empty if the namespace is not registered.
        """
        return self.records.get(namespace, {})

    def label(self, namespace: bytes) -> str:
        """Return the label "model@revision, tenant", or "unnamed" if the namespace is not registered.

        Unprintable characters are escaped.
        """
        found = self.identity(namespace)
        if not found:
            return "unnamed"
        name = str(found.get("model", "?")) + (f"@{found['revision']}" if found.get("revision") else "")
        return clean(name + (f", {found['tenant']}" if found.get("tenant") else ""))

    def named(self, namespace: bytes) -> str:
        """Return the first digits of a namespace's digest, followed by its label."""
        return f"{namespace.hex()[:SHORTER]} {self.label(namespace)}"

    def fits(self, namespace: bytes, text: str) -> bool:
        """Return whether `text` is the start of the namespace's digest or a part of its label.

        Case is ignored.
        """
        return namespace.hex().startswith(text.lower()) or (
            namespace in self.records and text.lower() in self.label(namespace).lower()
        )

    def matching(self, text: str, present: Iterable[bytes]) -> list[bytes]:
        """Return the registered or `present` namespaces that `text` matches (see `fits`).

        Raises ConfigError if no namespace matches.
        """
        everything = sorted({*self.records, *present})
        found = [namespace for namespace in everything if self.fits(namespace, text)]
        if not found:
            raise ConfigError(
                f"--namespace {clean(text)!r} matches no namespace here; there are"
                f" {_some(map(self.named, everything)) or 'none'}"
            )
        return found

    def one(self, text: str, present: Iterable[bytes]) -> bytes:
        """Return the only namespace that `text` matches; raises ConfigError if it matches none or several."""
        found = self.matching(text, present)
        exact = [namespace for namespace in found if namespace.hex() == text.lower()]
        if len(exact or found) > 1:
            raise ConfigError(
                f"--namespace {clean(text)!r} matches {len(found)} namespaces; give more digits or"
                f" letters of one: {_some(map(self.named, found))}"
            )
        return (exact or found)[0]

    def record(self, namespace: bytes) -> dict[str, Any]:
        """Return the namespace's fields for JSON."""
        return {
            "namespace": namespace.hex(),
            "label": self.label(namespace),
            "identity": dict(self.identity(namespace)),
        }


def _some(candidates: Iterable[str]) -> str:
    """Return the first candidates as text, with the number of the others."""
    listed = list(candidates)
    more = len(listed) - _CANDIDATES
    return "; ".join(listed[:_CANDIDATES]) + (f"; and {more} more" if more > 0 else "")


def check_hex(text: str, option: str, max_digits: int) -> str:
    """Return `text` as 1 to `max_digits` lower-case hex digits; raises ConfigError for any other text."""
    digits = text.lower()
    if not digits or not set(digits) <= _HEX:
        raise ConfigError(
            f"{option} {clean(text)!r} is not hex; give the digits of a page key as `tiercache ls` shows them"
        )
    if len(digits) > max_digits:
        raise ConfigError(f"{option} has {len(digits)} digits and a key has {max_digits}; give its first 12")
    return digits


def one_key(digits: str, keys: Iterable[bytes], option: str) -> bytes:
    """Return the only key that begins with these hex digits.

    Raises ConfigError if no key or several keys begin with them.
    """
    found = sorted(key for key in keys if key.hex().startswith(digits))
    if not found:
        raise ConfigError(
            f"{option} {digits} matches no stored page; `tiercache ls` shows the keys of stored pages"
        )
    if len(found) > 1:
        some = _some(key.hex()[: max(16, len(digits) + 4)] for key in found)
        raise ConfigError(f"{option} {digits} matches {len(found)} pages; give more digits of one: {some}")
    return found[0]


StoreOption = Annotated[
    str,
    typer.Option(
        "--store",
        "-s",
        envvar="TIERCACHE_STORE",
        metavar="TARGET",
        help=(
            "Directory of a stopped store or of a daemon, or a URL: grpc://host:port,"
            " grpc:///directory/of/sockets, file:///directory. Default: /var/lib/tiercache."
        ),
    ),
]
StoresOption = Annotated[
    list[str] | None,
    typer.Option(
        "--store",
        "-s",
        metavar="TARGET",
        help=(
            "Directory of a stopped store or of a daemon, or a URL: grpc://host:port,"
            " grpc:///directory/of/sockets, file:///directory. Default: /var/lib/tiercache. Repeated: the"
            " stopped stores that are the tiers of a chain, the fastest first. Variable: TIERCACHE_STORE (one"
            " store, or a JSON list)."
        ),
    ),
]
MacKeyOption = Annotated[
    str,
    typer.Option(
        "--mac-key",
        metavar="FILE",
        help="File with the MAC key of a stopped store that was created with one.",
    ),
]
NamespaceOption = Annotated[
    str, typer.Option(help="Objects of this namespace: first digits of its id, or a part of its label.")
]
PoolOption = Annotated[str, typer.Option(help="Objects of this pool: kv, mamba, swa or indexer.")]
OlderOption = Annotated[
    str, typer.Option(metavar="TIME", help="Objects that are older than this, such as 1h or 7d.")
]
NewerOption = Annotated[
    str, typer.Option(metavar="TIME", help="Objects that are newer than this, such as 10min.")
]


@dataclass(slots=True)
class Filter:
    """Conditions on objects; an object must meet all of them.

    Times are in seconds since 1970.

    Thread safety: one thread.
    """

    namespace: str = ""
    pool: PoolName | None = None
    before: float | None = None
    """Admit only objects stored before this time; objects without a time are not admitted."""
    after: float | None = None
    """Admit only objects stored after this time; objects without a time are not admitted."""
    names: Namespaces = field(default_factory=lambda: Namespaces({}))
    """Registered namespaces of the store; empty until `scan`."""
    _fits: dict[bytes, bool] = field(default_factory=dict)
    """Results of comparing the text `namespace` with namespaces, by namespace."""

    def admits(self, entry: ScanEntry) -> bool:
        """Return whether the object meets all conditions."""
        if self.pool is not None and entry.key.pool != self.pool:
            return False
        if self.before is not None and (entry.stored_at is None or entry.stored_at >= self.before):
            return False
        if self.after is not None and (entry.stored_at is None or entry.stored_at <= self.after):
            return False
        return not self.namespace or self._in_namespace(entry.meta.namespace)

    def scan(self, store: StorageBackend, entries: Iterable[ScanEntry] | None = None) -> Iterator[ScanEntry]:
        """Yield the objects of a store that meet all conditions.

        `entries` are the objects of the store, if the store was scanned already. Raises ConfigError, after
        the last object, if no namespace matches.
        """
        self.names = Namespaces.of(store)
        if self.namespace:
            for registered in self.names.records:
                self._in_namespace(registered)
        yield from filter(self.admits, store.scan_all() if entries is None else entries)
        # `_fits` now has the registered namespaces and the namespaces of the scanned objects.
        if self.namespace and not any(self._fits.values()):
            self.names.matching(self.namespace, self._fits)

    def _in_namespace(self, namespace: bytes) -> bool:
        known = self._fits.get(namespace)
        if known is None:
            known = self._fits[namespace] = self.names.fits(namespace, self.namespace)
        return known


def make_filter(
    now: float, *, namespace: str = "", pool: str = "", older: str = "", newer: str = ""
) -> Filter:
    """Return the filter that the options describe; raises ConfigError with the name of a wrong option.

    `now` is in seconds since 1970.
    """
    before, after = _seconds("--older", older), _seconds("--newer", newer)
    if before is not None and after is not None and before >= after:
        raise ConfigError(
            f"--older {older} and --newer {newer} match no object; --newer must be the longer time"
        )
    return Filter(
        namespace=namespace,
        pool=_pool(pool) if pool else None,
        before=None if before is None else now - before,
        after=None if after is None else now - after,
    )


def _pool(text: str) -> PoolName:
    try:
        return PoolName(text.lower())
    except ValueError:
        raise ConfigError(f"--pool {clean(text)!r} is not a pool; use one of {', '.join(PoolName)}") from None


def _seconds(option: str, text: str) -> float | None:
    try:
        return parse_duration(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{option}: {clean(str(error))}") from error
