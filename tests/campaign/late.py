"""A daemon that is stopped at random moments, and a client that gives its calls up and uses its memory again.

A trial stops the daemon (SIGSTOP) during a set from attached memory and during a get into it. As soon as a
call has answered, the client writes something else into the blocks of a set; the blocks of a hit must keep
their bytes when the daemon goes on. No hit may have other bytes than were meant when the object was set.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from threading import Lock, Thread

import numpy as np
from tiercache_backends.chain import TierChain
from tiercache_backends.memory import MemoryBackend

from tests.campaign.model import Verdict
from tests.campaign.report import Row, Run
from tests.storage_backends.chain.stores import chain_over
from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch, section
from tiercache.core import ObjectMeta, Outcome
from tiercache.errors import StorageError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key

BLOCK = 64 << 10
BLOCKS = 128
SIZES = (1000, BLOCK, 4 * BLOCK, 16 * BLOCK)
"""Bytes of an object; a trial has as many objects of one size as fit into half of the blocks, at most 8."""
PATIENCE = "120ms"
"""Deadline of the client's calls that move payload."""
GUARD = 120.0
"""Seconds after which a daemon that goes on must have come to rest on a busy machine."""
STORES = {
    "memory": "memory://?capacity=128MiB",
    "file": "file://{}/file?capacity=128MiB",
    "lmdb": "lmdb://{}/lmdb?capacity=128MiB",
    "chain": "memory://?capacity=32MiB&tier_name=near,file://{}/far?capacity=128MiB&tier_name=far",
    "near chain": "memory://?capacity=128MiB",
    "hasty chain": "memory://?capacity=128MiB",
}
"""Stores of the daemon. For the last two, the client has a chain, whose second tier is in its own memory."""


class Memory(HostArena):
    """Attached memory that knows how many quarantines are in force."""

    def __init__(self) -> None:
        super().__init__(BLOCKS * BLOCK, BLOCK, huge_pages=False)
        self._begun = Lock()
        self.in_force = 0

    def quarantine(self, ranges: Sequence[tuple[int, int]]) -> Callable[[], None]:
        self._count(1)
        lift = super().quarantine(ranges)

        def end() -> None:
            lift()
            self._count(-1)

        return end

    def _count(self, by: int) -> None:
        with self._begun:
            self.in_force += by


def campaign(run: Run) -> Iterator[Row]:
    """Trials with each of STORES."""
    for name in STORES:
        row = Row("late", name)
        with tempfile.TemporaryDirectory(dir=run.base) as base, rig(name, Path(base)) as client:
            run.row(row, lambda seed, _, client=client: client.trial(seed))
        row.figures = dict(sorted(client.counts.items()))
        yield row


@contextmanager
def rig(name: str, base: Path) -> Iterator[Client]:
    """Serve one of STORES, and connect a client."""
    sockets = Path(tempfile.mkdtemp(dir=scratch()))
    chained = name in ("near chain", "hasty chain")
    with Daemon("unix", sockets, STORES[name].format(*[base] * 2)) as daemon:
        given = {"timeout": "1s", "transfer_timeout": PATIENCE, "breaker_pause": "100ms"}
        if name == "hasty chain":  # the chain gives up before its tier does
            given["transfer_timeout"] = "5s"
        remote = open_backend(section("unix", str(sockets), type="grpc", breaker_failures="100", **given))
        deadline = {"deadline": 0.4} if name == "hasty chain" else {}
        with chain_over(remote, MemoryBackend(), settings={0: deadline}) if chained else remote as store:
            client = Client(daemon, store)
            yield client
        client.memory.close()


class Client:
    """A caller that gives up, and keeps its blocks.

    Thread safety: one thread.
    """

    def __init__(self, daemon: Daemon, store: StorageBackend) -> None:
        self.daemon, self.store, self.memory = daemon, store, Memory()
        self.counts = Counter[str]()
        self._seconds: dict[tuple[str, int], float] = {}
        self._bytes = np.frombuffer(self.memory.hold(), np.uint8)
        store.attach(self.memory)

    def trial(self, seed: int) -> Verdict:
        """Set and get some objects while the daemon is stopped."""
        random, verdict = Random(seed), Verdict()
        size = random.choice(SIZES)
        count = min(8, BLOCKS // 2 * BLOCK // max(size, BLOCK))
        keys = [key((seed, n)) for n in range(count)]
        sets, gets = ([self._place(half, n, size) for n in range(count)] for half in (0, 1))
        fresh = np.random.default_rng(seed)
        for place in sets:
            place[:] = fresh.integers(0, 256, size, np.uint8)
        meant = [place.tobytes() for place in sets]
        items = [
            SetItem(k, [place.data], ObjectMeta(b"late", size, b""))
            for k, place in zip(keys, self._whole(sets), strict=True)
        ]
        wanted = [GetItem(k, [place.data], size) for k, place in zip(keys, self._whole(gets), strict=True)]
        answers = self._stopped(random, ("set", size), lambda: self.store.set(items))
        self._bytes[: BLOCKS // 2 * BLOCK] = seed % 251
        self._go_on()
        with suppress(StorageError):  # tiers that serve have all objects then
            self.store.flush()
        found = self._stopped(random, ("get", size), lambda: self.store.get(wanted))
        self._compare(found, gets, meant, verdict, "at once")
        mine = [place for place, outcome in zip(gets, found, strict=True) if outcome is Outcome.HIT]
        for place in mine:
            place[:] = seed % 251
        self._go_on()
        for place in mine:
            if (place != seed % 251).any():
                verdict.wrong += 1
                verdict.notes.append("the buffers of a hit were written to afterwards")
        found = self._settled(wanted)
        self._compare(found, gets, meant, verdict, "at the end")
        verdict.lost += sum(
            answer is Outcome.STORED and outcome is not Outcome.HIT
            for answer, outcome in zip(answers, found, strict=True)
        )
        verdict.torn += found.count(Outcome.CORRUPT)
        verdict.present += found.count(Outcome.HIT)
        self.counts.update(f"set {answer}" for answer in answers)
        return verdict

    def _place(self, half: int, n: int, size: int) -> np.ndarray:
        start = (half * BLOCKS // 2 + n * -(-size // BLOCK)) * BLOCK
        return self._bytes[start : start + size]

    def _whole(self, places: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the whole blocks of each place."""
        for place in places:
            start = place.ctypes.data - self._bytes.ctypes.data
            yield self._bytes[start : start + -(-place.nbytes // BLOCK) * BLOCK]

    def _stopped(
        self, random: Random, kind: tuple[str, int], call: Callable[[], list[Outcome]]
    ) -> list[Outcome]:
        """Make a call, during or after which the daemon is stopped.

        The moment depends on the time that the last call of this kind took whose answer came.
        """
        moment = random.uniform(0, 1.5) * self._seconds.get(kind, 0.005)

        def stop() -> None:
            time.sleep(moment)
            self.daemon.stop()

        stopping = Thread(target=stop)
        stopping.start()
        begun = time.monotonic()
        answers = call()
        if Outcome.UNAVAILABLE not in answers:
            self._seconds[kind] = time.monotonic() - begun
        stopping.join()
        return answers

    def _go_on(self) -> None:
        """Let the daemon go on, and wait until it uses no memory of calls that were given up."""
        self.daemon.go_on()
        end = time.monotonic() + GUARD
        while self.memory.in_force:
            assert time.monotonic() < end, "the daemon does not give the memory back"
            time.sleep(0.002)

    def _settled(self, wanted: Sequence[GetItem]) -> list[Outcome]:
        """Get the objects until all have a definite answer, as soon as each tier serves again."""
        end = time.monotonic() + GUARD
        waiting = {Outcome.UNAVAILABLE, Outcome.THROTTLED, Outcome.ERROR}
        tiers = self.store.tiers if isinstance(self.store, TierChain) else ()
        while any(tier.health != "serving" for tier in tiers) or waiting & set(
            found := self.store.get(wanted)
        ):
            assert time.monotonic() < end, "the store does not come back"
            time.sleep(0.002)
            while self.memory.in_force:
                time.sleep(0.002)
        return found

    def _compare(
        self,
        found: Sequence[Outcome],
        places: Sequence[np.ndarray],
        meant: Sequence[bytes],
        verdict: Verdict,
        when: str,
    ) -> None:
        for outcome, place, data in zip(found, places, meant, strict=True):
            if outcome is Outcome.HIT:
                self.counts["hits"] += 1
                if place.tobytes() != data:
                    verdict.wrong += 1
                    verdict.notes.append(f"a hit has other bytes {when}")
