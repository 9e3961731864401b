"""A policy that keeps what it was shown."""

from __future__ import annotations

import numpy as np

from tests.policy.rig import PlainUnits, Rig
from tiercache.policy import Policy, Reuse, Units
from tiercache.policy.base import Ranks


class Seen(Policy):
    """LRU that keeps what it saw."""

    name = "seen"

    def __init__(self) -> None:
        self.seen: list[PlainUnits] = []
        self.told: list[Reuse] = []
        self.learned: list[tuple[PlainUnits, PlainUnits]] = []

    def rank(self, asked: Units) -> Ranks:
        self.seen.append(copied(asked))
        return asked.last_access.astype(np.float64)

    def reused(self, reuse: Reuse) -> None:
        self.told.append(reuse)

    def learn(self, live: Units, gone: Units) -> None:
        self.learned.append((copied(live), copied(gone)))


def copied(asked: Units) -> PlainUnits:
    names = PlainUnits.__annotations__.keys() - {"count", "now", "page_tokens"}
    columns = {name: np.array(getattr(asked, name), np.int64) for name in names}
    assert all(column.shape == (len(asked),) for column in columns.values())
    return PlainUnits(len(asked), asked.now, asked.page_tokens, **columns)


def digest_of(rig: Rig, path: tuple[int, ...]) -> int:
    return int(rig.match(path).node.digests[-1].view(np.int64))
