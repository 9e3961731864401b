"""The operator's verbs: they look at a store, check it and empty it, through the contract of every store.

A stopped store is opened from its directory alone, as it lies there; a daemon's is asked through the `grpc` backend.
"""
