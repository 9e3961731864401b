"""`tiercache status` and `tiercache ping`: the description of a store, and the round trips to a daemon."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Final, cast

import typer

import tiercache
from tiercache.cli.output import SHORTER, Output, OutputOption, console, count_text, document, line, safe, size_text, table, whole
from tiercache.cli.store.names import Namespaces
from tiercache.cli.store.options import MacKeyOption, StoreOption
from tiercache.cli.store.target import Target, check_reached, opened, resolve
from tiercache.errors import ConfigError
from tiercache.storage.base import ScanEntry, StorageBackend

_PONG: Final = ("version", "instance", "principal", "tenant", "verbs", "transport", "store")
"""Fields of a daemon's answer to a ping that are shown."""
_PAUSE: Final = 0.1
"""Seconds between two pings, where there are at most 100."""
_WORTH: Final = ("restorable_bytes", "dead_bytes", "orphans")
"""Keys of a store's usage details about what can be restored; stores that do not know it leave them out."""


def status(
    store: StoreOption = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Without the figures per namespace and pool, which take a look at every object.")
    ] = False,
    mac_key: MacKeyOption = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a store is and what it holds. Exit code 3 if a daemon does not answer.

    A stopped store, a daemon on this machine, and a check for a monitor:

        tiercache status -s /var/lib/tiercache

        tiercache status -s grpc:///run/tiercache --quick -o json

    JSON fields: name, kind, live, directory, owner (process id of the daemon),
    version, daemon (instance, principal, tenant, verbs, transport, store; null
    for a stopped store), objects, payload_bytes, used_bytes, capacity_bytes (0:
    no cap), restorable_bytes, dead_bytes (payload of which a restore can make
    use, or never), orphans (objects whose parent is gone; null where the store
    does not say), details (the store's own counters: corrupt, evicted, ...),
    namespaces (namespace, label, identity, objects, bytes, pools: pool,
    objects, bytes; null with --quick). With jsonl the same on one line.
    """
    target = resolve(store, mac_key)
    with opened(target) as found:
        record = _describe(target, found)
        names = Namespaces.of(found)
        record["namespaces"] = None if quick else _totals(found.scan_all(), names)
    if output is Output.TABLE:
        _print(record)
    else:
        whole(record, output)


def ping(
    store: StoreOption = "",
    count: Annotated[int, typer.Option(min=1, max=100_000, help="Round trips.")] = 5,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure round trips to a daemon. Exit code 3 if it does not answer.

    The daemon is named by its directory, or by its address:

        tiercache ping -s /var/lib/tiercache --count 20

    JSON fields: count, min_seconds, median_seconds, max_seconds, version,
    instance, principal, tenant, verbs, transport, store. With jsonl one line
    per round trip: seconds, and the same of the daemon.
    """
    target = resolve(store)
    if not target.live:
        raise ConfigError(f"{target.name} is not served by a daemon, so nobody can answer; start one there with: tiercache serve")
    times: list[float] = []
    with opened(target) as found:
        call = _ping_of(found, target)
        for n in range(count):
            if n:
                time.sleep(_PAUSE if count <= 100 else 0)
            pong = call()
            check_reached(target, found)
            times.append(float(pong.seconds))
            if output is Output.JSONL:
                line({"seconds": times[-1], **_pong(pong)})
    record = {
        "count": count,
        "min_seconds": min(times),
        "median_seconds": statistics.median(times),
        "max_seconds": max(times),
        **_pong(pong),
    }
    if output is Output.JSON:
        document(record)
    elif output is Output.TABLE:
        low, middle, high = (f"{record[f'{name}_seconds'] * 1e3:.2f} ms" for name in ("min", "median", "max"))
        shown = console()
        shown.print(f"{count_text(count, 'round trip')}: min {low}, median {middle}, max {high}", markup=False)
        shown.print(", ".join(f"{name} {safe(_text(record[name]))}" for name in _PONG if record[name]))


def _ping_of(store: StorageBackend, target: Target) -> Callable[[], Any]:
    call = getattr(store, "ping", None)
    if not callable(call):
        raise ConfigError(f"{target.name} is not a daemon's; ping asks daemons, such as grpc://host:port")
    return cast("Callable[[], Any]", call)


def _pong(pong: Any) -> dict[str, Any]:
    found = {name: getattr(pong, name, "") for name in _PONG}
    return found | {"verbs": list(found["verbs"])}


def _describe(target: Target, store: StorageBackend) -> dict[str, Any]:
    daemon = _pong(_ping_of(store, target)()) if target.live else None
    usage = store.usage()
    return {
        "name": target.name,
        "kind": target.kind,
        "live": target.live,
        "directory": target.directory or None,
        "owner": target.owner,
        "version": daemon.pop("version") if daemon else tiercache.__version__,
        "daemon": daemon,
        "objects": usage.objects,
        "payload_bytes": usage.payload_bytes,
        "used_bytes": usage.used_bytes,
        "capacity_bytes": usage.capacity_bytes,
        **{name: usage.details.get(name) for name in _WORTH},
        "details": dict(usage.details),
    }


def _totals(entries: Iterable[ScanEntry], names: Namespaces) -> list[dict[str, Any]]:
    counts: dict[bytes, dict[str, list[int]]] = {name: {} for name in names.records}
    for entry in entries:
        total = counts.setdefault(entry.meta.namespace, {}).setdefault(str(entry.key.pool), [0, 0])
        total[0] += 1
        total[1] += entry.meta.length
    return [
        {
            **names.record(namespace),
            "objects": sum(n for n, _ in pools.values()),
            "bytes": sum(nbytes for _, nbytes in pools.values()),
            "pools": [{"pool": pool, "objects": n, "bytes": nbytes} for pool, (n, nbytes) in sorted(pools.items())],
        }
        for namespace, pools in sorted(counts.items())
    ]


def _print(record: dict[str, Any]) -> None:
    shown = table(("", " "), left=("", " "))
    shown.show_header = False
    capacity = record["capacity_bytes"]
    share = f" ({record['used_bytes'] / capacity:.0%})" if capacity else ""
    rows = [
        ("store", record["name"]),
        ("kind", f"{record['kind']}, {'served by a daemon' if record['live'] else 'not served'}"),
        ("owner", f"process {record['owner']}" if record["owner"] else "nobody" if record["kind"] == "file" else ""),
        ("tiercache", record["version"]),
        *((name, _text(value)) for name, value in (record["daemon"] or {}).items()),
        ("objects", f"{record['objects']:,}"),
        ("payload", size_text(record["payload_bytes"])),
        ("used", size_text(record["used_bytes"]) + share),
        ("capacity", size_text(capacity) if capacity else "no cap"),
        ("restorable", _worth(record)),
        *((name.replace("_", " "), _text(value)) for name, value in record["details"].items() if name not in _WORTH),
    ]
    for name, value in rows:
        if value:
            shown.add_row(safe(name), safe(value))
    to = console()
    to.print(shown)
    if record["namespaces"]:
        to.print(_pools(record["namespaces"]))


def _worth(record: dict[str, Any]) -> str:
    """Return the restorable and the dead bytes and the orphans as text; empty if the store does not report them."""
    restorable, dead, orphans = (record[name] for name in _WORTH)
    if None in (restorable, dead, orphans):
        return ""
    share = f" ({restorable / (restorable + dead):.0%})" if restorable + dead else ""
    return f"{size_text(restorable)}{share}, dead {size_text(dead)}, {count_text(orphans, 'orphan')}"


def _pools(namespaces: list[dict[str, Any]]) -> Any:
    shown = table(("namespace", "label", "pool", "objects", "bytes"), left=("namespace", "label", "pool"))
    for space in namespaces:
        start = (space["namespace"][:SHORTER], safe(space["label"]))
        for pool in space["pools"] or [{"pool": "-", "objects": 0, "bytes": 0}]:
            shown.add_row(*start, safe(pool["pool"]), f"{pool['objects']:,}", size_text(pool["bytes"]))
            start = ("", "")
    return shown


def _text(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
