"""Views of the store, which limit a principal to the objects of a tenant, or to a list of namespaces.

A principal without a tenant sees the objects that belong to no tenant. With the verb admin, such a principal
also sees the objects of all tenants, but under hidden names (`NameCipher`), as the store has them.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Final

from blake3 import blake3

from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.events.source import ChangeNote
from tiercache.storage.base import (
    NAMESPACE_BYTES,
    Capabilities,
    GetItem,
    NamespaceRecord,
    ScanEntry,
    ScanPage,
    SetItem,
    StorageBackend,
    storable,
)
from tiercache.storage.checksum import Checksum
from tiercache.storage.history import History, TierHistory
from tiercache.storage.shares import Shares
from tiercache.storage.vectors import take
from tiercache.storage.wrappers import Wrapper, decide

_CONTEXT: Final = "tiercache 2026-11-20 tenant veil"
"""Context string of BLAKE3's key derivation; a change would make all tenants' objects unreadable."""
_ROUNDS: Final = 4
"""Rounds of the Feistel network, see `NameCipher`."""
_LAYOUT_BYTES: Final = 32
"""Bytes of each half of an object's digest: the layout digest and the page key."""
MARK_BYTES: Final = 16
"""Bytes of the mark by which a tenant's namespaces are recognised."""
_MAX_NAMESPACE_BYTES: Final = NAMESPACE_BYTES - MARK_BYTES
"""Maximum bytes of a tenant's namespace, without its mark."""
_KNOWN_NAMESPACES: Final = 4096
"""Number of namespaces of which a view remembers whose they are."""
_SCAN_ENTRIES: Final = 1024
"""Minimum number of entries in a batch of a scan; the last batch may have fewer."""


class NameCipher:
    """A secret, invertible renaming of one tenant's page keys and namespaces.

    The cipher is a Feistel network of four rounds, with keyed BLAKE3 as the round function. Such a network is
    a pseudorandom permutation, even against an attacker who can have any names hidden and revealed (Luby and
    Rackoff, 1988). A caller without the tenant's salt cannot name the tenant's objects, even if it knows
    their page keys. For this caller the objects are absent.

        hide      name = left | right      left ^= mask(0, right)    right ^= mask(1, left)
                                           left ^= mask(2, right)    right ^= mask(3, left)
        mark      hidden name | MAC of the hidden name (16 bytes)

    Thread safety: immutable.
    """

    def __init__(self, salt: bytes) -> None:
        key = blake3(salt, derive_key_context=_CONTEXT).digest()
        # One key for each round, and one for marks.
        *self._rounds, self._marker = (
            blake3(bytes([number]), key=key).digest() for number in range(_ROUNDS + 1)
        )

    def hide(self, name: bytes) -> bytes:
        """Return the hidden name of `name`, which has the same length."""
        left, right = name[: len(name) // 2], name[len(name) // 2 :]
        for number in range(0, _ROUNDS, 2):
            left = self._mix(number, left, right)
            right = self._mix(number + 1, right, left)
        return left + right

    def reveal(self, hidden: bytes) -> bytes:
        """Return the name that `hide` turned into `hidden`."""
        left, right = hidden[: len(hidden) // 2], hidden[len(hidden) // 2 :]
        for number in range(_ROUNDS - 2, -1, -2):  # the rounds of `hide`, the last one first
            right = self._mix(number + 1, right, left)
            left = self._mix(number, left, right)
        return left + right

    def mark(self, namespace: bytes) -> bytes:
        """Return the namespace as it is stored: hidden, followed by the tenant's mark."""
        hidden = self.hide(namespace)
        return hidden + self._mark_of(hidden)

    def unmark(self, marked: bytes) -> bytes | None:
        """Return the namespace that `mark` turned into `marked`; None if `marked` is not this tenant's."""
        hidden, found = marked[:-MARK_BYTES], marked[-MARK_BYTES:]
        return self.reveal(hidden) if hidden and found == self._mark_of(hidden) else None

    def _mark_of(self, hidden: bytes) -> bytes:
        return blake3(hidden, key=self._marker).digest(length=MARK_BYTES)

    def _mix(self, number: int, half: bytes, other: bytes) -> bytes:
        if not half:
            return half
        mask = blake3(other, key=self._rounds[number]).digest(length=len(half))
        return (int.from_bytes(half) ^ int.from_bytes(mask)).to_bytes(len(half))


class _View(Wrapper):
    """Wrapper that shows a caller some of the objects, perhaps under other names.

    What a store will evict next concerns the objects of all callers, so a view cannot say it.

    Thread safety: as `Wrapper`.
    """

    shows_all = False

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return super().get(self._asked(items))

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return super().peek(self._asked(items))

    def _asked(self, items: Sequence[GetItem]) -> Sequence[GetItem]:
        """Return the items as the inner store is asked for them."""
        return items

    def watch(self, note: ChangeNote | None) -> bool:
        """Return False: changes have the names of all tenants, and the daemon tells of the store's."""
        return False

    def coldest(self, nbytes: int) -> None:
        return None

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of `inner`, without shares: the owners of objects are the daemon's matter."""
        return replace(super().capabilities, shares=False)

    def share(self, shares: Shares, *, evict: bool = True) -> None:
        self.check_shares({}, shares)


class TenantView(_View):
    """The store as one tenant sees it: every page key, parent and namespace goes through the tenant's cipher.

    A caller cannot register a namespace for another tenant: the view sets `tenant` in the namespace's
    identity to the name that the operator gave the tenant. A namespace has at most 48 bytes here, because the
    mark takes 16 of the store's 64. A checksum covers the key as well as the bytes. Therefore the view checks
    the checksum that comes from the caller, and gives the store the checksum under the hidden key.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, cipher: NameCipher, tenant: str) -> None:
        super().__init__(inner)
        self._cipher = cipher
        self._tenant = tenant

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return super().exists(self._hidden(keys))

    def _asked(self, items: Sequence[GetItem]) -> Sequence[GetItem]:
        return [item._replace(key=self._hide(item.key)) for item in items]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            hidden = [self._hide_item(item) for item in items]
            answers = iter(self.inner.set([item for item in hidden if item is not None]))
            return [Outcome.ERROR if item is None else next(answers) for item in hidden]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return super().delete(self._hidden(keys))

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [entry and self._reveal_entry(entry) for entry in super().describe(self._hidden(keys))]

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        hidden = [self._cipher.hide(page) if len(page) == _LAYOUT_BYTES else page for page in pages]
        return super().history(self._hidden(keys), hidden)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        super().advise(self._hidden(keys), values, worker)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        marked = None if namespace is None else self._cipher.mark(namespace)
        return _own_page(
            lambda at: super(TenantView, self).scan(marked, at), cursor, self._cipher, self._reveal_entry
        )

    def register_namespace(self, record: NamespaceRecord) -> None:
        if len(record.namespace) <= _MAX_NAMESPACE_BYTES:
            identity = {**record.identity, "tenant": self._tenant}
            super().register_namespace(
                replace(record, namespace=self._cipher.mark(record.namespace), identity=identity)
            )

    def namespaces(self) -> list[NamespaceRecord]:
        records = [(self._cipher.unmark(record.namespace), record) for record in super().namespaces()]
        return [
            replace(record, namespace=namespace) for namespace, record in records if namespace is not None
        ]

    def _hide(self, key: ObjectKey) -> ObjectKey:
        # A digest of a wrong length is passed on unchanged: no store has an object with such a digest.
        layout, page = key.digest[:_LAYOUT_BYTES], key.digest[_LAYOUT_BYTES:]
        return ObjectKey(key.pool, layout + self._cipher.hide(page)) if len(page) == _LAYOUT_BYTES else key

    def _hidden(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        return [self._hide(key) for key in keys]

    def _hide_item(self, item: SetItem) -> SetItem | None:
        """Return the item for the store; None if it cannot be stored or does not match its checksum.

        One pass over the payload makes both checksums. After a pass for each, bytes that a client changes in
        between would be stored with a checksum of their own:

            1. the client gives up a SetFrom of this payload     2. here: the bytes match the checksum
            3. the client writes something else there            4. here: the checksum under the hidden key
        """
        meta, key = item.meta, self._hide(item.key)
        if not storable(item) or len(meta.namespace) > _MAX_NAMESPACE_BYTES:
            return None
        found = Checksum()
        found.add(take(item.buffers, 0, meta.length))
        if meta.checksum not in (b"", found.digest(item.key)):
            return None
        namespace = self._cipher.mark(meta.namespace)
        parent = meta.parent and self._cipher.hide(meta.parent)
        meta = replace(meta, namespace=namespace, checksum=found.digest(key), parent=parent)
        return SetItem(key, item.buffers, meta)

    def _reveal_entry(self, entry: ScanEntry) -> ScanEntry | None:
        """Return the entry under the tenant's names, without a checksum; None if it is not the tenant's."""
        key, meta = entry.key, entry.meta
        namespace = self._cipher.unmark(meta.namespace)
        if namespace is None:
            return None
        page = self._cipher.reveal(key.page_key)
        parent = meta.parent and self._cipher.reveal(meta.parent)
        shown = ObjectMeta(namespace, meta.length, b"", parent, meta.depth)
        return entry._replace(key=ObjectKey(key.pool, key.layout + page), meta=shown)


def _own_page(
    scan: Callable[[bytes], ScanPage],
    cursor: bytes,
    cipher: NameCipher | None,
    show: Callable[[ScanEntry], ScanEntry | None],
) -> ScanPage:
    """Return a batch of a scan, in which `show` replaces each entry, or removes it (None).

    Neither the length of the batch nor its cursor reveals that entries were removed: the scan goes on until
    the batch is long enough. A cursor may be a key. If `cipher` is not None, it hides the cursor.
    """
    entries: list[ScanEntry] = []
    at = cipher.reveal(cursor) if cipher else cursor
    while True:
        page = scan(at)
        entries += [shown for shown in map(show, page.entries) if shown is not None]
        at = page.cursor
        if not at or len(entries) >= _SCAN_ENTRIES:
            return ScanPage(entries, cipher.hide(at) if cipher else at)


class _LimitedView(_View):
    """The store limited to some namespaces: all other objects appear absent, and cannot be overwritten.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, cursors: NameCipher | None = None) -> None:
        """Hide the cursors of scans by `cursors`, if any."""
        super().__init__(inner)
        self._cursors = cursors

    @abstractmethod
    def allows(self, namespace: bytes) -> bool:
        """Return whether objects in this namespace can be seen and stored."""

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return super().exists(self._visible(keys))

    def _asked(self, items: Sequence[GetItem]) -> Sequence[GetItem]:
        visible = self._visible([item.key for item in items])
        return [item._replace(key=key) for item, key in zip(items, visible, strict=True)]

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            entries = iter(self.inner.describe([item.key for item in items]))
            return decide(items, lambda item: self._judge(item, next(entries)), self.inner.set)

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        mine = self._mine(keys)
        answers = iter(super().delete([key for key, own in zip(keys, mine, strict=True) if own]))
        return [own and next(answers) for own in mine]

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        return [self._shown(entry) for entry in super().describe(keys)]

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        return super().history(self._visible(keys), pages)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        own = [(k, v) for k, v, mine in zip(keys, values, self._mine(keys), strict=False) if mine]
        super().advise([key for key, _ in own], [value for _, value in own], worker)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        if namespace is not None and not self.allows(namespace):
            return ScanPage([], b"")
        return _own_page(
            lambda at: super(_LimitedView, self).scan(namespace, at), cursor, self._cursors, self._shown
        )

    def register_namespace(self, record: NamespaceRecord) -> None:
        if self.allows(record.namespace):
            super().register_namespace(record)

    def namespaces(self) -> list[NamespaceRecord]:
        return [record for record in super().namespaces() if self.allows(record.namespace)]

    def _shown(self, entry: ScanEntry | None) -> ScanEntry | None:
        return entry if entry and self.allows(entry.meta.namespace) else None

    def _visible(self, keys: Sequence[ObjectKey]) -> list[ObjectKey]:
        """Return the keys, and instead of one of an object beyond the view a key that no object has.

        Then the store answers exactly as for an absent object, even if the request is malformed.
        """
        return [key if own else _absent_key(key) for key, own in zip(keys, self._mine(keys), strict=True)]

    def _mine(self, keys: Sequence[ObjectKey]) -> list[bool]:
        return [entry is not None for entry in self.describe(keys)]

    def _judge(self, item: SetItem, held: ScanEntry | None) -> Outcome | None:
        own = self.allows(item.meta.namespace) and (held is None or self.allows(held.meta.namespace))
        return None if own else Outcome.ERROR


class CommonView(_LimitedView):
    """The store as principals without a tenant see it: without the tenants' objects and namespaces.

    A tenant's objects are absent also for a caller that got hold of their hidden names.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, ciphers: Sequence[NameCipher], cursors: NameCipher) -> None:
        """Leave out the namespaces that one of `ciphers` has marked; `cursors` hides the cursors of scans."""
        super().__init__(inner, cursors)
        self._ciphers = ciphers
        self._known: dict[bytes, bool] = {}
        """Answers of `allows`, of which there are as many as namespaces."""

    def allows(self, namespace: bytes) -> bool:
        answer = self._known.get(namespace)
        if answer is None:
            if len(self._known) >= _KNOWN_NAMESPACES:
                self._known.clear()
            answer = all(cipher.unmark(namespace) is None for cipher in self._ciphers)
            self._known[namespace] = answer
        return answer


class NamespaceView(_LimitedView):
    """The store limited to the namespaces that the operator has named.

    Thread safety: as the contract of `StorageBackend` says.
    """

    def __init__(self, inner: StorageBackend, namespaces: AbstractSet[bytes]) -> None:
        super().__init__(inner)
        self._namespaces = namespaces

    def allows(self, namespace: bytes) -> bool:
        return namespace in self._namespaces

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        # The namespace of an object that went is not remembered, so removals are not told.
        return History([TierHistory("", self._mine(keys))])


def _absent_key(key: ObjectKey) -> ObjectKey:
    """Return a key of the same pool and length that no object has, because no page key is all zeros."""
    return ObjectKey(key.pool, bytes(len(key.digest)))
