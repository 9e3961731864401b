"""Stores around stores: what one of them adds to any backend, in one place instead of behind a flag in each.

Read `base` (what a wrapper passes on), then `metered`, `read_only`, `verified`. `tiercache.testing` has `faulty`, `latency` and `outage`.
"""

from tiercache.storage.wrappers.base import Wrapper, unwrap
from tiercache.storage.wrappers.metered import Metered, StoreMetrics
from tiercache.storage.wrappers.read_only import ReadOnly
from tiercache.storage.wrappers.verified import Verified

__all__ = ["Metered", "ReadOnly", "StoreMetrics", "Verified", "Wrapper", "unwrap"]
