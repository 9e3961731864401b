"""Every error that tiercache raises.

    TierCacheError
    ├── InputError(ValueError)            a caller's argument is wrong; nothing was changed
    │   ├── TokenError                    token ids out of range, of a wrong type or too few
    │   ├── GeometryError                 sizes, layers or dtypes that do not fit together
    │   └── ConfigError                   a setting is unknown, malformed or contradicts another
    ├── PoolError(RuntimeError)
    │   ├── PoolFullError                 not enough free slots or blocks, even after eviction; nothing was taken
    │   └── SlotError                     a slot or block is freed twice, or was never handed out
    ├── TransferError(RuntimeError)       a copy between device and host failed
    ├── StorageError(OSError)
    │   ├── StoreLockedError              another process owns the directory
    │   ├── RefusedError                  the store is there, and does not serve this caller, or not that, or not that much
    │   ├── StoreFormatError              the directory holds a format that this version does not know
    │   └── StoreDamagedError             what is stored cannot be looked at before it was repaired
    ├── WireError(ValueError)             a message from the other end of a connection is malformed or beyond a limit
    ├── AdmissionError(RuntimeError)      an admission is used after its release, or out of order
    ├── UnsupportedModelError(ValueError) a model cannot be served; the message names the layer
    └── ClosedError(RuntimeError)         the object was closed

A message says what is wrong, which object it is about, and what to do. A *miss* is never an error: see `core.Outcome` and `core.Reason`.
"""

from __future__ import annotations


class TierCacheError(Exception):
    """The root of the tree."""


class InputError(TierCacheError, ValueError):
    """An argument is wrong; nothing was changed."""


class TokenError(InputError):
    """Token ids are out of range, of a wrong type, or too few."""


class GeometryError(InputError):
    """Sizes, layers or dtypes do not fit together."""


class ConfigError(InputError):
    """A setting is unknown, malformed or contradicts another."""


class PoolError(TierCacheError, RuntimeError):
    """A device pool or the host arena cannot do what was asked."""


class PoolFullError(PoolError):
    """Not enough free slots or blocks; nothing was taken."""


class SlotError(PoolError):
    """A slot or block is freed twice, or was never handed out; nothing was changed."""


class TransferError(TierCacheError, RuntimeError):
    """A copy between device and host failed; its destination is undefined and must not be published."""


class StorageError(TierCacheError, OSError):
    """A store cannot be opened or operated."""


class StoreLockedError(StorageError):
    """Another process owns the directory."""


class RefusedError(StorageError):
    """A store or a server answers, and does not serve this caller: it does not know it, does not allow it that, or its share is used up."""


class StoreFormatError(StorageError):
    """The directory holds a format that this version does not know."""


class StoreDamagedError(StorageError):
    """What is stored is damaged, and cannot be looked at before the store was opened to be changed, which repairs it."""


class WireError(TierCacheError, ValueError):
    """A message from the other end of a connection is malformed or beyond a limit."""


class AdmissionError(TierCacheError, RuntimeError):
    """An admission is used after its release, or its methods are called out of order."""


class UnsupportedModelError(TierCacheError, ValueError):
    """A model cannot be served; the message names the layer and the reason."""


class ClosedError(TierCacheError, RuntimeError):
    """The object was closed."""
