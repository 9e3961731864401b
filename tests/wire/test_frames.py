"""Frames by hand are what the generated code writes and reads."""

from __future__ import annotations

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tiercache.errors import WireError
from tiercache.wire.frames import Piece, cut, decode, encode
from tiercache.wire.v1 import storage_pb2 as pb

SIZES = st.lists(st.integers(0, 2**40), max_size=5)


@given(SIZES, st.lists(st.binary(max_size=300), max_size=5))
def test_a_frame_is_the_message_that_protobuf_writes(sizes: list[int], parts: list[bytes]) -> None:
    header = pb.GetPieces(items=range(len(sizes)), sizes=sizes)
    frame = encode(header, [memoryview(part) for part in parts])
    message = pb.GetReply.FromString(frame)
    assert message.pieces == header
    assert message.payload == b"".join(parts)
    assert decode(message.SerializeToString(), pb.GetPieces) == (header, b"".join(parts))


@given(st.binary(max_size=200))
def test_any_bytes_are_read_as_protobuf_reads_them_or_refused(data: bytes) -> None:
    try:
        expected = pb.GetReply.FromString(data)
    except DecodeError:
        expected = None
    try:
        header, payload = decode(data, pb.GetPieces)
    except WireError:
        return  # stricter than protobuf, which also reads groups
    if expected is not None:
        assert (header, payload) == (expected.pieces, expected.payload)


@given(st.binary(max_size=60), st.binary(max_size=60), st.binary(min_size=1, max_size=20))
def test_fields_of_newer_versions_are_passed_over(first: bytes, second: bytes, payload: bytes) -> None:
    newer = (
        b"\xfa\x3f"
        + bytes([len(first)])
        + first
        + b"\xf8\x3f\x96\x01"
        + b"\xf9\x3f"
        + bytes(8)
        + b"\xfd\x3f"
        + bytes(4)
    )
    frame = encode(pb.GetPieces(sizes=[len(payload)]), [memoryview(payload)])
    header, found = decode(newer + frame + b"\xfa\x3f" + bytes([len(second)]) + second, pb.GetPieces)
    assert (list(header.sizes), bytes(found)) == ([len(payload)], payload)


@pytest.mark.parametrize(
    "data",
    [
        b"\x12\xff\xff\xff\xff\x0f",
        b"\x12",
        b"\x0a\x02\xff\xff",
        b"\x80" * 11,
        b"\x00\x00",
        b"\x13",
        b"\x11\x00",
        b"\x12\x05abc",
    ],
    ids=[
        "a huge length",
        "no length",
        "a bad header",
        "an endless number",
        "field 0",
        "a group",
        "a cut fixed field",
        "a cut payload",
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data, pb.GetPieces)


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
