"""Insertion of computed pages and states: the index adopts some of their slots and rejects the others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tiercache.core import ABSENT, Locations, PoolName, Tier, full_pages
from tiercache.errors import InputError
from tiercache.index.base import InsertedPages, PlacedState, Span
from tiercache.index.node import Node
from tiercache.index.radix_tree import RadixTree

States = Mapping[int, Mapping[PoolName, int]]
"""Device slots of states, by depth (in pages) and then by pool."""


def check_pages(tree: RadixTree, tokens: int, pages: Mapping[PoolName, Locations]) -> int:
    """Return the number of pages that the slots in `pages` cover, for a request of `tokens` tokens.

    Without page pools, these are all whole pages. Raises InputError for arrays that do not fit.
    """
    if not tree.page_pools:
        if pages:
            raise InputError(
                f"slots came for pages of {', '.join(pages)}, and this index has only states; pass states"
            )
        return full_pages(tokens, tree.page_size)
    if set(pages) != set(tree.page_pools):
        raise InputError(
            f"slots came for {', '.join(pages) or 'no pool'}; pass them for {', '.join(tree.page_pools)}"
        )
    depth = len(next(iter(pages.values())))
    for pool, slots in pages.items():
        if slots.shape != (depth,) or slots.dtype != np.int64 or (depth and int(slots.min()) < 0):
            raise InputError(
                f"{pool}: every page pool needs {depth} int64 slots >= 0, one per page, not {slots!r}"
            )
    if depth > full_pages(tokens, tree.page_size):
        raise InputError(
            f"{depth} pages of {tree.page_size} tokens are more than {tokens} tokens; pass whole pages only"
        )
    return depth


def check_states(tree: RadixTree, states: States, depth: int) -> None:
    """Raise InputError for a state outside the first `depth` pages, an unknown pool, or a negative slot."""
    for at, slots in states.items():
        if not 1 <= at <= depth:
            raise InputError(
                f"a state at depth {at} is outside the {depth} pages that came with it; depths are in pages"
            )
        for pool, slot in slots.items():
            tree.check_state_pool(pool)
            if slot < 0:
                raise InputError(f"{pool}: {slot} is not a slot")


def adopt_pages(
    tree: RadixTree, node: Node, start: int, depth: int, pages: Mapping[PoolName, Locations]
) -> tuple[dict[PoolName, InsertedPages], list[Node]]:
    """Enter the given slots for those pages [start, depth) of the path to `node` that the device lacks.

    `pages` has slots from page 0 on. Returns the result for every slot from page `start` on, and the changed
    nodes, which the caller announces (see `Counters`).

        page on the device      given slot
        absent                  adopted
        present in that slot    nothing to do: the index has it already
        present in another      duplicate
        pending                 private: a transfer is filling another slot with the page
    """
    if not tree.page_pools:
        return {}, []
    held = tree.gather(node, depth, start)[Tier.DEVICE]
    absent, present = held == ABSENT, held >= 0
    given = np.stack([pages[pool][start:] for pool in tree.page_pools])
    table, duplicate, private = np.where(present, held, given), present & (held != given), held < ABSENT
    missing = absent.any(axis=0)
    # Fast path: usually only the last pages of a deep path are absent.
    first = int(missing.argmax()) if missing.any() else depth - start
    changed: list[Node] = []
    given, absent_here, missing = given[:, first:], absent[:, first:], missing[first:]
    for at, edge, part in tree.edge_slices(Span(node, start + first, depth)):
        if missing[part].any():
            np.copyto(at.where[Tier.DEVICE, :, edge], given[:, part], where=absent_here[:, part])
            tree.counters.recount(at)
            changed.append(at)
    answers = {
        pool: InsertedPages(table[row], absent[row], duplicate[row], private[row])
        for row, pool in enumerate(tree.page_pools)
    }
    return answers, changed


def adopt_states(
    tree: RadixTree, node: Node, states: States, now: int, changed: list[Node]
) -> tuple[list[PlacedState], list[PlacedState]]:
    """Enter the states that the device lacks; return the adopted and the rejected states.

    A state is rejected if a page before its depth is in no tier, or if the index has the state in another
    slot, present or pending. A state that the index has in the same slot already is in neither list.

    `now` is the tick of the insert. Adds the changed nodes to `changed`.
    """
    adopted: list[PlacedState] = []
    rejected: list[PlacedState] = []
    complete = _complete_depth(node) if states else 0
    for depth in sorted(states):
        for pool, slot in states[depth].items():
            at, number = node.covering(depth), tree.number[pool] - len(tree.page_pools)
            held = at.state(Tier.DEVICE, number) if at.end == depth else ABSENT
            if depth > complete or held not in (ABSENT, slot):
                rejected.append(PlacedState(depth, pool, slot))
            elif held == ABSENT:
                adopted.append(PlacedState(depth, pool, slot))
                at = at if at.end == depth else tree.split(at, depth)
                if at.states is None:
                    at.created = now
                at.set_state(Tier.DEVICE, number, slot)
                at.last_access = now
                tree.counters.recount_states(at)
                changed.append(at)
    return adopted, rejected


def _complete_depth(node: Node) -> int:
    """Return how many leading pages of the path to `node` every page pool has in some tier."""
    depth, at = node.end, node
    while (parent := at.parent) is not None:
        if at.complete_pages < at.pages:
            depth = parent.end + at.complete_pages
        at = parent
    return depth
