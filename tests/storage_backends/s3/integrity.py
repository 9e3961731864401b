"""A check of what an `s3` store knows of its bucket: every sum, counted anew."""

from __future__ import annotations

from tiercache_backends.s3 import S3Backend


def check_directory(store: S3Backend) -> None:
    """Raise AssertionError unless what a store knows of its bucket adds up; no other call is running."""
    directory = store._directory
    assert not directory._writes, "nothing is being written"
    packs, sizes, objects = directory._packs, directory._sizes, directory._objects
    assert directory._used == sum(sizes.values())
    assert directory._useless | directory._coming | packs.keys() <= sizes.keys()
    live = dict.fromkeys(packs, 0)
    for digest, place in objects.items():
        assert place.entry.key.digest == digest, "a digest leads to its entry"
        assert place.number not in place.pack.dead, "an object that is found is not dead"
        live[place.pack.name] += 1
    assert live == {name: pack.live for name, pack in packs.items()}, "live entries are counted"
    assert directory._payload == sum(place.entry.meta.length for place in objects.values())
