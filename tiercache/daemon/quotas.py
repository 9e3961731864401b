"""Quotas and guarantees of tenants: those of the settings, changes while the daemon serves, their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, Final, TypeVar, TypeVarTuple

from grpc import StatusCode

from tiercache.daemon.access import Permissions, Refusal
from tiercache.daemon.call import Call
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.store_threads import Threads
from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.base import StorageBackend
from tiercache.storage.shares import OwnerUse, Share, Shares
from tiercache.text import exact_size
from tiercache.wire.v1 import storage_pb2 as pb

T = TypeVar("T")
A = TypeVarTuple("A")


class TenantShares:
    """Quotas and guarantees that a daemon's store keeps for its tenants.

    Thread safety: any thread; changes wait for each other.
    """

    def __init__(self, store: StorageBackend, owner_of: Callable[[bytes], str]) -> None:
        """Keep shares in `store`; `owner_of` returns the tenant of a namespace, or "" (`Shares.owner_of`)."""
        self._store: Final = store
        self._owner_of: Final = owner_of
        self._lock: Final = Lock()
        self._limits: Mapping[str, Share] = {}

    @property
    def limits(self) -> Mapping[str, Share]:
        """Limits of each tenant that are in force."""
        return self._limits

    @property
    def kept(self) -> bool:
        """Whether the store can keep limits."""
        return self._store.capabilities.shares

    def take(self, limits: Mapping[str, Share]) -> list[str]:
        """Keep these limits from now on, and evict what is beyond; return the tenants whose limits changed.

        Raises ConfigError, with nothing changed, if the store cannot keep them.
        """
        with self._lock:
            changed = [name for name, share in limits.items() if self._limits.get(name, Share()) != share]
            if limits != self._limits:
                self._keep(limits, evict=True)
            return changed

    def change(self, tenant: str, change: Callable[[Share], Share], *, evict: bool) -> None:
        """Change the limits of one tenant, until the daemon ends or takes over its settings again.

        Raises ConfigError or RefusedError, with nothing changed; see `StorageBackend.share`.
        """
        with self._lock:
            limits = {**self._limits, tenant: change(self._limits[tenant])}
            self._keep(limits, evict=evict)

    def _keep(self, limits: Mapping[str, Share], *, evict: bool) -> None:
        shares = Shares(self._owner_of, limits)
        shares.check(0, "")
        self._store.share(shares, evict=evict)
        self._limits = limits

    def use(self) -> dict[str, OwnerUse]:
        """Return what each tenant has; raises StorageError if the store cannot be asked."""
        found = self._store.usage().owners
        return {name: found.get(name, _unknown(share)) for name, share in self._limits.items()}


def _unknown(share: Share) -> OwnerUse:
    return OwnerUse(quota_bytes=share.quota, guarantee_bytes=share.guarantee)


class QuotaCalls:
    """Handlers of the calls about the tenants' quotas.

    A principal of a tenant may know the quota and the use of its own tenant, an observer of the whole daemon
    those of all. Changing them needs the rights to change the daemon itself (`Permissions.operates`). The
    configuration of the daemon is not written, so a change lasts until the daemon ends or reloads it.

    Thread safety: the event loop's thread.
    """

    def __init__(self, shares: TenantShares, threads: Threads, calls: CallLog | None = None) -> None:
        self._shares: Final = shares
        self._threads: Final = threads
        self._calls: Final = calls or CallLog()

    async def quotas(self, call: Call) -> None:
        """Serve Quotas: what one tenant has, or all that the caller may know."""
        request = await call.request(pb.QuotasRequest)
        await self._answer(call, self._visible(call.caller.permissions, request.tenant))

    async def set_quota(self, call: Call) -> None:
        """Serve SetQuota: change the limits of a tenant, or nothing."""
        permissions = call.caller.permissions
        if not permissions.operates:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{permissions.name} may not change quotas: that needs the verb admin without a tenant and"
                " without a list of namespaces",
            )
        request = await call.request(pb.SetQuotaRequest)
        self._require(request.tenant)
        details = {"tenant": request.tenant, **_words(request)}
        try:
            await self._calls.change(
                "set_quota",
                partial(self._threads.start, call.caller.budgets.workers),
                partial(self._change, request.tenant, partial(_changed, request), not request.no_evict),
                **details,
            )
        except (ConfigError, RefusedError) as error:
            kind = pb.TIER_ERROR_CONFIG if isinstance(error, ConfigError) else pb.TIER_ERROR_REFUSED
            await call.send(pb.QuotasReply(error=kind, why=str(error)).SerializeToString())
        else:
            await self._answer(call, [request.tenant])

    def _change(self, tenant: str, change: Callable[[Share], Share], evict: bool) -> None:
        if not self._shares.kept:
            raise ConfigError(
                "the store of this daemon cannot keep quotas; serve a store or a tier of type memory, file or"
                " lmdb"
            )
        self._shares.change(tenant, change, evict=evict)

    def _visible(self, permissions: Permissions, tenant: str) -> list[str]:
        """Return the tenants of an answer; raises Refusal if the caller may not know them."""
        if permissions.tenant:
            if tenant not in ("", permissions.tenant):
                raise Refusal(
                    StatusCode.PERMISSION_DENIED,
                    f"{permissions.name} belongs to tenant {permissions.tenant}, and may know the quota of"
                    " that tenant only",
                )
            return [permissions.tenant]
        if not permissions.observes:
            raise Refusal(
                StatusCode.PERMISSION_DENIED,
                f"{permissions.name} may not know the quotas of tenants: that needs the verb observe or"
                " admin without a list of namespaces",
            )
        if tenant:
            self._require(tenant)
        return [tenant] if tenant else list(self._shares.limits)

    def _require(self, tenant: str) -> None:
        known = self._shares.limits
        if tenant not in known:
            there = f"there are {', '.join(known)}" if known else "this daemon has none"
            raise Refusal(StatusCode.FAILED_PRECONDITION, f"there is no tenant {tenant[:80]!r}; {there}")

    async def _answer(self, call: Call, tenants: Iterable[str]) -> None:
        use = await self._ask(call, self._shares.use)
        reply = pb.QuotasReply(
            tenants=[_message(name, use[name]) for name in tenants], kept=self._shares.kept
        )
        await call.send(reply.SerializeToString())

    async def _ask(self, call: Call, work: Callable[[*A], T], *arguments: *A) -> T:
        return await self._threads.start(call.caller.budgets.workers, work, *arguments)


def _changed(request: pb.SetQuotaRequest, was: Share) -> Share:
    share = was
    if request.no_quota:
        share = replace(share, quota=None)
    elif request.HasField("quota_bytes"):
        share = replace(share, quota=request.quota_bytes)
    if request.HasField("guarantee_bytes"):
        share = replace(share, guarantee=request.guarantee_bytes)
    return share


def _words(request: pb.SetQuotaRequest) -> dict[str, Any]:
    """Return a change in words, for the log."""
    said: dict[str, Any] = {}
    if request.no_quota:
        said["quota"] = "none"
    elif request.HasField("quota_bytes"):
        said["quota"] = exact_size(request.quota_bytes)
    if request.HasField("guarantee_bytes"):
        said["guarantee"] = exact_size(request.guarantee_bytes)
    return said | ({"no_evict": True} if request.no_evict else {})


def _message(name: str, use: OwnerUse) -> pb.TenantUse:
    return pb.TenantUse(
        tenant=name, used_bytes=use.used_bytes, quota_bytes=use.quota_bytes,
        guarantee_bytes=use.guarantee_bytes, evicted_objects=use.evicted_objects,
        throttled_objects=use.throttled_objects,
    )  # fmt: skip
