"""Plan of a life, drawn by a seed, and the plain model that the life is checked against."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from tiercache_backends.memory import MemoryBackend

from tests.simulation.router import Router
from tests.simulation.store import StoreFaults
from tests.simulation.world import World
from tiercache.controller import WRITE_BACK, WRITE_THROUGH
from tiercache.core import TokenArray


@dataclass
class Plan:
    """Settings and faults of a life, drawn by its seed."""

    processes: int
    pools: str
    """Pools of the model: `pages`, `states` or `both`."""
    pages: int
    states: int
    blocks: int
    write: str
    piece: int
    capacity: int
    faults: StoreFaults
    copy_faults: float
    calm: bool
    """Nothing fails, and there is room for everything."""
    has_more: bool = False
    """Whether there are three more pools: two of pages, and one of states."""
    parks_often: bool = False

    @classmethod
    def drawn(cls, draw: Random) -> Plan:
        """Draw a plan."""
        calm = draw.random() < 0.2
        some = lambda p: 0.0 if calm or draw.random() < 0.5 else p * draw.random()  # noqa: E731
        return cls(
            processes=1 if calm else draw.choice((1, 1, 2)),
            pools=draw.choice(("both", "both", "pages", "states")),
            pages=200 if calm else draw.choice((16, 20, 40)),
            states=100 if calm else draw.choice((10, 14, 30)),
            blocks=900 if calm else draw.choice((3, 12, 40, 80)),
            write=draw.choice((WRITE_THROUGH, WRITE_BACK)),
            piece=draw.choice((1, 8192, 8 << 20)),
            capacity=0 if calm else draw.choice((0, 60_000, 200_000)),
            faults=StoreFaults(
                some(0.3),
                some(0.5),
                some(0.1),
                some(0.1),
                draw.choice((0.0002, 0.002, 0.02, 0.02 if calm else 0.5)),
            ),
            copy_faults=some(0.2),
            calm=calm,
        )

    @property
    def hybrid(self) -> bool:
        """Whether there are states."""
        return self.pools != "pages"


@dataclass
class Life:
    """The world of one seed, and the model: what any process committed, and of that what has a state."""

    seed: int
    plan: Plan
    world: World
    medium: MemoryBackend
    router: Router
    """Router that reads what the medium tells."""
    pages: set[tuple[int, ...]] = field(default_factory=set)
    states: set[tuple[int, ...]] = field(default_factory=set)
    tickets: list[tuple[bytes, TokenArray, TokenArray]] = field(default_factory=list)
    """Tickets of parked requests in storage, which any process may take; see `Process.park`."""
    counts: dict[str, int] = field(default_factory=dict)

    def count(self, what: str, by: int = 1) -> None:
        """Count something for the report, and note it in the history."""
        self.counts[what] = self.counts.get(what, 0) + by
        self.world.note(what, by)
