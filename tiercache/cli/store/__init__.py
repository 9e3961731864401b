"""The operator's verbs: they show, check and empty a store, through the interface of all storage backends.

A stopped store is opened from its directory, without resizing it. The store of a running daemon is reached
through the `grpc` backend.
"""
