"""Our batches beside batches that vLLM and SGLang wrote."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgpack

from tests.events import golden
from tiercache.events.encoding import encode_batch

OURS = {"pool", "layout", "namespace", "depth"}
"""Fields that neither engine has; their readers ignore them."""


def without_ours(payload: bytes) -> Any:
    time, events, rank = msgpack.unpackb(payload)
    return [time, [{k: v for k, v in event.items() if k not in OURS} for event in events], rank]


def test_a_batch_has_all_that_vllm_writes_and_nothing_else_but_our_fields() -> None:
    assert without_ours(encode_batch(golden.TIME, golden.EVENTS)) == msgpack.unpackb(golden.VLLM)


def test_a_batch_is_the_same_bytes_in_every_release() -> None:
    stored, removed, cleared = golden.EVENTS
    short = replace(stored, keys=stored.keys[:1], tokens=())
    assert encode_batch(golden.TIME, [short, removed, cleared]).hex() == golden.OURS
