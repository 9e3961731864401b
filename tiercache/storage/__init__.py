"""The storage tier: the contract of a store, and the parts that stores share.

Principles:

1. A hit has exactly the bytes that were stored under its key, or it is no hit.
2. Each item has an outcome of its own; one bad item fails no batch.
3. An empty answer is never given for a question that could not be asked.
4. A store keeps within its capacity at every instant, and evicts no page before what depends on it.
5. No lock that another call may need is held during I/O.

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
