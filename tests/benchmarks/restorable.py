"""Restorable share of the KV in a full store: `python -m tests.benchmarks.restorable`.

Prints one JSON line a row; measures no time.

A page of KV is worth something if all pages before it are stored, and, in a model with recurrent states, a
state on it or behind it. The benchmark judges by the conversations themselves, whatever the store was told,
and reads the store with a scan. Samples are taken at the ends of turns, late in a history that fills the
store more than once.

    share        of the stored KV bytes, those that can be restored: the least of all samples
    share_mean   the mean of that share over the samples
    restorable   MiB of such KV, mean of the samples
    used         least part of the capacity in use at a sample
    loses_at     part of the capacity in use before or after (the larger) the first turn in which
                 something was evicted or throttled
    missed       names of the targets that the row is below: share, loses_at (0.9)

The exit status is 1 if a row missed a target.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Final

import numpy as np

from tests.benchmarks.conversations import (
    Conversation,
    Held,
    Truth,
    Turn,
    clients,
    growing,
    held,
    in_turn,
    mixed,
)
from tests.storage_backends.grpc.daemon import Daemon
from tiercache.core import HitPolicy, Outcome, PoolName, PoolTransfer
from tiercache.geometry import kv_geometry, state_geometry
from tiercache.pools import HostArena, HostPool
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.storage.hybrid import HybridStorage
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import page_key

STORES: Final = ("file", "lmdb", "memory", "daemon")
BATCH: Final = 128
"""Pages of one call, as controllers cut them."""
STATES: Final = 16
"""States of one call, at most."""
SAMPLES: Final = 8
SAMPLED_FROM: Final = 0.6
"""The part of a history's turns after which samples begin."""
MIB: Final = 1 << 20
CAPACITY: Final = 64 * MIB
PAGE_BYTES: Final = 24 << 10
STATE_BYTES: Final = 96 << 10
USED: Final = 0.9
"""A store loses nothing before so much of its capacity is in use."""
_ASK_STATES: Final = PoolTransfer(PoolName.MAMBA, hit_policy=HitPolicy.TRAILING_PAGES)


@dataclass(frozen=True)
class Plan:
    """One row: a history, given how many pages the capacity holds, and how it is written.

    `tells`: what the writer says of a page's parent: "all", "calls" (of those within one call), "nothing".
    `asks`: a turn asks what can be restored, reads that and writes the rest; otherwise it writes its new
    pages, and believes in what it wrote before. `states_first`: the states of a turn are written before its
    pages. `share`: the target; 0 where none can be named.
    """

    name: str
    history: Callable[[int], Iterable[Turn]]
    tells: str = "all"
    asks: bool = True
    states_first: bool = False
    share: float = 0.9
    stores: Sequence[str] = STORES[:3]


def one(pages: int, every: int, step: int = BATCH) -> Iterator[Turn]:
    """A conversation twice the capacity."""
    return growing(Conversation("one", every=every, ends=False), 2 * pages, step)


def again(pages: int) -> Iterator[Turn]:
    """The same prompt, half again as long as what fits, for ever."""
    conversation = Conversation("again", every=64)
    for _ in range(4):
        yield Turn(conversation, 0, pages * 3 // 2)


def rounds(count: int, turns: int, pages: int, **more: Any) -> Iterator[Turn]:
    """Run `count` conversations of `turns` turns of `pages` pages each at once; then as many new ones, for
    half as many turns.
    """
    for generation in range(2):
        yield from in_turn(
            [Conversation((generation, n), **more) for n in range(count)], turns // (1 + generation), pages
        )


def tenants() -> Iterator[Turn]:
    """A quiet tenant, who comes back now and then, and a busy one in another namespace."""
    quiet = [Conversation(("quiet", n)) for n in range(3)]
    yield from in_turn(quiet, 10, 20)
    for n, turn in enumerate(rounds(3, 10, 150, tenant=1)):
        yield turn
        if n % 15 == 14:
            yield Turn(quiet[n // 15 % 3], 200, 200)


def beside_attention() -> Iterator[Turn]:
    """A model with states, and one of attention alone in another namespace."""
    return mixed(rounds(3, 10, 100), rounds(3, 10, 100, tenant=1, hybrid=False))


PLANS: Final = [
    Plan("one.16", lambda pages: one(pages, 16), asks=False, stores=STORES),
    Plan("one.again", again),
    Plan("3x10x150", lambda _: rounds(3, 10, 150), stores=STORES),
    Plan("3x10x150.believed", lambda _: rounds(3, 10, 150), asks=False),
    Plan("20x10x20.shared", lambda _: rounds(20, 10, 20, shared=60)),
    Plan("zipf", lambda _: clients(200, 300, 7), stores=STORES),
    Plan("3x10x150.states-first", lambda _: rounds(3, 10, 150), asks=False, states_first=True),
    *(
        plan
        for tells in ("nothing", "calls")
        for plan in (
            Plan(f"3x10x150.{tells}", lambda _: rounds(3, 10, 150), tells, asks=False, share=0.0),
            Plan(f"zipf.{tells}", lambda _: clients(200, 300, 7), tells, share=0.0),
        )
    ),
    Plan("tenants", lambda _: tenants()),
    Plan("hybrid-and-attention", lambda _: beside_attention(), asks=False),
]


class Writer:
    """An engine's side: what it asks, reads and writes, turn by turn.

    Thread safety: one thread.
    """

    def __init__(self, store: StorageBackend, plan: Plan, page_bytes: int, state_bytes: int) -> None:
        self._plan, self._store = plan, store
        self._arena = HostArena(BATCH * page_bytes + STATES * state_bytes + (1 << 20), 4096, huge_pages=False)
        self._pools = [
            HostPool(kv_geometry([0], 1, page_bytes // 64, "bfloat16", 16), self._arena),
            HostPool(state_geometry([(0, "ssm", (state_bytes // 4,), "float32")], 16), self._arena),
        ]
        self._pages, self._states = self._pools[0].alloc(BATCH), self._pools[1].alloc(STATES)
        self._tenants: dict[int, HybridStorage] = {}
        self.outcomes: Counter[Outcome] = Counter()

    def turn(self, turn: Turn) -> None:
        """Serve one request."""
        conversation = turn.conversation
        storage = self._storage(conversation)
        keys = conversation.upto(turn.last)
        first = self._restored(storage, conversation, keys) if self._plan.asks else turn.first
        depths = conversation.states(first, turn.last)
        if self._plan.states_first:
            for start in range(0, len(depths), STATES):
                self._set(storage, [self._of_states(keys, depths[start : start + STATES])])
            depths = []
        for start in range(first, turn.last, BATCH):
            stop = min(start + BATCH, turn.last)
            here = [d for d in depths if start < d <= stop]
            states = [self._of_states(keys, here)] if here else []
            self._set(storage, [self._of_pages(keys, start, stop), *states])

    def close(self) -> None:
        """Give the memory back; the store is closed by now."""
        self._arena.close()

    def _set(self, storage: HybridStorage, call: list[PoolTransfer]) -> None:
        for answers in storage.batch_set_v2(call).values():
            self.outcomes.update(answers)

    def _restored(self, storage: HybridStorage, conversation: Conversation, keys: list[bytes]) -> int:
        """Read the deepest prefix that the store can restore: its pages; 0 where one does not come."""
        if not keys:
            return 0
        found = storage.batch_exists_v2(keys, [_ASK_STATES] if conversation.hybrid else []).kv_hit_pages
        for start in range(0, found, BATCH):
            part = keys[start : min(start + BATCH, found)]
            answers = storage.batch_get_v2([PoolTransfer(PoolName.KV, part, self._pages[: len(part)])])[
                PoolName.KV
            ]
            if set(answers) != {Outcome.HIT}:
                return 0
        if found and conversation.hybrid:
            state = replace(self._of_states(keys, [found]), depths=())
            return found if storage.batch_get_v2([state])[PoolName.MAMBA] == [Outcome.HIT] else 0
        return found

    def _of_pages(self, keys: list[bytes], start: int, stop: int) -> PoolTransfer:
        part, tells = keys[start:stop], self._plan.tells
        whole = PoolTransfer(PoolName.KV, part, self._pages[: len(part)])
        if tells == "nothing":
            return whole
        before = keys[start - 1] if start and tells == "all" else b""
        parents = [before, *part[:-1]]
        return replace(whole, parents=parents, depths=range(start + 1, stop + 1) if tells == "all" else ())

    def _of_states(self, keys: list[bytes], depths: list[int]) -> PoolTransfer:
        told = depths if self._plan.tells == "all" else ()
        handles = self._states[: len(depths)]
        return PoolTransfer(
            PoolName.MAMBA, [keys[d - 1] for d in depths], handles, HitPolicy.TRAILING_PAGES, depths=told
        )

    def _storage(self, conversation: Conversation) -> HybridStorage:
        if conversation.tenant not in self._tenants:
            record = NamespaceRecord(
                page_key(("tenant", conversation.tenant)),
                {"model": f"m{conversation.tenant}"},
                states=conversation.hybrid,
            )
            made = self._tenants[conversation.tenant] = HybridStorage(self._store, namespace=record)
            for pool in self._pools[: 1 + conversation.hybrid]:
                made.register_pool(pool)
        return self._tenants[conversation.tenant]


@contextmanager
def opened(store: str, capacity: int, directory: Path) -> Iterator[StorageBackend]:
    """An empty store; "daemon": of a daemon of its own, which keeps a `file` store, over a unix socket."""
    base = Path(tempfile.mkdtemp(dir=directory))
    url = (
        f"memory://?capacity={capacity}"
        if store == "memory"
        else f"{store}://{base}/store?capacity={capacity}"
    )
    try:
        if store == "daemon":
            sockets = Path(tempfile.mkdtemp(prefix="tc-"))  # a path that is short enough for a socket
            try:
                with (
                    Daemon("unix", sockets, url.replace("daemon:", "file:")) as daemon,
                    open_backend(f"grpc://{daemon.where}") as client,
                ):
                    yield client
            finally:
                shutil.rmtree(sockets)
        else:
            with open_backend(url) as backend:
                yield backend
    finally:
        shutil.rmtree(base)


def measure(
    store: str, plan: Plan, capacity: int, page_bytes: int, state_bytes: int, directory: Path
) -> dict[str, Any]:
    """One row."""
    turns = list(plan.history(capacity // page_bytes))
    truth = Truth()
    sampled = set(np.linspace(int(len(turns) * SAMPLED_FROM), len(turns) - 1, SAMPLES).astype(int).tolist())
    samples: list[tuple[Held, float]] = []
    loses_at, used = None, 0.0
    with opened(store, capacity, directory) as backend:
        writer = Writer(backend, plan, page_bytes, state_bytes)
        for n, turn in enumerate(turns):
            writer.turn(turn)
            truth.learn(turn.conversation, turn.first, turn.last)
            if loses_at is None:
                before_turn, used = used, backend.usage().used_bytes / capacity
                loses_at = max(before_turn, used) if lost(writer, backend) else None
            if n in sampled:
                usage = backend.usage()
                samples.append((held(backend.scan_all(), truth), usage.used_bytes / capacity))
        gone = writer.outcomes[Outcome.STORED] - usage.objects
    writer.close()
    shares = [found.share for found, _ in samples]
    row = {
        "benchmark": "restorable", "row": plan.name, "store": store, "tells": plan.tells,
        "target": plan.share,
        "share": round(min(shares), 3), "share_mean": round(mean(shares), 3),
        "restorable_mib": round(mean(len(found.restorable) for found, _ in samples) * page_bytes / MIB, 1),
        "capacity_mib": capacity // MIB,
        "used": round(min(used for _, used in samples), 3),
        "loses_at": None if loses_at is None else round(loses_at, 3),
        "objects": usage.objects, "evicted": gone,
        "throttled": writer.outcomes[Outcome.THROTTLED], "errors": writer.outcomes[Outcome.ERROR],
    }  # fmt: skip
    return row | {"missed": missed(row)}


def lost(writer: Writer, backend: StorageBackend) -> bool:
    """Tell whether the store has throttled or evicted an object yet."""
    return (
        bool(writer.outcomes[Outcome.THROTTLED]) or backend.usage().objects < writer.outcomes[Outcome.STORED]
    )


def missed(row: dict[str, Any]) -> list[str]:
    """The targets that a row is below."""
    found = ["share"] if row["share"] < row["target"] else []
    return found + (["loses_at"] if row["loses_at"] is None or row["loses_at"] < USED else [])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.restorable",
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--store", help=f"one of {', '.join(STORES)}; default: all", choices=STORES)
    parser.add_argument("--only", default="", help="rows whose name begins like this")
    options = parser.parse_args(arguments)
    below = False
    with tempfile.TemporaryDirectory(prefix=".restorable-", dir=Path.cwd()) as base:
        for plan in PLANS:
            for store in plan.stores if plan.name.startswith(options.only) else ():
                if options.store in (None, store):
                    row = measure(store, plan, CAPACITY, PAGE_BYTES, STATE_BYTES, Path(base))
                    print(json.dumps(row), flush=True)
                    below |= bool(row["missed"])
    return int(below)


if __name__ == "__main__":
    sys.exit(main())
