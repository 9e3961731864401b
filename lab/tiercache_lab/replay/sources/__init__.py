"""Sources of replayed requests: generators with seeds, and recorded traces.

Reading order: `base` (workloads, and the source that replays a workload), `options` (parameters of
workloads), `streams` (tokens computed from a name), `arrivals`; the workloads `groups`, `conversations`,
`chats`, `agents`, `documents`, `mixed`; `fields`, `trace` and `mooncake`,
`sessions` and `agentic` (files); `catalogue` (all generators by name).
"""

from tiercache_lab.replay.sources.base import Kind, Layout, Workload, WorkloadSource
from tiercache_lab.replay.sources.catalogue import SESSIONS, SOURCES, open_source
from tiercache_lab.replay.sources.options import Option, Span

__all__ = [
    "SESSIONS",
    "SOURCES",
    "Kind",
    "Layout",
    "Option",
    "Span",
    "Workload",
    "WorkloadSource",
    "open_source",
]
