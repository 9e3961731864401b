"""The names by which users refer to namespaces and keys: labels, and prefixes of hex digests, which must be unambiguous."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tiercache.cli.output import SHORTER, clean
from tiercache.errors import ConfigError
from tiercache.storage.base import StorageBackend

_CANDIDATES: Final = 8
"""Matches that an error message lists at most."""
_HEX: Final = frozenset("0123456789abcdef")


class Namespaces:
    """The namespaces that are registered in a store, with their labels.

    Thread safety: one thread.
    """

    def __init__(self, records: Mapping[bytes, Mapping[str, str | int]]) -> None:
        self.records = records

    @classmethod
    def of(cls, store: StorageBackend) -> Namespaces:
        """Return the namespaces that a store knows."""
        return cls({record.namespace: record.identity for record in store.namespaces()})

    def identity(self, namespace: bytes) -> Mapping[str, str | int]:
        """Return the identity of a namespace (model, revision, tenant, page size, ...); empty if it is not registered."""
        return self.records.get(namespace, {})

    def label(self, namespace: bytes) -> str:
        """Return the label "model@revision, tenant", safe to print; "unnamed" if the namespace is not registered."""
        found = self.identity(namespace)
        if not found:
            return "unnamed"
        name = str(found.get("model", "?")) + (f"@{found['revision']}" if found.get("revision") else "")
        return clean(name + (f", {found['tenant']}" if found.get("tenant") else ""))

    def named(self, namespace: bytes) -> str:
        """Return the first digits of the namespace's digest and its label."""
        return f"{namespace.hex()[:SHORTER]} {self.label(namespace)}"

    def fits(self, namespace: bytes, text: str) -> bool:
        """Whether `text` is the start of the namespace's digest or a part of its label; case does not matter."""
        return namespace.hex().startswith(text.lower()) or (namespace in self.records and text.lower() in self.label(namespace).lower())

    def matching(self, text: str, present: Iterable[bytes]) -> list[bytes]:
        """Return the registered or `present` namespaces that `text` names; raises ConfigError if there is none."""
        everything = sorted({*self.records, *present})
        found = [namespace for namespace in everything if self.fits(namespace, text)]
        if not found:
            raise ConfigError(f"--namespace {clean(text)!r} matches no namespace here; {self._listed(everything)}")
        return found

    def one(self, text: str, present: Iterable[bytes]) -> bytes:
        """Return the only namespace that `text` names; raises ConfigError if it names none or several."""
        found = self.matching(text, present)
        exact = [namespace for namespace in found if namespace.hex() == text.lower()]
        if len(exact or found) > 1:
            raise ConfigError(f"--namespace {clean(text)!r} matches {len(found)} namespaces; give more of one: {self._some(found)}")
        return (exact or found)[0]

    def record(self, namespace: bytes) -> dict[str, Any]:
        """Return the namespace's fields for JSON."""
        return {"namespace": namespace.hex(), "label": self.label(namespace), "identity": dict(self.identity(namespace))}

    def _listed(self, namespaces: Sequence[bytes]) -> str:
        return f"there are {self._some(namespaces)}" if namespaces else "the store has none"

    def _some(self, namespaces: Sequence[bytes]) -> str:
        listed = [self.named(namespace) for namespace in namespaces]
        return "; ".join(listed[:_CANDIDATES]) + (f"; and {len(listed) - _CANDIDATES} more" if len(listed) > _CANDIDATES else "")


def check_hex(text: str, option: str, most: int) -> str:
    """Return `text` as lower-case hex digits; raises ConfigError unless it is 1 to `most` hex digits."""
    digits = text.lower()
    if not digits or not set(digits) <= _HEX:
        raise ConfigError(f"{option} {clean(text)!r} is not hex; give the digits of a page key as `tiercache ls` shows them")
    if len(digits) > most:
        raise ConfigError(f"{option} has {len(digits)} digits and a key has {most}; give the first 12 or so")
    return digits


def one_key(digits: str, keys: Iterable[bytes], option: str) -> bytes:
    """Return the only key that begins with these hex digits; raises ConfigError if none does, or several, which it lists."""
    found = sorted(key for key in keys if key.hex().startswith(digits))
    if not found:
        raise ConfigError(f"{option} {digits} matches no stored page; see `tiercache ls` for those that are there")
    if len(found) > 1:
        shown = ", ".join(key.hex()[: max(16, len(digits) + 4)] for key in found[:_CANDIDATES])
        more = f", and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
        raise ConfigError(f"{option} {digits} matches {len(found)} pages; give more digits of one: {shown}{more}")
    return found[0]
