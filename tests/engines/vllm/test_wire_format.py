"""Our publisher's messages under vLLM's own classes, and vLLM's own messages beside ours."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)

from tests.engines.zmq_reader import Reader
from tests.events import golden
from tests.events.rig import LAYOUTS, NAMESPACE, page, published, store_pages
from tests.processes import free_port
from tiercache.core import ObjectKey, PoolName
from tiercache.events.encoding import encode_batch
from tiercache.events.publisher import END
from tiercache.keys import Identity
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend

DECODER = msgspec.msgpack.Decoder(KVEventBatch)


def as_vllm_has_them() -> list[Any]:
    """The golden events in vLLM's classes."""
    stored, removed, _ = golden.EVENTS
    return [
        BlockStored(
            block_hashes=list(stored.keys), parent_block_hash=stored.parent, token_ids=list(stored.tokens),
            block_size=64, lora_id=None, medium="STORAGE", lora_name=None, group_idx=0,
            kv_cache_spec_kind="full_attention",
            ownership="disk",
        ),
        BlockRemoved(block_hashes=list(removed.keys), medium="STORAGE", group_idx=0, ownership="disk"),
        AllBlocksCleared(),
    ]  # fmt: skip


def test_vllm_reads_our_batches_as_it_reads_its_own() -> None:
    ours = DECODER.decode(encode_batch(golden.TIME, golden.EVENTS))
    assert ours == KVEventBatch(ts=golden.TIME, events=as_vllm_has_them())
    assert ours == DECODER.decode(golden.VLLM)


def test_the_golden_batch_is_what_vllm_writes() -> None:
    batch = KVEventBatch(ts=golden.TIME, events=as_vllm_has_them())
    assert msgspec.msgpack.encode(batch) == golden.VLLM


def test_a_subscriber_of_vllm_follows_a_store_over_a_real_socket() -> None:
    with open_backend("memory://?capacity=1MiB") as store:
        identity = Identity("some/model", "r1", "", "bfloat16", "", 64)
        store.register_namespace(NamespaceRecord(NAMESPACE, identity.public_record()))
        with published(store) as publisher, Reader(publisher.endpoint, publisher.replay_endpoint) as reader:
            chains = count(9)
            reader.connected(lambda: store_pages(store, 1, chain=next(chains)))
            store_pages(store, 3)
            seen, held = [], dict[bytes, bytes | None]()
            while page(2) not in held or page(3) not in held:
                number, payload = reader.read()
                seen.append((number, payload))
                for event in DECODER.decode(payload).events:
                    assert isinstance(event, BlockStored)
                    assert (event.medium, event.block_size, event.token_ids) == ("STORAGE", 64, [])
                    parents = [event.parent_block_hash, *event.block_hashes]
                    held |= dict(zip(event.block_hashes, parents, strict=False))
            assert (held[page(1)], held[page(2)], held[page(3)]) == (None, page(1), page(2))
            store.delete([ObjectKey(PoolName.KV, LAYOUTS[PoolName.KV] + page(2))])
            number, payload = reader.read()
            seen.append((number, payload))
            assert DECODER.decode(payload).events == [
                BlockRemoved(block_hashes=[page(2)], medium="STORAGE", group_idx=0, ownership="memory")
            ]
            numbers = [number for number, _ in seen]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
            # The replay has the same numbers and bytes, and vLLM's mark at the end.
            assert reader.replay(numbers[0]) == seen
            # A number that the publisher no longer has: all is cleared, then comes all that is there.
            (_, first), *rest = reader.replay(0)
            assert DECODER.decode(first).events == [AllBlocksCleared()]
            there = {h for _, payload in rest for e in DECODER.decode(payload).events for h in e.block_hashes}
            assert there == {page(1), page(3)} | {page(1, chain=n) for n in range(9, next(chains))}


def test_our_messages_have_the_frames_of_vllms_own_publisher() -> None:
    """The same reader, on vLLM's publisher."""
    events, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    publisher = ZmqEventPublisher(
        0, endpoint=events.replace("127.0.0.1", "*"), replay_endpoint=replays, topic="kv-events"
    )
    try:
        with Reader(events, replays) as reader:
            batch = KVEventBatch(ts=1.0, events=as_vllm_has_them())
            reader.connected(lambda: publisher.publish(batch))
            seen = [reader.read() for _ in range(3) if publisher.publish(batch) is None]
            assert [payload for _, payload in seen] == [
                msgspec.msgpack.encode(KVEventBatch(ts=1.0, events=as_vllm_has_them(), data_parallel_rank=0))
            ] * 3
            assert reader.replay(seen[0][0]) == seen
            assert END == ZmqEventPublisher.END_SEQ
    finally:
        publisher.shutdown()
