"""KV events: what a tier has stored, removed or cleared, told to routers.

Read `base` (the nouns), `log` (numbered batches, kept for a while) and `encoding` (vLLM's format).
"""

from tiercache.events.base import EventKind, KVEvent, Medium, ObjectGroup, Place, runs_of
from tiercache.events.log import EventBatch, EventLog, EventReading

__all__ = [
    "EventBatch",
    "EventKind",
    "EventLog",
    "EventReading",
    "KVEvent",
    "Medium",
    "ObjectGroup",
    "Place",
    "runs_of",
]
