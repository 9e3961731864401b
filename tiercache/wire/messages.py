"""Conversion between protobuf messages and the types of `tiercache.core`.

The functions `read_...` check what comes from the other end: they return valid values or raise WireError.
Only `read_meta` checks nothing, because the store checks those values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

from tiercache.core import DIGEST_BYTES, ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import WireError
from tiercache.wire.v1 import storage_pb2 as pb

CHECKSUM_BYTES: Final = 16
CHUNK_BYTES: Final = 2 << 20
"""Maximum payload bytes of one message.

With larger messages, fewer streams could share one budget. With smaller messages, the fixed cost of each
message would count more."""
_MAX_TEXT: Final = 4096
"""Maximum number of characters of a text in a mapping."""
_MAX_ENTRIES: Final = 64
"""Maximum number of entries of a mapping, of pools in one batch of keys, and of tiers in one reply."""
_FEW_BYTES: Final = 64 << 10
"""Maximum bytes of a message that is parsed without counting its fields first."""
_MAX_FIELDS: Final = 8192
"""Maximum number of fields of a message, more than any batch needs.

The limit is needed because a field of two bytes may take 100 bytes of memory, and each field takes time."""
_TIER_FIELDS: Final = {field.name for field in pb.TierReport.DESCRIPTOR.fields} - {"texts", "numbers"}
"""Fields of a tier's report that have the same name and type on the wire as in a `TierReport`."""

_OUTCOMES: Final = (
    Outcome.HIT,
    Outcome.STORED,
    Outcome.MISS,
    Outcome.CORRUPT,
    Outcome.THROTTLED,
    Outcome.ERROR,
)
"""Outcomes in the order of their numbers on the wire, which begin at 1."""
NUMBER_OF: Final = {outcome: number for number, outcome in enumerate(_OUTCOMES, 1)} | {
    # These two outcomes mean that a daemon does not answer, or refuses its client. So no daemon reports them
    # about itself. But a daemon's own store may be behind a second daemon, and then return these outcomes.
    # The client of the first daemon then gets ERROR, because the object may be stored.
    Outcome.UNAVAILABLE: _OUTCOMES.index(Outcome.ERROR) + 1,
    Outcome.REFUSED: _OUTCOMES.index(Outcome.ERROR) + 1,
}
"""Number of each outcome on the wire; UNAVAILABLE and REFUSED are sent as ERROR."""

M = TypeVar("M", bound=Message)


def read_message(data: bytes, kind: type[M], max_bytes: int) -> M:
    """Parse a message.

    Raises WireError if the message has more than `max_bytes` bytes, is malformed, or has too many fields. The
    limit on fields (`_MAX_FIELDS`, checked above 64 KiB) bounds the memory for the parsed message.
    """
    if len(data) > max_bytes:
        raise WireError(
            f"a message of {len(data)} bytes is beyond the limit of {max_bytes}; send it in parts"
        )
    try:
        if len(data) > _FEW_BYTES:
            _count_fields(data)
        return kind.FromString(data)
    except (DecodeError, IndexError, KeyError) as error:
        raise WireError(f"a message cannot be read ({error})") from error


def _count_fields(data: bytes) -> None:
    """Raise WireError for more than `_MAX_FIELDS` fields; IndexError or KeyError for malformed ones."""
    at = 0
    for _ in range(_MAX_FIELDS):
        tag, at = _varint(data, at)
        if tag & 7 == 0:
            _, at = _varint(data, at)
        elif tag & 7 == 2:  # its length comes before its content
            size, at = _varint(data, at)
            at += size
        else:
            at += {1: 8, 5: 4}[tag & 7]
        if at == len(data):
            return
    raise WireError(f"a message has more than {_MAX_FIELDS} fields; send it in parts")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number at an offset (7 bits a byte, lowest first) and the offset after it."""
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 0x7F) << shift
        at += 1
        if data[at - 1] < 0x80:
            return value, at
    raise IndexError("a number of more than ten bytes")


def keys(items: Sequence[ObjectKey]) -> pb.Keys:
    """Encode object keys as columns: all digests, all pools, and for each key the index of its pool."""
    pools = list(dict.fromkeys(key.pool for key in items))
    index = {pool: i for i, pool in enumerate(pools)}
    return pb.Keys(
        digests=b"".join([key.digest for key in items]),
        pools=pools,
        pool_of=bytes([index[key.pool] for key in items]),
    )


def read_keys(message: pb.Keys, max_keys: int) -> list[ObjectKey]:
    """Decode object keys; raise WireError for more than `max_keys` keys or a malformed message."""
    digests, pool_of = message.digests, message.pool_of
    if len(digests) != DIGEST_BYTES * len(pool_of):
        raise WireError(
            f"{len(pool_of)} keys have {len(digests)} bytes instead of {DIGEST_BYTES} each; this is not a"
            " tiercache client's message"
        )
    if len(pool_of) > max_keys:
        raise WireError(f"a batch of {len(pool_of)} keys is beyond the limit of {max_keys}; send it in parts")
    try:
        pools = [PoolName(name) for name in message.pools[:_MAX_ENTRIES]]
        return [
            ObjectKey(pools[pool], digests[at : at + DIGEST_BYTES])
            for pool, at in zip(pool_of, range(0, len(digests), DIGEST_BYTES), strict=True)
        ]
    except (ValueError, IndexError) as error:
        raise WireError(
            f"the pools of a batch of keys cannot be read ({error}); the other end may have a newer version"
        ) from error


def outcomes(items: Iterable[Outcome]) -> pb.OutcomesReply:
    """Encode outcomes."""
    message = pb.OutcomesReply()
    # The stubs expect the enum's type; on the wire an enum is an int.
    message.outcomes.extend([NUMBER_OF[outcome] for outcome in items])  # type: ignore[misc]
    return message


def read_outcome(number: int) -> Outcome:
    """Decode one outcome; a number that this version does not know means ERROR."""
    return _OUTCOMES[number - 1] if 1 <= number <= len(_OUTCOMES) else Outcome.ERROR


def read_outcomes(numbers: Sequence[int], expected: int) -> list[Outcome]:
    """Decode outcomes; raise WireError unless their number is `expected`."""
    if len(numbers) != expected:
        raise WireError(
            f"{expected} outcomes were expected and {len(numbers)} came; the other end breaks the protocol"
        )
    return [read_outcome(number) for number in numbers]


def bits(flags: Sequence[bool]) -> bytes:
    """Encode flags, one bit each, lowest bit first."""
    return np.packbits(np.asarray(flags, np.bool_), bitorder="little").tobytes()


def read_bits(data: bytes, expected: int) -> list[bool]:
    """Decode `expected` flags; raise WireError unless `data` has exactly the bytes for them."""
    if len(data) != -(-expected // 8):
        raise WireError(
            f"{expected} bits were expected and {len(data)} bytes came; the other end breaks the protocol"
        )
    flags: list[bool] = (
        np.unpackbits(np.frombuffer(data, np.uint8), count=expected, bitorder="little")
        .astype(np.bool_)
        .tolist()
    )
    return flags


def meta(item: ObjectMeta) -> pb.ObjectMeta:
    """Encode an object's description."""
    return pb.ObjectMeta(
        namespace=item.namespace,
        length=item.length,
        checksum=item.checksum,
        parent=item.parent,
        depth=item.depth,
        value=item.value,
        worker=item.worker,
    )


def read_meta(message: pb.ObjectMeta) -> ObjectMeta:
    """Decode an object's description.

    The values are not checked here. The store decides whether it accepts them (`storage.base.storable`).
    """
    return ObjectMeta(
        namespace=message.namespace,
        length=message.length,
        checksum=message.checksum,
        parent=message.parent if message.HasField("parent") else None,
        depth=message.depth if message.HasField("depth") else None,
        value=message.value if message.HasField("value") else None,
        worker=message.worker,
    )


def tiers(names: Sequence[str]) -> pb.Tiers | None:
    """Encode the name of the tier of each object as columns; None if there are no tiers."""
    distinct = list(dict.fromkeys(names))
    if not any(distinct):
        return None
    index = {name: i for i, name in enumerate(distinct)}
    return pb.Tiers(names=distinct, tier_of=bytes([index[name] for name in names]))


def read_tiers(message: pb.Tiers, expected: int) -> list[str]:
    """Decode the name of the tier of each of `expected` objects; the names are empty if there are no tiers.

    Raises WireError for a malformed message.
    """
    if not message.tier_of:
        return [""] * expected
    names = message.names[:_MAX_ENTRIES]
    if len(message.tier_of) != expected or max(message.tier_of) >= len(names):
        raise WireError(
            f"the tiers of {expected} objects cannot be read: {len(message.tier_of)} came, out of"
            f" {len(names)} names; the other end may have a newer version"
        )
    return [names[tier] for tier in message.tier_of]


def tier(fields: Mapping[str, Any]) -> pb.TierReport:
    """Encode the fields of a tier's report, by name."""
    plain = {name: value for name, value in fields.items() if name != "details"}
    return pb.TierReport(**plain, texts=texts(fields["details"]), numbers=numbers(fields["details"]))


def read_tier(message: pb.TierReport) -> dict[str, Any]:
    """Decode the fields of a tier's report, by name."""
    plain = {name: getattr(message, name) for name in _TIER_FIELDS}
    last_read = message.last_read if message.HasField("last_read") else None
    return {**plain, "last_read": last_read, "details": joined(message.texts, message.numbers)}


def namespace(name: bytes, identity: Mapping[str, str | int], *, states: bool) -> pb.Namespace:
    """Encode a namespace's record."""
    return pb.Namespace(namespace=name, texts=texts(identity), numbers=numbers(identity), states=states)


def texts(mapping: Mapping[str, str | int]) -> dict[str, str]:
    """Return the texts in a mapping of texts and numbers."""
    return {name: value for name, value in mapping.items() if isinstance(value, str)}


def numbers(mapping: Mapping[str, str | int]) -> dict[str, int]:
    """Return the numbers in a mapping of texts and numbers."""
    return {name: value for name, value in mapping.items() if isinstance(value, int)}


def read_mapping(text: Mapping[str, str], number: Mapping[str, int]) -> dict[str, str | int]:
    """Join texts and numbers into one mapping.

    Raises WireError for more than 64 entries, or a text of more than 4096 characters.
    """
    if len(text) + len(number) > _MAX_ENTRIES or any(
        len(part) > _MAX_TEXT for pair in text.items() for part in pair
    ):
        raise WireError(
            f"a record has more than {_MAX_ENTRIES} entries, or one of more than {_MAX_TEXT} characters;"
            " shorten the identity"
        )
    return joined(text, number)


def joined(text: Mapping[str, str], number: Mapping[str, int]) -> dict[str, str | int]:
    """Join texts and numbers into one mapping sorted by name, because protobuf's maps have any order."""
    both: dict[str, str | int] = {**text, **number}
    return dict(sorted(both.items()))
