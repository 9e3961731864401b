"""Generators by name, and the opening of sources from texts such as "agent?sessions=24" or the path of a trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

from tiercache.config.quantities import shown
from tiercache.errors import ConfigError
from tiercache.replay.base import Source
from tiercache.replay.sources.agents import Agents
from tiercache.replay.sources.base import Kind, Layout, WorkloadSource
from tiercache.replay.sources.chats import Chats
from tiercache.replay.sources.conversations import MultiTurn, RoundRobin
from tiercache.replay.sources.documents import Documents
from tiercache.replay.sources.groups import SharedPrefix
from tiercache.replay.sources.mixed import Mixed
from tiercache.replay.sources.mooncake import read_trace
from tiercache.replay.sources.options import Span, options_of, with_options
from tiercache.replay.sources.trace import BLOCK

SOURCES: Final[Mapping[str, Kind]] = MappingProxyType(
    {
        "shared-prefix": Kind("groups of requests with a system prompt in common, all equally popular", SharedPrefix()),
        "shared-prefix-zipf": Kind(
            "groups of requests with a system prompt in common, some far more popular", SharedPrefix(groups=200, prompts=10, zipf=1.0)
        ),
        "multi-turn": Kind("conversations whose history grows from round to round", MultiTurn()),
        "multi-turn-stripped": Kind(
            "the same, with thinking before each answer that the history does not keep", MultiTurn(thinking=Span(128, 1024))
        ),
        "agent": Kind("agents that act and observe in turn, on top of a prompt with their tools", Agents()),
        "agent-collapse": Kind("the same, with observations older than 5 turns replaced by a placeholder", Agents(keep=5)),
        "sharegpt": Kind("short chats, 3 % of which continue an older one", Chats()),
        "mixed": Kind("shared prefixes, conversations, agents and short chats, interleaved", Mixed()),
        "mooncake-synthetic": Kind(
            "an imitation of Mooncake's synthetic trace: chats, and questions about long documents", Documents(), page_size=BLOCK
        ),
        "seed-20457": Kind(
            "the multi-turn benchmark of SGLang's pull request 20457, exactly: 10 clients x 12 rounds of 256 + 256 tokens",
            RoundRobin(clients=10, rounds=12, question=256, answer=256),
            concurrency=10,
            fixed=True,
            published=MappingProxyType(
                {"token_hit_rate": 0.898, "token_hit_rate_without_state_offload": 0.547049, "token_hit_rate_infinite": 0.897569}
            ),
            layout=Layout(device_states=50, host_ratio=2.0, file_storage=True),
        ),
        "seed-11214": Kind(
            "the shared-prefix benchmark of SGLang's pull request 11214: 50 groups x 10, system prompts of 10,240 tokens",
            SharedPrefix(groups=50, prompts=10, system=Span(10_240, 10_240), question=Span(256, 256), answer=Span(128, 128)),
            concurrency=5,
            fixed=True,
            published=MappingProxyType(
                {
                    "requests_per_second": 3.54,
                    "requests_per_second_without_cache": 2.64,
                    "ttft_ms_mean": 507.0,
                    "ttft_ms_mean_without_cache": 891.0,
                }
            ),
        ),
    }
)
"""Workloads that can be generated, by name. Traces are not listed: a trace file is opened by its path."""

_MAX_SEED: Final = 2**63


def open_source(spec: str, *, seed: int = 0, limit: int | None = None) -> Source:
    """Open the source that `spec` names; `limit` takes its first requests only.

    `spec` is a generator's name, with parameters as in "shared-prefix?groups=32&question=64-128", or the path of a Mooncake trace file (for
    a file named like a generator: "./agent"). A trace is the same with every seed. The returned source is a `WorkloadSource`.

    Raises ConfigError for an unknown name or parameter and for a value out of bounds, InputError for a file that is not a trace.
    """
    if type(seed) is not int or not 0 <= seed < _MAX_SEED:
        raise ConfigError(f"the seed must be a whole number from 0 to 2**63 - 1, not {shown(seed)}")
    if limit is not None and (type(limit) is not int or limit < 1):
        raise ConfigError(f"the limit must be a whole number of requests, at least 1, not {shown(limit)}")
    name, _, query = spec.partition("?")
    if name in SOURCES:
        return _generated(name, query, seed, limit)
    # `Path.exists` would raise for names that are too long.
    if not os.path.exists(spec):
        raise ConfigError(
            f"{shown(spec)} is neither a file nor a generator; give the path of a Mooncake trace (.jsonl) or one of {_names()}"
        )
    trace = read_trace(Path(spec), limit)
    return WorkloadSource(Path(spec).stem, trace, seed, trace.count(seed), page_size=BLOCK)


def _generated(name: str, query: str, seed: int, limit: int | None) -> WorkloadSource:
    kind = SOURCES[name]
    texts = _parameters(name, query)
    if kind.fixed and texts:
        raise ConfigError(f"{name} takes no parameters, for it repeats a published benchmark; these take some: {_names(fixed=False)}")
    workload = with_options(kind.workload, name, texts) if texts else kind.workload
    given = "&".join(f"{o.name}={o.default}" for o in options_of(workload) if o.name in texts)
    total = workload.count(seed)
    return WorkloadSource(
        name=f"{name}?{given}" if given else name,
        workload=workload,
        seed=seed,
        count=total if limit is None else min(total, limit),
        page_size=kind.page_size,
        concurrency=kind.concurrency,
        published=kind.published,
        layout=kind.layout,
    )


def _parameters(name: str, query: str) -> dict[str, str]:
    """Return the parameters that follow the question mark, by name."""
    texts: dict[str, str] = {}
    for part in query.split("&") if query else ():
        key, equals, text = part.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name}: {shown(part)} is not a parameter; write {name}?name=value&name=value")
        if key in texts:
            raise ConfigError(f"{name}: {shown(key)} is given twice; give it once")
        texts[key] = text
    return texts


def _names(*, fixed: bool = True) -> str:
    return ", ".join(name for name, kind in SOURCES.items() if fixed or not kind.fixed)
