"""The `s3` backend: packs of objects in a bucket of any S3 service."""
