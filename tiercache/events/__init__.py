"""KV events: what a tier has stored, removed or cleared, told to routers.

Principles:

1. Whoever has a tier publishes it; a client of a daemon publishes nothing of the daemon's store.
2. Changes are noted in the order in which they happen, so that no removal overtakes its object.
3. Events may be applied twice, and what was missed is made up for by a replay or a snapshot.

Read `base` (the nouns), `log` (numbered batches, kept for a while) and `encoding` (vLLM's format).
"""

from tiercache.events.base import EventKind, KVEvent, Medium, ObjectGroup, Place, runs_of
from tiercache.events.log import EventBatch, EventLog

__all__ = ["EventBatch", "EventKind", "EventLog", "KVEvent", "Medium", "ObjectGroup", "Place", "runs_of"]
