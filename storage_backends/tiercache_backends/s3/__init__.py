"""The `s3` backend: packs of objects in a bucket of any S3 service; see docs/stores.md.

Principles:

1. The bucket is the truth; each process knows of it what it has learned, which may lag behind.
2. A pack is written once and never changed; a name is used once.
3. Gets and sets wait for no listing; what is not known yet is a miss.
4. Nothing is evicted: that is for the lifecycle rules of the bucket, and what they remove is a miss.
"""

from tiercache_backends.s3.store import S3Backend

__all__ = ["S3Backend"]
