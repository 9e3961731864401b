"""tiercache: hierarchical offload of KV pages and recurrent states for hybrid language models.

The names below are the public surface of the core. Importing this package imports neither torch nor grpc.
"""

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
from tiercache.keys import Identity, namespace_of, page_keys

__version__ = "0.1.0"

__all__ = [
    "CacheTransferUnits",
    "Geometry",
    "HitPolicy",
    "Identity",
    "Outcome",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "Reason",
    "Tier",
    "__version__",
    "namespace_of",
    "page_keys",
    "restorable_prefixes",
]
