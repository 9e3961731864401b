"""Stores of the campaigns, and how they are opened."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from tiercache_backends.lmdb import LmdbBackend

from tests.campaign.model import Verdict
from tests.storage.integrity import check_tables
from tests.storage_backends.lmdb.hooks import check_integrity as check_lmdb
from tiercache.config.urls import section_of
from tiercache.storage.base import StorageBackend, StoreContext
from tiercache.storage.env import Env
from tiercache.storage.registry import GROUP
from tiercache.storage.wrappers import unwrap
from tiercache.testing.objects import fetch, key

KINDS = ("file", "lmdb")


@cache
def available() -> list[str]:
    """The kinds whose code is installed."""
    return [e.name for e in entry_points(group=GROUP) if e.name in KINDS and _loads(e)]


@cache
def load(kind: str) -> type[StorageBackend]:
    """Looked up once: a look at the installed packages costs more than a start of a small store."""
    [entry] = entry_points(group=GROUP, name=kind)
    return entry.load()


def _loads(entry: EntryPoint) -> bool:
    try:
        entry.load()
    except (ImportError, AttributeError):
        return False
    return True


@dataclass(frozen=True)
class Subject:
    """A store to be tested."""

    kind: str
    path: Path
    capacity: int
    durability: str = "process"

    @property
    def url(self) -> str:
        return f"{self.kind}://{self.path}?capacity={self.capacity}&durability={self.durability}"

    @property
    def fields(self) -> tuple[str, str, int, str]:
        """For another process."""
        return self.kind, str(self.path), self.capacity, self.durability

    @property
    def keeps_all(self) -> bool:
        """True if everything acknowledged survives a power cut without a flush."""
        return self.durability == "power"

    def at(self, path: Path) -> Subject:
        return replace(self, path=path)

    def open(self, env: Env | None = None) -> StorageBackend:
        section = section_of(self.url)
        return load(section.pop("type")).from_config(section, StoreContext(env or Env()))

    def recover(self, names: int, verdict: Verdict, env: Env | None = None) -> StorageBackend:
        """Open it, and note the seconds to the first hit, or until it is known that there is none."""
        start = time.perf_counter()
        store = self.open(env)
        try:
            lengths = {entry.key: entry.meta.length for entry in store.scan().entries[:1]}
            for found, length in lengths.items() or {key(0): 1}.items():
                fetch(store, found, length)
        except BaseException:
            store.close()
            raise
        verdict.recovery.append(time.perf_counter() - start)
        return store


def check_integrity(store: StorageBackend) -> None:
    """Check the tables of a store, which no other thread uses."""
    if isinstance(unwrap(store), LmdbBackend):
        check_lmdb(store)
    else:
        check_tables(store)


def descriptors() -> int:
    """Open ones of this process."""
    return len(os.listdir("/proc/self/fd"))
