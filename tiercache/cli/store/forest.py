"""The stored objects as trees of pages: parents and children, orphans, and the order in which objects may be removed.

No function here recurses, because a sequence may be a hundred thousand pages deep.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiercache.cli.store.rows import hangs
from tiercache.storage.base import ScanEntry


@dataclass(slots=True)
class Page:
    """The objects stored under one page key. `parent` is None if the page has no parent or the parent is not known.

    Thread safety: one thread.
    """

    key: bytes
    parent: bytes | None = None
    pages: list[ScanEntry] = field(default_factory=list)
    """Objects of the page itself, in all pools and layouts."""
    states: list[ScanEntry] = field(default_factory=list)
    """Objects attached to the page, such as states."""
    children: list[bytes] = field(default_factory=list)
    """Keys of the stored pages whose parent this page is."""

    @property
    def entries(self) -> list[ScanEntry]:
        """All objects under the key; those attached to the page come last."""
        return [*self.pages, *self.states]

    @property
    def depth(self) -> int | None:
        """Depth of the end of the page, counted in pages, as its objects record it; None if none does."""
        return next((entry.meta.depth for entry in self.entries if entry.meta.depth is not None), None)

    @property
    def namespace(self) -> bytes:
        """The namespace of the objects, taken from the first of them."""
        return self.entries[0].meta.namespace


class Forest:
    """All pages of a scan, linked to their parents and children.

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
        """Keys of the pages at which a walk begins: those whose parent is unknown or not stored."""
        for page in self.pages.values():
            if page.parent in self.pages and page.parent is not None:
                self.pages[page.parent].children.append(page.key)
            else:
                self.roots.append(page.key)
        self.order: list[bytes] = self.below(self.roots)
        """Every page key after its parent's. Pages whose parents form a cycle, which no correct writer makes, come last."""
        if len(self.order) < len(self.pages):
            self.order += self.pages.keys() - set(self.order)
        self.broken = self._find_broken()
        """Unreachable pages, each with the key of the missing page that it depends on, directly or through other pages."""

    def below(self, keys: Iterable[bytes]) -> list[bytes]:
        """Return the keys of these pages and of all their descendants, each after its parent."""
        found: dict[bytes, None] = {}
        stack = list(keys)[::-1]
        while stack:
            key = stack.pop()
            if key not in found:
                found[key] = None
                stack += self.pages[key].children
        return list(found)

    def cut_off_by(self, entry: ScanEntry) -> bytes | None:
        """Return the key of the missing page that makes an object unreachable; None if the object is reachable."""
        key = entry.key.page_key
        return self.broken.get(key) or (None if self.pages[key].pages else key)

    def orphans(self) -> list[ScanEntry]:
        """Return the unreachable objects, each page's after those of its parent."""
        return [entry for key in self.order for entry in self.pages[key].entries if self.cut_off_by(entry) is not None]

    def chain(self, key: bytes) -> list[bytes]:
        """Return the keys of the stored ancestors of a page, nearest first, up to the root or to the first missing page."""
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
        """Return how the chain of ancestors ends: "root", "missing" (with the missing page), or "unknown" if no parent is recorded."""
        top = self.pages[(self.chain(key) or [key])[-1]]
        if not top.pages:
            return "missing", top.key
        if top.parent is not None:
            return "missing", top.parent
        return ("unknown" if (top.depth or 1) > 1 else "root"), None

    def removal_order(self, wanted: Iterable[ScanEntry]) -> list[ScanEntry]:
        """Return these objects sorted so that every object comes after all objects that depend on it."""
        rank = {key: n for n, key in enumerate(self.order)}
        return sorted(wanted, key=lambda entry: (-rank[entry.key.page_key], not hangs(entry)))

    def dependents(self, wanted: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Return the objects that depend on these objects and are not among them."""
        have = {entry.key.digest for entry in wanted}
        tops = {entry.key.page_key for entry in wanted if not hangs(entry)}
        below = self.below(child for key in tops for child in self.pages[key].children)
        # A page of `tops` that is below another one goes in all its layouts; of the topmost, the other layouts stay reachable.
        found = [entry for key in below for entry in self.pages[key].entries]
        found += [entry for key in tops for entry in self.pages[key].states]
        return [entry for entry in {e.key.digest: e for e in found}.values() if entry.key.digest not in have]

    def needed(self, wanted: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Return those of these objects on which an object depends that is not among them."""
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
            # A parent that comes later in the order is part of a cycle.
            if above is None or not above.pages or above.key not in seen:
                broken[key] = page.parent
            elif above.key in broken:
                broken[key] = broken[above.key]
        return broken
