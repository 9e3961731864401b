"""Views of the store, which limit a principal to the objects of its tenant, and to some namespaces of these where it has a list.

A principal without a tenant sees the objects that belong to no tenant; with the verb admin it sees the objects of tenants as well, under
the names that the store has for them.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from blake3 import blake3

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.storage.base import (
    NAMESPACE_BYTES,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    checksum_of,
    storable,
)
from tiercache.storage.wrappers import Wrapper
from tiercache.storage.wrappers.base import decide

_CONTEXT: Final = "tiercache 2026-11-20 tenant veil"
_ROUNDS: Final = 4
_LAYOUT_BYTES: Final = 32
"""Bytes of each half of an object's digest: the layout digest and the page key."""
MARK_BYTES: Final = 16
"""Bytes of the mark by which a tenant's namespaces are recognised."""
_MOST_NAMESPACE: Final = NAMESPACE_BYTES - MARK_BYTES
"""Most bytes of a tenant's namespace, without its mark."""
_SCAN_ENTRIES: Final = 1024
"""Entries from which a page of a scan is complete."""


class Veil:
    """A secret, invertible renaming of one tenant's page keys and namespaces.

    It is a Feistel network of four rounds whose round functions are keyed BLAKE3: a pseudorandom permutation even for an attacker who may
    ask for both directions (Luby and Rackoff, 1988). Without a tenant's salt a caller cannot name that tenant's objects, even if it knows
    their page keys; to this caller they are absent.

    Thread safety: immutable.
    """

    def __init__(self, salt: bytes) -> None:
        key = blake3(salt, derive_key_context=_CONTEXT).digest()
        *self._rounds, self._marker = (blake3(bytes([number]), key=key).digest() for number in range(_ROUNDS + 1))

    def hide(self, name: bytes) -> bytes:
        """Return the name under which the store knows `name`; it has the same length."""
        left, right = name[: len(name) // 2], name[len(name) // 2 :]
        for number in range(0, _ROUNDS, 2):
            left = self._mix(number, left, right)
            right = self._mix(number + 1, right, left)
        return left + right

    def reveal(self, hidden: bytes) -> bytes:
        """Return the name that `hide` turned into `hidden`."""
        left, right = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
        for number in range(_ROUNDS - 2, -1, -2):
            right = self._mix(number + 1, right, left)
            left = self._mix(number, left, right)
        return left + right

    def mark(self, namespace: bytes) -> bytes:
        """Return the namespace as the store knows it: hidden, with a mark of MARK_BYTES behind it that shows whose it is."""
        hidden = self.hide(namespace)
        return hidden + self._mark_of(hidden)

    def unmark(self, marked: bytes) -> bytes | None:
        """Return the namespace that `mark` turned into `marked`; None if it is not this tenant's."""
        hidden, found = marked[:-MARK_BYTES], marked[-MARK_BYTES:]
        return self.reveal(hidden) if hidden and found == self._mark_of(hidden) else None

    def _mark_of(self, hidden: bytes) -> bytes:
        return blake3(hidden, key=self._marker).digest(length=MARK_BYTES)

    def _mix(self, number: int, half: bytes, other: bytes) -> bytes:
        if not half:
            return half
        mask = blake3(other, key=self._rounds[number]).digest(length=len(half))
        return (int.from_bytes(half) ^ int.from_bytes(mask)).to_bytes(len(half))


class Veiled(Wrapper):
    """The store as one tenant sees it: every page key, parent and namespace goes through the tenant's veil.

    The operator's name of the tenant replaces the `tenant` of an identity that a caller registers. A namespace is at most 48 bytes long
    here, because its mark takes 16. Checksums cover the key: the caller's is checked first, then the store computes one for the hidden key.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, veil: Veil, tenant: str) -> None:
        super().__init__(inner)
        self._veil = veil
        self._tenant = tenant

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return super().exists(self._hidden(keys))

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return super().get([item._replace(key=self._hide(item.key)) for item in items])

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            return decide(items, _refusal, lambda sound: self.inner.set([self._hide_item(item) for item in sound]))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return super().delete(self._hidden(keys))

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [entry and self._reveal_entry(entry) for entry in super().describe(self._hidden(keys))]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        marked = None if namespace is None else self._veil.mark(namespace)
        return _own_page(lambda at: super(Veiled, self).scan(marked, at), cursor, self._veil, self._reveal_entry)

    def register_namespace(self, record: NamespaceRecord) -> None:
        if len(record.namespace) <= _MOST_NAMESPACE:
            identity = {**record.identity, "tenant": self._tenant}
            super().register_namespace(replace(record, namespace=self._veil.mark(record.namespace), identity=identity))

    def namespaces(self) -> list[NamespaceRecord]:
        records = [(self._veil.unmark(record.namespace), record) for record in super().namespaces()]
        return [replace(record, namespace=namespace) for namespace, record in records if namespace is not None]

    def _hide(self, key: ObjectKey) -> ObjectKey:
        # A malformed digest is passed on unchanged: no store holds an object under one.
        layout, page = key.digest[:_LAYOUT_BYTES], key.digest[_LAYOUT_BYTES:]
        return ObjectKey(key.pool, layout + self._veil.hide(page)) if len(page) == _LAYOUT_BYTES else key

    def _hidden(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        return [self._hide(key) for key in keys]

    def _hide_item(self, item: SetItem) -> SetItem:
        meta = item.meta
        parent = meta.parent and self._veil.hide(meta.parent)
        return SetItem(
            self._hide(item.key), item.buffers, replace(meta, namespace=self._veil.mark(meta.namespace), checksum=b"", parent=parent)
        )

    def _reveal_entry(self, entry: ScanEntry) -> ScanEntry | None:
        """Return the entry under the tenant's own names, without a checksum; None if it is not the tenant's."""
        key, meta = entry.key, entry.meta
        namespace = self._veil.unmark(meta.namespace)
        if namespace is None:
            return None
        page = self._veil.reveal(key.page_key)
        parent = meta.parent and self._veil.reveal(meta.parent)
        shown = ObjectMeta(namespace, meta.length, b"", parent, meta.depth)
        return entry._replace(key=ObjectKey(key.pool, key.layout + page), meta=shown)


def _own_page(
    scan: Callable[[bytes], ScanPage], cursor: bytes, veil: Veil | None, show: Callable[[ScanEntry], ScanEntry | None]
) -> ScanPage:
    """Return a page of a scan with what `show` makes of each entry; entries for which it returns None are left out.

    Neither the length of the page nor its cursor tells of entries that were left out. A cursor may be a key, so `veil` hides it, if given.
    """
    entries: list[ScanEntry] = []
    at = veil.reveal(cursor) if veil else cursor
    while True:
        page = scan(at)
        entries += [shown for entry in page.entries if (shown := show(entry)) is not None]
        at = page.cursor
        if not at or len(entries) >= _SCAN_ENTRIES:
            return ScanPage(entries, veil.hide(at) if veil else at)


class Common(Wrapper):
    """The store as principals without a tenant see it, where there are tenants: without the tenants' objects and namespaces.

    Lists leave these out, and their hidden keys cannot be guessed.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, veils: Sequence[Veil], cursors: Veil) -> None:
        """Leave out the namespaces that one of `veils` has marked; `cursors` hides the cursors of scans."""
        super().__init__(inner)
        self._veils = veils
        self._cursors = cursors

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            return decide(items, lambda item: None if self._common(item.meta.namespace) else Outcome.ERROR, self.inner.set)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        def show(entry: ScanEntry) -> ScanEntry | None:
            return entry if self._common(entry.meta.namespace) else None

        return _own_page(lambda at: super(Common, self).scan(namespace, at), cursor, self._cursors, show)

    def register_namespace(self, record: NamespaceRecord) -> None:
        if self._common(record.namespace):
            super().register_namespace(record)

    def namespaces(self) -> list[NamespaceRecord]:
        return [record for record in super().namespaces() if self._common(record.namespace)]

    def _common(self, namespace: bytes) -> bool:
        return all(veil.unmark(namespace) is None for veil in self._veils)


def _refusal(item: SetItem) -> Outcome | None:
    """Return ERROR for an item that cannot be stored or does not match the caller's checksum, else None."""
    if not storable(item) or len(item.meta.namespace) > _MOST_NAMESPACE:
        return Outcome.ERROR
    meta = item.meta
    return None if not meta.checksum or checksum_of(item._replace(meta=replace(meta, checksum=b""))) == meta.checksum else Outcome.ERROR


class Fenced(Wrapper):
    """The store limited to some namespaces: objects of all others appear absent, and cannot be overwritten.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, namespaces: AbstractSet[bytes]) -> None:
        super().__init__(inner)
        self._namespaces = namespaces

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [entry is not None for entry in self.describe(keys)]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        mine = self._mine([item.key for item in items])
        # Foreign objects are asked for too, under a key that no object has: they are answered as absent, malformed requests included.
        return super().get([item if own else item._replace(key=_nobody(item.key)) for item, own in zip(items, mine, strict=True)])

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            entries = iter(self.inner.describe([item.key for item in items]))
            return decide(items, lambda item: self._judge(item, next(entries)), self.inner.set)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        mine = self._mine(keys)
        answers = iter(super().delete([key for key, own in zip(keys, mine, strict=True) if own]))
        return [own and next(answers) for own in mine]

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [entry if entry and entry.meta.namespace in self._namespaces else None for entry in super().describe(keys)]

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        if namespace is not None and namespace not in self._namespaces:
            return ScanPage([], b"")

        def show(entry: ScanEntry) -> ScanEntry | None:
            return entry if entry.meta.namespace in self._namespaces else None

        return _own_page(lambda at: super(Fenced, self).scan(namespace, at), cursor, None, show)

    def register_namespace(self, record: NamespaceRecord) -> None:
        if self.allows(record.namespace):
            super().register_namespace(record)

    def namespaces(self) -> list[NamespaceRecord]:
        return [record for record in super().namespaces() if record.namespace in self._namespaces]

    def allows(self, namespace: bytes) -> bool:
        """Return whether this namespace may be registered and stored in."""
        return namespace in self._namespaces

    def _mine(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [entry is not None for entry in self.describe(keys)]

    def _judge(self, item: SetItem, held: ScanEntry | None) -> Outcome | None:
        own = item.meta.namespace in self._namespaces and (held is None or held.meta.namespace in self._namespaces)
        return None if own else Outcome.ERROR


def _nobody(key: ObjectKey) -> ObjectKey:
    """Return a key of the same pool and length that no object has: no page key is all zeros."""
    return ObjectKey(key.pool, bytes(len(key.digest)))
