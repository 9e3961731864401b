"""`lmdb`: values inside LMDB, for small objects and for several processes that share one directory. Read `records.py`, then `store.py`."""

from tiercache_backends.lmdb.store import LmdbBackend

__all__ = ["LmdbBackend"]
