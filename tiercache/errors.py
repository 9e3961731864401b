"""Every error that tiercache raises.

    TierCacheError
    ├── InputError(ValueError)            a caller's argument is wrong; nothing was changed
    │   ├── TokenError                    token ids out of range, of a wrong type or too few
    │   ├── GeometryError                 sizes, layers or dtypes that do not fit together
    │   └── ConfigError                   a setting is unknown, malformed or contradicts another
    │       └── MissingExtraError         a package of an extra is not installed
    ├── PoolError(RuntimeError)           a device pool or the host arena cannot do what was asked
    │   ├── PoolFullError                 not enough free slots or blocks, even after eviction
    │   └── SlotError                     a slot or block is freed twice, or was never handed out
    ├── TransferError(RuntimeError)       a copy between device and host failed
    ├── StorageError(OSError)             a store cannot be opened or operated
    │   ├── StoreLockedError              another process owns the directory
    │   ├── UnavailableError              the store cannot be reached, or does not answer in time
    │   │   └── UnansweredError           it was sent a change, which may have been made
    │   ├── RefusedError                  the store answers, and refuses the caller or the call
    │   ├── UnlistedError                 the store answers, and cannot list its objects
    │   ├── StoreFormatError              the directory holds a format that this version does not know
    │   └── StoreDamagedError             the store is damaged and cannot be read before it is repaired
    ├── WireError(ValueError)             a message from the other end is malformed or beyond a limit
    ├── AdmissionError(RuntimeError)      an admission is used after its release, or out of order
    ├── RankError(RuntimeError)           the ranks of a group do not fit together, or differ in their calls
    ├── UnsupportedModelError(ValueError) a model cannot be served; the message names the layer
    └── ClosedError(RuntimeError)         the object was closed

A message says what is wrong, which object it is about, and what to do. A *miss* is never an error: see
`core.Outcome` and `core.Reason`.
"""

from __future__ import annotations

from tiercache_distribution import DISTRIBUTION

_DISTRIBUTIONS = {
    "google": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "mooncake": "mooncake-transfer-engine-non-cuda",
    "zmq": "pyzmq",
}
"""Names of distributions by the top-level module that they install, if the two names differ."""


def install_line(extra: str) -> str:
    """Return the pip line that adds an extra to the installed tiercache."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


class TierCacheError(Exception):
    """Base class of every error that tiercache raises."""


class InputError(TierCacheError, ValueError):
    """An argument is wrong; nothing was changed."""


class TokenError(InputError):
    """Token ids are out of range, of a wrong type, or too few."""


class GeometryError(InputError):
    """Sizes, layers or dtypes do not fit together."""


class ConfigError(InputError):
    """A setting is unknown, malformed or contradicts another."""


class MissingExtraError(ConfigError):
    """A package that an optional part of tiercache needs is not installed; the message has the pip line.

    `what` names the optional part, as the subject of the message's sentence. `extra` is the extra of
    tiercache that installs the missing package. `error` is the failed import.
    """

    def __init__(self, what: str, extra: str, error: ImportError) -> None:
        module = (error.name or "").partition(".")[0]
        missing = _DISTRIBUTIONS.get(module, module.replace("_", "-")) or "another package"
        super().__init__(f"{what} needs {missing}, which is not installed: {install_line(extra)}")


class PoolError(TierCacheError, RuntimeError):
    """A device pool or the host arena cannot do what was asked."""


class PoolFullError(PoolError):
    """Not enough slots or blocks are free; nothing was taken."""


class SlotError(PoolError):
    """A slot or block is freed twice, or was never handed out; nothing was changed."""


class TransferError(TierCacheError, RuntimeError):
    """A copy between device and host failed; its destination is undefined and must not be published."""


class StorageError(TierCacheError, OSError):
    """A store cannot be opened or operated."""


class StoreLockedError(StorageError):
    """Another process owns the directory."""


class UnavailableError(StorageError):
    """A store cannot be reached, or does not answer in time."""


class UnansweredError(UnavailableError):
    """A change was sent to a store that did not answer: it may have been made, or be made yet."""


class RefusedError(StorageError):
    """A store or a server refuses this caller.

    The caller is unknown, lacks the permission, or has used up its share.
    """


class UnlistedError(StorageError):
    """A store cannot list its objects, although it answers."""


class StoreFormatError(StorageError):
    """The directory holds a format that this version does not know."""


class StoreDamagedError(StorageError):
    """The store is damaged and cannot be read. Opening the store for writing repairs it."""


class WireError(TierCacheError, ValueError):
    """A message from the other end of a connection is malformed or beyond a limit."""


class AdmissionError(TierCacheError, RuntimeError):
    """An admission is used after its release, or its methods are called out of order."""


class RankError(TierCacheError, RuntimeError):
    """The ranks of a group do not fit together, do not all answer, or differ in their calls."""


class UnsupportedModelError(TierCacheError, ValueError):
    """A model cannot be served; the message names the layer and the reason."""


class ClosedError(TierCacheError, RuntimeError):
    """The object was closed."""
