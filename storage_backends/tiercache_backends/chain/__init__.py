"""The `chain` store: several stores as tiers of one, the fastest first."""

from tiercache_backends.chain.store import TierChain

__all__ = ["TierChain"]
