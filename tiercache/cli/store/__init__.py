"""The operator's verbs: show, check and empty a store, through the interface that every storage backend has.

A stopped store is opened from its directory, without resizing it; the store of a running daemon is reached through the `grpc` backend.
"""
