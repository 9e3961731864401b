"""Payload on its way in and out: `windows` and `receiving` for every way, the rest for data connections.

`sessions` says who may open data connections (docs/design/payload.md), `port` who does, `channel` moves the
bytes, and `calls` are those that they carry, served in `call_threads`. `wire.data` has the frames.
"""
