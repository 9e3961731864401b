"""Dynamo's own router, which reads a controller's events: without states it finds what ours finds."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from itertools import product

import pytest
from dynamo.llm import SelectionService

from tests.controller.harness import IDENTITY, Engine, P, prompt
from tests.events.rig import ANY, Follower
from tiercache.config.models import ScoreSettings
from tiercache.controller import ControllerOptions
from tiercache.core import PoolName, Tier, as_tokens
from tiercache.daemon.fleet import Fleet
from tiercache.events.publisher import EventPublisher
from tiercache.keys import namespace_of

EVENTS = replace(ANY, topic="kv@pod-1@toy", token_ids=True)
NOBODY = [{"endpoint": "tcp://127.0.0.1:1", "replay": "tcp://127.0.0.1:2"}]


class Router:
    """Dynamo's own follower of workers, which finds prefixes; it follows one worker."""

    def __init__(self) -> None:
        self.service = SelectionService(indexer_threads=1)

    async def follow(self, publisher: EventPublisher) -> None:
        await self.service.upsert_worker(
            {
                "worker_id": 1, "model_name": "toy", "endpoint": "pod-1", "block_size": P,
                "data_parallel_start_rank": 0, "data_parallel_size": 1,
                "kv_events_endpoints": {0: publisher.endpoint}, "replay_endpoint": publisher.replay_endpoint,
            }
        )  # fmt: skip

    async def depths(self, tokens: list[int]) -> list[int]:
        """Pages that lie on the device, on the device or the host, and anywhere."""
        told = await self.service.overlap_scores({"model_name": "toy", "token_ids": tokens})
        [worker] = told["workers"]
        return [worker[f"{place}_blocks"] for place in ("device", "host_pinned", "disk")]


@pytest.mark.parametrize("seed", range(3))
def test_dynamo_finds_the_pages_that_our_own_score_finds(seed: int) -> None:
    asyncio.run(history(random.Random(seed)))


async def history(draw: random.Random) -> None:
    engine = Engine(hybrid=False, options=ControllerOptions(restore_deadline=10.0, events=EVENTS))
    publisher, router = engine.controller.publisher, Router()
    fleet, follower = Fleet(ScoreSettings.model_validate({"workers": {"pod-1": NOBODY}})), Follower(publisher)
    await router.follow(publisher)
    for step in range(30):
        if draw.random() < 0.7:
            engine.serve(prompt(*(draw.randrange(3) for _ in range(draw.randint(1, 4)))))
        else:
            engine.controller.evict(draw.choice([Tier.DEVICE, Tier.HOST]))
        engine.controller.tick()
        if step % 5 or step < 10:
            continue
        for _ in range(100):  # both are told by threads of their own
            heard = len(follower.batches)
            follower.read(0.1)
            for batch in follower.batches[heard:]:  # states apart: Dynamo's blocks are pages
                pages = [e for e in batch.events if e.group is None or e.group.pool is PoolName.KV]
                fleet.apply("pod-1/0", pages)
            found, right = {}, {}
            for path in product(range(3), repeat=3):
                scores = fleet.score(namespace_of(IDENTITY), as_tokens(prompt(*path, 9)))["pod-1"]
                right[path] = [depth // P for depth in scores.values()]
                found[path] = await router.depths(prompt(*path, 9))
            if found == right:
                break
        assert found == right
    assert engine.controller.close()
    follower.subscriber.close()
    router.service.shutdown()
