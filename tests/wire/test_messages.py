"""Round trips of messages over the wire, and readable errors for bytes that are no such message."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import WireError
from tiercache.storage.base import TierReport
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

KEYS = st.lists(
    st.builds(ObjectKey, st.sampled_from(PoolName), st.binary(min_size=64, max_size=64)), max_size=20
)
METAS = st.builds(
    ObjectMeta, st.binary(max_size=64), st.integers(0, 2**64 - 1), st.sampled_from([b"", bytes(16)]),
    st.none() | st.binary(min_size=32, max_size=32), st.none() | st.integers(0, 2**32 - 1),
)  # fmt: skip


def over_the_wire(message: pb.Keys) -> pb.Keys:
    return pb.Keys.FromString(message.SerializeToString())


CLIENT_SIDE = (Outcome.UNAVAILABLE, Outcome.REFUSED)


@given(KEYS)
def test_keys(keys: list[ObjectKey]) -> None:
    assert messages.read_keys(over_the_wire(messages.keys(keys)), 20) == keys


@given(METAS)
def test_metas(meta: ObjectMeta) -> None:
    assert messages.read_meta(pb.ObjectMeta.FromString(messages.meta(meta).SerializeToString())) == meta


@given(st.lists(st.booleans(), max_size=40))
def test_bits(flags: list[bool]) -> None:
    assert messages.read_bits(messages.bits(flags), len(flags)) == flags


@given(st.lists(st.sampled_from(Outcome), max_size=40))
def test_outcomes(outcomes: list[Outcome]) -> None:
    """UNAVAILABLE and REFUSED from a daemon's own store arrive as ERROR."""
    expected = [Outcome.ERROR if outcome in CLIENT_SIDE else outcome for outcome in outcomes]
    assert messages.read_outcomes(messages.outcomes(outcomes).outcomes, len(outcomes)) == expected


def test_every_outcome_of_a_daemon_has_the_number_of_the_proto() -> None:
    numbers = {f"OUTCOME_{o.name}": messages.NUMBER_OF[o] for o in Outcome if o not in CLIENT_SIDE}
    assert numbers | {"OUTCOME_UNSPECIFIED": 0} == dict(pb.Outcome.items())


def test_an_outcome_of_a_newer_version_is_an_error_of_that_object_alone() -> None:
    assert messages.read_outcomes([1, 77, 0], 3) == [Outcome.HIT, Outcome.ERROR, Outcome.ERROR]


@given(st.binary(max_size=200))
def test_any_message_of_keys_is_read_or_refused(data: bytes) -> None:
    try:
        message = pb.Keys.FromString(data)
    except DecodeError:
        return
    try:
        keys = messages.read_keys(message, 5)
    except WireError:
        return
    assert len(keys) <= 5
    assert all(len(key.digest) == 64 and isinstance(key.pool, PoolName) for key in keys)


@pytest.mark.parametrize(
    "message",
    [
        pb.Keys(digests=bytes(63), pools=["kv"], pool_of=b"\0"),
        pb.Keys(digests=bytes(64), pools=["kv"], pool_of=b"\0\0"),
        pb.Keys(digests=bytes(64), pools=["kv"], pool_of=b"\1"),
        pb.Keys(digests=bytes(64), pools=["nothing of ours"], pool_of=b"\0"),
        pb.Keys(digests=bytes(64 * 6), pools=["kv"], pool_of=bytes(6)),
    ],
)
def test_malformed_keys_are_refused(message: pb.Keys) -> None:
    with pytest.raises(WireError):
        messages.read_keys(message, 5)


def test_too_few_or_too_many_answers_are_refused() -> None:
    for numbers in ([], [1, 1, 1]):
        with pytest.raises(WireError):
            messages.read_outcomes(numbers, 2)
    for data in (b"", b"\0\0"):
        with pytest.raises(WireError):
            messages.read_bits(data, 8)


REPORTS = st.builds(
    TierReport,
    name=st.text(max_size=32),
    kind=st.text(max_size=8),
    health=st.sampled_from(["serving", "read-only", "out"]),
    why=st.text(max_size=40),
    last_read=st.none() | st.floats(0, 2e9),
    details=st.dictionaries(st.text(max_size=8), st.text(max_size=8) | st.integers(-(2**63), 2**63 - 1)),
    **dict.fromkeys(
        (field.name for field in fields(TierReport) if field.type == "int"), st.integers(0, 2**64 - 1)
    ),
)


@given(REPORTS)
def test_reports_of_tiers(report: TierReport) -> None:
    sent = pb.TierReport.FromString(messages.tier(asdict(report)).SerializeToString())
    assert TierReport(**messages.read_tier(sent)) == report


@given(st.lists(st.sampled_from(["", "memory", "file", "file-2"]), max_size=20))
def test_tiers_of_objects(names: list[str]) -> None:
    sent = pb.ScanReply(tiers=messages.tiers(names)).SerializeToString()
    assert messages.read_tiers(pb.ScanReply.FromString(sent).tiers, len(names)) == names


def test_an_older_daemon_tells_no_tiers() -> None:
    assert messages.read_tiers(pb.ScanReply().tiers, 2) == ["", ""]
    assert messages.tiers(["", ""]) is None, "a store without tiers sends what an older daemon sends"


@pytest.mark.parametrize(
    "message",
    [
        pb.Tiers(names=["file"], tier_of=b"\0"),
        pb.Tiers(names=["file"], tier_of=b"\0\0\0"),
        pb.Tiers(names=["file"], tier_of=b"\0\1"),
        pb.Tiers(tier_of=b"\0\0"),
    ],
)
def test_malformed_tiers_are_refused(message: pb.Tiers) -> None:
    with pytest.raises(WireError, match="tiers"):
        messages.read_tiers(message, 2)


def test_names_and_figures_arrive_sorted() -> None:
    """Protobuf's maps have another order in every process, in which `status` would show them."""
    figures = {f"figure{n}": n for n in range(30)} | {"state": "open"}
    sent = pb.UsageReply(texts=messages.texts(figures), numbers=messages.numbers(figures))
    found = pb.UsageReply.FromString(sent.SerializeToString())
    for joined in (messages.joined, messages.read_mapping):
        assert joined(found.texts, found.numbers) == figures
        assert list(joined(found.texts, found.numbers)) == sorted(figures)
    report = pb.TierReport(texts=found.texts, numbers=found.numbers)
    assert list(messages.read_tier(report)["details"]) == sorted(figures)


def test_a_mapping_is_bounded() -> None:
    both = {"model": "m", "page_size": 64}
    assert messages.read_mapping(messages.texts(both), messages.numbers(both)) == both
    with pytest.raises(WireError):
        messages.read_mapping({str(i): "" for i in range(40)}, {str(i): i for i in range(40)})
    with pytest.raises(WireError):
        messages.read_mapping({"model": "x" * 5000}, {})


COUNTED = b"\x7a\x80\x80\x04" + bytes(1 << 16)
"""A field of a newer version, so large that the fields of its message are counted."""


@given(st.binary(max_size=200))
def test_any_large_message_is_read_as_protobuf_reads_it_or_refused(data: bytes) -> None:
    try:
        expected = pb.SetHeader.FromString(COUNTED + data)
    except DecodeError:
        expected = None
    try:
        found = messages.read_message(COUNTED + data, pb.SetHeader, 1 << 20)
    except WireError:
        return  # stricter than protobuf, which also reads groups
    assert found == expected


@given(METAS, st.binary(max_size=60))
def test_fields_of_newer_versions_are_passed_over(meta: ObjectMeta, more: bytes) -> None:
    numbers = b"\xf8\x3f\x96\x01" + b"\xf9\x3f" + bytes(8) + b"\xfd\x3f" + bytes(4)
    whole = pb.SetHeader(metas=[messages.meta(meta)])
    newer = COUNTED + b"\xfa\x3f" + bytes([len(more)]) + more + numbers
    found = messages.read_message(newer + whole.SerializeToString(), pb.SetHeader, 1 << 20)
    assert list(found.metas) == list(whole.metas)


@pytest.mark.parametrize(
    "data",
    [b"\x12\xff\xff\xff\xff\x0f", b"\x12", b"\x0a\x02\xff\xff", b"\x80" * 11, b"\x00\x00", b"\x13",
     b"\x11\x00", b"\x12\x05abc"],
    ids=["a huge length", "no length", "a bad number inside", "an endless number", "field 0", "a group",
         "a cut fixed field", "cut bytes"],
)  # fmt: skip
@pytest.mark.parametrize("before", [b"", COUNTED], ids=["small", "counted"])
def test_what_is_no_message_is_refused(before: bytes, data: bytes) -> None:
    with pytest.raises(WireError):
        messages.read_message(before + data, pb.SetHeader, 1 << 20)
