"""Format of batches on the wire: `KVEventBatch` of vLLM 0.33, as msgpack.

A batch is the array `[time, events, None]`; the last is vLLM's data-parallel rank. An event is a map, with
the name of its class under `type`: vLLM's fields and ours, which readers that know only vLLM's ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final

import msgpack
from blake3 import blake3

from tiercache.core import PoolName
from tiercache.errors import WireError
from tiercache.events.base import EventKind, KVEvent, Medium, ObjectGroup, Place

MAX_PAYLOAD: Final = 16 << 20
"""Longest payload that `decode_batch` accepts, in bytes."""
_MAX_ARRAY: Final = 1 << 18
"""Maximum number of events of a batch, and of keys or tokens of an event.

Some versions of msgpack allocate at once what an array announces, in each of a thousand nested arrays.
"""
LABEL_BYTES: Final = 8
"""Length of a namespace's label in bytes."""

_POOLS: Final = tuple(PoolName)
_SPEC_KINDS: Final = {PoolName.KV: "full_attention", PoolName.MAMBA: "mamba", PoolName.SWA: "sliding_window"}
"""vLLM's names for the kinds of our pools, where it has one."""
_TYPES: Final = {
    EventKind.STORED: "BlockStored",
    EventKind.REMOVED: "BlockRemoved",
    EventKind.CLEARED: "AllBlocksCleared",
}
_KINDS: Final = {name: kind for kind, name in _TYPES.items()}


def namespace_label(namespace: bytes) -> str:
    """Return the name of a namespace in events, 16 hexadecimal digits.

    Whoever has a namespace can compute its label, and page keys. From the label neither can be computed.
    """
    return blake3(namespace, derive_key_context="tiercache 2026 namespace label of events").hexdigest(
        LABEL_BYTES
    )


def encode_batch(time: float, events: Iterable[KVEvent], *, numbered: bool = False) -> bytes:
    """Return the payload of a batch.

    If `numbered`, pages are the last 8 bytes of keys, states the first; keys are in `keys` and `parent`.
    """
    maps = [as_map(event) for event in events]
    for found in maps if numbered else ():
        for name, own in (("block_hashes", "keys"), ("parent_block_hash", "parent")):
            if given := found.get(name):
                found[own] = given
                at = slice(8) if found["group_idx"] else slice(-8, None)
                numbers = [int.from_bytes(key[at]) for key in ([given] if own == "parent" else given)]
                found[name] = numbers[0] if own == "parent" else numbers
    packed: bytes = msgpack.packb([time, maps, None], use_bin_type=True)
    return packed


def as_map(event: KVEvent) -> dict[str, Any]:
    """Return an event as the map of vLLM's fields and ours.

    field             of      content
    group_idx         vLLM    number of the pool in `PoolName`
    ownership         vLLM    name of the tier
    pool, layout      ours    what tells apart objects with one page key
    namespace         ours    label of the namespace
    depth             ours    pages from the sequence's start to the end of the first block
    medium, ownership ours, of AllBlocksCleared: the place; all places if there is no medium
    """
    found: dict[str, Any] = {"type": _TYPES[event.kind]}
    if event.place is None:
        return found
    if event.group is None:
        return found | _owner(event.place) | {"medium": str(event.place.medium)}
    found["block_hashes"] = list(event.keys)
    if event.kind is EventKind.STORED:
        found |= {
            "parent_block_hash": event.parent,
            "token_ids": list(event.tokens),
            "block_size": event.group.page_size,
            "lora_id": None,
            "lora_name": None,
        }
        if (spec := _SPEC_KINDS.get(event.group.pool)) is not None:
            found["kv_cache_spec_kind"] = spec
        if event.depth is not None:
            found["depth"] = event.depth
    return found | _whereabouts(event.place, event.group)


@lru_cache(1024)
def _whereabouts(place: Place, group: ObjectGroup) -> dict[str, Any]:
    """Return the fields that all events of a group in a place share; the caller does not change the map."""
    found: dict[str, Any] = {
        "medium": str(place.medium),
        "group_idx": _POOLS.index(group.pool),
        "pool": str(group.pool),
    }
    found |= _owner(place)
    if group.layout:
        found["layout"] = group.layout
    if group.namespace:
        found["namespace"] = namespace_label(group.namespace)
    return found


def _owner(place: Place) -> dict[str, Any]:
    return {"ownership": place.tier} if place.tier else {}


def decode_batch(payload: bytes) -> tuple[float, list[KVEvent]]:
    """Return the time and the events of a payload; the namespace of a group is its label in bytes.

    Events of unknown types are left out. Raises WireError for a payload that is not such a batch, or that is
    longer than `MAX_PAYLOAD`.
    """
    if len(payload) > MAX_PAYLOAD:
        raise WireError(f"a payload of {len(payload)} bytes is too long for a batch of events")
    try:
        time, events, *_ = msgpack.unpackb(
            payload, strict_map_key=True, max_ext_len=0, max_array_len=_MAX_ARRAY, max_map_len=_MAX_ARRAY
        )
        return float(time), [_event(found) for found in events if found["type"] in _KINDS]
    except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
        raise WireError(f"a payload is no batch of KV events: {error!r:.200}") from error


def _event(found: Mapping[str, Any]) -> KVEvent:
    kind = _KINDS[found["type"]]
    medium = found.get("medium", "")
    place = Place(Medium(medium), _text(found, "ownership")) if medium else None
    if kind is EventKind.CLEARED:
        return KVEvent(kind, place)
    pool, namespace, layout = PoolName(found["pool"]), _text(found, "namespace"), found.get("layout", b"")
    size, depth = found.get("block_size"), found.get("depth")
    parent = found.get("parent", found.get("parent_block_hash"))
    keys, tokens = found.get("keys", found["block_hashes"]), found.get("token_ids") or ()
    if (
        place is None
        or not _are(bytes, keys)
        or (tokens and not _are(int, tokens))
        or not isinstance(layout, bytes)
        or not isinstance(parent, bytes | None)
        or not isinstance(size, int | None)
        or not isinstance(depth, int | None)
    ):
        raise TypeError("a field has a value of another type")
    group = ObjectGroup(pool, bytes.fromhex(namespace), layout, size or 0)
    return KVEvent(kind, place, group, keys, parent, depth, tokens)


def _text(found: Mapping[str, Any], name: str) -> str:
    text = found.get(name, "")
    if not isinstance(text, str):
        raise TypeError(f"{name} is no text")
    return text


def _are(kind: type, values: object) -> bool:
    return isinstance(values, list) and set(map(type, values)) <= {kind}
