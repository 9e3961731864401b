"""Several processes, each with a chain over the same tiers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiercache_backends.chain import TierChain

from tests.storage_backends.chain.hooks import ChainHooks, add, chain_of, is_ahead, remove, store_of
from tests.storage_backends.lmdb.hooks import LmdbHooks
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.storage import open_backend
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import HIT, STORED
from tiercache.testing.conformance.persistence import Peer
from tiercache.testing.objects import fetch, key, payload, to_set

SIZE = 40_000
UPPER = 8 << 20


def opened(path: Path, write: str = "write_through") -> TierChain:
    """A chain of two shared tiers."""
    path.mkdir(exist_ok=True)
    upper = f"lmdb://{path}/a?capacity={UPPER}&tier_name=a"
    lower = f"lmdb://{path}/b?capacity=64MiB&tier_name=b&tier_write={write}&tier_promote=always"
    return chain_of(open_backend([upper, lower]))


class Through(ChainHooks):
    """Such a chain, the second tier written through."""

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return opened(path)


class Upper(LmdbHooks):
    """The first tier of these chains alone."""

    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        return super().open_store(path / "a", UPPER)


def store(chain: TierChain, names: Sequence[str]) -> None:
    assert set(chain.set([to_set(key(n), payload(n, SIZE)) for n in names])) == {STORED}


def assert_kept(chain: TierChain, names: Sequence[str]) -> None:
    """Check that some tier has each object and reads give its bytes, not too fast for copies."""
    assert [
        n for n, there in zip(names, chain.exists([key(n) for n in names]), strict=True) if not there
    ] == []
    for n in names:
        assert fetch(chain, key(n), SIZE) in (payload(n, SIZE), Outcome.MISS)


def named(who: str, turn: int) -> list[str]:
    return [f"{who}/{turn}/{n}" for n in range(10)]


def test_what_another_process_stores_in_the_tier_above_is_written_back(tmp_path):
    chain, known = opened(tmp_path / "s", "write_back"), []
    with Peer(Upper, tmp_path / "s") as peer:
        for turn in range(25):
            names = named("theirs", turn)
            assert peer.set(names, SIZE) == [STORED] * 10
            known += names
            until(lambda: is_ahead(*map(store_of, chain.tiers)))
    assert chain.usage().tiers[1].objects > 0
    assert_kept(chain, known)
    chain.close()


def test_a_change_in_one_process_costs_the_other_nothing(tmp_path):
    chain = opened(tmp_path / "s")
    with Peer(Through, tmp_path / "s") as peer:
        ours, theirs, more, later = (named(who, n) for n in range(2) for who in ("ours", "theirs"))
        store(chain, ours)
        assert peer.set(theirs, SIZE) == [STORED] * 10
        remove(chain, "a")
        store(chain, more)
        assert peer.set(later, SIZE) == [STORED] * 10
        assert peer.get([*ours, *more, *theirs, *later], SIZE) == [HIT] * 40
        assert peer.ask("delete", ours[:1]) == [True]
        # The peer copies what it stores, so that this process finds that in the tier that it has kept.
        until(lambda: all(chain.exists([key(n) for n in [*theirs, *later]])))
        assert chain.exists([key(ours[0])]) == [False]
        add(chain, f"lmdb://{tmp_path}/s/a?capacity={UPPER}&tier_name=a", 0)
        assert all(fetch(chain, key(n), SIZE) == payload(n, SIZE) for n in [*ours[1:], *theirs])
    chain.close()
