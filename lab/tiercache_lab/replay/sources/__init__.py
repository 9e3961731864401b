"""Sources of replayed requests: generators with seeds, and recorded traces.

Reading order: `base` (workloads with their parameters, and the source that replays a workload), `streams`
(tokens computed from a name); the workloads `conversations`, `agents`; the files `mooncake`
and `sessions`, with `fields`; `catalogue` (all generators by name).
"""

from tiercache_lab.replay.sources.base import Span, Workload, WorkloadSource
from tiercache_lab.replay.sources.catalogue import SESSIONS, SOURCES, open_source

__all__ = ["SESSIONS", "SOURCES", "Span", "Workload", "WorkloadSource", "open_source"]
