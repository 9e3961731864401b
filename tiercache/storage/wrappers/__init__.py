"""Wrappers: stores that contain another store and add one feature to it.

A feature in a wrapper is written once, and works for all backends.

Read `base` (a wrapper that adds nothing), then `metered`. More wrappers are in `tiercache.testing`: `faulty`,
`latency` and `outage`.
"""

from tiercache.storage.wrappers.base import Wrapper, unwrap
from tiercache.storage.wrappers.metered import Metered, StoreMetrics

__all__ = ["Metered", "StoreMetrics", "Wrapper", "unwrap"]
