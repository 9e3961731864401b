"""All generators by name, the mixture of all kinds, and the function that opens sources.

The name of a source is a generator with parameters, such as "agent?sessions=24", or the path of a trace.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tiercache.errors import ConfigError
from tiercache.text import shown
from tiercache_lab.replay.base import Request
from tiercache_lab.replay.sources.agents import Agents
from tiercache_lab.replay.sources.base import (
    Kind,
    Layout,
    Span,
    Workload,
    WorkloadSource,
    options_of,
    parameters,
    with_options,
)
from tiercache_lab.replay.sources.conversations import Chats, MultiTurn, RoundRobin, SharedPrefix
from tiercache_lab.replay.sources.mooncake import BLOCK, read_trace
from tiercache_lab.replay.sources.sessions import SUFFIX, Sessions, read_sessions

_SECONDS: Final = 1200
"""Approximate duration in seconds of each of the mixed workloads."""

_LIVE: Final = 20
_AGENTS: Final = 6


@dataclass(frozen=True, slots=True)
class Mixed(Workload):
    """Mixture of four workloads: groups with system prompts, conversations, agents and short chats.

    The requests of these parts are merged by arrival time. All parts have about the same duration.
    """

    def count(self, seed: int) -> int:
        """Return the number of requests of all parts."""
        return sum(part.count(seed) for part in self._parts())

    def generate(self, seed: int) -> Iterator[Request]:
        """Yield the requests of all parts in order of arrival, with session numbers that are unique."""
        parts = self._parts()
        renumbered = [_renumber(part.generate(seed), number, len(parts)) for number, part in enumerate(parts)]
        return heapq.merge(*renumbered, key=lambda request: request.arrival)

    def _parts(self) -> tuple[Workload, ...]:
        # Each part takes about `_SECONDS`: 20 groups of 32 requests, 60 conversations of 12 rounds, 26
        # sessions of agents with about 28 turns, and 900 chats.
        return (
            SharedPrefix(groups=20, prompts=32, rate=20 * 32 / _SECONDS),
            MultiTurn(conversations=60, live=_LIVE, pause=_SECONDS * _LIVE / (60 * 12)),
            Agents(sessions=26, live=_AGENTS, pause=_SECONDS * _AGENTS / (26 * 28)),
            Chats(chats=900, rate=900 / _SECONDS),
        )


def _renumber(requests: Iterator[Request], part: int, parts: int) -> Iterator[Request]:
    """Return the requests of one part with new session numbers, which the other parts do not use."""
    return (replace(request, session=request.session * parts + part) for request in requests)


SOURCES: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "shared-prefix": Kind(
            "groups of requests with a system prompt in common, all equally popular", SharedPrefix()
        ),
        "shared-prefix-zipf": Kind(
            "groups of requests with a system prompt in common, some much more popular than others",
            SharedPrefix(groups=200, prompts=10, zipf=1.0),
        ),
        "multi-turn": Kind("conversations whose history grows from round to round", MultiTurn()),
        "multi-turn-stripped": Kind(
            "multi-turn with thinking before each answer; the history keeps only the answers",
            MultiTurn(thinking=Span(128, 1024)),
        ),
        "agent": Kind(
            "agents that act and observe in turn, after a prompt that describes their tools", Agents()
        ),
        "agent-collapse": Kind(
            "agent with observations older than 5 turns replaced by a placeholder", Agents(keep=5)
        ),
        "sharegpt": Kind("short chats, 3 % of which continue an older one", Chats()),
        "mixed": Kind("shared prefixes, conversations, agents and short chats, interleaved", Mixed()),
        "seed-20457": Kind(
            "the multi-turn benchmark of SGLang's pull request 20457, exactly: 10 clients x 12 rounds of 256"
            " + 256 tokens",
            RoundRobin(clients=10, rounds=12, question=256, answer=256),
            concurrency=10,
            fixed=True,
            published={
                "token_hit_rate": 0.898,
                "token_hit_rate_without_state_offload": 0.547049,
                "token_hit_rate_infinite": 0.897569,
            },
            layout=Layout(device_states=50, host_ratio=2.0),
        ),
        "seed-11214": Kind(
            "the shared-prefix benchmark of SGLang's pull request 11214: 50 groups x 10, system prompts of"
            " 10,240 tokens",
            SharedPrefix(
                groups=50,
                prompts=10,
                system=Span(10_240, 10_240),
                question=Span(256, 256),
                answer=Span(128, 128),
            ),
            concurrency=5,
            fixed=True,
            published={
                "requests_per_second": 3.54,
                "requests_per_second_without_cache": 2.64,
                "ttft_ms_mean": 507.0,
                "ttft_ms_mean_without_cache": 891.0,
            },
        ),
    }
)
"""Generators by name. Trace files are not listed here, because they are opened by path."""

SESSIONS: Final = Kind("recorded sessions of agents: a directory of .json files, or one file", Sessions())
"""How recorded sessions are replayed; opened by path."""

_MAX_SEED: Final = 2**63
_MAX_PAGE: Final = 4096


def open_source(
    spec: str, *, seed: int = 0, limit: int | None = None, closed: bool = False, page: int | None = None
) -> WorkloadSource:
    """Return the source that `spec` names, limited to the first `limit` requests.

    `spec` is one of the following, where parameters look like "shared-prefix?groups=32&question=64-128". If
    a file has the name of a generator, write its path like "./agent".

    - A generator's name with parameters.
    - The path of a Mooncake trace file.
    - The path of a recorded session (.json), or of a directory of such files, with parameters of `SESSIONS`.

    `seed` has no effect on a Mooncake trace. With `closed`, the times of recorded sessions are those of
    `Sessions.closed`; it has no effect on other sources. `page` is the number of tokens per page.

    Raises ConfigError for an unknown name or parameter, and for a value out of bounds. Raises InputError for
    a file that is not a trace.
    """
    if type(seed) is not int or not 0 <= seed < _MAX_SEED:
        raise ConfigError(f"the seed must be a whole number from 0 to 2**63 - 1, not {shown(seed)}")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"the limit must be a whole number of requests, at least 1, not {shown(limit)}")
    name, _, query = spec.partition("?")
    if name in SOURCES:
        found = _generated(name, query, seed, limit)
        if SOURCES[name].fixed and page is not None:
            raise ConfigError(f"{name} repeats a published benchmark, so its pages are fixed")
        return _paged(found, page, 1)
    if not _exists(spec):
        # The path itself may contain question marks.
        name, _, query = spec.rpartition("?")
        if not _exists(name):
            raise ConfigError(
                f"{shown(spec)} is neither a file nor a generator; give the path of a Mooncake trace"
                f" (.jsonl), of recorded sessions (a directory, or .json) or one of {_names()}"
            )
    else:
        name, query = spec, ""
    path = Path(name)
    if path.suffix == SUFFIX or path.is_dir():
        if page is not None:
            raise ConfigError(
                f"write the page after the path of recorded sessions, like '{path}?page={page}'"
            )
        return _recorded(path, query, seed, limit, closed=closed)
    if query:
        raise ConfigError(f"{path.name} has no parameters, because it is a Mooncake trace")
    trace = read_trace(path, limit)
    found = WorkloadSource(path.stem, trace, seed, trace.count(seed), page_size=BLOCK)
    return _paged(found, page, BLOCK)


def _paged(source: WorkloadSource, page: int | None, block: int) -> WorkloadSource:
    """Return a source with pages of `page` tokens, if that is not None; its prompts share whole blocks."""
    if page is None:
        return source
    if type(page) is not int or not 16 <= page <= _MAX_PAGE or page % 16:
        raise ConfigError(f"a page has a multiple of 16 tokens up to {_MAX_PAGE}, not {shown(page)}")
    if block % page and page % block:
        raise ConfigError(
            f"{source.name} has blocks of {block} tokens; use a page that divides them, such as 64, or a"
            f" multiple of them, not {page}"
        )
    return replace(source, page_size=page)


def _exists(path: str) -> bool:
    # `os.path.exists` returns False for names that are too long; `Path.exists` would raise an error.
    return bool(path) and os.path.exists(path)


def _recorded(path: Path, query: str, seed: int, limit: int | None, *, closed: bool) -> WorkloadSource:
    name = path.resolve().stem
    texts = parameters(name, query)
    asked = with_options(SESSIONS.workload, name, texts)  # a wrong parameter raises before the files are read
    assert isinstance(asked, Sessions)
    workload = replace(asked, closed=closed).dealt(read_sessions(path))
    kind = replace(SESSIONS, workload=workload, page_size=workload.page)
    return replace(_source(name, kind, texts, seed, limit), about=workload.about())


def _generated(name: str, query: str, seed: int, limit: int | None) -> WorkloadSource:
    kind = SOURCES[name]
    texts = parameters(name, query)
    if kind.fixed and texts:
        raise ConfigError(
            f"{name} has no parameters, because it repeats a published benchmark; generators with parameters:"
            f" {_names(fixed=False)}"
        )
    workload = with_options(kind.workload, name, texts) if texts else kind.workload
    return _source(name, replace(kind, workload=workload), texts, seed, limit)


def _source(name: str, kind: Kind, texts: Mapping[str, str], seed: int, limit: int | None) -> WorkloadSource:
    """Return the source of a kind, named with the parameters that were given in the order of the fields."""
    workload, total = kind.workload, kind.workload.count(seed)
    given = "&".join(f"{o.name}={o.default}" for o in options_of(workload) if o.name in texts)
    return WorkloadSource(
        f"{name}?{given}" if given else name, workload, seed, total if limit is None else min(total, limit),
        kind.page_size, kind.concurrency, kind.published, kind.layout,
    )  # fmt: skip


def _names(*, fixed: bool = True) -> str:
    return ", ".join(name for name, kind in SOURCES.items() if fixed or not kind.fixed)
