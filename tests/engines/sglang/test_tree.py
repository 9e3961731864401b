"""tiercache in the place of SGLang's tree, where a round fails; tests/servers has all else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.engines.sglang.conftest import STAND_IN


def test_a_round_that_fails_costs_what_it_would_have_noted_and_ranks_end_that_would_differ(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(STAND_IN.parents[1])
    from tiercache.integrations.sglang_tree.tree import TierCacheTree  # late: it imports SGLang's kernels

    noted: list[object] = []
    failing = SimpleNamespace(tick=lambda: 1 / 0, note_pass=lambda *_: [][0])
    tree = SimpleNamespace(
        _controller=failing, _computed=[(0, 5)], _round=1.0, _computed_at=3.0, page_size=4,
        _is_one_of_several=True, _has_loaded=False,
    )  # fmt: skip
    with pytest.raises(ZeroDivisionError):
        TierCacheTree.check_hicache_events(tree)
    tree._is_one_of_several = False  # private: nothing else of a tree is needed
    TierCacheTree.check_hicache_events(tree)
    assert all(error in caplog.text for error in ("ZeroDivisionError", "IndexError"))
    failing.note_pass = lambda *told: noted.append(told)
    tree._computed.append((5, 9))  # private: nothing else of a tree is needed
    tree._computed_at = tree._round + 2.0
    TierCacheTree.check_hicache_events(tree)
    tree._computed, tree._has_loaded = [(0, 9)], True  # private: as above
    TierCacheTree.check_hicache_events(tree)
    assert noted == [([(5, 9)], pytest.approx(2.0))]
