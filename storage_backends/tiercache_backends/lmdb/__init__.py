"""The `lmdb` store, which suits small objects, and several processes that share one directory.

Principles:

1. Readers never wait; one thread of all processes writes at a time.
2. A process that dies anywhere leaves a database that the others use on.
3. LMDB's own structure is examined after each death; a damaged database is put aside, and the store is empty.

Read `records.py` (the format) first, then `store.py`.
"""

from tiercache_backends.lmdb.store import LmdbBackend

__all__ = ["LmdbBackend"]
