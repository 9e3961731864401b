"""Namespaces as a transaction sees them; a value that cannot be read is passed over, so that only its own namespace is lost."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from tiercache_backends.lmdb.environment import Environment
from tiercache_backends.local.names import Name, unpack_name


def name_in(environment: Environment, txn: Any, namespace: bytes) -> Name | None:
    """Return what is stored of one namespace; None where that is nothing, or cannot be read."""
    value = txn.get(namespace, db=environment.names)
    if value is not None:
        with suppress(ValueError):
            return unpack_name(namespace, value)
    return None


def names_in(environment: Environment, txn: Any) -> dict[bytes, Name]:
    """Return what is stored of all namespaces, by namespace."""
    names: dict[bytes, Name] = {}
    with txn.cursor(environment.names) as cursor:
        for namespace, value in cursor:
            with suppress(ValueError):
                names[bytes(namespace)] = unpack_name(bytes(namespace), value)
    return names


def free_number(environment: Environment, txn: Any) -> int:
    """Return a number that stands for no namespace, not even for one that cannot be read."""
    known = max((name.number for name in names_in(environment, txn).values()), default=0)
    return max(known, int(txn.stat(environment.names)["entries"])) + 1
