"""Decoders of what a daemon remembers of objects, and of its account."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from tiercache.errors import WireError
from tiercache.storage.history import Cause, History, PastRemoval, TierHistory
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

_CAUSES: Final[dict[int, Cause]] = {
    pb.REMOVAL_CAUSE_EVICTED: Cause.EVICTED,
    pb.REMOVAL_CAUSE_DELETED: Cause.DELETED,
    pb.REMOVAL_CAUSE_CORRUPT: Cause.CORRUPT,
}


@dataclass(frozen=True, slots=True)
class DaemonReport:
    """Account of a daemon, as far as the caller may know it."""

    rows: Sequence[Mapping[str, Any]]
    """Rows by hour and tenant, in this order, with the fields of AccountRow on the wire."""
    begun: float
    """Begin of the first hour of the account, in seconds since 1970; 0 if it has no rows."""


def read_report(reply: pb.ReportReply) -> DaemonReport:
    """Decode an account."""
    names = [found.name for found in pb.AccountRow.DESCRIPTOR.fields]
    rows = [{name: getattr(row, name) for name in names} for row in reply.rows]
    return DaemonReport(rows, reply.begun)


def read_history(reply: pb.HistoryReply, keys: int, pages: int) -> History:
    """Decode the history of `keys` objects and `pages` pages; raises WireError."""
    tiers = [
        TierHistory(
            tier.name,
            [] if tier.why else messages.read_bits(tier.present, keys),
            tier.since or None,
            tier.why,
        )
        for tier in reply.tiers
    ]
    columns = (reply.pages, reply.layout_of, reply.tier_of, reply.causes, reply.times)
    if len({len(column) for column in columns}) > 1:
        raise WireError("the removals of a history are not of one number")
    removals = []
    for page, layout, tier, cause, at in zip(*columns, strict=True):
        if page >= pages or layout >= len(reply.layouts) or tier > len(tiers):
            raise WireError("a removal of a history names a page, a layout or a tier that is not there")
        name = tiers[tier - 1].name if tier else ""
        removals.append(PastRemoval(page, reply.layouts[layout], name, _CAUSES.get(cause, Cause.EVICTED), at))
    return History(tiers, removals, reply.forgotten or None)


def joined(parts: Sequence[tuple[int, History]]) -> History:
    """Return one history of several that were asked for one after the other.

    Each comes with the position of its first page. What several tiers answer is joined by their names; a tier
    that one of them could not ask has not answered.
    """
    tiers: dict[str, TierHistory] = {}
    for _, part in parts:
        for tier in part.tiers:
            before = tiers.get(tier.name)
            if before is None:
                tiers[tier.name] = tier
            elif before.why or tier.why:
                tiers[tier.name] = replace(before, present=[], why=before.why or tier.why)
            else:
                tiers[tier.name] = replace(before, present=[*before.present, *tier.present])
    removals = [
        removal._replace(page=removal.page + first) for first, part in parts for removal in part.removals
    ]
    forgotten = [part.forgotten for _, part in parts if part.forgotten is not None]
    removals.sort(key=lambda removal: -removal.at)
    return History(list(tiers.values()), removals, max(forgotten, default=None))
