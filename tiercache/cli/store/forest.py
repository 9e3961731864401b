"""The stored objects as trees of pages: who is whose parent, which objects have lost theirs, and what may go before what.

Nothing here recurses: a sequence may be a hundred thousand pages deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiercache.cli.store.rows import hangs
from tiercache.storage.base import ScanEntry


@dataclass(slots=True)
class Page:
    """What is stored under one page key. `parent` is None where it is not known, or where there is none.

    Thread safety: one thread.
    """

    key: bytes
    parent: bytes | None = None
    pages: list[ScanEntry] = field(default_factory=list)
    """Objects of the page itself, of all pools and layouts."""
    states: list[ScanEntry] = field(default_factory=list)
    """Objects that hang on it."""
    children: list[bytes] = field(default_factory=list)

    @property
    def entries(self) -> list[ScanEntry]:
        """All of them; what hangs on the page comes last."""
        return [*self.pages, *self.states]

    @property
    def depth(self) -> int | None:
        """Pages up to its end, as its objects say."""
        return next((entry.meta.depth for entry in self.entries if entry.meta.depth is not None), None)

    @property
    def namespace(self) -> bytes:
        """The namespace of its objects."""
        return self.entries[0].meta.namespace


class Forest:
    """All pages of a scan.

    Thread safety: one thread.
    """

    def __init__(self, entries: Iterable[ScanEntry]) -> None:
        self.pages: dict[bytes, Page] = {}
        for entry in entries:
            key = entry.key.page_key
            page = self.pages.get(key)
            if page is None:
                page = self.pages[key] = Page(key)
            if hangs(entry):
                page.states.append(entry)
            else:
                page.pages.append(entry)
                page.parent = page.parent or entry.meta.parent
        self.roots: list[bytes] = []
        """Pages at which a walk begins: those whose parent is unknown or not here."""
        for page in self.pages.values():
            if page.parent in self.pages and page.parent is not None:
                self.pages[page.parent].children.append(page.key)
            else:
                self.roots.append(page.key)
        self.order: list[bytes] = self.below(self.roots)
        """Every page after its parent. Pages whose parents go round in a circle, as no honest writer makes them, come last."""
        if len(self.order) < len(self.pages):
            self.order += self.pages.keys() - set(self.order)
        self.broken = self._find_broken()
        """Pages that nothing can reach, and the missing page that cuts them off: they depend on it, directly or through others."""

    def below(self, keys: Iterable[bytes]) -> list[bytes]:
        """These pages and everything under them, each after its parent."""
        found: dict[bytes, None] = {}
        stack = list(keys)[::-1]
        while stack:
            key = stack.pop()
            if key not in found:
                found[key] = None
                stack += self.pages[key].children
        return list(found)

    def cut_off_by(self, entry: ScanEntry) -> bytes | None:
        """The page without which nothing can reach an object; None where it can be reached."""
        key = entry.key.page_key
        return self.broken.get(key) or (None if self.pages[key].pages else key)

    def orphans(self) -> list[ScanEntry]:
        """Objects that nothing can reach, deepest last."""
        return [entry for key in self.order for entry in self.pages[key].entries if self.cut_off_by(entry) is not None]

    def chain(self, key: bytes) -> list[bytes]:
        """The stored pages above this one, nearest first, up to the root or to the first that is missing."""
        found: dict[bytes, None] = {}
        page = self.pages.get(key)
        while page is not None and page.parent is not None and page.parent not in found:
            above = self.pages.get(page.parent)
            if above is None or not above.pages:
                break
            found[above.key] = None
            page = above
        return list(found)

    def end_of(self, key: bytes) -> tuple[str, bytes | None]:
        """How the chain above this page ends: "root", "missing" (with the page that is), or "unknown", where nobody noted the parent."""
        top = self.pages[(self.chain(key) or [key])[-1]]
        if not top.pages:
            return "missing", top.key
        if top.parent is not None:
            return "missing", top.parent
        return ("unknown" if (top.depth or 1) > 1 else "root"), None

    def removal_order(self, wanted: Iterable[ScanEntry]) -> list[ScanEntry]:
        """These objects in an order in which nothing goes before what depends on it."""
        rank = {key: n for n, key in enumerate(self.order)}
        return sorted(wanted, key=lambda entry: (-rank[entry.key.page_key], not hangs(entry)))

    def dependents(self, wanted: Sequence[ScanEntry]) -> list[ScanEntry]:
        """What depends on these objects, and is not among them."""
        have = {entry.key.digest for entry in wanted}
        tops = {entry.key.page_key for entry in wanted if not hangs(entry)}
        found = [entry for key in self.below(tops) if key not in tops for entry in self.pages[key].entries]
        found += [entry for key in tops for entry in self.pages[key].states]
        # Of a page of several objects, the rest goes along only where what is below it goes anyway.
        return [entry for entry in {e.key.digest: e for e in found}.values() if entry.key.digest not in have]

    def needed(self, wanted: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Those of these objects that something depends on which is not among them."""
        going = {entry.key.digest for entry in wanted}
        held: set[bytes] = set()
        kept: list[ScanEntry] = []
        for key in reversed(self.order):
            page = self.pages[key]
            if any(entry.key.digest not in going for entry in page.states):
                held.add(key)
            if key in held:
                kept += [entry for entry in page.pages if entry.key.digest in going]
            stays = key in held or any(entry.key.digest not in going for entry in page.pages)
            if stays and page.parent is not None and page.pages:
                held.add(page.parent)
        return kept

    def _find_broken(self) -> dict[bytes, bytes]:
        broken: dict[bytes, bytes] = {}
        seen: set[bytes] = set()
        for key in self.order:
            page = self.pages[key]
            seen.add(key)
            if page.parent is None:
                continue
            above = self.pages.get(page.parent)
            # A parent that comes later is part of a circle.
            if above is None or not above.pages or above.key not in seen:
                broken[key] = page.parent
            elif above.key in broken:
                broken[key] = broken[above.key]
        return broken
