"""The storage tier: the contract of a store, and the parts that stores share.

Read `base` (the contract), `hybrid` (storage v2, the calls of controllers) and `registry` (opening a store).
Then read the shared parts: `env`, `vectors`, `checksum`, `residents`, `gate`.
"""

from tiercache.storage.base import (
    Capabilities,
    GetItem,
    NamespaceRecord,
    SetItem,
    StorageBackend,
    StoreContext,
    Usage,
)
from tiercache.storage.env import Env
from tiercache.storage.hybrid import HybridStorage
from tiercache.storage.registry import open_backend

__all__ = [
    "Capabilities",
    "Env",
    "GetItem",
    "HybridStorage",
    "NamespaceRecord",
    "SetItem",
    "StorageBackend",
    "StoreContext",
    "Usage",
    "open_backend",
]
