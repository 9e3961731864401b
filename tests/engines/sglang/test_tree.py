"""tiercache in the place of SGLang's tree, where a pass cannot be measured; tests/servers has all else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.engines.sglang.conftest import STAND_IN


def test_a_pass_that_cannot_be_measured_costs_its_measurement_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(STAND_IN.parents[1])
    from tiercache.integrations.sglang_tree.tree import TierCacheTree  # late: it imports SGLang's kernels

    ticks, noted = [], []
    failing = SimpleNamespace(tick=lambda: ticks.append(1), note_pass=lambda *_: 1 / 0)
    tree = SimpleNamespace(_controller=failing, _computed=[(0, 5)], _round=1.0, _computed_at=3.0)
    TierCacheTree.check_hicache_events(tree)
    assert "ZeroDivisionError" in caplog.text
    failing.note_pass = lambda *told: noted.append(told)
    tree._computed.append((5, 9))  # private: nothing else of a tree is needed
    tree._computed_at = tree._round + 2.0
    TierCacheTree.check_hicache_events(tree)
    assert (len(ticks), noted) == (2, [([(5, 9)], pytest.approx(2.0))])
