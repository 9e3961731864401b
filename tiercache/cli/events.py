"""The verb `tiercache events`: prints KV events as they come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any, Final

import typer

from tiercache.cli.terminal import Output, OutputOption, UnreachableError, records, safe, say
from tiercache.errors import ConfigError
from tiercache.events import KVEvent
from tiercache.events.settings import check_endpoint
from tiercache.events.subscriber import SNAPSHOT, BatchOrigin, EventSubscriber, ReceivedBatch

_STEP_S: Final = 0.5


def events(
    endpoint: Annotated[str, typer.Argument(help="Address of the events.")] = "tcp://127.0.0.1:5557",
    replay: Annotated[
        str, typer.Option(help="Address of the replays; without it, gaps are only reported.")
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C with what is published.")
    ] = False,
    start: Annotated[
        int | None,
        typer.Option("--from", min=0, help="Number of the first batch; default: what is there now."),
    ] = None,
    topic: Annotated[str, typer.Option(help="Topic of the events.")] = "kv-events",
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what the tiers of a daemon or of a worker hold, and what changes.

    The configuration of the publisher says its addresses (`[events]`). Without --follow, the verb
    prints a snapshot, or the batches from --from on, and ends; this needs --replay. With --follow it
    goes on with the events that are published; gaps are healed by a replay, or by a snapshot, which
    begins with an event that clears everything. Of mooncake stores and of a remote daemon's stores
    nothing is published; a remote daemon publishes its own events.

    Print what a daemon has, and follow a daemon for a script:

        tiercache events --replay tcp://127.0.0.1:5558

        tiercache events --follow --replay tcp://127.0.0.1:5558 -o jsonl

    JSON fields: sequence (number of the batch), time (seconds since 1970), origin (live, replay or
    lost), kind (stored, removed, cleared; null if batches were lost), medium, tier (null: everything),
    pool, namespace (label), layout, page_size (tokens), parent, depth (pages, of the first key), keys.
    """
    for address in (endpoint, replay):
        if address:
            check_endpoint(address, public=True)
    if not (follow or replay):
        raise ConfigError("without --follow only a replay can be printed; give --replay ADDRESS, or --follow")
    if output is Output.JSON and follow:
        raise ConfigError("one JSON document never ends with --follow; use -o jsonl")
    begin = start if start is not None else SNAPSHOT if replay else None
    subscriber = EventSubscriber(endpoint, replay, topic, begin)
    try:
        if follow:
            _follow(subscriber, output)
        else:
            batches = [batch for batch in subscriber.read(0.0) if batch.origin is not BatchOrigin.LIVE]
            if any(batch.origin is BatchOrigin.LOST for batch in batches):
                raise UnreachableError(f"{replay} did not answer with all events; does a publisher serve it?")
            _show(_rows(batches), output)
    finally:
        subscriber.close()


def _follow(subscriber: EventSubscriber, output: Output) -> None:
    try:
        while True:
            for batch in subscriber.read(_STEP_S):
                _show(_rows([batch]), output)
    except KeyboardInterrupt:
        say("")


def _show(rows: Iterator[dict[str, Any]], output: Output) -> None:
    if output is not Output.TABLE:
        records(rows, output)
        return
    for row in rows:
        sys.stdout.write(_text(row) + "\n")
    sys.stdout.flush()


def _rows(batches: list[ReceivedBatch]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        origin = {"sequence": batch.sequence, "time": batch.time, "origin": str(batch.origin)}
        if batch.origin is BatchOrigin.LOST:
            yield origin | {"kind": None}
        for event in batch.events:
            yield origin | _row(event)


def _row(event: KVEvent) -> dict[str, Any]:
    place, group = event.place, event.group
    row: dict[str, Any] = {
        "kind": str(event.kind),
        "medium": None if place is None else str(place.medium),
        "tier": None if place is None else place.tier,
    }
    if group is not None:
        row |= {
            "pool": str(group.pool),
            "namespace": group.namespace.hex() or None,
            "layout": group.layout.hex() or None,
            "page_size": group.page_size or None,
            "parent": None if event.parent is None else event.parent.hex(),
            "depth": event.depth,
            "keys": [key.hex() for key in event.keys],
        }
    return row


def _text(row: dict[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(row["time"]))
    if row["kind"] is None:
        return f"{when}  {row['sequence']}  batches before this one are lost"
    place = "everything" if row["medium"] is None else row["medium"]
    if row["tier"]:
        place += f"/{row['tier']}"
    text = f"{when}  {row['sequence']}  {row['origin']:<6}  {row['kind']:<7}  {safe(place)}"
    if keys := row.get("keys"):
        depth = "" if row["depth"] is None else f"  depth {row['depth']}"
        text += f"  {row['pool']}{depth}  {len(keys)} x {keys[0][:16]}"
    return text
