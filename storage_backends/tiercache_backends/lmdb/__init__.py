"""The `lmdb` store, which suits small objects, and several processes that share one directory.

Read `records.py` (the format) first, then `store.py`.
"""

from tiercache_backends.lmdb.store import LmdbBackend

__all__ = ["LmdbBackend"]
