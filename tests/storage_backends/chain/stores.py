"""Stores that hang, forget, refuse or break their contract, and chains over open stores."""

from __future__ import annotations

import threading

from tiercache_backends.chain import TierChain
from tiercache_backends.memory import MemoryBackend

from tests.storage.late import Late
from tests.storage_backends.chain.hooks import QuickClock, tier_of
from tiercache.core import Outcome
from tiercache.errors import RefusedError, UnavailableError
from tiercache.testing.objects import fetch, key

HIT, MISS, STORED, UNAVAILABLE = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.UNAVAILABLE
SIZE = 5000
BLOCK = 4096


class Hanging(Late):
    """A store whose calls of these operations hang until `release`, once `hang` was called."""

    def __init__(self, inner, *operations):
        self.free, self.entered = threading.Event(), threading.Event()
        self.free.set()
        super().__init__(inner, operations, self.stop)
        self.release = self.free.set

    def hang(self):
        self.entered.clear()
        self.free.clear()

    def stop(self):
        self.entered.set()
        self.free.wait(60)


class Forgetful(MemoryBackend):
    """A store that acknowledges objects and does not keep them."""

    def set(self, items):
        return [STORED] * len(items)


class Broken(MemoryBackend):
    """A store that breaks its contract: its calls raise what none may raise."""

    broken = False

    def get(self, items):
        if self.broken:
            raise RuntimeError("a bug in a plug-in")
        return super().get(items)


class Refusing(MemoryBackend):
    """A store that refuses every deletion but that of a canary."""

    def delete(self, keys):
        if any(key.layout.startswith(b"tiercache canary") for key in keys):
            return super().delete(keys)
        raise RefusedError("this store keeps what it has")


class Hiccup(MemoryBackend):
    """A store whose next `peek` fails."""

    fails = 0

    def peek(self, items):
        if self.fails:
            self.fails -= 1
            raise UnavailableError("not now")
        return super().peek(items)


def chain_over(*stores, settings=None):
    """A chain of open stores; `settings` by position."""
    tiers = []
    for n, store in enumerate(stores):
        given = {"name": f"t{n}", **(settings or {}).get(n, {})}
        tiers.append(tier_of(lambda store=store: store, store.capabilities, QuickClock(), **given))
    return TierChain(tiers)


def health(chain):
    return [tier.health for tier in chain.tiers]


def lose(chain, away):
    """Let a store go away, and its tier be found out by three calls that fail."""
    away.begin()
    for _ in range(3):
        fetch(chain, key("lost"), SIZE)


def held(store, *names):
    return store.exists([key(name) for name in names])
