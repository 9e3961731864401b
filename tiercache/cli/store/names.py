"""Text and JSON of namespaces, keys and objects: labels, unambiguous digits, records, rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tiercache.cli.terminal import SHORT, SHORTER, clean
from tiercache.errors import ConfigError
from tiercache.storage.base import ScanEntry, StorageBackend
from tiercache.text import readable_age, readable_size

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
                f"--namespace {clean(text)!r} matches no namespace here; {self._listed(everything)}"
            )
        return found

    def one(self, text: str, present: Iterable[bytes]) -> bytes:
        """Return the only namespace that `text` matches; raises ConfigError if it matches none or several."""
        found = self.matching(text, present)
        exact = [namespace for namespace in found if namespace.hex() == text.lower()]
        if len(exact or found) > 1:
            raise ConfigError(
                f"--namespace {clean(text)!r} matches {len(found)} namespaces; give more digits or"
                f" letters of one: {self._some(found)}"
            )
        return (exact or found)[0]

    def record(self, namespace: bytes) -> dict[str, Any]:
        """Return the namespace's fields for JSON."""
        return {
            "namespace": namespace.hex(),
            "label": self.label(namespace),
            "identity": dict(self.identity(namespace)),
        }

    def _listed(self, namespaces: Sequence[bytes]) -> str:
        return f"there are {self._some(namespaces)}" if namespaces else "the store has none"

    def _some(self, namespaces: Sequence[bytes]) -> str:
        listed = [self.named(namespace) for namespace in namespaces]
        return "; ".join(listed[:_CANDIDATES]) + (
            f"; and {len(listed) - _CANDIDATES} more" if len(listed) > _CANDIDATES else ""
        )


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
        shown = ", ".join(key.hex()[: max(16, len(digits) + 4)] for key in found[:_CANDIDATES])
        more = f", and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
        raise ConfigError(
            f"{option} {digits} matches {len(found)} pages; give more digits of one: {shown}{more}"
        )
    return found[0]


_WIDTHS: Final = (
    ("page key", -SHORT),
    ("pool", -8),
    ("namespace", -9),
    ("depth", 7),
    ("size", 10),
    ("stored", 7),
    ("parent", -SHORT),
    ("layout", -8),
)
"""Columns with their widths in characters; the width of a left-aligned column is negative.

The widths are fixed, because the first rows are printed before the scan has found the widest ones.
"""


def is_attached(entry: ScanEntry) -> bool:
    """Return whether an object is attached to a page, as a state is; False for a page itself."""
    # The parent of a state is its own page, so both have the same page key.
    return entry.meta.parent == entry.key.page_key


def object_record(entry: ScanEntry) -> dict[str, Any]:
    """Return the object's fields for JSON."""
    key, meta = entry.key, entry.meta
    return {
        "page_key": key.page_key.hex(),
        "pool": str(key.pool),
        "namespace": meta.namespace.hex(),
        "depth": meta.depth,
        "bytes": meta.length,
        "stored_at": entry.stored_at,
        "parent": None if meta.parent is None else meta.parent.hex(),
        "layout": key.layout.hex(),
        "checksum": meta.checksum.hex(),
        "tier": entry.tier or None,
    }


def object_header(*, tiers: bool = False) -> str:
    """Return the line with the names of the columns; `tiers`: with the column of tiers."""
    return _joined([name for name, _ in _WIDTHS]) + "  tier" * tiers


def object_row(entry: ScanEntry, now: float) -> str:
    """Return the object as one line of text; `now` is in seconds since 1970."""
    key, meta = entry.key, entry.meta
    row = _joined(
        [
            key.page_key.hex()[:SHORT],
            clean(str(key.pool)),
            meta.namespace.hex()[:SHORTER],
            "-" if meta.depth is None else str(meta.depth),
            readable_size(meta.length),
            readable_age(None if entry.stored_at is None else now - entry.stored_at),
            "-" if meta.parent is None else "(own page)" if is_attached(entry) else meta.parent.hex()[:SHORT],
            key.layout.hex()[:SHORTER],
        ]
    )
    return f"{row}  {clean(entry.tier)}" if entry.tier else row


def _joined(cells: list[str]) -> str:
    padded = (
        cell.ljust(-width) if width < 0 else cell.rjust(width)
        for cell, (_, width) in zip(cells, _WIDTHS, strict=True)
    )
    return "  ".join(padded).rstrip()
