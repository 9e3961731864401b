"""tiercache: hierarchical offload of KV pages and recurrent states for hybrid language models.

The names in `__all__` are the public surface of the core. The module of a name is imported when the name is
first used; importing this package imports no other module of tiercache. `Worker` needs the extra `worker`.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING

if _TYPE_CHECKING:
    from tiercache.controller import HybridCacheController
    from tiercache.core import (
        CacheTransferUnits,
        HitPolicy,
        Outcome,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
        Reason,
        Tier,
        restorable_prefixes,
    )
    from tiercache.geometry import Geometry
    from tiercache.integrations.transformers import Worker
    from tiercache.keys import Identity, namespace_of, page_keys
    from tiercache.storage import HybridStorage, open_backend

__version__ = "0.1.0"

__all__ = [
    "CacheTransferUnits",
    "Geometry",
    "HitPolicy",
    "HybridCacheController",
    "HybridStorage",
    "Identity",
    "Outcome",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "Reason",
    "Tier",
    "Worker",
    "__version__",
    "namespace_of",
    "open_backend",
    "page_keys",
    "restorable_prefixes",
]
_ELSEWHERE = {
    "HybridCacheController": "controller", "HybridStorage": "storage", "open_backend": "storage",
    "Geometry": "geometry", "Identity": "keys", "namespace_of": "keys", "page_keys": "keys",
    "Worker": "integrations.transformers",
}  # fmt: skip
"""Modules of the public names that are not in `core`."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'tiercache' has no attribute {name!r}")
    found: object = getattr(_import_module(f"tiercache.{_ELSEWHERE.get(name, 'core')}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
