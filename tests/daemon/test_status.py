"""The status document: figures of real calls, of the last hour, and what each reader may know."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.daemon.hosts import secret, until
from tests.daemon.test_metrics import SIZE, Told, exists, get, serving, store
from tiercache.config.models import Settings
from tiercache.daemon import status as status_module
from tiercache.daemon.access import Access, Budgets
from tiercache.daemon.budget import Budget
from tiercache.daemon.call_log import CallLog, Journal
from tiercache.daemon.node_metrics import NodeMetrics, UsageFigures
from tiercache.daemon.status import (
    CounterSample,
    Readiness,
    SampleRing,
    StatusBoard,
    history_of,
    hits_of,
    lookups_of,
    tier_hits,
)
from tiercache.errors import StorageError
from tiercache.storage.base import TierReport, Usage
from tiercache.storage.hits import Hits
from tiercache.storage.shares import OwnerUse
from tiercache.storage.tiers import SET_READ_ONLY
from tiercache.testing.objects import key, payload, to_set

DOCS = Path(__file__).parents[2] / "docs"


def test_figures_of_calls(tmp_path: Path) -> None:
    with serving(tmp_path) as (node, client):
        board = node._board  # private: the document itself, before it is JSON
        assert board is not None
        stored, absent = [key(1), key(2)], [key(3)]
        store(client, [to_set(k, payload(k, SIZE)) for k in stored])
        client.call("Exists", exists(stored + absent))
        assert list(client.stream("Get", iter([get(stored + absent)])))
        until(lambda: board.document(None)["history"]["read"][-1:] > [0.0])
        found = board.document(None)
        looked = found["lookups"]
        assert (looked["asked"], looked["found"], looked["fetched"]) == (3, 2, 3)
        assert looked["pools"] == [{"pool": "kv", "asked": 3, "found": 2, "fetched": 3, "got": 2}]
        assert looked["misses"] == [
            {"operation": operation, "reason": "absent", "objects": 1} for operation in ("exists", "get")
        ]
        assert found["hits"]["token_hit_rate"] is None
        assert found["hits"]["why_no_rate"].startswith("3 objects were looked up whose tokens are not known")
        assert found["hits"]["why_not_saved"] == "nothing was restored"
        [tier] = found["tiers"]
        assert (tier["name"], tier["health"], tier["hits"]) == ("MemoryBackend", "serving", 2)
        assert tier["read_share"] == 2 / 3
        [row] = [row for row in found["principals"] if row["name"] == "anonymous"]
        assert (row["calls"], row["read_bytes"], row["written_bytes"]) == (3, 2 * SIZE, 2 * SIZE)
        assert found["history"]["written"][-1] > 0
        assert {limit["name"]: limit["limit"] for limit in found["limits"]}["threads"] == 16
        assert found["readiness"] == {"ready": True, "reasons": [], "state": "ready"}
        assert "serves a store of type MemoryBackend" in found["journal"][-1]["text"]


@contextmanager
def board_of(
    usage: Callable[[], Usage], hits: Callable[[], dict[str, Hits]] = dict, **settings: Any
) -> Iterator[StatusBoard]:
    """A board of a store whose usage is told by a function, asked all the time."""
    figures = UsageFigures(Told(MemoryBackend(), usage), every=0.01)
    budgets = Budgets(*(Budget(10) for _ in range(5)))
    access = Access(Settings(**settings), MemoryBackend(), budgets)
    calls = CallLog(NodeMetrics(list(access.tenants)))
    yield StatusBoard("chain", b"i", calls, figures, budgets, access, hits=hits)
    figures.close(30)


def test_what_is_counted_right_after_the_start_is_told() -> None:
    """The first sample is older than the first call, however late its thread runs."""
    found: dict[str, Hits] = {}
    with board_of(lambda: Usage(0, 0, 0, 0), lambda: found) as board:
        found["acme"] = Hits(asked_tokens=64, restored_tokens=16)
        assert board.document(None)["hits"]["token_hit_rate"] == 0.25
        found["mallory"] = Hits(asked_tokens=64, restored_tokens=64, unsized_objects=1)
        total = board.document(None)["hits"]
        assert (total["asked_tokens"], total["token_hit_rate"]) == (64, 0.25), "of those who can have a rate"


def test_all_parts_of_a_status_are_of_one_moment() -> None:
    calls = itertools.count(1)

    def usage() -> Usage:
        n = next(calls)
        tiers = [TierReport(name="t", kind="file", health="serving", objects=n)]
        owners = {"acme": OwnerUse(used_bytes=n)}
        return Usage(n, n, n, n, tiers=tiers, owners=owners, details={"dead_bytes": n})

    with board_of(usage) as board:
        until(lambda: board.document(None)["tenants"])
        found = board.document(None)
        store, [tier], [tenant] = found["store"], found["tiers"], found["tenants"]
        assert store["objects"] == store["dead_bytes"] == tier["objects"] == tenant["used_bytes"] > 0


def test_a_daemon_is_ready_while_one_of_its_tiers_answers() -> None:
    health, why = ["out", "read-only"], ["w", "w"]

    def usage() -> Usage:
        tiers = [TierReport(name=f"t{n}", kind="file", health=health[n], why=why[n]) for n in range(2)]
        return Usage(0, 0, 0, 0, tiers=tiers)

    with board_of(usage) as board:
        until(lambda: len(board.document(None)["tiers"]) == 2)
        board.sample()
        found = Readiness(True, ["tier t0 is out: w", "tier t1 is read-only: w"], "degraded")
        assert board.readiness() == found
        assert board.document(None)["readiness"] == found._asdict()
        why[:] = ["w", SET_READ_ONLY]
        until(lambda: board.readiness().reasons == ["tier t0 is out: w"])
        why[:] = ["w", "w"]
        health[1] = "out"
        until(lambda: not board.readiness().ready)
        assert board.readiness() == Readiness(False, ["no tier answers: t0, t1"], "not ready")
        board.sample()
        health[:] = ["serving", "serving"]
        until(lambda: board.readiness().ready)
        board.sample()
        texts = [(entry["level"], entry["text"]) for entry in board.document(None)["journal"]]
        assert texts[:-1] == [
            ("info", "tier t1 is serving: w"), ("info", "tier t0 is serving: w"),
            ("warning", "tier t1 is out: w"), ("warning", "tier t1 is read-only: w"),
            ("warning", "tier t0 is out: w"),
        ]  # fmt: skip


def test_a_store_that_does_not_answer_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def usage() -> Usage:
        raise StorageError("the disk is away")

    with board_of(usage) as board:
        assert board.readiness().ready
        # private: the true limit would take half a minute
        monkeypatch.setattr(status_module, "_SILENT_SECONDS", 0.1)
        until(lambda: not board.readiness().ready)
        assert board.readiness().reasons == ["the store has not answered for 0 s"]


def test_a_tenant_gets_its_own_rows_and_no_reasons(tmp_path: Path) -> None:
    names = {"acme-1": "acme", "acme-2": "acme", "rival": "rival", "common-1": "", "common-2": ""}
    tenants = {name: {"salt_file": secret(tmp_path / name, name * 8)} for name in ("acme", "rival")}
    principals = [
        {"name": name, "token_file": secret(tmp_path / f"{name}.token", name * 4), "tenant": tenant}
        for name, tenant in names.items()
    ]
    settings = {"principals": principals, "tenants": tenants}
    with board_of(lambda: Usage(0, 0, 0, 0), **settings) as board:
        access = board._access  # private: who calls is the concern of other tests
        board.drain()
        for name, own in (
            ("acme-1", {"acme-1", "acme-2"}), ("rival", {"rival"}), ("common-1", {"common-1"}),
        ):  # fmt: skip
            found = board.document(access.authenticate(f"Bearer {name * 4}", {}))
            assert {row["name"] for row in found["principals"]} == own, "no tenant is no common tenant"
            assert found["readiness"] == {"ready": False, "reasons": [], "state": "not ready"}
            assert (found["whole"], found["reader"]) == (False, name)
            assert not any(
                found[part] for part in ("store", "tiers", "hits", "lookups", "history", "journal")
            )
        assert board.document(None)["readiness"]["reasons"] == ["the daemon shuts down"]


def lookups(found: float, absent: float) -> dict[tuple[str, str, str], float]:
    return {("exists", "", "kv"): found, ("exists", "absent", "kv"): absent}


def sample(at: float, **figures: Any) -> CounterSample:
    return CounterSample(time=1e9 + at, at=at, **figures)


def test_the_window_moves_and_is_bounded() -> None:
    ring = SampleRing(window=100.0, every=10.0)
    for n in range(1000):
        ring.add(sample(n * 10.0, lookups=lookups(n * 2.0, n * 1.0)))
    within = ring.within(sample(10_000.0, lookups=lookups(2000.0, 1000.0)))
    assert [s.at for s in within] == [9900.0 + 10 * n for n in range(11)]
    found = lookups_of(within)
    assert (found["window"], found["asked"], found["found"]) == (100.0, 30, 20)
    assert found["pools"] == [{"pool": "kv", "asked": 30, "found": 20, "fetched": 0, "got": 0}]
    assert found["misses"] == [{"operation": "exists", "reason": "absent", "objects": 10}]
    assert lookups_of(within[-1:])["asked"] == 0
    ring = SampleRing(window=100.0, every=10.0)
    ring.add(sample(10.0, read=5.0))
    assert history_of(ring.within(sample(10.5, read=6.0)), 9)["read"] == [2.0], "nothing older is known"
    ring.add(sample(20.0))
    assert [s.at for s in ring.within(sample(20.5))] == [10.0, 20.5], "half a second says nothing"


def test_a_history_is_rates_of_few_points_and_the_newest_is_the_last() -> None:
    samples = [
        sample(
            10.0 * n, read=1000.0 * n, calls=20.0 * n, used_bytes=float(n), tier_reads={"a": 5.0 * n},
            hits={"acme": Hits(asked_tokens=64 * max(0, n - 50), restored_tokens=16 * max(0, n - 50))},
        )
        for n in range(100)
    ]  # fmt: skip
    found = history_of(samples, 30)
    assert len(found["times"]) == len(found["read"]) == len(found["token_hit_rate"]) <= 30
    assert (found["times"][-1], found["used_bytes"][-1]) == (1e9 + 990.0, 99.0)
    assert {*found["read"]} == {100.0}
    assert {*found["calls"]} == {2.0}
    assert {*found["token_hit_rate"]} == {None, 0.25}, "None while nobody asks"
    assert hits_of(samples) == {"acme": Hits(asked_tokens=64 * 49, restored_tokens=16 * 49)}
    assert history_of(samples[:1], 30)["times"] == []
    assert tier_hits(samples, "a") == 495
    again = [*samples, sample(1000.0, tier_reads={"a": 7.0})]
    assert tier_hits(again[50:], "a") == 7, "a tier that was opened again counts from 0"
    assert tier_hits(again, "unknown") == 0


def test_a_journal_is_short() -> None:
    journal = Journal(lambda: 5.0)
    for n in range(1000):
        journal.add(f"{n} " + "x" * 5000)
    kept = journal.latest()
    assert len(kept) == 48
    assert kept[0].text.startswith("999 ")
    assert len(kept[0].text) == 300


def test_the_page_of_the_documentation_lists_every_field() -> None:
    def names(found: Any, before: str) -> Iterator[str]:
        if isinstance(found, dict):
            for name, inner in found.items():
                yield from names(inner, f"{before}.{name}".lstrip("."))
        elif isinstance(found, list):
            for inner in found or [None]:
                yield from names(inner, f"{before}[]")
        else:
            yield before

    used = Usage(0, 0, 0, 0, owners={"acme": OwnerUse()})
    principals = [{"name": "a", "uid": 1}]
    with board_of(lambda: used, lambda: {"acme": Hits(asked_tokens=1)}, principals=principals) as board:
        until(lambda: board.document(None)["tenants"])
        counters = board._counters  # private: calls of a moment ago
        # private: see above
        board._samples.add(replace(counters(used), at=time.monotonic() - 2.0, hits={}))
        # private: see above
        board._counters = lambda told: replace(counters(told), lookups=lookups(2, 1))  # type: ignore[method-assign]
        made = set(names(board.document(None), ""))
    told = set(re.findall(r"(?m)^\| `([\w.\[\]]+)` \|", (DOCS / "status.md").read_text()))
    assert told == made
