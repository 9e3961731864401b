"""The `s3` backend: packs of objects in a bucket of any S3 service; see docs/stores.md."""

from tiercache_backends.s3.store import S3Backend

__all__ = ["S3Backend"]
