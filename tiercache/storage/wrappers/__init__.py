"""Wrappers: stores around stores, each of which adds one thing to any backend, in one place instead of behind a flag in each backend.

Read `base` (what a wrapper passes on), then `metered`, `read_only`, `verified`. `tiercache.testing` has `faulty`, `latency` and `outage`.
"""

from tiercache.storage.wrappers.base import Wrapper, unwrap
from tiercache.storage.wrappers.metered import Metered, StoreMetrics
from tiercache.storage.wrappers.read_only import ReadOnly
from tiercache.storage.wrappers.verified import Verified

__all__ = ["Metered", "ReadOnly", "StoreMetrics", "Verified", "Wrapper", "unwrap"]
