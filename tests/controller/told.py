"""Knowledge of a subscriber of a controller's KV events, compared with what the index holds."""

from __future__ import annotations

from tiercache.controller.residency_events import ResidencyEvents
from tiercache.core import Tier
from tiercache.events import EventKind, Medium, ObjectGroup, Place
from tiercache.events.base import ResidencyMap, Resident


class Told:
    """Subscriber of the events of one controller, without sockets."""

    def __init__(self, context):
        self.index = context.index
        self.groups = {
            pool: ObjectGroup(pool, context.namespace, pool.encode().ljust(32), context.page_size)
            for pool in context.pools
        }
        self.source = context.residency = ResidencyEvents(context.index, self.groups)
        self.map = ResidencyMap()

    def read(self):
        self.source.post(0.0, everything=True)
        while events := self.source.collect():
            self.map.apply(events)
            self.check_changes(events)

    def check_changes(self, events):
        """Nothing is told without a change."""
        assert all(event.keys for event in events if event.kind is not EventKind.CLEARED)

    def check(self):
        self.read()
        chains = self.chains()
        assert self.map.places() == places(chains)
        told = {}
        for events in self.source.snapshot():
            for event in events:
                parent, depth = event.parent, event.depth
                for key in event.keys:
                    told[event.place, Resident(event.group.pool, event.group.layout, key)] = (parent, depth)
                    parent, depth = key, depth + 1
        assert told == chains

    def chains(self):
        """Parent and depth of every object on device and host, by place and name, as the index has them."""
        found = {}
        for node in self.index.nodes():
            if not node.pages:
                continue
            keys = None
            for tier in (Tier.DEVICE, Tier.HOST):
                held = {
                    pool: node.where[tier, row] >= 0 for row, pool in enumerate(self.index.page_pools)
                } | {
                    pool: [False] * (node.pages - 1) + [node.state(tier, number) >= 0]
                    for number, pool in enumerate(self.index.state_pools)
                }
                for pool, flags in held.items():
                    for i, here in enumerate(flags):
                        if here:
                            keys = keys or self.index.page_keys(node, node.end)
                            at = node.start + i
                            named = Resident(pool, self.groups[pool].layout, keys[at])
                            is_page = pool in self.index.page_pools
                            parent = keys[at - 1] if is_page and at else None
                            found[Place(Medium.of(tier)), named] = (parent, at + 1)
        return found


def places(objects):
    """Objects by place, as a `ResidencyMap` has them."""
    found = {}
    for place, named in objects:
        found.setdefault(place, set()).add(named)
    return found
