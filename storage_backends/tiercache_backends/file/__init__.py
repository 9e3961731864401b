"""The `file` store, the default local store: preallocated slabs with a log as their catalog.

Principles:

1. An object is visible when its record is committed, and only after its bytes are in their blocks.
2. Every record and every payload is checked when it is read: neither disk nor catalog is believed.
3. Slabs are preallocated as the store grows; a full disk throttles sets, and stops nothing else.

Read `catalog.py` for the format, then `store.py`.
"""

from tiercache_backends.file.store import FileBackend

__all__ = ["FileBackend"]
