"""Calls that concern all tiers: flush, scan, delete, a fork, and a chain of which no tier answers."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest
from tiercache_backends.chain import scans
from tiercache_backends.file import FileBackend
from tiercache_backends.memory import MemoryBackend

from tests.faulty import Outage
from tests.processes import refuses_a_child
from tests.storage_backends.chain.stores import Hanging, Refusing, health, held, lose
from tests.storage_backends.grpc.nodes import daemon_settings
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.daemon import StorageServer
from tiercache.errors import RefusedError, StorageError, UnavailableError
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import fetch, key, payload, put, to_set

HIT, MISS, STORED, UNAVAILABLE = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 5000


def test_no_tier_answers(chain_over):
    away = [Outage(MemoryBackend()) for _ in range(2)]
    chain = chain_over(*away)
    put(chain, key("a"), payload("a", SIZE))
    for each in away:
        each.begin()
    for _ in range(4):
        assert fetch(chain, key("a"), SIZE) is UNAVAILABLE
    assert put(chain, key("b"), payload("b", SIZE)) is UNAVAILABLE
    for ask in (
        lambda: chain.exists([key("a")]),
        lambda: chain.delete([key("a")]),
        lambda: chain.describe([key("a")]),
        chain.scan,
        chain.namespaces,
        chain.usage,
        chain.flush,
    ):
        with pytest.raises(UnavailableError, match=r"no tier answers: t0: .*; t1: "):
            ask()
    for each in away:
        each.end()
    until(lambda: fetch(chain, key("a"), SIZE) == payload("a", SIZE))


def test_a_chain_does_not_work_in_a_forked_process(chain_over):
    chain = chain_over(MemoryBackend(), MemoryBackend())
    assert refuses_a_child(chain)
    assert chain.exists([key("a")]) == [False]


def test_a_refused_deletion_is_said_and_takes_no_tier_away(chain_over):
    chain = chain_over(Refusing(), MemoryBackend())
    put(chain, key("a"), payload("a", SIZE))
    with pytest.raises(RefusedError, match="keeps what it has"):
        chain.delete([key("a")])
    assert health(chain) == ["serving", "serving"]


def test_a_flush_says_that_a_tier_with_new_objects_is_out(chain_over):
    away = Outage(MemoryBackend())
    chain = chain_over(away, MemoryBackend())
    put(chain, key("a"), payload("a", SIZE))
    lose(chain, away)
    with pytest.raises(StorageError, match="has not flushed 1 objects"):
        chain.flush()
    away.end()
    until(lambda: health(chain) == ["serving", "serving"])
    chain.flush()
    lose(chain, away)
    chain.flush()


def test_a_flush_means_every_tier_that_is_written_through(chain_over, tmp_path):
    disk = Outage(FileBackend(str(tmp_path / "far"), 16 << 20))
    chain = chain_over(FileBackend(str(tmp_path / "near"), 16 << 20), disk)
    items = [to_set(key(n), payload(n, SIZE)) for n in range(300)]
    chain.set(items[:100])
    chain.flush()
    assert held(disk, *range(100)) == [True] * 100
    disk.begin()
    chain.set(items[100:])
    until(lambda: health(chain) == ["serving", "out"])
    settings = daemon_settings("unix")
    with StorageServer(settings, chain), open_backend(f"grpc://{settings.sockets}") as client:
        for store in (chain, client):
            with pytest.raises(StorageError, match="'t1' lacks 200 objects that are written through to it"):
                store.flush()
        disk.end()
        until(lambda: health(chain) == ["serving", "serving"])
        client.flush()
        assert held(disk, *range(300)) == [True] * 300


def _asks(chain):
    """Whether any tier is asked, after a call that may find that one does not answer."""
    with suppress(UnavailableError):
        chain.exists([key(0)])
    return "serving" in health(chain)


def test_a_flush_counts_what_only_a_tier_has_that_is_out(chain_over, tmp_path):
    """The near tier is flushed and goes away before the far one, which was away, could copy from it."""
    near, far = (Outage(FileBackend(str(tmp_path / name), 16 << 20)) for name in ("near", "far"))
    chain = chain_over(near, far)
    far.begin()
    chain.set([to_set(key(n), payload(n, SIZE)) for n in range(20)])
    until(lambda: health(chain) == ["serving", "out"])
    with pytest.raises(StorageError, match="'t1' lacks 20 objects"):
        chain.flush()  # all the same, the near tier is flushed
    near.begin()
    until(lambda: not _asks(chain))
    far.end()
    until(lambda: health(chain) == ["out", "serving"])
    with pytest.raises(StorageError, match="'t1' lacks 20 objects"):
        chain.flush()
    near.end()
    until(lambda: health(chain) == ["serving", "serving"])
    chain.flush()
    assert held(far, *range(20)) == [True] * 20


def test_a_tier_that_hangs_in_a_flush_holds_nobody(chain_over, tmp_path):
    disk = Hanging(FileBackend(str(tmp_path / "far"), 16 << 20), "flush")
    chain = chain_over(MemoryBackend(), disk, settings={1: {"deadline": 0.3}})
    put(chain, key("a"), payload("a", SIZE))
    disk.hang()
    began = time.monotonic()
    with pytest.raises(StorageError, match="'t1' has not flushed 1 objects: tier t1: flush has not"):
        chain.flush()
    assert time.monotonic() - began < 30
    disk.release()
    until(lambda: health(chain) == ["serving", "serving"])
    chain.flush()


def test_a_scan_names_what_a_tier_has_that_comes_back_meanwhile(chain_over):
    away = Outage(MemoryBackend())
    chain = chain_over(away, MemoryBackend())
    names = range(3000)
    chain.set([to_set(key(n), payload(n, 16)) for n in names])
    until(lambda: chain.usage().tiers[1].objects == len(names))
    lose(chain, away)
    page = chain.scan()
    away.end()
    until(lambda: health(chain) == ["serving", "serving"])
    found = list(page.entries)
    while page.cursor:
        page = chain.scan(cursor=page.cursor)
        found += page.entries
    assert {entry.key for entry in found} == {key(n) for n in names}


def test_nothing_is_deleted_while_a_read_only_tier_is_out(chain_over):
    away = Outage(MemoryBackend())
    put(away, key("old"), payload("old", SIZE))
    chain = chain_over(MemoryBackend(), away, settings={1: {"read_only": True}})
    lose(chain, away)
    with pytest.raises(UnavailableError):
        chain.delete([key("old")])
    away.end()


def test_a_flush_does_not_fail_for_a_tier_that_has_copies_only(chain_over):
    away = Outage(MemoryBackend())
    chain = chain_over(MemoryBackend(), away)
    put(chain, key("a"), payload("a", SIZE))
    until(lambda: held(away, "a") == [True])
    away.begin()
    until(lambda: fetch(chain, key("x"), SIZE) is MISS and health(chain) == ["serving", "out"])
    chain.flush()
    away.end()


def test_scans_that_are_never_ended_take_bounded_memory(chain_over):
    chain = chain_over(MemoryBackend(), MemoryBackend())
    put(chain, key("a"), payload("a", SIZE))
    first = chain.scan()
    assert first.cursor
    for _ in range(64):
        chain.scan()
    with pytest.raises(UnavailableError, match="dropped for newer ones"):
        chain.scan(cursor=first.cursor)
    assert [entry.key for entry in chain.scan_all()] == [key("a")]


def test_a_scan_that_is_alone_may_name_objects_twice_beyond_the_limit(chain_over, monkeypatch):
    chain = chain_over(MemoryBackend(), MemoryBackend())
    chain.set([to_set(key(n), b"x") for n in range(3)])
    chain.flush()
    for limit, named in ((2, 6), (4, 3)):
        monkeypatch.setattr(scans, "_MAX_REPORTED", limit)  # private: a million objects
        assert len(list(chain.scan_all())) == named, "nothing is left out"
    older = chain.scan()
    assert len(chain.scan().entries) == 3
    with pytest.raises(UnavailableError, match="dropped for newer ones"):
        chain.scan(cursor=older.cursor)
