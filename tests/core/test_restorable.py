"""`restorable_prefixes` against a brute force that enumerates every prefix."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core import HitPolicy, PoolName, PoolPresence, restorable_prefixes
from tiercache.errors import InputError


def brute_force(presence, anchor=PoolName.KV):
    run = 0
    if anchor is None:
        run = len(next(iter(presence.values())).present)
    while anchor and run < len(presence[anchor].present) and presence[anchor].present[run]:
        run += 1

    def allows(pool, p):
        first = 0 if pool.hit_policy is HitPolicy.ALL_PAGES else max(0, p - pool.trailing)
        return all(pool.present[i] for i in range(first, p))

    everyone = [p for p in range(1, run + 1) if all(allows(pool, p) for pool in presence.values())]
    alone = {
        n: max((p for p in range(1, run + 1) if allows(pool, p)), default=0)
        for n, pool in presence.items()
        if n is not anchor
    }
    return run, everyone, alone


@st.composite
def presences(draw, anchored=True):
    pages = draw(st.integers(0, 12))
    others = st.sampled_from([PoolName.MAMBA, PoolName.SWA, PoolName.INDEXER])
    names = draw(st.sets(others, min_size=0 if anchored else 1))
    bits = st.lists(st.booleans(), min_size=pages, max_size=pages)
    drawn = {PoolName.KV: PoolPresence(HitPolicy.ALL_PAGES, np.array(draw(bits), bool))} if anchored else {}
    for name in names:
        drawn[name] = PoolPresence(
            draw(st.sampled_from(HitPolicy)), np.array(draw(bits), bool), draw(st.integers(1, 14))
        )
    return drawn


@given(presences())
def test_equals_the_brute_force(presence):
    run, everyone, alone = brute_force(presence)
    result = restorable_prefixes(presence)
    assert result.kv_run_pages == run
    assert list(result.restorable_prefix_pages) == everyone
    assert result.kv_hit_pages == max(everyone, default=0)
    assert result.extra_pool_hit_pages == alone


@given(presences(anchored=False))
def test_without_an_anchor_the_whole_sequence_is_the_run(presence):
    run, everyone, alone = brute_force(presence, None)
    result = restorable_prefixes(presence, None)
    assert (result.kv_run_pages, list(result.restorable_prefix_pages)) == (run, everyone)
    assert result.extra_pool_hit_pages == alone


def test_no_pool_at_all():
    for anchor in (PoolName.KV, None):
        with pytest.raises(InputError, match="no pool was given"):
            restorable_prefixes({}, anchor)


def test_worked_example():
    """KV pages 0 to 5 stored, states under pages 1 and 3: 2 and 4 are restorable, 5 and 3 are not."""
    states = np.zeros(6, bool)
    states[[1, 3]] = True
    result = restorable_prefixes(
        {
            PoolName.KV: PoolPresence(HitPolicy.ALL_PAGES, np.ones(6, bool)),
            PoolName.MAMBA: PoolPresence(HitPolicy.TRAILING_PAGES, states),
        }
    )
    assert (result.kv_hit_pages, result.restorable_prefix_pages, result.extra_pool_hit_pages) == (
        4,
        (2, 4),
        {PoolName.MAMBA: 4},
    )


def test_nothing_is_stored():
    result = restorable_prefixes({PoolName.KV: PoolPresence(HitPolicy.ALL_PAGES, np.zeros(0, bool))})
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, ())


@pytest.mark.parametrize("trailing", [0, -1, 2**31 + 1, 2**63, 1.5, None, True])
def test_a_prefix_needs_some_last_pages(trailing):
    kv = PoolPresence(HitPolicy.ALL_PAGES, np.ones(3, bool))
    states = PoolPresence(HitPolicy.TRAILING_PAGES, np.zeros(3, bool), trailing)
    with pytest.raises(InputError, match="trailing="):
        restorable_prefixes({PoolName.KV: kv, PoolName.MAMBA: states})


def test_pools_cover_the_same_pages_and_the_anchor_is_one_of_them():
    kv = PoolPresence(HitPolicy.ALL_PAGES, np.ones(3, bool))
    with pytest.raises(InputError, match="covers 2 pages"):
        restorable_prefixes(
            {PoolName.KV: kv, PoolName.SWA: PoolPresence(HitPolicy.ALL_PAGES, np.ones(2, bool))}
        )
    with pytest.raises(InputError, match="missing"):
        restorable_prefixes({PoolName.SWA: kv})
