"""Trees of the stored pages: parents and children, orphans, and the order in which objects may be removed.

No function recurses, because a sequence may be a hundred thousand pages long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tiercache.core import PoolName
from tiercache.storage.base import ScanEntry


def is_attached(entry: ScanEntry) -> bool:
    """Return whether an object is attached to a page, as a state is; False for a page itself."""
    # The parent of a state is its own page, so both have the same page key.
    return entry.meta.parent == entry.key.page_key


@dataclass(slots=True)
class Page:
    """Objects stored under one page key.

    Thread safety: one thread.
    """

    key: bytes
    parent: bytes | None = None
    """Key of the page before this one; None if there is none, or if the objects do not record a parent."""
    pages: list[ScanEntry] = field(default_factory=list)
    """Objects of the page itself, in all pools and layouts."""
    states: list[ScanEntry] = field(default_factory=list)
    """Objects attached to the page, such as states."""
    children: list[bytes] = field(default_factory=list)
    """Keys of the stored pages that follow this page directly."""

    @property
    def entries(self) -> list[ScanEntry]:
        """All objects under the key; objects attached to the page come last."""
        return [*self.pages, *self.states]

    @property
    def is_states_alone(self) -> bool:
        """Whether these are states of a model that keeps no pages: none is KV, and none has a parent."""
        return bool(self.pages) and not any(
            entry.key.pool is PoolName.KV or entry.meta.parent is not None for entry in self.entries
        )

    @property
    def depth(self) -> int | None:
        """Depth of the page, counted in pages from 1 at a root; None if no object records a depth."""
        return next((entry.meta.depth for entry in self.entries if entry.meta.depth is not None), None)

    @property
    def namespace(self) -> bytes:
        """Namespace of the objects, taken from the first object."""
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
            if is_attached(entry):
                page.states.append(entry)
            else:
                page.pages.append(entry)
                page.parent = page.parent or entry.meta.parent
        self.roots: list[bytes] = []
        """Keys of the pages whose parent is not known or not stored."""
        for page in self.pages.values():
            if page.parent in self.pages and page.parent is not None:
                self.pages[page.parent].children.append(page.key)
            else:
                self.roots.append(page.key)
        self.order: list[bytes] = self.below(self.roots)
        """All page keys, each after its parent.

        Pages whose parents form a cycle come last; no correct writer stores such pages.
        """
        if len(self.order) < len(self.pages):
            self.order += self.pages.keys() - set(self.order)

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

    def chain(self, key: bytes) -> list[bytes]:
        """Return the keys of a page's stored ancestors, nearest first, up to the root or a missing page."""
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
        """Return how the chain of ancestors ends, and the key of the missing page, if one is missing.

        The end is "root", "missing", or "unknown" if the last stored page does not record its parent.
        """
        top = self.pages[(self.chain(key) or [key])[-1]]
        if not top.pages:
            return "missing", top.key
        if top.parent is not None:
            return "missing", top.parent
        if top.is_states_alone:
            return "root", None
        return ("unknown" if (top.depth or 1) > 1 else "root"), None

    def removal_order(self, wanted: Iterable[ScanEntry]) -> list[ScanEntry]:
        """Return these objects sorted, so that each object comes after all objects that depend on it."""
        rank = {key: n for n, key in enumerate(self.order)}
        return sorted(wanted, key=lambda entry: (-rank[entry.key.page_key], not is_attached(entry)))

    def needed(self, wanted: Sequence[ScanEntry]) -> list[ScanEntry]:
        """Return the `wanted` objects that must stay, because objects that are not `wanted` need them."""
        going = {entry.key.digest for entry in wanted}
        held: set[bytes] = set()  # keys of the pages whose objects must stay
        kept: list[ScanEntry] = []
        # Go from the deepest pages up, because a page that stays makes the page before it stay too.
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
