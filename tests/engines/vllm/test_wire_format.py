"""Our publisher's messages under vLLM's own classes, and vLLM's own messages beside ours."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    ZmqEventPublisher,
)
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from tests.engines.zmq_reader import Reader
from tests.events import golden
from tests.processes import free_port
from tiercache.events.encoding import encode_batch
from tiercache.events.publisher import END

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
    assert msgspec.msgpack.encode(ours) == golden.VLLM, "the golden batch is what vLLM writes"


def test_numbered_blocks_have_the_numbers_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    stored, removed, cleared = as_vllm_has_them()
    for event in (stored, removed):
        event.block_hashes = list(map(maybe_convert_block_hash, event.block_hashes))
    stored.parent_block_hash = maybe_convert_block_hash(stored.parent_block_hash)
    ours = DECODER.decode(encode_batch(golden.TIME, golden.EVENTS, numbered=True))
    assert ours == KVEventBatch(ts=golden.TIME, events=[stored, removed, cleared])


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
