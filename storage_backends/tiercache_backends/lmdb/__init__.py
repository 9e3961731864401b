"""The `lmdb` store: values inside LMDB, for small objects and for several processes that share one directory.

Read `records.py` first, then `store.py`.
"""

from tiercache_backends.lmdb.store import LmdbBackend

__all__ = ["LmdbBackend"]
