"""The storage tier, for objects that the host has no room for: the contract of a store, storage v2 on top of it, and how a store is opened.

Read `base` (the contract), `hybrid` (storage v2), `registry` (opening one); then what stores are made of: `env`, `vectors`, `checksum`,
`residents`, `gate`.
"""

from tiercache.storage.base import Capabilities, GetItem, NamespaceRecord, SetItem, StorageBackend, StoreContext, Usage
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
