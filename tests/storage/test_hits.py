"""The hit rate and the saved time: what they are, and what they say if they are not known."""

from __future__ import annotations

import pytest

from tiercache.storage.hits import Hits


@pytest.mark.parametrize(
    ("hits", "rate", "why"),
    [
        (Hits(), None, "no prompt was looked up"),
        (Hits(asked_tokens=640), 0.0, ""),
        (Hits(asked_tokens=640, restored_tokens=160), 0.25, ""),
        (Hits(asked_tokens=640, restored_tokens=700), 1.0, ""),
        (Hits(asked_tokens=640, restored_tokens=1300), None, "clients read pages"),
        (Hits(restored_tokens=64), None, "clients read pages"),
        (Hits(asked_tokens=640, restored_tokens=64, unsized_objects=1), None, "1 objects were looked up"),
    ],
)
def test_the_rate_and_why_there_is_none(hits: Hits, rate: float | None, why: str) -> None:
    assert hits.token_hit_rate == rate
    assert hits.why_no_rate.startswith(why)
    assert bool(hits.why_no_rate) == (rate is None)


def test_saved_time_is_of_tokens_whose_prefill_has_a_known_time() -> None:
    some = Hits(100, 90, timed_tokens=60, prefill_seconds=3.0, read_seconds=0.5)
    assert some.saved_seconds == 2.5
    assert some.why_not_saved == "no worker has registered how long the prefill of 30 of the tokens takes"
    slow = Hits(100, 60, timed_tokens=60, prefill_seconds=3.0, read_seconds=9.0)
    assert (slow.saved_seconds, slow.why_not_saved) == (-6.0, "")
    assert (Hits().saved_seconds, Hits().why_not_saved) == (None, "nothing was restored")
    assert Hits.total([some, slow]) - slow == some
    assert Hits.total([]) == Hits()
