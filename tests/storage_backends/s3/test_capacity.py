"""A capacity that several processes share: one of them evicts, and another takes over when it is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import obstore
import pytest
from tiercache_backends.s3 import S3Backend
from tiercache_backends.s3.pack import make_name

from tests.processes import suspend
from tests.storage_backends.s3.filler import SIZE, Filler
from tests.storage_backends.s3.hooks import open_s3, prefix_of, s3_of
from tests.storage_backends.s3.proxy import Exchange, Proxy
from tests.storage_backends.s3.server import bucket, endpoint, needs_weed
from tests.storage_backends.s3.test_packs import gets, run
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.testing.objects import fetch, key, payload, put, to_get

pytestmark = [needs_weed, pytest.mark.slow]

CAPACITY = 2 << 20
LEASE = {"capacity": str(CAPACITY), "lease": "2s", "deadline": "0.5s", "refresh": "0.2s"}
ENOUGH = CAPACITY // SIZE + 5
"""Objects of which some must be evicted."""


def deletions(proxy: Proxy) -> int:
    return sum(
        one.method == "DELETE" or (one.method == "POST" and "delete" in one.target) for one in proxy.log
    )


def owns(store: S3Backend) -> bool:
    return store.usage().details["owner"] == 1


def fill(store: S3Backend, name: str, objects: int) -> list[Outcome]:
    return [put(store, key((name, n)), payload((name, n), SIZE)) for n in range(objects)]


def test_an_owner_that_was_stopped_beyond_its_lease_removes_nothing(tmp_path: Path, proxy: Proxy) -> None:
    with Filler(tmp_path, proxy.url, str(CAPACITY), "2s") as first:
        assert set(first.fill("a", ENOUGH)) == {"stored"}
        assert deletions(proxy)
        assert first.is_owner()
        suspend(first.process.pid)
        with open_s3(tmp_path, **LEASE) as second:
            assert not owns(second)
            assert Outcome.THROTTLED in fill(second, "b", 5), "it is full, and another process is the owner"
            until(lambda: owns(second))
            assert set(fill(second, "c", ENOUGH)) == {Outcome.STORED}
            proxy.log.clear()
            first.tell("d", 10)
            os.kill(first.process.pid, signal.SIGCONT)
            assert set(first.ask()) <= {"stored", "throttled"}
            assert not first.is_owner()
            assert deletions(proxy) == 0
            assert owns(second)
            newest = [("c", n) for n in range(ENOUGH - 10, ENOUGH)]
            assert all(fetch(second, key(one), SIZE) == payload(one, SIZE) for one in newest)


def test_an_owner_that_sleeps_after_its_last_look_at_the_clock_removes_nothing(
    tmp_path: Path, proxy: Proxy
) -> None:
    with open_s3(tmp_path, proxy.url, **LEASE) as first, open_s3(tmp_path, **LEASE) as second:
        fill(first, "a", ENOUGH)
        room = first._room  # private: the sleep is where no call of a test can be
        room._closing.set()  # private: so are the rounds, which would renew the lease
        assert room._thread is not None  # private: as above
        room._thread.join()  # private: as above
        asleep = room.lease._renewed + 0.6  # private: of a lease of two seconds
        room.lease._clock = lambda: asleep  # private: as above
        until(lambda: owns(second))
        assert owns(first), "as far as it knows"
        proxy.log.clear()
        before = {entry.key for entry in first.scan_all()}
        assert Outcome.THROTTLED in fill(first, "b", 10)
        assert deletions(proxy) == 0
        kept = before & {entry.key for entry in second.scan_all()}
        assert {entry.key for entry in first.scan_all()} >= kept
        assert not owns(first)
        s3_of(first).check_integrity()


def test_another_process_takes_over_from_an_owner_that_was_killed(tmp_path: Path) -> None:
    with open_s3(tmp_path, **LEASE) as second, Filler(tmp_path, endpoint(), str(CAPACITY), "2s") as first:
        assert owns(second)
        assert not first.is_owner()
        second.close()
        until(first.is_owner)
        assert set(first.fill("a", ENOUGH)) == {"stored"}
        first.process.kill()
        first.process.wait()
        with open_s3(tmp_path, **LEASE) as third:
            assert not owns(third)
            until(lambda: owns(third))
            assert set(fill(third, "b", ENOUGH)) == {Outcome.STORED}
            assert third.usage().used_bytes <= CAPACITY
            s3_of(third).check_integrity()


def test_the_owner_makes_room_for_the_others(tmp_path: Path) -> None:
    with open_s3(tmp_path, **LEASE) as owner, open_s3(tmp_path, **LEASE) as other:
        assert (owns(owner), owns(other)) == (True, False)
        for n in range(ENOUGH):
            until(lambda n=n: put(other, key(n), payload(n, SIZE)) is Outcome.STORED)  # type: ignore[misc]
            assert other.usage().used_bytes <= CAPACITY
        until(lambda: owner.usage().used_bytes <= CAPACITY)
        assert owner.usage().details["evicted"]
        assert fetch(other, key(ENOUGH - 1), SIZE) == payload(ENOUGH - 1, SIZE)


def test_a_renewal_whose_answer_is_lost_costs_nothing(
    tmp_path: Path, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    cuts: list[Exchange] = []

    def cut(exchange: Exchange) -> bool:
        lost = exchange.method == "PUT" and exchange.target.endswith("/owner") and len(cuts) < 3
        if lost:
            cuts.append(exchange)
        return not lost

    with open_s3(tmp_path, proxy.url, **LEASE) as store:
        proxy.after = cut
        until(lambda: len(cuts) == 3)
        renewals = len(proxy.log)
        until(lambda: len(proxy.log) > renewals + 10)
        assert owns(store)
        assert set(fill(store, "a", ENOUGH)) == {Outcome.STORED}
    assert "another process evicts" not in caplog.text


def test_packs_of_many_objects_are_evicted_by_their_ends(tmp_path: Path) -> None:
    parents = {}
    with open_s3(tmp_path, **{**LEASE, "capacity": "4MiB", "lease": "10s"}) as store:
        for turn in range(40):
            items = run(turn, 12)
            parents.update({item.key: item.meta.parent for item in items})
            assert set(store.set(items)) == {Outcome.STORED}
            assert store.usage().used_bytes <= 4 << 20
            assert store.get(gets(items)) == [Outcome.HIT] * 13
        kept = {entry.key for entry in store.scan_all()}
        pages = {k.page_key for k in kept}
        assert all(parents[k] is None or parents[k] in pages for k in kept)
        assert sum(entry.meta.length for entry in store.scan_all()) > (4 << 20) // 3
        s3_of(store).check_integrity()


def test_a_pack_that_is_mostly_dead_is_rewritten(tmp_path: Path) -> None:
    items = run("s", 40)
    with open_s3(tmp_path, **{**LEASE, "capacity": "16MiB"}) as store:
        store.set(items)
        before = store.usage().used_bytes
        assert all(store.delete([item.key for item in items[10:]]))
        assert store.usage().used_bytes >= before, "a tombstone was added"
        until(lambda: store.usage().used_bytes < before // 2)
        assert store.get(gets(items)) == [Outcome.HIT] * 10 + [Outcome.MISS] * 31
        s3_of(store).check_integrity()
    with open_s3(tmp_path) as again:
        assert again.get(gets(items)) == [Outcome.HIT] * 10 + [Outcome.MISS] * 31


def test_what_nobody_can_read_goes_first(tmp_path: Path) -> None:
    for n in range(10):
        obstore.put(
            bucket(), f"{prefix_of(tmp_path)}/packs/{make_name(n, '0' * 16, n, 1000)}", bytes(CAPACITY // 5)
        )
    with open_s3(tmp_path, **LEASE) as store:
        assert store.usage().used_bytes >= CAPACITY
        assert fill(store, "a", 3) == [Outcome.STORED] * 3
        assert store.usage().used_bytes <= CAPACITY
        assert store.get([to_get(key(("a", n)), SIZE) for n in range(3)]) == [Outcome.HIT] * 3
