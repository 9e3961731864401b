"""Table that says which pages of a store can be restored, updated as objects come and go.

In a namespace whose prefixes need states, KV is useful only with a state on its page or on a later page. A
state is useful only with all KV up to the state. Pages and their objects are therefore

    live         if a state is on the page or on a page after it, or if the prefixes need no states
    broken       if the page, or a page before it, is not stored; the objects of such a page are orphans
    restorable   if they are live and not broken
    useless      if they are not restorable
    dead         if they are useless but not broken (in `Worth`)

    page       1 <---- 2 <---- 3 <---- 4          `parent_node` leads to the left
    state                      S                  one recurrent state, attached to page 3
    live       1       1       1       0          page 4 is useless: no state on it or after it
    after page 2 was deleted:
    broken     -       x       x       x          page 3, its state and page 4 are orphans until page 2 is
                                                  stored again
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from tiercache.storage.pages import BROKEN, CUT, NONE, SERVED, Ints, Mask, PageTable
from tiercache.storage.values import Values

_MAX_EVICTABLE: Final = 1 << 16
"""Maximum number of pages noted for the eviction order. If there are more, the order scans all pages."""
_MAX_REFUSED: Final = 1 << 14
"""Maximum number of refused pages that are remembered; if there are more, the oldest are forgotten."""


class Admissibility(enum.Enum):
    """Verdict on whether an object may be stored at its place in its sequence."""

    FINE = "fine"
    ABSENT_PARENT = "absent_parent"
    """The parent of the object is neither stored nor being written in the object's namespace."""
    IMPOSSIBLE = "impossible"
    """The object contradicts objects that are stored, in one of these ways:

    - its depth differs from the depth of its page, or is not one more than the depth of its parent;
    - its page has another parent, or another namespace;
    - its page would become its own ancestor.
    """


class Worth(NamedTuple):
    """Content of a store by its use: restorable and dead payload bytes, and the number of orphans."""

    restorable_bytes: int
    dead_bytes: int
    orphans: int


class RestorablePages(PageTable):
    """Page table that also knows which pages are live and which are broken.

    The store chooses a number for each namespace, `namespace_id`. `clock` gives the seconds by which hints
    age.

    Thread safety: none of its own; the store calls it under its mutex.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.values = Values(self, clock)
        self.unproven_bytes = 0
        """Payload bytes on pages without the flag SERVED: KV without a state, and states without KV.

        No restore has been able to use these bytes so far, and perhaps none ever will.
        """
        self.orphans_changed = False
        """Whether a page that other pages follow was removed or came back.

        If so, orphans are counted again when their number is next asked for.
        """
        self._evictable: set[int] | None = None
        """Pages that may have become evictable since the eviction order last asked; None: not known."""
        self._hybrid: set[int] = set()
        """Namespaces whose prefixes need states."""
        self._kv_of: Counter[int] = Counter()
        """Number of stored pages by namespace."""
        self._refused: dict[bytes, None] = {}
        """Keys of pages that were not stored when they came last, the oldest first."""

    def require_states(self, namespace_id: int) -> None:
        """Record that prefixes of this namespace need states, so that KV without a state is useless."""
        if namespace_id in self._hybrid:
            return
        self._hybrid.add(namespace_id)
        if self._kv_of[namespace_id]:
            # Until now, each stored page of the namespace counted itself in `live`.
            namespace_ids, kv = (self.columns[name][: self.used] for name in ("namespace_id", "kv"))
            for node in np.flatnonzero((namespace_ids == namespace_id) & (kv > 0)).tolist():
                self._uncount_live(node)

    def stateless(self) -> Mask:
        """Return a mask by node: True where the page's KV may be restored without a state."""
        return ~np.isin(self.columns["namespace_id"], np.fromiter(self._hybrid, np.uint32, len(self._hybrid)))

    def admissibility(
        self, node: int, parent: int | None, depth: int, namespace_id: int, *, refused: bool = False
    ) -> Admissibility:
        """Return whether an object may be stored on `node` behind the page of node `parent`, and if not, why.

        `parent` is None if the parent is not known. It is `node` itself if the object is attached to the page
        of `node`. `depth` is 0 if it is not known. `refused` says that the object's page was part of the same
        call and was not stored. Unless the page is that, or was refused before, an attached object may be
        stored before its page.
        """
        if self.first[node] >= 0 and self.namespace_id[node] != namespace_id:
            return Admissibility.IMPOSSIBLE
        if depth and self.depth[node] and self.depth[node] != depth:
            return Admissibility.IMPOSSIBLE
        absent = parent == node and not (self.kv[node] or self.coming[node])
        if absent and (refused or self.has_refused(self.key(node))):
            return Admissibility.ABSENT_PARENT
        if parent is None or parent == node:
            return Admissibility.FINE
        if not (self.kv[parent] or self.coming[parent]) or self.namespace_id[parent] != namespace_id:
            return Admissibility.ABSENT_PARENT
        if depth and self.depth[parent] and depth != self.depth[parent] + 1:
            return Admissibility.IMPOSSIBLE
        if self.parent_node[node] >= 0 and self.parent_node[node] != parent:
            return Admissibility.IMPOSSIBLE
        if self.children[node] and self.is_below(parent, node):
            return Admissibility.IMPOSSIBLE
        return Admissibility.FINE

    def refuse(self, pages: Iterable[bytes]) -> None:
        """Note that these pages were not stored, for want of room or of a page before them.

        Until they come again, no state of theirs is stored, and one that is there does not wait for them.
        """
        for page in pages:
            node = self.find(page)
            if node >= 0 and self.kv[node]:  # stored in another layout
                continue
            self._refused.pop(page, None)
            self._refused[page] = None
            if node >= 0 and self.states[node]:
                self.number[node] = 0
                self.note_evictable(node)
        while len(self._refused) > _MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    def has_refused(self, page: bytes) -> bool:
        """Return whether this page was not stored when it came last."""
        return page in self._refused

    def admit(self, pages: Iterable[bytes]) -> None:
        """Forget that these pages were refused."""
        for page in self._refused.keys() & pages:
            del self._refused[page]

    def expect(self, node: int, depth: int, namespace_id: int) -> None:
        """Record that a page object is being written on this node, so that other pages may follow it.

        The caller holds the node.
        """
        self.coming[node] += 1
        if self._refused:
            self._refused.pop(self.key(node), None)
        if not self.kv[node]:
            self.namespace_id[node] = namespace_id
        if depth:
            self.depth[node] = depth

    def hold(self, page: bytes) -> int:
        """Keep a page and all pages before it from eviction; return its node, for `release`.

        The page need not be stored.
        """
        node = self.obtain(page)
        self.holds[node] += 1
        return node

    def release(self, node: int) -> None:
        """Undo one `hold`."""
        self.holds[node] -= 1
        if not self.holds[node]:
            if self.first[node] >= 0:
                self.note_evictable(node)
            else:
                self.tidy(node)

    def expected_all(self, nodes: Sequence[int]) -> None:
        """Undo one `expect` of each of these nodes, after the write has succeeded or failed.

        If nothing is stored or being written on a node, the depth of the page is unknown again.
        """
        at = np.array(nodes, np.int64)
        columns = self.columns
        np.subtract.at(columns["coming"], at, 1)
        columns["depth"][at[(columns["coming"][at] == 0) & (columns["first"][at] < 0)]] = 0

    def are_plain(self, nodes: Ints, parents: Ints, namespace_id: int) -> bool:
        """Return whether `pages_added` can add the first page objects of these distinct nodes, in this order.

        A plain page follows the page before it in the order, a page that is stored and not broken, or no
        known page (NONE). Nothing is stored on it or follows it.
        """
        columns = self.columns
        if (
            (columns["first"][nodes] >= 0).any()
            or columns["children"][nodes].any()
            or columns["flags"][nodes].any()
        ):
            return False
        chained = np.zeros(len(nodes), np.bool_)
        chained[1:] = parents[1:] == nodes[:-1]
        above = parents[~chained & (parents >= 0)]
        return bool(
            (columns["kv"][above] > 0).all()
            and not (columns["flags"][above] & BROKEN).any()
            and (columns["namespace_id"][above] == namespace_id).all()
        )

    def is_leaf(self, node: int) -> bool:
        """Return whether the page has an object, no page follows it, and no call holds it."""
        return self.first[node] >= 0 and not self.children[node] and not self.holds[node]

    def is_useless(self, node: int) -> bool:
        """Return whether no restore can use the objects of this page."""
        return not self.live[node] or bool(self.flags[node] & BROKEN)

    def is_promising(self, node: int, namespace_id: int, *, attached: bool) -> bool:
        """Return whether a restore could use an object of this namespace as soon as the object is stored.

        If `attached` is True, the object is attached to the page of `node`, as a state is. Otherwise the
        object is that page.
        """
        return bool(self.kv[node] or self.coming[node]) if attached else namespace_id not in self._hybrid

    def recount_orphans(self) -> bool:
        """Count the orphans again if some may have come or gone; return whether this was necessary."""
        orphans_changed, self.orphans_changed = self.orphans_changed, False
        if orphans_changed:
            self.recount_worth()
        return orphans_changed

    def worth(self) -> Worth:
        """Return how many stored bytes are restorable and dead, and how many objects are orphans.

        This takes some 4 ms for a million objects, and 0.2 s more if `recount_orphans` has to count.
        """
        self.recount_orphans()
        columns, used = self.columns, self.used
        live, flags, nbytes, kv, states = (
            columns[name][:used] for name in ("live", "flags", "nbytes", "kv", "states")
        )
        orphan, live = flags & BROKEN != 0, live > 0
        return Worth(
            int(nbytes[live & ~orphan].sum()),
            int(nbytes[~live & ~orphan].sum()),
            int((kv + states)[orphan].sum()),
        )

    def recount_all(self, namespace_ids_with_states: Iterable[int]) -> None:
        """Recompute all counts after many objects were taken in at once."""
        kv = np.flatnonzero(self.columns["kv"])
        namespace_ids, counts = np.unique(self.columns["namespace_id"][kv], return_counts=True)
        self._kv_of = Counter(dict(zip(namespace_ids.tolist(), counts.tolist(), strict=True)))
        self._hybrid.update(namespace_ids_with_states)
        self.recount_worth()
        # Two objects of one page may name different parents. Only the first parent is linked. The node of the
        # other parent may have neither an object nor a child. Free such nodes.
        first, children = (self.columns[name][: self.used] for name in ("first", "children"))
        for node in np.flatnonzero((first < 0) & (children == 0)).tolist():
            self.tidy(node)

    def recount_worth(self) -> None:
        """Recompute which pages are live, broken and unproven, and the sum of unproven bytes."""
        self.recount(self.stateless())
        self.unproven_bytes = int(self.columns["nbytes"][self.columns["flags"] & SERVED == 0].sum())

    def note_evictable(self, *nodes: int) -> None:
        """Record that pages may have become evictable, or that their ranks may have changed.

        A page becomes evictable when no page follows it any more, or when no restore can use it any more.
        """
        # Nothing is noted before the eviction order has asked for the first time, so that filling a store
        # costs nothing here.
        if self._evictable is not None:
            self._evictable.update(nodes)
            if len(self._evictable) > _MAX_EVICTABLE:
                self._evictable = None

    def take_evictable(self) -> set[int] | None:
        """Return the pages that may have become evictable since the last call.

        Returns None if they are not known: at the first call, or if there were too many to note.
        """
        found, self._evictable = self._evictable, set()
        return found

    def weigh(self, node: int, nbytes: int) -> None:
        """Add to the payload bytes of a page; `nbytes` is negative for an object that left the page."""
        self.nbytes[node] += nbytes
        if not self.flags[node] & SERVED:
            self.unproven_bytes += nbytes

    def restart_wait(self, node: int, number: int) -> None:
        """Let a useless page wait for the object that makes it useful, like a new page with this number."""
        self.number[node] = number
        if self.flags[node] & SERVED:
            self.flags[node] &= 0xFF ^ SERVED
            self.unproven_bytes += self.nbytes[node]

    def page_added(self, node: int, parent: int | None) -> None:
        """Account for one more page object on this node. The object names `parent` (None: not known)."""
        self.kv[node] = kv = self.kv[node] + 1
        if parent is not None and self.parent_node[node] < 0:
            self._follow(node, parent)
        if kv == 1:
            self._first_page_added(node)

    def pages_added(self, nodes: Ints, parents: Ints, lengths: npt.NDArray[Any], namespace_id: int) -> None:
        """Do `weigh` and `page_added` for the first page objects of these nodes, in this order.

        `parents` has NONE where none is known. Nothing may be stored on the nodes or follow them. A parent is
        the node before it in the order, or a page of this namespace that is stored and not broken.
        """
        columns, follows = self.columns, parents[parents >= 0]
        columns["kv"][nodes] = 1
        columns["nbytes"][nodes] = lengths
        columns["parent_node"][nodes] = parents
        np.add.at(columns["children"], follows, 1)
        self._kv_of[namespace_id] += len(nodes)
        if namespace_id in self._hybrid:
            self.unproven_bytes += int(lengths.sum())
            return
        # Without states, a page counts itself in `live`, and its parent counts it.
        columns["live"][nodes] = 1
        np.add.at(columns["live"], follows, 1)
        columns["flags"][nodes] |= SERVED

    def page_removed(self, node: int) -> None:
        """Account for the removal of one page object from this node."""
        self.kv[node] -= 1
        if not self.kv[node]:
            self._last_page_removed(node)

    def state_added(self, node: int) -> None:
        """Account for one more object attached to this page; prefixes of its namespace need states now."""
        self.states[node] += 1
        if not self.kv[node]:
            self.flags[node] |= BROKEN
        self.require_states(self.namespace_id[node])
        self._count_live(node)

    def state_removed(self, node: int) -> None:
        """Account for the removal of one object that was attached to this page."""
        self.states[node] -= 1
        if self.hinted and not self.states[node]:
            self.state_rank[node] = 0.0
        self._uncount_live(node)

    def _follow(self, node: int, parent: int) -> None:
        """Link a new page to the page before it; if that would close a circle, flag it CUT instead."""
        if self.children[node] and self.is_below(parent, node):
            self.flags[node] |= CUT
            self.orphans_changed = True
            return
        self.parent_node[node] = parent
        self.children[parent] += 1
        # The page is stored in another layout as well, and was not broken while its parent was not known.
        # From now on, this page and all pages after it are broken if the parent is.
        if self.kv[node] > 1:
            self.orphans_changed = True
        if self.live[node]:
            self._count_live(parent)

    def _first_page_added(self, node: int) -> None:
        """Account for the first page object of a node."""
        flags = self.flags
        namespace_id, up = self.namespace_id[node], self.parent_node[node]
        self._kv_of[namespace_id] += 1
        if flags[node] & CUT or (up >= 0 and (not self.kv[up] or flags[up] & BROKEN)):
            flags[node] |= BROKEN
        else:
            flags[node] &= 0xFF ^ BROKEN
            if self.live[node]:
                self._mark_served(node)
        if self.children[node]:  # the pages after this page may no longer be orphans
            self.orphans_changed = True
        if self._refused:
            self._refused.pop(self.key(node), None)
        if namespace_id not in self._hybrid:
            self._count_live(node)

    def _last_page_removed(self, node: int) -> None:
        """Account for the loss of a node's last page object.

        The node has no parent from now on. The page before it gets the later of the two times of last use,
        and the higher of the two ranks.
        """
        up = self.parent_node[node]
        namespace_id = self.namespace_id[node]
        self._kv_of[namespace_id] -= 1
        self.flags[node] = (self.flags[node] | BROKEN) & (0xFF ^ CUT)
        self.orphans_changed |= self.children[node] > 0
        if namespace_id not in self._hybrid:
            self._uncount_live(node)
        if up >= 0:
            self.parent_node[node] = NONE
            self.children[up] -= 1
            if self.hinted:
                self.values.inherit(up, node)
            self.tick[up] = max(self.tick[up], self.tick[node])
            if self.live[node]:
                self._uncount_live(up)
            if self.first[up] >= 0:
                self.note_evictable(up)
            else:
                self.tidy(up)
        if self.hinted:
            self.rank[node] = 0.0

    def _count_live(self, node: int) -> None:
        """Add 1 to the `live` of a page, for a state or a live child; if it was 0, go on with the parent.

        The parent then has one more live child.
        """
        live, up, flags = self.live, self.parent_node, self.flags
        #   page     1 <- 2 <- 3 <- 4 [state]
        #   live     1    1    1    1             before
        #   live     1    2    1    1             after a state came to page 2; the walk ends at page 2,
        #                                         because page 1 counts page 2 already
        while node >= 0:
            live[node] += 1
            if live[node] > 1:
                return
            if not flags[node] & (BROKEN | SERVED):
                flags[node] |= SERVED
                self.unproven_bytes -= self.nbytes[node]
            node = up[node]

    def _uncount_live(self, node: int) -> None:
        """Take 1 from the `live` of a page, for a state or a live child; if 0 is left, go on with the parent.

        The parent then has one live child less.
        """
        live, up = self.live, self.parent_node
        while node >= 0:
            live[node] -= 1
            # Something else keeps the page live, and so all pages before it stay live.
            if live[node]:
                return
            if self.is_leaf(node):
                self.note_evictable(node)
            node = up[node]

    def _mark_served(self, node: int) -> None:
        """Flag a live page as SERVED, and all pages before it up to a page that has the flag already."""
        flags, up = self.flags, self.parent_node
        while node >= 0 and not flags[node] & (SERVED | BROKEN):
            flags[node] |= SERVED
            self.unproven_bytes -= self.nbytes[node]
            node = up[node]


def hold_new(
    table: RestorablePages,
    pages: Sequence[bytes],
    parents: Sequence[bytes | None],
    depths: Sequence[int],
    namespace_id: int,
) -> dict[bytes, int] | None:
    """Do `hold`, `admissibility` and `expect` for page objects that are to be written in this order.

    A depth of 0 is not known. Returns the nodes of all pages and parents, which are held once each.
    Returns None, with nothing changed, if a page is known already, given twice or given before its
    parent, or if one of them may not be stored.
    """
    position = {page: i for i, page in enumerate(pages)}
    if len(position) < len(pages):
        return None
    before = [NONE if parent is None else position.get(parent, NONE) for parent in parents]
    told, above = np.array(depths, np.int64), np.array(before, np.int64)
    known = (above >= 0) & (told > 0) & (told[above] > 0)
    if (above >= np.arange(len(pages))).any() or (told[known] != told[above[known]] + 1).any():
        return None
    held: dict[bytes, int] = {}
    for i in np.flatnonzero(above < 0).tolist():
        parent = parents[i]
        if parent is not None:
            held[parent] = node = table.find(parent)
            if node < 0 or not _may_follow(table, node, depths[i], namespace_id):
                return None
    nodes = [table.obtain(page) for page in pages]
    at = np.array(nodes)
    columns = table.columns
    # A node of a page that is not stored may exist, because a call holds it or a page follows it.
    if any(columns[name][at].any() for name in ("holds", "children", "coming")) or (
        (columns["first"][at] >= 0).any()
    ):
        for node in nodes:
            table.tidy(node)
        return None
    table.admit(pages)
    columns["holds"][at] = columns["coming"][at] = 1
    columns["namespace_id"][at] = namespace_id
    columns["depth"][at] = told
    for node in held.values():
        table.holds[node] += 1
    held.update(zip(pages, nodes, strict=True))
    return held


def _may_follow(table: RestorablePages, parent: int, depth: int, namespace_id: int) -> bool:
    """Return whether a new page of this depth (0: not known) may follow the page of `parent`."""
    return bool(
        (table.kv[parent] or table.coming[parent])
        and table.namespace_id[parent] == namespace_id
        and (not depth or not table.depth[parent] or depth == table.depth[parent] + 1)
    )
