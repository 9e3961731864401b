"""Objects are divided among messages, each byte once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tiercache.wire.pieces import Piece, cut


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 20), st.integers(1, 5))
def test_pieces_cover_every_item_once_in_order(lengths: list[int], chunk: int, most: int) -> None:
    messages = list(cut(lengths, chunk, most))
    pieces = [piece for message in messages for piece in message]
    for message in messages:
        assert 0 < len(message) <= most
        assert sum(p.stop - p.start for p in message) <= chunk
    at = dict.fromkeys(range(len(lengths)), 0)
    for item, start, stop in pieces:
        assert start == at[item]
        assert stop > start or lengths[item] == 0
        at[item] = stop
    assert at == dict(enumerate(lengths))
    assert [p.item for p in pieces] == sorted(p.item for p in pieces)
    assert Piece(0, 0, 0) not in pieces or lengths[0] == 0
