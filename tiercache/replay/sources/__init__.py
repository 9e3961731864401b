"""Sources of replayed requests: generators with seeds, and recorded traces.

Reading order: `base` (workloads, and the source that replays one), `options` (their parameters), `streams` (tokens as a function of their
purpose), `arrivals`; the workloads `groups`, `conversations`, `chats`, `agents`, `documents`, `mixed`; `trace` and `mooncake` (files);
`catalogue` (names).
"""

from tiercache.replay.sources.base import Kind, Layout, Workload, WorkloadSource
from tiercache.replay.sources.catalogue import SOURCES, open_source
from tiercache.replay.sources.options import Option, Span

__all__ = ["SOURCES", "Kind", "Layout", "Option", "Span", "Workload", "WorkloadSource", "open_source"]
