"""The store as one principal sees it: under its tenant's names, and limited to what it may see.

    caller ── names ──▶ fence ──▶ values and bounds ──▶ account ──▶ store
              `NameCipher`  `allows`  `fairness`         `account`

A principal without a tenant sees the objects that belong to no tenant. With the verb admin, such a principal
also sees the objects of all tenants, but under hidden names (`NameCipher`), as the store has them.
"""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from blake3 import blake3

from tiercache.config.files import read_salt
from tiercache.config.models import Settings
from tiercache.core import ObjectKey, ObjectMeta, Outcome
from tiercache.daemon.tenants.account import Account, PriceList, TenantAccount
from tiercache.daemon.tenants.fairness import NamespaceBounds, ValueScale
from tiercache.events.base import ChangeNote
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
_CURSORS: Final = b"cursors"
"""Domain separator of the cipher that hides the cursors of scans."""
_ROUNDS: Final = 4
"""Rounds of the Feistel network, see `NameCipher`."""
_LAYOUT_BYTES: Final = 32
"""Bytes of each half of an object's digest: the layout digest and the page key."""
MARK_BYTES: Final = 16
"""Bytes of the mark by which a tenant's namespaces are recognised."""
_MAX_NAMESPACE_BYTES: Final = NAMESPACE_BYTES - MARK_BYTES
"""Maximum bytes of a tenant's namespace, without its mark."""
_KNOWN_NAMESPACES: Final = 1 << 14
"""Number of namespaces of which it is remembered whose they are."""
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


class TenantStore(Wrapper):
    """The store as one principal sees it; without options, the whole store under its own names.

    `rename` hides every page key, parent and namespace of `tenant`. A caller cannot register a namespace for
    another tenant: the identity gets the name that the operator gave the tenant. A namespace has at most 48
    bytes here, because the mark takes 16 of the store's 64.

    `allows` decides by their names in the store which namespaces are seen: objects in others appear absent,
    and cannot be overwritten. A key does not tell the namespace of its object, so the store describes the
    keys of every call first. `named` are the namespaces that the operator has listed, if any.

    What a store will evict next concerns the objects of all callers, so no principal is told.

    Thread safety: as `Wrapper`.
    """

    shows_all = False

    def __init__(
        self,
        inner: StorageBackend,
        *,
        rename: NameCipher | None = None,
        tenant: str = "",
        allows: Callable[[bytes], bool] | None = None,
        named: frozenset[bytes] | None = None,
        cursors: NameCipher | None = None,
        scale: ValueScale | None = None,
        bounds: NamespaceBounds | None = None,
        account: TenantAccount | None = None,
    ) -> None:
        """Hide the cursors of scans by `cursors`; count calls in `account`, if there is one."""
        super().__init__(inner)
        self._rename: Final = rename
        self._tenant: Final = tenant
        self._named: Final = named
        self._allows: Final = _fence(named, allows)
        self._cursors: Final = cursors or rename
        self._scale: Final = scale
        self._bounds: Final = bounds
        self._account: Final = account

    @property
    def is_fenced(self) -> bool:
        """Whether objects of this principal's names are hidden from it because of their namespace."""
        return self._allows is not None

    @property
    def is_narrow(self) -> bool:
        """Whether the operator has limited the principal to some namespaces."""
        return self._named is not None

    def may_register(self, namespace: bytes) -> bool:
        """Return whether the principal's list of namespaces, if it has one, has this one."""
        return self._named is None or self._marked(namespace) in self._named

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of `inner`, without shares: the owners of objects are the daemon's matter."""
        return replace(super().capabilities, shares=False)

    def share(self, shares: Shares) -> None:
        self.check_shares({}, shares)

    def watch(self, note: ChangeNote | None) -> bool:
        """Return False: changes have the names of all tenants, and the daemon tells of the store's."""
        return False

    def coldest(self, nbytes: int) -> None:
        return None

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            asked = self._visible(keys)
            answers = self.inner.exists(asked)
            if self._account is not None:
                self._account.count_exists(asked, answers)
            return answers

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            asked = self._asked(items)
            began = time.perf_counter()
            outcomes = self.inner.get(asked)
            if self._account is not None:
                self._account.count_get(self.inner, asked, outcomes, time.perf_counter() - began)
            return outcomes

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        with self._gate:
            return self.inner.peek(self._asked(items))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        with self._gate:
            if self._rename is None and self._allows is None:
                return self._store(items)
            stored = [
                self._renamed(item) if own else None
                for item, own in zip(items, self._may_store(items), strict=True)
            ]
            answers = iter(self._store([item for item in stored if item is not None]))
            return [Outcome.ERROR if item is None else next(answers) for item in stored]

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        with self._gate:
            hidden = self._hidden(keys)
            mine = self._mine(hidden)
            answers = iter(self.inner.delete([key for key, own in zip(hidden, mine, strict=True) if own]))
            return [own and next(answers) for own in mine]

    def describe(self, keys: Sequence[ObjectKey]) -> list[ScanEntry | None]:
        with self._gate:
            return [entry and self._shown(entry) for entry in self.inner.describe(self._hidden(keys))]

    def history(self, keys: Sequence[ObjectKey], pages: Sequence[bytes]) -> History:
        with self._gate:
            if self.is_narrow:
                # The namespace of an object that went is not remembered, so removals are not told.
                return History([TierHistory("", self._mine(self._hidden(keys)))])
            if self._rename is not None:
                pages = [self._rename.hide(page) if len(page) == _LAYOUT_BYTES else page for page in pages]
            return self.inner.history(self._visible(keys), pages)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        with self._gate:
            hidden = self._hidden(keys)
            if self._allows is not None:
                mine = self._mine(hidden)
                values = [v for v, is_own in zip(values, mine, strict=False) if is_own]
                hidden = [key for key, is_own in zip(hidden, mine, strict=True) if is_own]
            if self._scale is None:
                self.inner.advise(hidden, values, worker)
            else:
                self._scale.advise(self.inner, hidden, values, worker)

    def scan(self, namespace: bytes | None = None, cursor: bytes = b"") -> ScanPage:
        name = None if namespace is None else self._marked(namespace)
        if name is not None and self._allows is not None and not self._allows(name):
            return ScanPage([], b"")
        with self._gate:
            if self._rename is None and self._allows is None:
                return self.inner.scan(name, cursor)
            return _own_page(lambda at: self.inner.scan(name, at), cursor, self._cursors, self._shown)

    def register_namespace(self, record: NamespaceRecord) -> None:
        """Store a record; raises RefusedError for one beyond the bounds of its tenant."""
        name, identity = self._marked(record.namespace), record.identity
        if self._rename is not None:
            if len(record.namespace) > _MAX_NAMESPACE_BYTES:
                return
            identity = {**identity, "tenant": self._tenant}
        if self._allows is not None and not self._allows(name):
            return
        record = replace(record, namespace=name, identity=identity)
        with self._gate:
            if self._bounds is not None:
                self._bounds.check_record(record, self.inner.namespaces())
            self.inner.register_namespace(record)
            if self._account is not None:
                self._account.prices.learn_record(record)

    def namespaces(self) -> list[NamespaceRecord]:
        found = []
        for record in super().namespaces():
            name = record.namespace if self._rename is None else self._rename.unmark(record.namespace)
            if name is not None and (self._allows is None or self._allows(record.namespace)):
                found.append(replace(record, namespace=name))
        return found

    def _marked(self, namespace: bytes) -> bytes:
        """Return the name of a namespace in the store."""
        return namespace if self._rename is None else self._rename.mark(namespace)

    def _hide(self, key: ObjectKey) -> ObjectKey:
        # A digest of a wrong length is passed on unchanged: no store has an object with such a digest.
        layout, page = key.digest[:_LAYOUT_BYTES], key.digest[_LAYOUT_BYTES:]
        if self._rename is None or len(page) != _LAYOUT_BYTES:
            return key
        return ObjectKey(key.pool, layout + self._rename.hide(page))

    def _hidden(self, keys: Sequence[ObjectKey]) -> Sequence[ObjectKey]:
        """Return the keys as the store has them."""
        return keys if self._rename is None else [self._hide(key) for key in keys]

    def _mine(self, hidden: Sequence[ObjectKey]) -> list[bool]:
        """Return which of these keys of the store have an object that the principal sees."""
        if self._allows is None:
            return [True] * len(hidden)
        entries = self.inner.describe(hidden)
        return [entry is not None and self._allows(entry.meta.namespace) for entry in entries]

    def _visible(self, keys: Sequence[ObjectKey]) -> Sequence[ObjectKey]:
        """Return keys of the store, and instead of one of an object beyond the view one that no object has.

        Then the store answers exactly as for an absent object, even if the request is malformed.
        """
        hidden = self._hidden(keys)
        if self._allows is None:
            return hidden
        return [key if own else _absent_key(key) for key, own in zip(hidden, self._mine(hidden), strict=True)]

    def _asked(self, items: Sequence[GetItem]) -> Sequence[GetItem]:
        """Return the items as the store is asked for them."""
        if self._rename is None and self._allows is None:
            return items
        visible = self._visible([item.key for item in items])
        return [item._replace(key=key) for item, key in zip(items, visible, strict=True)]

    def _may_store(self, items: Sequence[SetItem]) -> list[bool]:
        """Return which items the principal may store, under keys that have no object beyond its view."""
        if (allows := self._allows) is None:
            return [True] * len(items)
        held = self.inner.describe(self._hidden([item.key for item in items]))
        return [
            allows(self._marked(item.meta.namespace)) and (entry is None or allows(entry.meta.namespace))
            for item, entry in zip(items, held, strict=True)
        ]

    def _renamed(self, item: SetItem) -> SetItem | None:
        """Return the item for the store; None if it cannot be stored or does not match its checksum.

        A checksum covers the key as well as the bytes, so the store gets one under the hidden key. One pass
        over the payload makes both checksums. After a pass for each, bytes that a client changes in between
        would be stored with a checksum of their own:

            1. the client gives up a SetFrom of this payload     2. here: the bytes match the checksum
            3. the client writes something else there            4. here: the checksum under the hidden key
        """
        if self._rename is None:
            return item
        meta, key = item.meta, self._hide(item.key)
        if not storable(item) or len(meta.namespace) > _MAX_NAMESPACE_BYTES:
            return None
        found = Checksum()
        found.add(take(item.buffers, 0, meta.length))
        if meta.checksum not in (b"", found.digest(item.key)):
            return None
        namespace = self._rename.mark(meta.namespace)
        parent = meta.parent and self._rename.hide(meta.parent)
        meta = replace(meta, namespace=namespace, checksum=found.digest(key), parent=parent)
        return SetItem(key, item.buffers, meta)

    def _store(self, items: Sequence[SetItem]) -> list[Outcome]:
        """Store items of the store's names, within the bounds of the tenant, and count them."""
        if not items:
            return []
        bounds, inner = self._bounds, self.inner

        def store(scaled: Sequence[SetItem]) -> list[Outcome]:
            return inner.set(scaled) if bounds is None else decide(scaled, bounds.judge, inner.set)

        outcomes = store(items) if self._scale is None else self._scale.set(items, store)
        if self._account is not None:
            self._account.count_set(items, outcomes)
        return outcomes

    def _shown(self, entry: ScanEntry) -> ScanEntry | None:
        """Return the entry as the principal may know it, without a hidden checksum; None if it may not."""
        meta = entry.meta
        if self._allows is not None and not self._allows(meta.namespace):
            return None
        if self._rename is None:
            return entry
        namespace = self._rename.unmark(meta.namespace)
        if namespace is None:
            return None
        page = self._rename.reveal(entry.key.page_key)
        parent = meta.parent and self._rename.reveal(meta.parent)
        shown = ObjectMeta(namespace, meta.length, b"", parent, meta.depth)
        return entry._replace(key=ObjectKey(entry.key.pool, entry.key.layout + page), meta=shown)


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


def _fence(
    named: frozenset[bytes] | None, allows: Callable[[bytes], bool] | None
) -> Callable[[bytes], bool] | None:
    """Return the function that decides which namespaces are seen; None if all are."""
    if named is None:
        return allows
    return lambda name: name in named and (allows is None or allows(name))


def _absent_key(key: ObjectKey) -> ObjectKey:
    """Return a key of the same pool and length that no object has, because no page key is all zeros."""
    return ObjectKey(key.pool, bytes(len(key.digest)))


class TenantStores:
    """Maker of the principals' views of one store.

    The values that callers give are on one scale for each tenant, and for each list of namespaces
    (`ValueScale`). If all callers see the same, values are taken as they are.

    Thread safety: make views in one thread at a time; any thread may call `tenant_of`.
    """

    def __init__(self, settings: Settings, store: StorageBackend, account: Account | None = None) -> None:
        """Read every salt; raises ConfigError. The calls of all principals count in `account`."""
        salts = {
            name: read_salt(tenant.salt_file, f"tenants.{name}.salt_file")
            for name, tenant in sorted(settings.tenants.items())
        }
        self._inner: Final = store
        self._ciphers: Final = {name: NameCipher(salt) for name, salt in salts.items()}
        self._cursors: Final = NameCipher(_CURSORS + b"".join(salts.values()))
        self.tenant_of: Final = lru_cache(_KNOWN_NAMESPACES)(self._find_tenant)
        """Function that returns the tenant of a namespace, by its name in the store; "" for none."""
        self._bounds: Final = NamespaceBounds(self.tenant_of)
        self._account: Final = account
        self._accounts: Final[dict[tuple[str, bool], TenantAccount]] = {}
        """Accounts by tenant, and whether the callers see everything."""
        self.prices: Final = PriceList(store)
        limited = any("*" not in principal.namespaces for principal in settings.principals)
        self._is_one_view: Final = not (self._ciphers or limited)
        self._scales: Final[dict[tuple[str, frozenset[bytes]], ValueScale]] = {}
        """Scales by tenant and, without a tenant, by the list of namespaces."""

    def view(self, tenant: str, namespaces: Sequence[str], *, everything: bool) -> TenantStore:
        """Return the view of a principal of `tenant`, or of a principal without a tenant ("").

        `namespaces` are in hexadecimal; a "*" among them stands for all namespaces. `everything` says whether
        a principal without a tenant sees the objects of tenants as well.
        """
        cipher = self._ciphers[tenant] if tenant else None
        names = [bytes.fromhex(name) for name in namespaces if name != "*"]
        if cipher is not None:
            # The settings may name a namespace of the tenant by its name in the store. That name is encrypted
            # and ends with the tenant's mark. `unmark` returns None for any other name.
            names = [name if cipher.unmark(name) is not None else cipher.mark(name) for name in names]
        named = None if "*" in namespaces else frozenset(names)
        self._bounds.reserve(names)
        hides_tenants = bool(self._ciphers) and not (tenant or everything)
        group = tenant, frozenset() if tenant or named is None else named
        return TenantStore(
            self._inner, rename=cipher, tenant=tenant, named=named,
            allows=(lambda name: not self.tenant_of(name)) if hides_tenants else None,
            cursors=self._cursors if hides_tenants else None,
            scale=None if self._is_one_view else self._scales.setdefault(group, ValueScale()),
            bounds=self._bounds, account=self._account_of(tenant, everything),
        )  # fmt: skip

    def _account_of(self, tenant: str, everything: bool) -> TenantAccount | None:
        if self._account is None:
            return None

        def owns(name: bytes) -> bool:
            # By the page sizes of other tenants, a caller would learn of them.
            return (everything and not tenant) or self.tenant_of(name) == tenant

        mine = TenantAccount(self._account, tenant, self.prices, owns)
        return self._accounts.setdefault((tenant, everything), mine)

    def _find_tenant(self, namespace: bytes) -> str:
        for tenant, cipher in self._ciphers.items():
            if cipher.unmark(namespace) is not None:
                return tenant
        return ""
