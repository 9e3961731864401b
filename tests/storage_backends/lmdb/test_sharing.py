"""The `lmdb` store with several processes on one directory, some of which stand still, and forks."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tiercache_backends.lmdb.environment import MAX_WAIT_SECONDS

from tests.faults import FaultEnv
from tests.processes import refuses_a_child, suspend
from tests.storage_backends.lmdb.hooks import CAPACITY, check_integrity, opened
from tests.storage_backends.lmdb.sharer import size_of
from tests.storage_backends.local.files import disk_bytes
from tiercache.errors import ConfigError, StorageError
from tiercache.testing.conformance.figures import StoreFollower
from tiercache.testing.conformance.hooks import HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import chain, fetch, key, outcomes, payload, put


@contextmanager
def sharer(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage_backends.lmdb.sharer", str(path), str(CAPACITY), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def say(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdin is not None
    child.stdin.write(word + "\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str], until: str) -> list[str]:
    """The lines that a process prints, to the first that begins with `until`."""
    lines: list[str] = []
    assert child.stdout is not None
    while not lines or not lines[-1].startswith(until):
        line = child.stdout.readline()
        assert line, f"the process ended after {lines[-3:]}"
        lines.append(line.strip())
    return lines


def test_four_processes_share_a_store_and_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        sharer(path, "load", "1") as a,
        sharer(path, "load", "2") as b,
        sharer(path, "load", "3") as c,
        sharer(path, "load", "4") as victim,
    ):
        everybody = [a, b, c, victim]
        for _ in range(4):
            for child in everybody:
                say(child, "go")
        for child in everybody:
            hear(child, "round")
        said = hear(victim, "stored")
        victim.send_signal(signal.SIGKILL)
        said += victim.communicate()[0].split("\n")
        rest = [a, b, c]
        for child in rest:
            for _ in range(8):
                say(child, "go")
            say(child, "")
        totals = [hear(child, "done")[-1].split() for child in rest]
        assert [(wrong, failed) for _, wrong, failed, _ in totals] == [("0", "0")] * 3
        assert sum(int(hits) for *_, hits in totals) > 10
        for child in rest:
            assert child.wait(30) == 0
    with opened(path) as store:
        check_integrity(store)
        usage = store.usage()
        assert usage.details["evicted"] != 0
        assert usage.details["corrupt"] == 0
        assert usage.details["readers"] == 0, "what the dead process was reading holds nothing back"
        assert disk_bytes(path) <= CAPACITY
        last = [int(line.split()[1]) for line in said if line.startswith("stored")]
        assert last
        assert all(fetch(store, key(n), size_of(n)) in (MISS, payload(n, size_of(n))) for n in range(300))
        assert put(store, key("new"), payload("new", 100_000)) is STORED


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_a_reader_that_stands_still_throttles_writers_and_harms_nothing(tmp_path, end):
    path = tmp_path / "s"
    with opened(path) as store:
        stored = {n: STORED for n in range(60) if put(store, key(n), payload(n, 150_000)) is STORED}
        with sharer(path, "hold") as child:
            hear(child, "holding")
            suspend(child.pid)
            answers = []
            for n in range(60, 300):
                answers.append(put(store, key(n), payload(n, 150_000)))
                if answers[-1] is STORED:
                    stored[n] = STORED
                assert store.usage().used_bytes <= CAPACITY
            assert outcomes(answers).keys() == {STORED, THROTTLED}
            assert answers[-1] is THROTTLED
            left = [n for n in stored if store.exists([key(n)])[0]]
            assert len(left) * 150_000 > CAPACITY // 2, "nothing is evicted for sets that cannot be"
            assert all(fetch(store, key(n), 150_000) == payload(n, 150_000) for n in left)
            check_integrity(store)
            if end is signal.SIGCONT:
                child.send_signal(signal.SIGCONT)
                child.terminate()
            else:
                child.kill()
            child.wait(30)
            again = [put(store, key(n), payload(n, 150_000)) for n in range(300, 400)]
            assert set(again) == {STORED}, "the store recovers as soon as the reader is gone"
        check_integrity(store)
        assert disk_bytes(path) <= CAPACITY


class HurriedEnv(FaultEnv):
    """Waiting takes no time."""

    waited = 0.0

    def sleep(self, seconds: float) -> None:
        self.waited += max(seconds, 0.1)

    def monotonic(self) -> float:
        return self.waited


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_stands_still_throttles_the_others(tmp_path: Path, end: signal.Signals) -> None:
    env = HurriedEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        with sharer(tmp_path / "s", "stall") as child:
            hear(child, "holding")
            assert put(store, key("b"), payload("b", 5000)) is THROTTLED
            assert env.waited > MAX_WAIT_SECONDS
            env.waited = 0.0
            assert put(store, key("b"), payload("b", 5000)) is THROTTLED
            assert env.waited < MAX_WAIT_SECONDS / 2, "the second waits less"
            assert (store.delete([key("a")]), put(store, key("a"), payload("a", 5000))) == ([False], HIT)
            assert fetch(store, key("a"), 5000) == payload("a", 5000)
            child.send_signal(end)
            child.wait(30)
            assert put(store, key("b"), payload("b", 5000)) is STORED
        check_integrity(store)


def test_suffixes_go_first_across_processes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    watched = {k: parent for name in ("shared", "crossed") for k, parent in chain(name, 8)}
    with opened(path) as store, sharer(path, "tail") as child:
        for k, parent in chain("shared", 8)[:4]:
            assert put(store, k, payload(k, 60_000), parent) is STORED
        hear(child, "stored")
        for k, parent in chain("crossed", 8)[4:]:
            assert put(store, k, payload(k, 60_000), parent) is STORED
        n = 0
        kept = set(watched)
        while kept:
            assert put(store, key(n), payload(n, 60_000)) is STORED
            n += 1
            kept = {k for k in watched if store.exists([k])[0]}
            pages = {k.page_key for k in kept}
            assert all(watched[k] is None or watched[k] in pages for k in kept)
        assert n < 2 * CAPACITY // 60_000, "a sequence whose end is gone goes at once, and not a page a round"
        check_integrity(store)


def test_a_second_opener_in_this_process_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        (tmp_path / "link").symlink_to(tmp_path / "s")
        for path in (tmp_path / "s", tmp_path / "link"):
            with pytest.raises(StorageError, match="already open in this process"):
                opened(path)
        assert fetch(store, key("a"), 1) == b"x", "the refused opener did no harm"
    opened(tmp_path / "s").close()


def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        assert refuses_a_child(store)
        assert put(store, key("b"), b"y") is STORED
        assert fetch(store, key("a"), 1) == b"x"


def test_a_shared_store_keeps_its_capacity(tmp_path: Path) -> None:
    with sharer(tmp_path / "s", "hold") as child:
        hear(child, "holding")
        for capacity in (CAPACITY // 2, CAPACITY * 2):
            with pytest.raises(
                ConfigError,
                match=(
                    f"in use with a capacity of {CAPACITY} bytes and cannot be opened with {capacity}; give"
                ),
            ):
                opened(tmp_path / "s", capacity)
        with opened(tmp_path / "s") as store:
            assert put(store, key("a"), b"x") is STORED
    opened(tmp_path / "s", CAPACITY * 2).close()


def test_what_another_process_stores_evicts_and_deletes_is_told(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store, sharer(tmp_path / "s", "load", "told") as other:
        told = StoreFollower(store)
        for n in range(25):
            say(other, "go")
            put(store, key(("mine", n)), payload(n, 100_000))
            hear(other, "round")
            if n % 10 == 0:
                told.await_truth()
        say(other, "")
        hear(other, "done")
        told.await_truth()
        assert told.removed, "nothing was evicted or deleted"
