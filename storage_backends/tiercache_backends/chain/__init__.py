"""The `chain` store: several stores as tiers of one, the fastest first.

Principles:

1. The failure of a tier is felt for its deadline at most, and costs its hits.
2. A get asks the fastest tier first; no other tier writes where a late one still may.
3. Copies wait as keys: the bytes are read again when it is their turn.
4. A deletion reaches every tier, also one that was away.
"""

from tiercache_backends.chain.store import TierChain

__all__ = ["TierChain"]
