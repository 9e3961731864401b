"""Restorable depths of a prompt, and which object is missing first at each other depth, and why.

The depths of a prompt are divided by what is missing first:

    KV        1 2 3 4 5 6 7 . 9 10          page 8 is missing
    states        ◆       ◆
    depths        3       7                 restorable
              1,2   4 5 6                   gaps: no state
                            8 9 10          gap: page 8, although pages 9 and 10 are there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, product
from typing import Any, Final

import numpy as np

from tiercache.cli.store.forest import Forest, is_attached
from tiercache.cli.terminal import clean, count_text, ranges_text, time_text
from tiercache.core import (
    HitPolicy,
    ObjectKey,
    PoolName,
    PoolPresence,
    TokenArray,
    restorable_prefixes,
    reusable_pages,
)
from tiercache.keys import object_key, page_keys, sglang_page_keys
from tiercache.storage.base import FLOPS_FIELD, SPEED_FIELD
from tiercache.storage.history import Cause, History, PastRemoval
from tiercache.text import readable_age

_SHOWN: Final = 4
"""Number of removals that one line names."""
_DAY_S: Final = 86_400
_WORDS: Final = {
    Cause.EVICTED: "evicted",
    Cause.DELETED: "deleted",
    Cause.CORRUPT: "found corrupt and dropped",
}


_COMBINATIONS: Final = 16
"""Maximum number of combinations of layouts that are tried.

A combination has one layout of each pool. Two layouts of one pool may be shards, which a restore needs
together, or dtypes, of which a restore needs only one. Layout digests do not say which of the two they are,
so the combination that can be restored deepest is explained."""


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """Objects of one pool and one layout (geometry and shard) along the prompt."""

    pool: PoolName
    layout: bytes
    """Layout digest."""
    presence: PoolPresence
    """Whether the object of each page is stored: `present[0]` is that of the first page, at depth 1."""
    has_pages: bool
    """Whether the objects belong to pages: they are pages, or attached to pages as states are."""

    def key_of(self, page: bytes) -> ObjectKey:
        """Return the key of this layout's object on a page."""
        return object_key(self.pool, self.layout, page)


@dataclass(frozen=True, slots=True)
class PromptPath:
    """Stored part of a prompt in one namespace.

    Depths count pages, from 1.
    """

    namespace: bytes
    page_size: int
    """Tokens of a page."""
    tokens: int
    """Number of tokens of the prompt."""
    keys: Sequence[bytes]
    """Page key of each page of the prompt."""
    layouts: Sequence[Layout]

    @property
    def is_states_alone(self) -> bool:
        """Whether the namespace has objects, and all are states without pages."""
        return bool(self.layouts) and not any(found.has_pages for found in self.layouts)

    @property
    def matched(self) -> int:
        """Number of pages of the prompt with at least one stored object."""
        return int(
            np.logical_or.reduce(
                [np.zeros(len(self.keys), np.bool_), *(found.presence.present for found in self.layouts)]
            ).sum()
        )

    @property
    def limit(self) -> int:
        """Deepest depth that a restore may have, because one token must be left to compute."""
        return reusable_pages(self.tokens, self.page_size)

    def restorable(self) -> tuple[Sequence[Layout], Sequence[int]]:
        """Return one layout of each pool, and their restorable depths, in pages; the deepest combination.

        Both are empty if no combination has KV pages where the namespace needs them.
        """
        by_pool: dict[PoolName, list[Layout]] = {}
        for found in self.layouts:
            by_pool.setdefault(found.pool, []).append(found)
        anchor = None if self.is_states_alone else PoolName.KV
        if anchor and anchor not in by_pool:
            return (), ()
        choices: list[tuple[Sequence[Layout], Sequence[int]]] = []
        for choice in islice(product(*by_pool.values()), _COMBINATIONS):
            depths = restorable_prefixes(
                {found.pool: found.presence for found in choice}, anchor
            ).restorable_prefix_pages
            choices.append((choice, [depth for depth in depths if depth <= self.limit]))
        return max(choices, key=lambda found: list(found[1])[-1:])


def keys_of_prompt(
    namespace: bytes, tokens: TokenArray, page_size: int, extra: bytes, known: Callable[[bytes], bool]
) -> list[bytes]:
    """Return the page keys of a prompt: those of SGLang if only they are `known`, otherwise tiercache's own.

    `extra` are the bytes that the page keys include for adapters and images (`keys.sequence_extra`).
    """
    own = page_keys(namespace, tokens, page_size, extra=extra)
    if extra or not own or any(map(known, own)):
        return own
    others = sglang_page_keys(namespace, tokens, page_size)
    return others if any(map(known, others)) else own


def follow(
    forest: Forest, namespace: bytes, tokens: TokenArray, page_size: int, keys: Sequence[bytes]
) -> PromptPath:
    """Return the stored part of a prompt, whose pages have these keys."""
    # All layouts of the namespace, each with whether its objects are attached to pages, as states are, and
    # whether they belong to pages at all.
    layouts: dict[tuple[PoolName, bytes], tuple[bool, bool]] = {}
    for page in forest.pages.values():
        alone = page.is_states_alone
        for entry in page.entries:
            if entry.meta.namespace == namespace:
                place = (entry.key.pool, entry.key.layout)
                attached, has_pages = layouts.get(place, (False, False))
                layouts[place] = attached or is_attached(entry), has_pages or not alone
    found = {place: np.zeros(len(keys), np.bool_) for place in layouts}
    for n, key in enumerate(keys):
        for entry in forest.pages[key].entries if key in forest.pages else ():
            if (present := found.get((entry.key.pool, entry.key.layout))) is not None:
                present[n] = True
    made = [
        Layout(
            PoolName(pool),
            layout,
            PoolPresence(
                HitPolicy.ALL_PAGES if has_pages and not attached else HitPolicy.TRAILING_PAGES,
                found[pool, layout],
            ),
            has_pages,
        )
        for (pool, layout), (attached, has_pages) in sorted(layouts.items())
    ]
    return PromptPath(namespace, page_size, len(tokens), keys, made)


@dataclass(frozen=True, slots=True)
class Gap:
    """Consecutive depths, in pages, at which the same is missing first."""

    first: int
    last: int
    pool: str
    layout: bytes
    """Layout digest of what is missing; empty if nothing of it is stored, so that it is not known."""
    missing: int | None
    """Depth of the missing page; None if a state at each of the depths is missing."""
    behind: Sequence[int]
    """Depths of stored pages that cannot be reached because of the missing page."""
    removed: Sequence[PastRemoval]
    """Known removals of what is missing, by depth (`page`), the deepest first."""

    @property
    def reason(self) -> str:
        """Cause of the latest removal; "not stored" if no removal is known."""
        return str(max(self.removed, key=lambda one: one.at).cause) if self.removed else "not stored"

    def record(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return {
            "first": self.first,
            "last": self.last,
            "pool": self.pool,
            "layout": self.layout.hex() or None,
            "missing": "state" if self.missing is None else "page",
            "page": self.missing,
            "reason": self.reason,
            "removed": [
                {"depth": one.page, "cause": str(one.cause), "at": one.at, "tier": one.tier or None}
                for one in self.removed
            ],
            "stored_behind": list(self.behind),
        }


@dataclass(frozen=True, slots=True)
class Explanation:
    """Explanation of what can be restored of a prompt in one namespace."""

    path: PromptPath
    history: History
    depths: Sequence[int]
    """Restorable depths in pages, ascending."""
    gaps: Sequence[Gap]

    @property
    def deepest(self) -> int:
        """Deepest restorable depth, in pages; 0 if there is none."""
        return self.depths[-1] if self.depths else 0

    @property
    def known_since(self) -> float | None:
        """Time from which on every removal is known; None if some are not."""
        times = [None if tier.why else tier.since for tier in self.history.tiers]
        if not times or None in times:
            return None
        return max(*(at for at in times if at is not None), self.history.forgotten or 0.0)


def explain_path(path: PromptPath, history: History, *, states: bool) -> Explanation:
    """Return the explanation of a prompt's stored part.

    `states`: the namespace needs states besides pages. The pages of `history` are those of `path`.
    """
    choice, depths = path.restorable()
    kv = next((found for found in choice if found.presence.hit_policy is HitPolicy.ALL_PAGES), None)
    attached = [found for found in choice if found.presence.hit_policy is not HitPolicy.ALL_PAGES]
    if states and not attached:
        depths = ()
    limit = path.limit
    run = len(path.keys) if path.is_states_alone else 0
    if kv is not None and not path.is_states_alone:
        run = int(np.logical_and.accumulate(kv.presence.present).sum())
    by_page: dict[int, list[PastRemoval]] = {}
    for removal in history.removals:
        by_page.setdefault(removal.page + 1, []).append(removal)
    known = {found.layout for found in path.layouts}
    gaps: list[Gap] = []
    restorable = set(depths)
    for depth in range(1, min(run, limit) + 1):
        if depth not in restorable:
            lacking = next((found for found in attached if not found.presence.present[depth - 1]), None)
            layout = b"" if lacking is None else lacking.layout
            lost = [
                one._replace(page=depth)
                for one in by_page.get(depth, ())
                if (one.layout == layout if layout else one.layout not in known)
            ]
            pool = "states" if lacking is None else str(lacking.pool)
            first = depth
            if gaps and (gaps[-1].last, gaps[-1].layout) == (depth - 1, layout):
                # The depth before this one lacks a state of the same layout.
                before = gaps.pop()
                first, lost = before.first, [*lost, *before.removed]
            gaps.append(Gap(first, depth, pool, layout, None, (), lost))
    if run < limit:
        layout = b"" if kv is None else kv.layout
        lost = [
            one._replace(page=run + 1)
            for one in by_page.get(run + 1, ())
            if not layout or one.layout == layout
        ]
        there = () if kv is None else np.flatnonzero(kv.presence.present[run:limit]) + run + 1
        gaps.append(
            Gap(run + 1, limit, str(PoolName.KV), layout, run + 1, [int(page) for page in there], lost)
        )
    return Explanation(path, history, depths, gaps)


def sentence(gap: Gap, found: Explanation, now: float) -> str:
    """Return what is missing at the depths of a gap, and why, as one sentence."""
    if gap.missing is not None:
        why = f"was {_losses(gap.removed, now)}" if gap.removed else f"is {_unwritten(found, now)}"
        behind = (
            f"; {count_text(len(gap.behind), 'page')} behind it ({ranges_text(gap.behind)}) cannot be used"
        )
        return f"{gap.pool} of page {gap.missing} {why}{behind if gap.behind else ''}"
    what = f"no state of {gap.pool}" if gap.layout else "no state, and none is stored anywhere"
    by_depth: dict[int, list[PastRemoval]] = {}
    for removal in gap.removed:
        by_depth.setdefault(removal.page, []).append(removal)
    lost = [f"the one at {depth} was {_losses(some, now)}" for depth, some in by_depth.items()]
    if len(lost) > _SHOWN:
        lost[_SHOWN:] = [f"{len(lost) - _SHOWN:,} more were removed"]
    if len(by_depth) < gap.last - gap.first + 1:
        lost.append(("the others are " if lost else "") + _unwritten(found, now))
    return f"{what}: {', '.join(lost)}"


def _losses(removals: Sequence[PastRemoval], now: float) -> str:
    """Return when and why one object went; from several tiers, perhaps at several times."""
    by_time: dict[tuple[Cause, str], list[str]] = {}
    for one in removals:
        by_time.setdefault((one.cause, moment(one.at, now)), []).append(clean(one.tier))
    words = [
        _WORDS[cause] + (f" from {' and '.join(tiers)}" if any(tiers) else "") + f" {at}"
        for (cause, at), tiers in by_time.items()
    ]
    return " and ".join(words)


def _unwritten(found: Explanation, now: float) -> str:
    since = found.known_since
    if any(tier.why for tier in found.history.tiers):
        return "not in the tiers that answer"
    if since is None:
        return "not there, and removals are not known"
    return f"not written since {clock_text(since, now)}, before which nothing is known"


def moment(at: float, now: float) -> str:
    """Return a time with its age, such as "at 10:41:03 (2min ago)"."""
    return f"at {clock_text(at, now)} ({readable_age(max(0.0, now - at))} ago)"


def clock_text(at: float, now: float) -> str:
    """Return a time of day, with the date if it is not within a day of `now`."""
    return time_text(at, "%H:%M:%S" if abs(now - at) < _DAY_S else "%Y-%m-%d %H:%M:%S")


def differing(
    one: Mapping[str, str | int], other: Mapping[str, str | int]
) -> dict[str, tuple[str | int | None, str | int | None]]:
    """Return the fields in which two identities differ, with the values of both."""
    names = [name for name in dict.fromkeys([*one, *other]) if name not in (FLOPS_FIELD, SPEED_FIELD)]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}
