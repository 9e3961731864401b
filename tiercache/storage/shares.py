"""Shares of a store: how many bytes each owner may have at most, and how many of them nobody else evicts.

An owner is who a namespace belongs to, such as a tenant of a daemon. Namespaces of no tenant belong to the
common owner, "", which has neither limit.

    0                guarantee                      quota
    |--- evicted ----|--- evicted by any write -----|  never more than this, at any instant
         by its own
         writes only

Bytes are what objects take in the store that keeps the shares (`Footprint`), because payload bytes alone
bound nothing: an object of one byte takes a block of 4 KiB in `file`, and a row of the tables in every store.

    payload     |-- unit --|-- unit --|-- unit --|      whole units; `margin` bytes of each hold no payload
    beside it   |-- record on the medium --|-- Python objects --|-- rows of the tables --|      `fixed`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tiercache.errors import ConfigError
from tiercache.text import exact_size, readable_size

_MAX_NAMES: Final = 1 << 16
"""Maximum number of namespaces whose owners are remembered by name."""
NEAR_SHARE: Final = 5
"""An owner is near its quota if less than this fraction of it is left."""
COMMON: Final = ""
"""Name of the owner of namespaces that belong to no tenant."""
INDEX_BYTES: Final = 512
"""Memory of an object in the tables of objects and pages and in the eviction order.

Measured in full stores, with values and queues: at most 491 bytes (`tests/storage/test_tiny_objects.py`).
Some 150 more if each object has a layout of its own; what else is counted for an object covers these.
"""

Lengths = TypeVar("Lengths", int, Any)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that an object takes in one kind of store; by default its payload alone."""

    fixed: int = 0
    """Bytes of an object without payload."""
    unit: int = 1
    """Bytes in which the medium is given out."""
    margin: int = 0
    """Bytes of a unit that hold no payload."""

    def of(self, length: Lengths) -> Lengths:
        """Return what an object with a payload of `length` bytes takes; an array gives an array."""
        held = self.unit - self.margin
        return self.fixed + (length + (held - 1)) // held * self.unit


@dataclass(frozen=True, slots=True)
class Share:
    """Limits of one owner."""

    quota: int | None = None
    """Maximum bytes that the owner's objects take; None: no limit."""
    guarantee: int = 0
    """Bytes of the owner that the writes of others do not evict."""

    def of(self, part: int, whole: int) -> Share:
        """Return the limits in a store that has `part` of `whole` bytes."""
        quota = None if self.quota is None else self.quota * part // whole
        return Share(quota, self.guarantee * part // whole)


@dataclass(frozen=True, slots=True)
class Shares:
    """Limits of all owners of a store, and who owns a namespace."""

    owner_of: Callable[[bytes], str]
    """Name of the owner of a namespace: one of `limits`, or `COMMON`.

    The answer for a namespace never changes. The function may be called while a lock of the store is held: it
    does not wait and does not call the store.
    """
    limits: Mapping[str, Share] = field(default_factory=dict)
    """Limits by owner, without `COMMON`; an owner without limits has an empty `Share`."""

    @property
    def is_limiting(self) -> bool:
        """Whether any owner has a quota or a guarantee."""
        return any(share != Share() for share in self.limits.values())

    def of(self, part: int, whole: int) -> Shares:
        """Return the shares in a store that has `part` of `whole` bytes."""
        return Shares(self.owner_of, {name: share.of(part, whole) for name, share in self.limits.items()})

    def check(self, room: int, where: str) -> None:
        """Raise ConfigError if the limits contradict each other, or `room` bytes (0: no limit) of a store.

        `where` names the store in the error.
        """
        for name, share in self.limits.items():
            if share.quota is not None and share.guarantee > share.quota:
                raise ConfigError(
                    f"tenant {name}: the guarantee ({exact_size(share.guarantee)}) is more than the quota"
                    f" ({exact_size(share.quota)}); lower the first or raise the second"
                )
        guaranteed = {name: share.guarantee for name, share in self.limits.items() if share.guarantee}
        total = sum(guaranteed.values())
        if room and total > room:
            largest = max(guaranteed, key=lambda name: guaranteed[name])
            raise ConfigError(
                f"the guarantees of tenants {', '.join(guaranteed)} add up to {readable_size(total)}, more"
                f" than the {readable_size(room)} of {where}; lower one of them (the largest is that of"
                f" {largest}), or raise the capacity"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUse:
    """Objects of one owner in a store, its limits there, and what they have caused since the store opened."""

    used_bytes: int = 0
    """Bytes that the objects which can be found take in the store (`Footprint`)."""
    quota_bytes: int | None = None
    """Maximum of `used_bytes`; None: no limit."""
    guarantee_bytes: int = 0
    evicted_objects: int = 0
    """Objects of this owner that its own writes evicted because of its quota."""
    throttled_objects: int = 0
    """Objects of this owner that were THROTTLED because of its quota."""

    def __add__(self, other: OwnerUse) -> OwnerUse:
        """Return the sum of what two stores of a chain have."""
        quotas = self.quota_bytes, other.quota_bytes
        return OwnerUse(
            used_bytes=self.used_bytes + other.used_bytes,
            quota_bytes=None if None in quotas else sum(quota or 0 for quota in quotas),
            guarantee_bytes=self.guarantee_bytes + other.guarantee_bytes,
            evicted_objects=self.evicted_objects + other.evicted_objects,
            throttled_objects=self.throttled_objects + other.throttled_objects,
        )


def limits_of(tenants: Mapping[str, Any]) -> dict[str, Share]:
    """Return the limits of tenants, which are settings with `quota` and `guarantee`."""
    return {name: Share(tenant.quota, tenant.guarantee) for name, tenant in sorted(tenants.items())}


class Writer(NamedTuple):
    """The writes for which an eviction makes room."""

    owner: int
    """Number of the owner of the new objects."""
    nbytes: int = 0
    """Bytes that the new objects take and that are not reserved yet."""
    for_quota: bool = False
    """Whether the room is needed below the owner's quota, so that only its own objects are evicted."""


class Owners:
    """Bytes of the owners of a table of objects (`Residents`), by the owners' numbers; `COMMON` is 0.

    Before the first `replace` nothing is counted, and every namespace belongs to owner 0.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self) -> None:
        self.active = False
        """Whether shares were given."""
        self.names: list[str] = [COMMON]
        self.quotas: list[float] = [inf]
        self.guarantees: list[int] = [0]
        self.used: list[int] = [0]
        """Bytes that the objects which can be found take."""
        self.extra: list[int] = [0]
        """Bytes that count besides: objects that are being written or removed."""
        self.evicted: list[int] = [0]
        self.throttled: list[int] = [0]
        self._shares = Shares(lambda _: COMMON)
        self._name_of: Callable[[int], bytes] = lambda _: b""
        self._numbers: dict[int, int] = {}
        """Number of the owner of each namespace that was asked for by its number."""
        self._by_name: dict[bytes, int] = {}
        """The same by name."""

    def replace(self, shares: Shares, name_of: Callable[[int], bytes]) -> None:
        """Take these shares, with all bytes 0; `name_of` gives the namespace with a number of the store."""
        was = dict(zip(self.names, zip(self.evicted, self.throttled, strict=True), strict=True))
        self.active = True
        self._shares, self._name_of, self._numbers, self._by_name = shares, name_of, {}, {}
        limits = {COMMON: Share(), **shares.limits}
        self.names = list(limits)
        self.quotas = [inf if share.quota is None else share.quota for share in limits.values()]
        self.guarantees = [share.guarantee for share in limits.values()]
        self.used, self.extra = [0] * len(limits), [0] * len(limits)
        self.evicted, self.throttled = ([was.get(name, (0, 0))[which] for name in limits] for which in (0, 1))

    @property
    def shares(self) -> Shares | None:
        """The shares that were given."""
        return self._shares if self.active else None

    def of(self, namespace_id: int) -> int:
        """Return the number of the owner of a namespace."""
        if not self.active:
            return 0
        number = self._numbers.get(namespace_id)
        if number is None:
            name = self._name_of(namespace_id)
            # A number without a name may get one later.
            number = self.of_namespace(name) if name else 0
            if name:
                self._numbers[namespace_id] = number
        return number

    def of_all(self, namespace_ids: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the numbers of the owners of these namespaces."""
        distinct, places = np.unique(namespace_ids, return_inverse=True)
        return np.array([self.of(number) for number in distinct.tolist()], np.int64)[places]

    def of_namespace(self, namespace: bytes) -> int:
        """Return the number of the owner of a namespace, by its name."""
        number = self._by_name.get(namespace)
        if number is None:
            owner = self._shares.owner_of(namespace) if self.active else COMMON
            number = self.names.index(owner) if owner in self._shares.limits else 0
            if len(self._by_name) < _MAX_NAMES:
                self._by_name[namespace] = number
        return number

    def room(self, owner: int) -> float:
        """Return how many bytes are left below the quota of an owner, also what is being written counted."""
        return self.quotas[owner] - self.used[owner] - self.extra[owner]

    def is_above(self, owner: int) -> bool:
        """Return whether an owner has more than its guarantee, so that the writes of others may evict."""
        return self.used[owner] > self.guarantees[owner]

    def is_entitled(self, writer: Writer) -> bool:
        """Return whether the new objects stay within their owner's guarantee."""
        owner = writer.owner
        return self.used[owner] + self.extra[owner] + writer.nbytes <= self.guarantees[owner]

    def protected(self) -> list[int]:
        """Return the owners that have no more than their guarantees, which is more than nothing."""
        owners = range(len(self.names)) if self.active else ()
        return [owner for owner in owners if self.guarantees[owner] and not self.is_above(owner)]

    def near_quota(self) -> dict[int, int]:
        """Return the owners that have nearly their quotas, and how many bytes they may lose soon."""
        found: dict[int, int] = {}
        for owner, quota in enumerate(self.quotas if self.active else ()):
            if quota != inf and self.room(owner) < quota / NEAR_SHARE:
                found[owner] = int(quota / NEAR_SHARE)
        return found

    def beyond(self) -> list[int]:
        """Return the owners that have more than their quotas."""
        if not self.active:
            return []
        return [owner for owner in range(len(self.names)) if self.room(owner) < 0]

    def use(self) -> dict[str, OwnerUse]:
        """Return what each owner has; empty before shares were given."""
        if not self.active:
            return {}
        return {
            name: OwnerUse(
                used_bytes=self.used[number],
                quota_bytes=None if self.quotas[number] == inf else int(self.quotas[number]),
                guarantee_bytes=self.guarantees[number],
                evicted_objects=self.evicted[number],
                throttled_objects=self.throttled[number],
            )
            for number, name in enumerate(self.names)
        }
