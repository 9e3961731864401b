"""The operator's verbs: they look at a store, check it and empty it, through the contract of every store.

A stopped store is opened from its directory alone, as it lies there; a daemon's is asked through the `grpc` backend.
"""

from __future__ import annotations

from tiercache.cli.store.doctor import doctor
from tiercache.cli.store.flush import flush
from tiercache.cli.store.inspect import inspect
from tiercache.cli.store.ls import ls
from tiercache.cli.store.status import ping, status
from tiercache.cli.store.verify import verify

VERBS = (status, ping, ls, inspect, verify, flush, doctor)
"""In the order in which the help lists them."""

__all__ = ["VERBS"]
