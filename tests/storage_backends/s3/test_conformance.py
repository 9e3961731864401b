"""The contract, over a real S3 service."""

from __future__ import annotations

import obstore
import pytest

from tests.storage_backends.s3.hooks import S3Hooks, medium, place
from tests.storage_backends.s3.server import bucket, needs_weed
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, HIT, STORED
from tiercache.testing.objects import content, key, payload, to_get, to_set


@pytest.mark.slow
@needs_weed
class TestS3(S3Hooks):
    def test_every_single_flipped_bit_is_found(self, store: StorageBackend) -> None:
        """The test of the suite, with one write of the pack instead of one for each bit."""
        size = 64
        names = range(size * 8)
        store.set([to_set(key(n), payload(n, size)) for n in [*names, "sound", "too"]])
        path, data = medium(store, key(0))
        for n in names:
            data[place(store, key(n)).entry.offset + n // 8] ^= 1 << n % 8
        obstore.put(bucket(), path, bytes(data))
        items = [to_get(key(n), size) for n in ["sound", *names, "too"]]
        assert store.get(items) == [HIT, *[CORRUPT] * len(names), HIT]
        assert [content(items[0]), content(items[-1])] == [payload("sound", size), payload("too", size)]
        assert store.usage().objects == 2
        assert store.set([to_set(key(n), payload(n, size)) for n in names]) == [STORED] * len(names)
