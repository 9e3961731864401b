"""A plain model of the tables that every store shares, which is searched from end to end."""

from __future__ import annotations

from dataclasses import dataclass, field

from tiercache.storage.pages import PAGE_KEY_BYTES
from tiercache.storage.residents import Residents
from tiercache.storage.restorable import Admissibility, Worth
from tiercache.testing.objects import page_key

LAYOUTS = [page_key(("layout", n)) for n in range(4)]
KV, MORE_KV, STATE, MORE_STATE = range(4)
"""Layouts: the last two hang on their page."""
PLAIN, HYBRID = 0, 1
"""Namespaces: the prefixes of the second need states."""
MOST = 12
"""Pages of the machine: few, so that they meet."""
NAMES = {page_key(n): n for n in range(64)}


def digest(page: int, layout: int = KV) -> bytes:
    return LAYOUTS[layout] + page_key(page)


def page_of(residents: Residents, row: int) -> int:
    return NAMES[residents.digest(row)[-PAGE_KEY_BYTES:]]


def put(
    residents: Residents,
    page: int,
    above: int | None = None,
    *,
    layout: int = KV,
    length: int = 1,
    namespace_id: int = PLAIN,
    depth: int = 0,
) -> int:
    """Take in an object, whatever may be said against it. Layouts of states hang on their page."""
    node = residents.pages.hold(page_key(page))
    if layout >= STATE:
        above = page
    parent = None if above is None else residents.pages.hold(page_key(above))
    row = residents.add(digest(page, layout), node, parent, residents.newest + 1, length, namespace_id, depth)
    for held in (node, parent):
        if held is not None:
            residents.pages.release(held)
    return row


def remove(residents: Residents, row: int) -> None:
    residents.leave(row)
    residents.drop(row)


class Everything:
    """Takes until a number of objects went. See `Taker`."""

    def __init__(self, residents: Residents, number: int | None = None) -> None:
        self.residents = residents
        self.number = number
        self.gone: list[bytes] = []

    def take(self, rows: list[int]) -> None:
        for row in rows:
            self.gone.append(self.residents.digest(row))
            remove(self.residents, row)

    def enough(self) -> bool:
        return self.number is not None and len(self.gone) >= self.number

    def full(self) -> bool:
        return False


@dataclass
class Page:
    """A page of the model. `lengths`: by layout; `up`: the page that it follows."""

    lengths: dict[int, int] = field(default_factory=dict)
    up: int | None = None
    cut: bool = False
    namespace_id: int = PLAIN
    depth: int = 0
    used: int = 0
    number: int = 0
    served: bool = False
    holds: int = 0
    coming: int = 0
    pins: int = 0

    @property
    def kv(self) -> bool:
        return any(layout < STATE for layout in self.lengths)

    @property
    def states(self) -> bool:
        return any(layout >= STATE for layout in self.lengths)

    @property
    def nbytes(self) -> int:
        return sum(self.lengths.values())


@dataclass
class Left:
    """An object that left, as it was."""

    name: int
    layout: int
    up: int | None
    length: int
    namespace_id: int
    depth: int
    used: int
    number: int


class Model:
    """Model of `Residents` that computes every answer from all its pages."""

    def __init__(self) -> None:
        self.pages: dict[int, Page] = {}
        self.hybrid: set[int] = set()
        self.clock = self.newest = 0

    def at(self, page: int) -> Page:
        return self.pages.setdefault(page, Page())

    def stored(self) -> dict[int, Page]:
        return {name: page for name, page in self.pages.items() if page.lengths}

    def followers(self, name: int) -> list[int]:
        return [other for other, page in self.pages.items() if page.up == name]

    def path(self, name: int | None) -> list[int]:
        """The page and all before it, as far as they are stored."""
        path: list[int] = []
        while name is not None and name in self.pages and name not in path:
            path.append(name)
            name = self.pages[name].up
        return path

    def is_live(self, name: int) -> bool:
        page = self.pages[name]
        own = page.states or (page.kv and page.namespace_id not in self.hybrid)
        return own or any(self.is_live(other) for other in self.followers(name))

    def is_broken(self, name: int) -> bool:
        return any(not (p := self.pages.get(above, Page())).kv or p.cut for above in self.path(name))

    def is_useless(self, name: int) -> bool:
        return not self.is_live(name) or self.is_broken(name)

    def is_young(self, name: int) -> bool:
        page = self.pages[name]
        return self.newest - page.number < len(self) // (16 if page.kv else 1)

    def is_dead(self, name: int) -> bool:
        return self.is_useless(name) and (self.pages[name].served or not self.is_young(name))

    def is_leaf(self, name: int) -> bool:
        return bool(self.pages[name].lengths) and not self.followers(name) and not self.pages[name].holds

    def leaves(self) -> list[int]:
        """Pages that can be evicted as a whole."""
        return [name for name, page in self.pages.items() if self.is_leaf(name) and not page.pins]

    def is_mostly_unproven(self) -> bool:
        pages = self.pages.values()
        return 4 * sum(p.nbytes for p in pages if not p.served) > 3 * sum(p.nbytes for p in pages)

    def admissibility(
        self, name: int, above: int | None, depth: int, namespace_id: int, refused: bool
    ) -> Admissibility:
        page, parent = self.at(name), self.at(name if above is None else above)
        if page.lengths and page.namespace_id != namespace_id:
            return Admissibility.IMPOSSIBLE
        if depth and page.depth and depth != page.depth:
            return Admissibility.IMPOSSIBLE
        if above == name and refused and not (page.kv or page.coming):
            return Admissibility.ABSENT_PARENT
        if above is None or above == name:
            return Admissibility.FINE
        if not (parent.kv or parent.coming) or parent.namespace_id != namespace_id:
            return Admissibility.ABSENT_PARENT
        other_depth = depth and parent.depth and depth != parent.depth + 1
        if other_depth or page.up not in (None, above) or name in self.path(above):
            return Admissibility.IMPOSSIBLE
        return Admissibility.FINE

    def add(
        self, name: int, layout: int, above: int | None, length: int, namespace_id: int, depth: int
    ) -> None:
        page = self.at(name)
        if not page.kv:
            page.namespace_id = namespace_id
        page.depth = depth or page.depth
        self.newest += 1
        page.number = self.newest
        self.use(name)
        self.enter(name, layout, above, length)

    def enter(self, name: int, layout: int, above: int | None, length: int) -> None:
        page = self.at(name)
        if layout < STATE and above is not None and page.up is None:
            page.cut |= name in self.path(above)
            page.up = None if page.cut else above
            self.at(above)
        page.lengths[layout] = length
        if layout >= STATE:
            self.hybrid.add(page.namespace_id)
        self.settle()

    def leave(self, name: int, layout: int) -> Left:
        page = self.pages[name]
        left = Left(
            name, layout, page.up, page.lengths.pop(layout), page.namespace_id, page.depth, page.used,
            page.number,
        )  # fmt: skip
        if not page.kv and layout < STATE:
            if page.up is not None:
                parent = self.pages[page.up]
                parent.used = max(parent.used, page.used)
            page.up, page.cut = None, False
        self.settle()
        return left

    def come_back(self, left: Left) -> None:
        page = self.at(left.name)
        if not page.kv:
            page.namespace_id = left.namespace_id
        page.depth = page.depth or left.depth
        page.used = max(page.used, left.used)
        page.number = max(page.number if page.lengths else 0, left.number)
        self.enter(left.name, left.layout, left.up, left.length)

    def use(self, name: int) -> None:
        self.clock += 1
        self.pages[name].used = self.clock

    def renew(self, name: int) -> None:
        self.use(name)
        if self.is_useless(name):
            self.pages[name].number, self.pages[name].served = self.newest, False

    def settle(self) -> None:
        """Forget pages that nothing needs, and note which can be restored."""
        for name, page in list(self.pages.items()):
            if not (page.lengths or page.holds or self.followers(name)):
                del self.pages[name]
        for name, page in self.pages.items():
            page.served |= bool(page.lengths) and not self.is_useless(name)

    def worth(self) -> Worth:
        restorable = dead = orphans = 0
        for name, page in self.stored().items():
            if self.is_broken(name):
                orphans += len(page.lengths)
            elif self.is_live(name):
                restorable += page.nbytes
            else:
                dead += page.nbytes
        return Worth(restorable, dead, orphans)

    def __len__(self) -> int:
        return sum(len(page.lengths) for page in self.pages.values())
