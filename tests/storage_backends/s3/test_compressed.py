"""Compressed objects in a bucket: what is stored, read by others, damaged, or from a later version."""

from __future__ import annotations

import random
from pathlib import Path

import obstore
import pytest
from tiercache_backends.s3 import S3Backend
from tiercache_backends.s3.choices import TRIAL
from tiercache_backends.s3.compression import Codec
from tiercache_backends.s3.pack import NewEntry, pack_head, read_head

from tests.storage_backends.s3.hooks import medium, open_s3, place
from tests.storage_backends.s3.server import bucket, needs_weed
from tests.storage_backends.s3.test_compression import floats
from tiercache.core import ObjectKey, Outcome
from tiercache.testing.objects import key, to_get, to_set

pytestmark = [pytest.mark.slow, needs_weed]

OBJECTS = TRIAL + 8
SIZE = 9000


def fill(store: S3Backend) -> dict[ObjectKey, bytes]:
    """Store objects of one pool, the last of which are compressed."""
    objects = {key(number): floats("bf16", SIZE // 2, number) for number in range(OBJECTS)}
    for part in (list(objects)[:TRIAL], list(objects)[TRIAL:]):
        assert set(store.set([to_set(k, objects[k]) for k in part])) == {Outcome.STORED}
    return objects


def test_others_read_compressed_objects_whatever_their_settings(tmp_path: Path) -> None:
    with open_s3(tmp_path, compression="smallest") as store:
        objects = fill(store)
        usage = store.usage()
        assert usage.details["compression_kv"].startswith("planes2 1.")
        codecs = [place(store, k).entry.codec for k in objects]
        assert codecs == [Codec.RAW] * TRIAL + [Codec.PLANES2] * (OBJECTS - TRIAL)
        assert usage.payload_bytes == OBJECTS * SIZE
    with open_s3(tmp_path, compression="none") as other:
        items = [to_get(k, SIZE) for k in objects]
        assert set(other.get(items)) == {Outcome.HIT}
        assert [b"".join(item.buffers)[:SIZE] for item in items] == list(objects.values())
        assert other.set([to_set(key("more"), objects[key(0)])]) == [Outcome.STORED]
        assert place(other, key("more")).entry.codec == Codec.RAW


def test_damage_anywhere_in_a_compressed_object_is_found(tmp_path: Path) -> None:
    with open_s3(tmp_path, compression="smallest", refresh="60s") as store:
        objects = fill(store)
        victims = list(objects)[TRIAL:]
        rng = random.Random(5)
        name, data = medium(store, victims[0])
        places = {k: place(store, k).entry for k in victims}
        heads = [places[k].offset + rng.randrange(12) for k in victims[:4]]
        bodies = [places[k].offset + rng.randrange(12, places[k].stored) for k in victims[4:]]
        for at in heads + bodies:
            data[at] ^= 1 << rng.randrange(8)
        obstore.put(bucket(), name, bytes(data))
        items = [to_get(k, SIZE) for k in victims]
        before = [b"".join(item.buffers) for item in items]
        assert set(store.get(items)) == {Outcome.CORRUPT}
        assert [b"".join(item.buffers) for item in items] == before
        assert store.set([to_set(k, objects[k]) for k in victims]) == [Outcome.STORED] * len(victims)
        items = [to_get(k, SIZE) for k in victims]
        assert set(store.get(items)) == {Outcome.HIT}


def test_an_object_of_a_later_version_s_codec_is_a_miss_and_stays(tmp_path: Path) -> None:
    data = floats("bf16", SIZE // 2, 0)
    with open_s3(tmp_path, compression="none") as store:
        assert store.set([to_set(key(0), data)]) == [Outcome.STORED]
        name, pack = medium(store, key(0))
        entry = place(store, key(0)).entry
        head = pack_head([NewEntry(entry.key, entry.meta, 99, entry.stored)])
        assert read_head(head, len(pack)) is not None
        obstore.put(bucket(), name, head + bytes(pack[len(head) :]))
    with open_s3(tmp_path) as store:
        assert store.get([to_get(key(0), SIZE)]) == [Outcome.MISS]
        assert store.exists([key(0)]) == [True]
