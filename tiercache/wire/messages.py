"""Conversion between protobuf messages and the types of `tiercache.core`.

Values from the other end are checked here, once: each `read_...` returns sound values or raises WireError. `read_meta` is the
exception: a store checks its values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from tiercache.core import ObjectKey, ObjectMeta, Outcome, PoolName
from tiercache.errors import WireError
from tiercache.wire.v1 import storage_pb2 as pb

DIGEST_BYTES: Final = 64
CHECKSUM_BYTES: Final = 16
_MOST_TEXT: Final = 4096
_MOST_ENTRIES: Final = 64

_OUTCOMES: Final = (Outcome.HIT, Outcome.STORED, Outcome.MISS, Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR)
"""Outcomes in the order of their numbers on the wire, which begin at 1."""
NUMBER_OF: Final = {outcome: number for number, outcome in enumerate(_OUTCOMES, 1)}
"""Number of each outcome on the wire."""


def keys(items: Sequence[ObjectKey]) -> pb.Keys:
    """Encode object keys as columns."""
    pools = list(dict.fromkeys(key.pool for key in items))
    index = {pool: i for i, pool in enumerate(pools)}
    return pb.Keys(digests=b"".join([key.digest for key in items]), pools=pools, pool_of=bytes([index[key.pool] for key in items]))


def read_keys(message: pb.Keys, most: int) -> list[ObjectKey]:
    """Decode object keys. Raises WireError for more than `most` of them, or a malformed message."""
    digests, pool_of = message.digests, message.pool_of
    if len(digests) != DIGEST_BYTES * len(pool_of):
        raise WireError(
            f"{len(pool_of)} keys need {DIGEST_BYTES} bytes each and {len(digests)} came; this is not a tiercache client's message"
        )
    if len(pool_of) > most:
        raise WireError(f"a batch of {len(pool_of)} keys is beyond the limit of {most}; send it in parts")
    try:
        pools = [PoolName(name) for name in message.pools[:_MOST_ENTRIES]]
        return [
            ObjectKey(pools[pool], digests[at : at + DIGEST_BYTES])
            for pool, at in zip(pool_of, range(0, len(digests), DIGEST_BYTES), strict=True)
        ]
    except (ValueError, IndexError) as error:
        raise WireError(f"the pools of a batch of keys cannot be read ({error}); the other end may be newer") from error


def outcomes(items: Iterable[Outcome]) -> pb.OutcomesReply:
    """Encode outcomes in order."""
    message = pb.OutcomesReply()
    message.outcomes.extend([NUMBER_OF[outcome] for outcome in items])  # type: ignore[misc]  # an enum on the wire is an int
    return message


def read_outcome(number: int) -> Outcome:
    """Decode one outcome; a number that this version does not know is ERROR."""
    return _OUTCOMES[number - 1] if 1 <= number <= len(_OUTCOMES) else Outcome.ERROR


def read_outcomes(numbers: Sequence[int], expected: int) -> list[Outcome]:
    """Decode exactly `expected` outcomes; raises WireError for another number of them."""
    if len(numbers) != expected:
        raise WireError(f"{expected} outcomes were due and {len(numbers)} came; the other end does not keep to the protocol")
    return [read_outcome(number) for number in numbers]


def bits(flags: Sequence[bool]) -> bytes:
    """Encode flags, one bit each, lowest bit first."""
    return np.packbits(np.asarray(flags, np.bool_), bitorder="little").tobytes()


def read_bits(data: bytes, expected: int) -> list[bool]:
    """Decode exactly `expected` flags; raises WireError if `data` does not have the bytes for them."""
    if len(data) != -(-expected // 8):
        raise WireError(f"{expected} bits were due and {len(data)} bytes came; the other end does not keep to the protocol")
    flags: list[bool] = np.unpackbits(np.frombuffer(data, np.uint8), count=expected, bitorder="little").astype(np.bool_).tolist()
    return flags


def meta(item: ObjectMeta) -> pb.ObjectMeta:
    """Encode an object's description."""
    return pb.ObjectMeta(namespace=item.namespace, length=item.length, checksum=item.checksum, parent=item.parent, depth=item.depth)


def read_meta(message: pb.ObjectMeta) -> ObjectMeta:
    """Decode an object's description. Whether a store accepts it is checked by the store (`storage.base.storable`)."""
    return ObjectMeta(
        namespace=message.namespace,
        length=message.length,
        checksum=message.checksum,
        parent=message.parent if message.HasField("parent") else None,
        depth=message.depth if message.HasField("depth") else None,
    )


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
    """Join texts and numbers into one mapping. Raises WireError for more than 64 entries, or a text of more than 4096 characters."""
    if len(text) + len(number) > _MOST_ENTRIES or any(len(part) > _MOST_TEXT for pair in text.items() for part in pair):
        raise WireError(f"a record has more than {_MOST_ENTRIES} entries or one of more than {_MOST_TEXT} characters; that is no identity")
    return {**text, **number}
