"""Checks of what a controller is given: pools, prompts, and the slots and tokens of a commit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tiercache.core import HitPolicy, Locations, PoolName, TokenArray, as_tokens
from tiercache.errors import GeometryError, SlotError, TokenError
from tiercache.keys import Identity
from tiercache.pools import DevicePool

if TYPE_CHECKING:
    from tiercache.controller.admission import Admission


def own_tokens(tokens: Any) -> TokenArray:
    """Return the tokens of a prompt as an array that nobody else writes to; TokenError if there are none."""
    prompt = as_tokens(tokens)
    if not len(prompt):
        raise TokenError("the prompt is empty; pass at least one token")
    # The engine may reuse its token buffer while the request goes on.
    return prompt.copy() if prompt is tokens or prompt.base is not None else prompt


def check_pages(admission: Admission, pages: Mapping[PoolName, Locations] | None, full: int) -> None:
    """Raise SlotError unless `pages` agree with the first `full` pages of the admission's own table."""
    for pool, slots in (pages or {}).items():
        expected = admission.pages.get(pool)
        if expected is None:
            raise SlotError(
                f"slots came for pages of pool {pool}, and the page pools of this controller are"
                f" {', '.join(admission.pages) or 'none, only states'}; leave {pool} out of `pages`"
            )
        if len(slots) < full or not np.array_equal(expected[:full], slots[:full]):
            raise SlotError(
                f"the slots given for pool {pool} are not this admission's; commit the slots of its own table"
            )


def check_tokens(admission: Admission, tokens: TokenArray, page_size: int) -> None:
    """Raise InputError for tokens that are not the admission's, SlotError for too many."""
    admission.check_sequence(tokens)
    covered = admission.slots.pages
    if len(tokens) // page_size > covered:
        raise SlotError(
            f"{len(tokens)} tokens fill more than the {covered} pages of this admission; extend it before"
            " computing them"
        )


def split_pools(
    identity: Identity, pools: Mapping[PoolName, DevicePool]
) -> tuple[list[PoolName], list[PoolName]]:
    """Return the page pools and the state pools among `pools`; there may be no page pool.

    Raises GeometryError for a pool that the index cannot serve.
    """
    if not pools:
        raise GeometryError(
            "no pool is registered, so there is nothing to keep; pass the device pool of the KV pages, of the"
            " states, or of both"
        )
    kinds: dict[HitPolicy, list[PoolName]] = {HitPolicy.ALL_PAGES: [], HitPolicy.TRAILING_PAGES: []}
    for name, pool in pools.items():
        geometry = pool.geometry
        if geometry.pool is not name:
            raise GeometryError(
                f"the pool given as {name} is a {geometry.pool} pool; name each by its own kind"
            )
        if geometry.page_size != identity.page_size:
            raise GeometryError(
                f"pool {name} has pages of {geometry.page_size} tokens and the identity {identity.page_size};"
                " make them equal"
            )
        if geometry.hit_policy is HitPolicy.TRAILING_PAGES and geometry.trailing != 1:
            raise GeometryError(
                f"pool {name} needs its last {geometry.trailing} pages; the controller serves whole prefixes"
                " and single states"
            )
        kinds[geometry.hit_policy].append(name)
    if kinds[HitPolicy.ALL_PAGES] and PoolName.KV not in kinds[HitPolicy.ALL_PAGES]:
        raise GeometryError(
            f"there are page pools ({', '.join(kinds[HitPolicy.ALL_PAGES])}), and none is named kv; a hit is"
            " anchored on KV pages, or on the tokens alone where there are only states"
        )
    return kinds[HitPolicy.ALL_PAGES], kinds[HitPolicy.TRAILING_PAGES]
