"""The account of a daemon: exact, bounded, and there after crashes, full disks and clocks that jump."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.memory import MemoryBackend

from tests.cli.store.test_samples import identity
from tests.daemon.hosts import until
from tests.daemon.test_removals import client, key, page, put, server, worker
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.core import ObjectKey, Outcome, PoolName, as_tokens
from tiercache.daemon import StorageServer
from tiercache.daemon.tenants.account import (
    HOUR_S,
    MAX_HOURS,
    NAMES,
    Account,
    Counts,
    PriceList,
    TenantAccount,
)
from tiercache.daemon.tenants.store import TenantStore
from tiercache.keys import namespace_of, page_keys
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import payload, to_get, to_set

NOW = 1_800_000_000 // HOUR_S * HOUR_S


class Clock:
    now: float = NOW + 10.0

    def __call__(self) -> float:
        return self.now


class TestAccount:
    def test_counts_add_up_by_hour_and_tenant_across_writes_and_starts(self, tmp_path: Path) -> None:
        clock = Clock()
        account = Account(tmp_path / "a", clock=clock)
        account.add("red", Counts(read_objects=2, saved_flops=1.5e15))
        assert account.write()
        account.add("red", Counts(read_objects=3))
        account.add("", Counts(written_bytes=7))
        again = Account(tmp_path / "a", clock=clock)
        assert again.rows() == {(NOW, "red"): Counts(read_objects=2, saved_flops=1.5e15)}, "not written yet"
        account.close()
        clock.now += HOUR_S
        again.add("red", Counts(read_objects=100))
        assert again.rows() == {
            (NOW, ""): Counts(written_bytes=7),
            (NOW, "red"): Counts(read_objects=5, saved_flops=1.5e15),
            (NOW + HOUR_S, "red"): Counts(read_objects=100),
        }
        assert list(again.rows("red")) == [(NOW, "red"), (NOW + HOUR_S, "red")]
        assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600

    @pytest.mark.parametrize("cut", [1, 5, 40])
    def test_a_cut_line_is_left_out_and_what_follows_is_whole(self, tmp_path: Path, cut: int) -> None:
        path = tmp_path / "a"
        account = Account(path, clock=Clock())
        for n in (1, 2):
            account.add("red", Counts(read_objects=n))
            account.write()
        os.truncate(path, path.stat().st_size - cut)
        account.add("red", Counts(read_objects=10))
        account.write()
        whole = 13 if cut == 1 else 11  # without its end of line, a line is whole
        assert Account(path).rows() == {(NOW, "red"): Counts(read_objects=whole)}

    def test_lines_that_are_not_the_daemon_s_are_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "a"
        good = {"hour": NOW, "tenant": "red", "read_objects": 1}
        bad: list[Any] = [
            [], 1, None, {}, {**good, "hour": -1}, {**good, "hour": "x"}, {**good, "hour": 2**70},
            {**good, "tenant": 3},
            {**good, "read_objects": -1}, {**good, "read_objects": 1.5}, {**good, "read_objects": True},
            {**good, "read_objects": 2**64}, {**good, "saved_flops": -1.0}, {**good, "saved_flops": "many"},
        ]  # fmt: skip
        lines = [json.dumps(one) for one in (*bad, good)]
        lines += [
            '{"hour": 1e999}', "[" * 3000, "\x00\xff", "x" * 9000,
            '{"saved_flops": NaN, "hour": 0, "tenant": ""}', "",
        ]  # fmt: skip
        path.write_bytes("\n".join(lines).encode("utf-8", "surrogateescape"))
        assert Account(path).rows() == {(NOW, "red"): Counts(read_objects=1)}

    def test_it_is_bounded_and_a_clock_that_was_wrong_costs_nothing(self, tmp_path: Path) -> None:
        clock, path = Clock(), tmp_path / "a"
        account = Account(path, clock=clock, max_bytes=4096)
        hours = [NOW, NOW - 3 * HOUR_S, NOW + 10**7 * HOUR_S, NOW + HOUR_S, 0]
        for hour in hours:
            clock.now = hour + 1.0
            for _ in range(50):
                account.add("red", Counts(read_objects=1))
                account.write()
        assert path.stat().st_size < 3 * 4096
        assert account.rows() == {(hour, "red"): Counts(read_objects=50) for hour in sorted(hours)}
        clock.now = -5.0
        account.add("red", Counts(read_objects=1))
        assert account.rows()[0, "red"] == Counts(read_objects=51)
        # Beyond MAX_HOURS the oldest hours go.
        lines = [
            json.dumps({"hour": NOW + n * HOUR_S, "tenant": "red", "read_objects": n + 1}) + "\n"
            for n in range(MAX_HOURS + 100)
        ]
        path.write_text("".join(lines))
        account = Account(path, clock=clock, max_bytes=4096)
        account.write()
        kept = account.rows()
        assert len(kept) == MAX_HOURS
        assert min(kept) == (NOW + 100 * HOUR_S, "red")

    def test_a_disk_that_cannot_be_written_loses_nothing_while_the_process_lives(self, tmp_path):
        place = tmp_path / "d"
        place.write_text("a file in the way")
        failed: list[int] = []
        account = Account(place / "a", clock=Clock(), count_failed=lambda: failed.append(1))
        account.add("red", Counts(read_objects=2))
        assert not account.write()
        account.add("red", Counts(read_objects=3))
        assert not account.write()
        place.unlink()
        assert account.write()
        assert account.write()
        assert len(failed) == 2
        assert Account(place / "a").rows() == {(NOW, "red"): Counts(read_objects=5)}

    def test_a_compaction_that_fails_counts_nothing_twice(self, tmp_path: Path) -> None:
        (tmp_path / "a.new").mkdir()
        account = Account(tmp_path / "a", clock=Clock(), max_bytes=10)
        for _ in range(5):
            account.add("red", Counts(read_objects=1))
            assert not account.write()
        (tmp_path / "a.new").rmdir()
        assert account.write()
        assert account.rows() == {(NOW, "red"): Counts(read_objects=5)}
        assert len((tmp_path / "a").read_text().splitlines()) == 1

    def test_a_full_disk_leaves_no_half_line(self, tmp_path: Path) -> None:
        """A limit on the size of files stands for a full disk."""
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(f"""
                import resource, signal
                from pathlib import Path
                from tiercache.daemon.tenants.account import Account, Counts
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                account = Account(Path({str(tmp_path / 'a')!r}))
                account.add("red", Counts(read_objects=1)); assert account.write()
                size = account.path.stat().st_size
                resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
                account.add("red", Counts(read_objects=2)); assert not account.write()
                assert account.path.stat().st_size == size
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                assert account.write()
            """)],
            check=False, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert sum(counts.read_objects for counts in Account(tmp_path / "a").rows().values()) == 3

    def test_no_symbolic_link_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "other").write_text("keep\n")
        (tmp_path / "a").symlink_to(tmp_path / "other")
        account = Account(tmp_path / "a")
        account.add("", Counts(read_objects=1))
        assert not account.write()
        with pytest.raises(OSError):
            account.rows()
        assert (tmp_path / "other").read_text() == "keep\n"

    def test_kill_9_in_the_middle_loses_at_most_the_last_line(self, tmp_path: Path) -> None:
        """Also in the middle of a compaction, of which there are many."""
        path, said = tmp_path / "a", tmp_path / "said"
        code = textwrap.dedent(f"""
            import itertools
            from pathlib import Path
            from tiercache.daemon.tenants.account import Account, Counts
            account = Account(Path({str(path)!r}), max_bytes=600)
            with open({str(said)!r}, "a") as said:
                for n in itertools.count():
                    account.add(f"t{{n % 3}}", Counts(read_objects=1))
                    account.write()
                    print("x", end="", file=said, flush=True)
        """)
        for _ in range(4):
            before = said.stat().st_size if said.exists() else 0
            process = subprocess.Popen([sys.executable, "-c", code])
            until(lambda: said.exists() and said.stat().st_size > before + 20)  # noqa: B023
            process.send_signal(signal.SIGKILL)
            process.wait()
            total = sum(counts.read_objects for counts in Account(path).rows().values())
            acknowledged = said.stat().st_size
            assert acknowledged <= total <= acknowledged + 4, "a kill between a write and its word"
        assert path.stat().st_size < 10_000


# -- through daemons

MODEL = identity(model="priced")
NAMESPACE = namespace_of(MODEL)
PAGE_SIZE = MODEL.page_size


def register(store: Any, **fields: int) -> None:
    store.register_namespace(NamespaceRecord(NAMESPACE, MODEL.public_record() | fields))


def sequence(
    store: Any, pages: int, layout: bytes = b"l" * 32, pool: PoolName = PoolName.KV
) -> list[ObjectKey]:
    """Store the pages of a prompt, and return their keys."""
    keys = page_keys(NAMESPACE, as_tokens(range(pages * PAGE_SIZE)), PAGE_SIZE)
    items = [
        to_set(
            ObjectKey(pool, layout + one),
            payload((layout, one), 1000),
            namespace=NAMESPACE,
            parent=keys[n - 1] if n else None,
            depth=n + 1,
        )
        for n, one in enumerate(keys)
    ]
    assert set(store.set(items)) == {Outcome.STORED}
    return [item.key for item in items]


def read(store: Any, keys: list[ObjectKey]) -> None:
    assert set(store.get([to_get(key, 1000) for key in keys])) == {Outcome.HIT}


def the_row(store: Any) -> dict[str, Any]:
    rows = store.report(0).rows
    assert {row["tenant"] for row in rows} == {""}
    return {name: sum(row[name] for row in rows) for name in NAMES}  # the hour may change meanwhile


@pytest.mark.parametrize("kind", ["memory", "file", "lmdb"])
def test_tokens_and_flops_of_what_was_read(kind: str, tmp_path: Path) -> None:
    url = "memory://" if kind == "memory" else f"{kind}://{tmp_path}/s?capacity=16MiB"
    settings = daemon_settings("unix")
    with StorageServer(settings, open_backend(url)) as node, worker(node) as store:
        register(store, flops_per_token=1000)
        keys = sequence(store, 10)
        read(store, keys[:6])
        read(store, [keys[8], keys[2]])  # no run
        assert store.exists([*keys, key(1)]) == [True] * 10 + [False]
        assert store.get([to_get(key(1), 1000)]) == [Outcome.MISS]
        row = the_row(store)
        assert (row["restored_tokens"], row["saved_flops"]) == (8 * PAGE_SIZE, 8 * PAGE_SIZE * 1000)
        assert (row["unpriced_tokens"], row["read_objects"], row["read_bytes"]) == (0, 8, 8000)
        assert (row["found_objects"], row["absent_objects"], row["missed_objects"]) == (10, 1, 1)
        assert (row["written_objects"], row["written_bytes"]) == (10, 10_000)
        store.peek([to_get(key, 1000) for key in keys])
        assert the_row(store)["read_objects"] == 8, "a look is no read"
    written = settings.account_file.read_text().splitlines()
    assert sum(json.loads(line).get("restored_tokens", 0) for line in written) == 8 * PAGE_SIZE


def test_a_batch_of_two_namespaces_is_counted_by_both() -> None:
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
        register(store, flops_per_token=1000)
        keys = sequence(store, 2)
        other = replace(MODEL, page_size=64)
        record = NamespaceRecord(namespace_of(other), other.public_record() | {"flops_per_token": 1})
        store.register_namespace(record)
        between = ObjectKey(PoolName.KV, b"l" * 32 + page(7))
        store.set([to_set(between, payload(7, 1000), namespace=namespace_of(other), depth=1)])
        read(store, [keys[0], between, keys[1]])
        row = the_row(store)
        assert (row["restored_tokens"], row["saved_flops"]) == (2 * PAGE_SIZE + 64, 2 * PAGE_SIZE * 1000 + 64)


def test_what_was_stored_before_the_start_is_counted_too(tmp_path: Path) -> None:
    store = open_backend(f"file://{tmp_path}/s?capacity=16MiB")
    register(store, flops_per_token=10)
    keys = sequence(store, 3)
    state = ObjectKey(PoolName.MAMBA, b"s" * 32 + keys[2].page_key)
    item = to_set(state, payload(1, 1000), namespace=NAMESPACE, parent=keys[2].page_key, depth=3)
    assert store.set([item]) == [Outcome.STORED]
    with StorageServer(daemon_settings("unix"), store) as node, worker(node) as grpc:
        for _ in range(40):
            read(grpc, [*keys, state])
        row = the_row(grpc)
        assert (row["restored_tokens"], row["saved_flops"]) == (40 * 3 * PAGE_SIZE, 40 * 3 * PAGE_SIZE * 10)
        assert row["read_objects"] == 160


def test_ranks_count_once_and_other_pools_not(tmp_path: Path) -> None:
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
        register(store, flops_per_token=10)
        ranks = [sequence(store, 5, bytes([rank]) * 32) for rank in range(4)]
        others = sequence(store, 5, b"i" * 32, PoolName.INDEXER)
        for keys in (others, *ranks, ranks[0]):
            read(store, keys)
        row = the_row(store)
        assert row["restored_tokens"] == 10 * PAGE_SIZE, "the first rank has read twice"


def test_states_alone_count_their_depth() -> None:
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
        register(store, flops_per_token=10)
        state = ObjectKey(PoolName.MAMBA, b"s" * 32 + page(1))
        store.set([to_set(state, payload(1, 1000), namespace=NAMESPACE, depth=7)])
        read(store, [state])
        assert the_row(store)["restored_tokens"] == 7 * PAGE_SIZE


def test_what_is_not_known_is_not_guessed() -> None:
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
        keys = sequence(store, 3)
        read(store, keys)
        assert the_row(store)["restored_tokens"] == 0, "the namespace is not registered"
    for value in (0, -1, 10**16 + 1, 2**62):
        with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
            register(store, flops_per_token=value)
            read(store, sequence(store, 3))
            row = the_row(store)
            assert (row["restored_tokens"], row["unpriced_tokens"], row["saved_flops"]) == (12, 12, 0)


def test_a_writer_that_does_not_know_the_flops_does_not_erase_them() -> None:
    store = open_backend("memory://")
    with StorageServer(daemon_settings("unix"), store) as node, worker(node) as one, worker(node) as other:
        register(one, flops_per_token=10)
        register(other)
        [record] = other.namespaces()
        assert record.identity == MODEL.public_record() | {"flops_per_token": 10}
        register(other, flops_per_token=20)
        assert one.namespaces()[0].identity["flops_per_token"] == 20


def test_tenants_are_counted_apart_and_see_themselves_only(tmp_path: Path) -> None:
    with server(tmp_path, "memory://") as node:
        metrics = node._board._metrics  # type: ignore[union-attr]  # private: this daemon has no HTTP port
        for name, tenant, pages in (("red", "red", 3), ("blue", "blue", 5), ("plain", "", 7)):
            with client(node, tmp_path, name) as store:
                register(store, flops_per_token=10, prefill_flops_per_second=10)
                keys = sequence(store, pages)
                store.exists(keys)
                read(store, keys[1:])
                assert [one["tenant"] for one in store.status()["tenant_hits"]] == [tenant], "its own"
                assert store.status()["hits"] is None
            restored = (pages - 1) * PAGE_SIZE
            assert metrics.total("node_tokens_total", tenant=tenant, how="asked") == pages * PAGE_SIZE
            assert metrics.total("node_tokens_total", tenant=tenant, how="restored") == restored
            assert metrics.total("node_prefill_seconds_total", tenant=tenant) == restored
            assert 0 < metrics.total("node_read_seconds_total", tenant=tenant) < 60
        seen = {}
        for name in ("red", "blue", "plain", "chief"):
            with client(node, tmp_path, name) as store:
                answer = store.report(0)
                seen[name] = {row["tenant"]: row["restored_tokens"] for row in answer.rows}
        assert seen == {
            "red": {"red": 8}, "blue": {"blue": 16}, "plain": {"": 24},
            "chief": {"": 24, "blue": 16, "red": 8},
        }  # fmt: skip
        with (
            client(node, tmp_path, "fenced") as store,
            pytest.raises(Exception, match="limited to namespaces"),
        ):
            store.report(0)


def test_lookups_of_a_principal_with_few_namespaces_count(tmp_path: Path) -> None:
    with (
        server(tmp_path, "memory://") as node,
        client(node, tmp_path, "plain") as plain,
        client(node, tmp_path, "fenced") as fenced,
    ):
        put(plain, 1)
        assert fenced.exists([key(1), key(2)]) == [False, False]
        row = the_row(plain)
        assert (row["found_objects"], row["absent_objects"]) == (0, 2)


def test_a_daemon_goes_on_without_a_disk_for_its_account(tmp_path: Path) -> None:
    settings = daemon_settings("unix")
    settings.account_file.mkdir()
    with StorageServer(settings, open_backend("memory://")) as node, worker(node) as store:
        register(store, flops_per_token=10)
        read(store, sequence(store, 3))
        with pytest.raises(Exception, match="account cannot be read"):
            store.report(0)
        settings.account_file.rmdir()
        assert the_row(store)["restored_tokens"] == 12


# -- the hit rate and the saved time


def test_to_look_up_is_to_ask_and_only_what_is_read_is_a_hit(tmp_path: Path) -> None:
    """Twelve pages are asked for, ten are there, six are read; a second rank changes nothing."""
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
        register(store, flops_per_token=1000)
        keys = sequence(store, 10)
        other = sequence(store, 10, layout=b"m" * 32)
        absent = [ObjectKey(PoolName.KV, key.layout + page(n)) for n, key in enumerate(keys[:2])]
        store.exists([*keys, *absent])
        document = store.status()
        assert (document["hits"]["token_hit_rate"], document["hits"]["restored_tokens"]) == (0.0, 0)
        store.exists([*other, *(ObjectKey(PoolName.KV, b"m" * 32 + page(n)) for n in range(2))])
        read(store, keys[:6])
        read(store, other[:6])
        row = the_row(store)
        assert (row["asked_tokens"], row["restored_tokens"]) == (12 * PAGE_SIZE, 6 * PAGE_SIZE)
        hits = store.status()["hits"]
        assert hits["token_hit_rate"] == 0.5
        assert store.status()["tenant_hits"] == [hits]
        assert hits["saved_seconds"] is None
        assert hits["why_not_saved"] == (
            f"no worker has registered how long the prefill of {6 * PAGE_SIZE:,} of the tokens takes"
        )


def test_saved_seconds_are_those_of_the_prefill_less_those_of_the_reads(tmp_path: Path) -> None:
    """Half a second per token: no read of this machine takes as long."""
    with StorageServer(daemon_settings("unix"), open_backend("memory://")) as node, worker(node) as store:
        register(store, flops_per_token=1000, prefill_flops_per_second=2000)
        keys = sequence(store, 10)
        states = sequence(store, 1, layout=b"s" * 32, pool=PoolName.MAMBA)
        store.exists(keys)
        read(store, keys[:6])
        row = the_row(store)
        assert (row["timed_tokens"], row["prefill_seconds"]) == (6 * PAGE_SIZE, 3.0 * PAGE_SIZE)
        assert 0 < row["read_seconds"] < 60
        read(store, states)
        assert the_row(store)["read_seconds"] > row["read_seconds"], "a state is read for tokens"
        hits = store.status()["hits"]
        row = the_row(store)
        assert hits["saved_seconds"] == pytest.approx(3.0 * PAGE_SIZE - row["read_seconds"])
        assert hits["why_not_saved"] == ""
        register(store)  # a writer that does not know the speed forgets it no more than the FLOPs
        assert store.namespaces()[0].identity["prefill_flops_per_second"] == 2000


def test_records_of_other_daemons_are_known_after_the_next_reading(tmp_path: Path) -> None:
    store = MemoryBackend()
    account, prices = Account(tmp_path / "a"), PriceList(store)
    mine = TenantStore(store, account=TenantAccount(account, "", prices, lambda _: True))
    register(store)
    for asked, unsized in ((0, 1), (PAGE_SIZE, 1)):
        mine.exists([key(1)])
        [hits] = account.hits().values()
        assert (hits.asked_tokens, hits.unsized_objects) == (asked, unsized)
        prices.read_records()


def test_a_tenant_learns_no_page_size_of_others_and_takes_no_rate_from_them(tmp_path: Path) -> None:
    """One lookup of a key that nobody knows: by whoever has no record, nothing of the others' is counted."""
    with server(tmp_path, "memory://") as node:
        with client(node, tmp_path, "red") as store:
            register(store)
            keys = sequence(store, 4)
            store.exists(keys)
            read(store, keys[:2])
        with client(node, tmp_path, "blue") as store:
            store.exists([key(1)])
            [own] = store.status()["tenant_hits"]
            assert (own["asked_tokens"], own["token_hit_rate"]) == (0, None)
            assert own["why_no_rate"].startswith("1 objects were looked up whose tokens are not known")
            register(store, page_size=2**32)
            lie = sequence(store, 2)
            store.exists(lie)
            read(store, lie)
        document = node._board.document(None)  # type: ignore[union-attr]  # private: no HTTP port here
        found = document["hits"]
        assert (found["asked_tokens"], found["restored_tokens"]) == (4 * PAGE_SIZE, 2 * PAGE_SIZE)
        assert found["token_hit_rate"] == 0.5
        assert document["history"]["token_hit_rate"][-1] in (0.5, None)
