"""Quotas and guarantees of the tenants of a daemon, asked for and changed by a client."""

# ruff: noqa: D102 (the contract documents these methods)

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from tiercache.errors import ConfigError, RefusedError
from tiercache.storage.shares import OwnerUse, QuotaControl
from tiercache.wire.v1 import storage_pb2 as pb


class RemoteQuotas(QuotaControl):
    """Part of a store in a daemon: the quotas and guarantees of the daemon's tenants.

    Thread safety: any thread.
    """

    @abstractmethod
    def _ask_of_quotas(self, name: str, request: Any) -> Any:
        """Return the reply to a call; raises UnavailableError, RefusedError or another StorageError."""

    def quotas(self, tenant: str = "") -> dict[str, OwnerUse]:
        reply = self._ask_of_quotas("Quotas", pb.QuotasRequest(tenant=tenant))
        return {one.tenant: _use(one) for one in reply.tenants}

    def set_quota(self, tenant: str, change: Mapping[str, int | None], *, evict: bool = True) -> OwnerUse:
        request = pb.SetQuotaRequest(
            tenant=tenant,
            quota_bytes=change.get("quota"),
            no_quota="quota" in change and change["quota"] is None,
            guarantee_bytes=change.get("guarantee"),
            no_evict=not evict,
        )
        reply = self._ask_of_quotas("SetQuota", request)
        if reply.error == pb.TIER_ERROR_CONFIG:
            raise ConfigError(reply.why)
        if reply.error:
            raise RefusedError(reply.why)
        [found] = reply.tenants
        return _use(found)


def _use(one: pb.TenantUse) -> OwnerUse:
    return OwnerUse(
        used_bytes=one.used_bytes,
        quota_bytes=one.quota_bytes if one.HasField("quota_bytes") else None,
        guarantee_bytes=one.guarantee_bytes,
        evicted_objects=one.evicted_objects,
        throttled_objects=one.throttled_objects,
    )
