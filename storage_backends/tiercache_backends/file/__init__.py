"""The `file` store, the default local store: preallocated slabs with an LMDB catalog.

Read `catalog.py` for the format, then `store.py`.
"""

from tiercache_backends.file.store import FileBackend

__all__ = ["FileBackend"]
