"""Mooncake's client library: how it is loaded and kept quiet, what its codes mean, and idle clients."""

from __future__ import annotations

import ctypes
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple
from weakref import WeakSet

from tiercache.core import Outcome
from tiercache.errors import ConfigError, MissingExtraError

_FATAL: Final = 3
"""Level of glog below which nothing is written."""
_NEEDED: Final = (
    "batch_get_into_multi_buffers",
    "batch_is_exist",
    "batch_put_from_multi_buffers",
    "batch_remove",
    "get_into_ranges",
    "get_size",
    "register_buffer",
    "remove_by_regex",
    "unregister_buffer",
)
_SYSTEM: Final = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
}
"""Packages of Debian by the libraries that Mooncake needs of the system, even without RDMA."""

FULL: Final = -200
INVALID: Final = -600
NOT_READY: Final = -703
ABSENT: Final = -704
LEASE_OVER: Final = -707
TRANSFER: Final = -800
_ABSENT: Final = (NOT_READY, ABSENT, LEASE_OVER)


@cache
def library() -> Any:
    """Return the module `mooncake.store`, loaded and silent.

    Raises ConfigError if it, or a library that it needs, is missing or too old.
    """
    quiet = not {"MC_LOG_LEVEL", "GLOG_minloglevel"} & os.environ.keys()
    try:
        module: Any = import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise MissingExtraError("storage type 'mooncake'", "mooncake", error) from error
    except ImportError as error:
        raise ConfigError(_missing(str(error))) from error
    if lacking := [name for name in _NEEDED if not hasattr(module.MooncakeDistributedStore, name)]:
        raise ConfigError(
            f"this version of Mooncake has no {lacking[0]}; install mooncake-transfer-engine-non-cuda"
            " 0.3.13.post1 or later"
        )
    if quiet:
        _silence(module)
    return module


def _missing(text: str) -> str:
    """Return the sentence for an import that failed with `text`."""
    found = re.search(r"(lib[\w.+-]+\.so[.\d]*)", text)
    package = _SYSTEM.get(found[1]) if found else None
    if package:
        return f"Mooncake needs {found[1]} of the system; install it with `apt-get install {package}`"  # type: ignore[index]
    return f"Mooncake's library cannot be loaded ({text}); install mooncake-transfer-engine-non-cuda again"


def _silence(module: Any) -> None:
    """Stop glog's lines on stderr: a cache that misses writes one line for each object."""
    try:
        # fLI::FLAGS_minloglevel of libglog. The library sets it again from MC_LOG_LEVEL only.
        level = ctypes.c_int.in_dll(ctypes.CDLL(module.__file__), "_ZN3fLI17FLAGS_minloglevelE")
    except (OSError, ValueError):  # another build of glog; its lines are a nuisance and no fault
        return
    level.value = _FATAL


class MooncakeClient:
    """One client of a master; every call may take long, and none is made after `close`.

    Keys are names, buffers are lists of addresses and of sizes in bytes, in registered memory.

    Thread safety: any thread, as the library says.
    """

    def __init__(self) -> None:
        self._module: Final = library()
        self._raw: Final = self._module.MooncakeDistributedStore()
        _clients.add(self)

    def setup(self, spec: ClientSpec) -> int:
        """Connect to the master; return 0, or a code if that fails. May block for 90 s."""
        *places, tenant = spec
        return int(self._raw.setup(*places, **({} if tenant == "default" else {"tenant_id": tenant})))

    def register(self, address: int, nbytes: int) -> int:
        """Register memory; return 0 if that succeeds."""
        return int(self._raw.register_buffer(address, nbytes))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._raw.unregister_buffer(address)

    def exist(self, names: Sequence[str]) -> list[int]:
        """Return 1, 0 or a negative code for each name; what is there gets a lease of some seconds."""
        return list(self._raw.batch_is_exist(list(names)))

    def get(
        self, names: Sequence[str], addresses: Sequence[list[int]], sizes: Sequence[list[int]]
    ) -> list[int]:
        """Read whole objects; return the number of bytes or a negative code for each."""
        return list(self._raw.batch_get_into_multi_buffers(list(names), list(addresses), list(sizes)))

    def put(
        self, names: Sequence[str], addresses: Sequence[list[int]], sizes: Sequence[list[int]], replicas: int
    ) -> list[int]:
        """Write objects; return 0 or a negative code for each. An object that is there stays as it is."""
        config = self._module.ReplicateConfig()
        config.replica_num = replicas
        return list(self._raw.batch_put_from_multi_buffers(list(names), list(addresses), list(sizes), config))

    def heads(self, names: Sequence[str], address: int, nbytes: int) -> list[int]:
        """Read the first `nbytes` of each object to `address` and on; return the bytes or a code for each."""
        count = len(names)
        targets = [[at * nbytes] for at in range(count)]
        found = self._raw.get_into_ranges(
            [address], [list(names)], [targets], [[[0]] * count], [[[nbytes]] * count]
        )
        return [sum(parts) if min(parts) >= 0 else min(parts) for parts in found[0]]

    def size(self, name: str) -> int:
        """Return the bytes of an object, or a negative code."""
        return int(self._raw.get_size(name))

    def remove(self, names: Sequence[str]) -> list[int]:
        """Remove objects even if they have a lease; return 0 or a negative code for each."""
        return list(self._raw.batch_remove(list(names), True))

    def remove_all_with(self, prefix: str) -> int:
        """Remove the objects whose names begin with `prefix`; return their number, or a negative code."""
        return int(self._raw.remove_by_regex(f"^{re.escape(prefix)}", True))

    def put_bytes(self, name: str, data: bytes) -> int:
        """Write a small object that is not to be evicted."""
        config = self._module.ReplicateConfig()
        if hasattr(config, "with_hard_pin"):
            config.with_hard_pin = True
        return int(self._raw.put(name, data, config))

    def get_bytes(self, name: str) -> bytes:
        """Read a small object; empty if it cannot be read."""
        return bytes(self._raw.get(name))

    def close(self) -> None:
        """Disconnect. A call that is under way, or that follows, would crash the process."""
        self._raw.close()

    def keep(self) -> None:
        """Let nothing destroy the client any more, because one of its calls does not return."""
        increment: Callable[[ctypes.py_object[Any]], None] = ctypes.pythonapi.Py_IncRef
        increment(ctypes.py_object(self._raw))


_clients: WeakSet[MooncakeClient] = WeakSet()


def _keep_all() -> None:
    """Keep the clients of the parent in a forked process, which has none of their threads."""
    for client in _clients:
        client.keep()


os.register_at_fork(after_in_child=_keep_all)


def outcome_of(code: int) -> Outcome:
    """Return the outcome of an item for a negative code of a get or put."""
    if code in _ABSENT:
        return Outcome.MISS
    return Outcome.THROTTLED if code == FULL else Outcome.UNAVAILABLE


_MAX_IDLE: Final = 4
"""Clients of one kind that are kept for the next store of this process when their stores are closed.

To disconnect a client takes Mooncake a second, for which it stops all Python threads of the process.
"""


class ClientSpec(NamedTuple):
    """Arguments of `MooncakeClient.setup`; clients that have the same serve any store of theirs."""

    hostname: str
    metadata: str
    segment: int
    buffer: int
    protocol: str
    devices: str
    master: str
    tenant: str


_idle: Final[dict[ClientSpec, deque[MooncakeClient]]] = {}
"""Idle clients; each step of theirs is one call of a deque, so that they need no lock."""


def idle_client(spec: ClientSpec) -> MooncakeClient | None:
    """Return an idle client that the master answers; None if there is none. May block as a call may."""
    clients = _idle.get(spec, deque())
    while True:
        try:
            client = clients.pop()
        except IndexError:
            return None
        # If the master was started anew meanwhile, the first call finds the old connection broken.
        if any(client.exist(["tc1"])[0] >= 0 for _ in range(2)):
            return client
        client.close()


def release_client(spec: ClientSpec, client: MooncakeClient) -> None:
    """Keep a client that nothing uses and that has no registered memory, or disconnect it.

    A client that lends memory is disconnected: its owner wants the memory back.
    """
    clients = _idle.setdefault(spec, deque())
    if spec.segment or len(clients) >= _MAX_IDLE:
        client.close()
    else:
        clients.append(client)
