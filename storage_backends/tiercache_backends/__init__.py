"""The stores that come with tiercache: `memory`, `file`, `lmdb` and `grpc`.

`tiercache` finds them by entry point only.
"""
