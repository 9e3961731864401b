"""Real servers of LMCache, and its adapters in its own process."""

from __future__ import annotations

from typing import Any

from tests.servers.server import Storage, settings


def plugin(storage: Storage, **more: object) -> dict[str, Any]:
    """Return LMCache's configuration of our adapter over a store."""
    return {
        "type": "plugin",
        "module_path": "tiercache.integrations.lmcache",
        "class_name": "TierCacheL2",
        "adapter_params": settings(storage, **more),
    }
