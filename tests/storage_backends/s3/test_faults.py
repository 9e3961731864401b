"""A service that is lost, slow or busy, lies or refuses: an outcome for each item, and never wrong bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from tiercache_backends.s3 import S3Backend

from tests.processes import refuses_a_child
from tests.storage_backends.s3.hooks import know, open_s3
from tests.storage_backends.s3.integrity import check_directory
from tests.storage_backends.s3.proxy import Exchange, Proxy
from tests.storage_backends.s3.server import SECRET, needs_weed
from tests.storage_backends.s3.test_packs import gets, run
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.testing.conformance.hooks import HIT, MISS, STORED
from tiercache.testing.objects import content, fetch, key, payload, put, to_get, to_set

pytestmark = [needs_weed, pytest.mark.slow]

SIZE = 30_000


@pytest.fixture
def store(tmp_path: Path, proxy: Proxy) -> Iterator[S3Backend]:
    with open_s3(tmp_path, proxy.url, deadline="2s", refresh="1h") as opened:
        yield opened
        proxy.well()
        check_directory(opened)


def reads(exchange: Exchange) -> bool:
    return exchange.method == "GET" and exchange.is_pack


def test_a_connection_that_is_lost_in_the_middle(store: S3Backend, proxy: Proxy) -> None:
    items = run("s", 8)
    cut: list[str] = []

    def once(exchange: Exchange) -> bool:
        if exchange.is_pack and exchange.method not in cut:
            cut.append(exchange.method)
            return False
        return True

    proxy.after = once
    assert store.set(items) == [STORED] * 9, "the second attempt finds what the first wrote"
    wanted = gets(items)
    assert store.get(wanted) == [HIT] * 9
    assert [content(one) for one in wanted] == [b"".join(item.buffers) for item in items]
    assert cut == ["PUT", "HEAD", "GET"], "an answer that there is such an object is looked into"


def test_a_service_that_is_busy(store: S3Backend, proxy: Proxy) -> None:
    put(store, key("a"), payload("a", SIZE))
    proxy.before = lambda exchange: exchange.refuse(503, "SlowDown")
    item = to_get(key("a"), SIZE)
    assert store.get([item, to_get(key("a"), 1)]) == [Outcome.THROTTLED, Outcome.ERROR]
    assert content(item) == b"\xaa" * SIZE
    assert put(store, key("b"), payload("b", SIZE)) is Outcome.THROTTLED
    proxy.well()
    assert put(store, key("b"), payload("b", SIZE)) is STORED
    assert fetch(store, key("a"), SIZE) == payload("a", SIZE)


@pytest.mark.parametrize("how", ["flipped", "short"])
def test_bytes_that_change_on_their_way(store: S3Backend, proxy: Proxy, how: str) -> None:
    items = run("s", 8)
    store.set(items)
    harmed: list[Exchange] = []
    times = 1

    def harm(exchange: Exchange) -> None:
        if reads(exchange) and len(harmed) < times:
            harmed.append(exchange)
            if how == "flipped":
                exchange.body[len(exchange.body) // 2] ^= 4
            else:
                del exchange.body[len(exchange.body) // 2 :]

    proxy.after = harm
    wanted = gets(items)
    assert store.get(wanted) == [HIT] * 9, "what was wrong is asked for once more"
    assert [content(one) for one in wanted] == [b"".join(item.buffers) for item in items]
    assert harmed
    times = 1 << 30
    outcomes = store.get(gets(items))
    assert Outcome.CORRUPT in outcomes
    proxy.well()
    lost = [n for n, outcome in enumerate(outcomes) if outcome is not HIT]
    assert store.exists([items[n].key for n in lost]) == [False] * len(lost)
    assert set(store.set(items)) == {STORED, HIT} or len(lost) == 9
    assert store.get(gets(items)) == [HIT] * 9


def test_a_service_that_hangs_is_unavailable_in_time_and_comes_back(store: S3Backend, proxy: Proxy) -> None:
    items = [to_set(key(n), payload(n, SIZE)) for n in range(4)]
    store.set(items)
    go_on = Event()
    proxy.before = lambda _: go_on.wait(60) and None
    outcomes = store.get([to_get(item.key, SIZE) for item in items])
    assert set(outcomes) == {Outcome.UNAVAILABLE}
    assert put(store, key("new"), payload("new", SIZE)) is Outcome.UNAVAILABLE
    assert put(store, key("new"), payload("new", SIZE)) is Outcome.UNAVAILABLE
    asked = len(proxy.log)
    assert store.get([to_get(key(0), SIZE)] * 50) == [Outcome.UNAVAILABLE] * 50
    assert len(proxy.log) <= asked + 1, "nothing is asked but whether the service is back"
    with pytest.raises(UnavailableError):
        store.exists([key(0)])
    go_on.set()
    proxy.well()
    until(lambda: fetch(store, key(0), SIZE) == payload(0, SIZE))
    assert put(store, key("new"), payload("new", SIZE)) in (STORED, HIT)


def test_more_than_may_be_in_flight_waits(tmp_path: Path) -> None:
    with open_s3(tmp_path, pack="64KiB", in_flight="128KiB") as store:
        items = run("s", 64)
        assert store.set(items) == [STORED] * 65
        wanted = gets(items)
        assert store.get(wanted) == [HIT] * 65
        assert [content(one) for one in wanted] == [b"".join(item.buffers) for item in items]
        big = to_set(key("big"), payload("big", 1 << 20))
        assert store.set([big]) == [STORED]
        assert store.get([to_get(key("big"), 1 << 20)]) == [HIT]
        assert store._service.in_flight.nbytes == 0  # private: everything is given back


def test_nothing_is_encoded_before_its_share_of_memory_is_free(tmp_path: Path, proxy: Proxy) -> None:
    arrived, go_on = Event(), Event()

    def hold(exchange: Exchange) -> None:
        if exchange.method == "PUT":
            arrived.set()
            go_on.wait(60)

    with (
        open_s3(tmp_path, proxy.url, pack="64KiB", in_flight="64KiB", compression="smallest") as store,
        ThreadPoolExecutor(4) as pool,
    ):
        proxy.before = hold
        sets = [pool.submit(put, store, key(n), payload(n, 60_000)) for n in range(4)]
        assert arrived.wait(60)
        time.sleep(0.3)  # in which one that does not wait for its share would encode
        [[_, known]] = store._choices._pools.items()  # private: no figure says what was encoded so far
        assert known.since == 1
        go_on.set()
        assert [one.result() for one in sets] == [STORED] * 4
        assert store._service.in_flight.nbytes == 0  # private: everything is given back


REFUSALS = {
    "ExpiredToken": (403, "renew"), "AccessDenied": (403, "allow this user"),
    "RequestTimeTooSkewed": (403, "clock"), "InvalidAccessKeyId": (403, "access key"),
    "SignatureDoesNotMatch": (403, "secret"), "NoSuchBucket": (404, "create the bucket"),
    "PermanentRedirect": (301, "region"),
}  # fmt: skip


@pytest.mark.parametrize("code", REFUSALS)
def test_a_refusal_is_one_sentence_with_what_to_do(store, proxy, tmp_path, code):
    status, advice = REFUSALS[code]
    put(store, key("a"), payload("a", SIZE))
    proxy.before = lambda exchange: exchange.refuse(status, code)
    assert store.get([to_get(key("a"), SIZE)]) == [Outcome.REFUSED]
    assert put(store, key("b"), payload("b", SIZE)) is Outcome.REFUSED
    with pytest.raises(RefusedError, match=advice) as caught:
        store.exists([key("a")])
    with pytest.raises(RefusedError, match=advice):
        open_s3(tmp_path, proxy.url)
    assert SECRET not in str(caught.value)
    assert "\n" not in str(caught.value)
    proxy.well()
    until(lambda: fetch(store, key("a"), SIZE) == payload("a", SIZE))


def spoiled(proxy: Proxy, which: Callable[[Exchange], bool], times: int, status: int, code: str) -> list[str]:
    """Answer so many requests with an error; return the list to which their methods are added."""
    seen: list[str] = []

    def fault(exchange: Exchange) -> None:
        if which(exchange) and len(seen) < times:
            seen.append(exchange.method)
            exchange.refuse(status, code)

    proxy.before = fault
    return seen


def test_a_put_that_conflicts_is_tried_again_and_never_stored_unless_it_is_there(store, proxy):
    seen = spoiled(proxy, lambda e: e.method == "PUT", 1, 409, "ConditionalRequestConflict")
    assert put(store, key("a"), payload("a", SIZE)) is STORED
    assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
    assert seen == ["PUT"]
    for status, code in ((409, "OperationAborted"), (412, ""), (404, "NoSuchKey"), (416, "")):
        spoiled(proxy, lambda e: e.method == "PUT", 1 << 30, status, code)
        assert put(store, key("b"), payload("b", SIZE)) is Outcome.ERROR, status
        proxy.well()
        assert fetch(store, key("b"), SIZE) is MISS
    assert put(store, key("b"), payload("b", SIZE)) is STORED
    assert fetch(store, key("b"), SIZE) == payload("b", SIZE)


def test_one_refusal_is_no_reason_to_refuse(store: S3Backend, proxy: Proxy, tmp_path: Path) -> None:
    put(store, key("a"), payload("a", SIZE))
    seen = spoiled(proxy, lambda _: True, 1, 403, "AccessDenied")
    assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
    assert seen == ["GET"]
    seen = spoiled(proxy, lambda _: True, 1, 403, "")
    assert put(store, key("b"), payload("b", SIZE)) is STORED
    assert seen == ["PUT"]
    seen = spoiled(proxy, lambda e: e.is_list, 1, 403, "SignatureDoesNotMatch")
    know(store)
    assert seen == ["GET"]
    assert store.exists([key("a"), key("b"), key("x")]) == [True, True, False]
    spoiled(proxy, lambda e: e.is_list, 1, 403, "AccessDenied")
    with open_s3(tmp_path, proxy.url) as other:
        assert other.exists([key("a"), key("b")]) == [True, True]


def test_no_service_and_no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: Proxy) -> None:
    with pytest.raises(UnavailableError, match="endpoint="):
        open_s3(tmp_path, "http://127.0.0.1:1", deadline="1s")
    proxy.before = lambda exchange: exchange.refuse(404, "")
    with pytest.raises(StorageError, match="no S3 service"):
        open_s3(tmp_path, proxy.url, deadline="1s")
    proxy.well()
    private = tmp_path / "credentials"
    private.write_text(f"[default]\naws_access_key_id = tests-key\naws_secret_access_key = {SECRET}\n")
    private.chmod(0o600)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ConfigError, match="one half"):
        open_s3(tmp_path, proxy.url)
    with open_s3(tmp_path, proxy.url, credentials_file=str(private)) as store:
        assert put(store, key("a"), payload("a", SIZE)) is STORED
        assert SECRET not in repr(vars(store)) + str(store._settings)  # private: nothing of it shows them
    private.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        open_s3(tmp_path, proxy.url, credentials_file=str(private))


def test_a_process_that_is_killed_in_the_middle_of_a_put_leaves_nothing(tmp_path: Path, proxy: Proxy) -> None:
    arrived, go_on = Event(), Event()

    def hold(exchange: Exchange) -> None:
        if exchange.method == "PUT":
            arrived.set()
            go_on.wait(60)

    proxy.before = hold
    code = (
        "import sys; from pathlib import Path; from tests.storage_backends.s3.hooks import open_s3;"
        " from tests.storage_backends.s3.test_packs import run;"
        " open_s3(Path(sys.argv[1]), sys.argv[2]).set(run('s', 8))"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path), proxy.url])
    assert arrived.wait(60)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    proxy.before = lambda exchange: False if exchange.method == "PUT" else None
    with open_s3(tmp_path) as store:
        assert store.usage().used_bytes == 0
        assert store.set(run("s", 8)) == [STORED] * 9
    go_on.set()
    until(lambda: proxy.count("PUT") == 1)
    with open_s3(tmp_path) as again:
        assert again.get(gets(run("s", 8))) == [HIT] * 9, "even if the dead process's bytes arrive after all"


def test_a_forked_process_is_told_to_open_its_own(tmp_path: Path) -> None:
    with open_s3(tmp_path) as store:
        put(store, key("a"), payload("a", SIZE))
        assert refuses_a_child(store)
        assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
