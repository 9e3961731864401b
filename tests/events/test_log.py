"""The numbered batches, and their encoding as vLLM's own classes read it."""

from __future__ import annotations

import msgspec
import pytest

from tiercache.core import PoolName
from tiercache.errors import StorageError, WireError
from tiercache.events import EventKind, EventLog, KVEvent, Medium, ObjectGroup, Place, runs_of
from tiercache.events.base import StoredObject
from tiercache.events.encoding import decode_batch, encode_batch, namespace_label
from tiercache.events.log import KEYS_PER_BATCH

KV = ObjectGroup(PoolName.KV, b"n" * 32, b"l" * 32, 64)
STATES = ObjectGroup(PoolName.MAMBA, b"n" * 32, b"m" * 32, 64)
DISK = Place(Medium.STORAGE, "nvme")


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def removed(*numbers: int) -> KVEvent:
    return KVEvent(EventKind.REMOVED, DISK, KV, [key(n) for n in numbers])


def test_batches_are_numbered_one_by_one_and_the_latest_are_replayed():
    log = EventLog(4, clock=lambda: 1000.0)
    first = log.next
    assert [log.publish([removed(n)]).sequence for n in range(6)] == list(range(first, first + 6))
    assert (log.oldest, log.next) == (first + 2, first + 6)
    assert [log.follows(first + n) for n in (1, 2, 6, 7)] == [False, True, True, False]
    some = list(log.replay([], first + 3))
    assert [batch.sequence for batch in some] == list(range(first + 3, first + 6))
    assert [batch.events[0].keys[0] for batch in some] == [key(n) for n in range(3, 6)]
    assert [*log.replay([], first + 6)] == []
    [cleared] = log.replay([], first + 1)
    assert (cleared.sequence, cleared.events) == (first + 5, (KVEvent(EventKind.CLEARED, None),))


def test_a_replay_that_is_slower_than_the_log_fails():
    log = EventLog(4)
    for n in range(4):
        log.publish([removed(n)])
    answer = log.replay([], log.oldest)
    next(answer)
    for n in range(5):
        log.publish([removed(n)])
    with pytest.raises(StorageError, match="forgotten"):
        next(answer)


def test_a_later_log_begins_behind_the_numbers_of_an_earlier_one():
    early, late = EventLog(clock=lambda: 1000.0), EventLog(clock=lambda: 1001.0)
    for n in range(1000):
        early.publish([removed(n)])
    assert late.next > early.next
    assert late.next < 2**53


def test_a_log_keeps_a_bounded_number_of_keys_and_always_the_last_batch():
    log = EventLog(4)
    for _ in range(4):
        log.publish([removed(*range(KEYS_PER_BATCH * 2 - 1))])
    assert log.next - log.oldest == 2
    log.publish([removed(*range(KEYS_PER_BATCH * 9))])
    assert log.next - log.oldest == 1
    log.publish([removed(1)])
    assert log.next - log.oldest == 1
    log.publish([removed(2)])
    assert log.next - log.oldest == 2


def test_objects_of_which_each_follows_the_other_share_an_event():
    objects = [
        StoredObject(KV, key(2), key(1), 2), StoredObject(KV, key(3), key(2), 3),
        StoredObject(STATES, key(3), key(3), 3), StoredObject(STATES, key(4), key(4), 4),
        StoredObject(KV, key(9), None, None), StoredObject(KV, key(10), key(8), 7),
    ]  # fmt: skip
    events = runs_of(DISK, objects)
    assert [(event.group, event.keys, event.parent, event.depth) for event in events] == [
        (KV, [key(2), key(3)], key(1), 2), (STATES, [key(3)], None, 3), (STATES, [key(4)], None, 4),
        (KV, [key(9)], None, None), (KV, [key(10)], key(8), 7),
    ]  # fmt: skip
    assert runs_of(DISK, []) == []


STORED = KVEvent(EventKind.STORED, DISK, KV, [key(2), key(3)], key(1), 2, [7] * 128)
EVENTS = [STORED, removed(2), KVEvent(EventKind.CLEARED, DISK), KVEvent(EventKind.CLEARED, None)]


def test_our_reader_reads_all_fields():
    label = bytes.fromhex(namespace_label(KV.namespace))
    group = KV._replace(namespace=label)
    time, events = decode_batch(encode_batch(12.5, EVENTS))
    assert time == 12.5
    assert events == [
        KVEvent(EventKind.STORED, DISK, group, [key(2), key(3)], key(1), 2, [7] * 128),
        KVEvent(EventKind.REMOVED, DISK, group._replace(page_size=0), [key(2)]),
        *EVENTS[2:],
    ]


def test_a_payload_does_not_reveal_the_namespace():
    assert KV.namespace not in encode_batch(1.0, EVENTS)


@pytest.mark.parametrize(
    "payload",
    [
        b"", b"\xc1", b"\x00", msgspec.msgpack.encode([1.0]), msgspec.msgpack.encode([1.0, [1]]),
        msgspec.msgpack.encode([1.0, [{"type": []}]]), msgspec.msgpack.encode(["x", []]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved"}]]),
        msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": "ab", "pool": "kv"}]]),
        msgspec.msgpack.encode(
            [1.0, [{"type": "BlockRemoved", "block_hashes": [b"k"], "pool": "kv", "medium": "MOON"}]]
        ),
        msgspec.msgpack.encode(
            [1.0, [{"type": "BlockRemoved", "block_hashes": [b"k"], "pool": "kv", "medium": "GPU",
                    "namespace": "xx"}]]
        ),
        b"\x91" * 2000 + b"\x00", encode_batch(1.0, EVENTS)[:-1], encode_batch(1.0, EVENTS) + b"x",
    ],
)  # fmt: skip
def test_a_payload_that_is_no_batch_is_refused(payload):
    with pytest.raises(WireError):
        decode_batch(payload)


def test_a_payload_that_is_too_long_is_refused():
    with pytest.raises(WireError, match="too long"):
        decode_batch(bytes((16 << 20) + 1))


def test_events_of_other_types_are_left_out():
    assert decode_batch(msgspec.msgpack.encode([1.0, [{"type": "BlockMoved"}]])) == (1.0, [])
