"""Contract between the ranks that serve one model together, and what they tell each other.

`docs/ranks.md` has the rules for the author of an engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, cast

import msgpack

from tiercache.core import Reason
from tiercache.errors import InputError, WireError
from tiercache.keys import Shard

LEADER: Final = 0
"""Rank that counts the votes, and whose engine tells the others when a request begins."""
MAX_MESSAGE_BYTES: Final = 1 << 20
"""Maximum length of one message. A vote on a prompt of a million pages has 125 KiB."""
_MAX_FIELDS: Final = 64
"""Maximum number of fields of a message, and of pools in it."""


class RankGroup(Protocol):
    """Channel for messages between the ranks of one model.

    The caller guarantees:

    - every rank has its own number in [0, size), and all have the same `size`;
    - the engines of all ranks make the same calls of `admit` and `release` in the same order, with the same
      arguments.

    The implementation guarantees that no method waits for another rank, except `close`, which ends within a
    second. It may lose, repeat, delay and reorder messages; a lost message costs at most a miss.

    Thread safety: any thread may call `send`; the rest belongs to the owner's thread.
    """

    @property
    def rank(self) -> int:
        """Number of this rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def open(self, deliver: Callable[[bytes], None]) -> None:
        """Call `deliver` with each message for this rank from now on, on one thread of the group's own.

        Replaces the function of an earlier call.
        """

    def send(self, to: int, message: bytes) -> None:
        """Queue a message of up to `MAX_MESSAGE_BYTES` for rank `to`, and return at once.

        A message to a rank that is not there is lost.
        """

    def close(self) -> None:
        """End the threads of the group. A second call is harmless."""


class MessageKind(enum.IntEnum):
    """Kind of a message."""

    HELLO = 1
    """Follower to leader: who it is, and what it has been made with."""
    WELCOME = 2
    """Leader to follower: all ranks are there, and fit together."""
    REFUSED = 3
    """Leader to follower: the ranks do not fit together."""
    VOTE = 4
    """Follower to leader: what it can restore."""
    TARGET = 5
    """Leader to follower: what all ranks can restore, of which the deepest depth is to be fetched."""
    DECIDED = 6
    """Leader to follower: the depth at which all ranks begin the request."""
    AGAIN = 7
    """Leader to follower: a load has failed on some rank, and all vote again."""
    LOADED = 8
    """Follower to leader: everything is on the device."""


class Message(NamedTuple):
    """One message: its kind, the session to which it belongs, its sender, and the fields of the kind."""

    kind: MessageKind
    session: bytes
    sender: int
    fields: Sequence[Any]

    def pack(self) -> bytes:
        """Return the message as bytes."""
        packed = msgpack.packb([int(self.kind), self.session, self.sender, list(self.fields)])
        return cast(bytes, packed)


def unpack(data: bytes) -> Message:
    """Return the message that `data` holds. Raises WireError for bytes that are no message."""
    try:
        # Without limits, nested arrays of a few KiB announce gigabytes, which are allocated.
        kind, session, sender, fields = msgpack.unpackb(
            data, max_array_len=_MAX_FIELDS, max_map_len=_MAX_FIELDS, max_ext_len=0
        )
        message = Message(MessageKind(kind), session, sender, fields)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise WireError(f"a rank sent {len(data)} bytes that are no message: {error}") from None
    if not isinstance(session, bytes) or not isinstance(sender, int) or not isinstance(fields, list):
        raise WireError(f"a rank sent a message of kind {kind} with fields of wrong types")
    return message


def pack_depths(mask: int) -> bytes:
    """Return a set of depths as bytes. Bit d - 1 of `mask` stands for a depth of d pages."""
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def unpack_depths(data: bytes) -> int:
    """Return the set of depths that `pack_depths` has packed."""
    return int.from_bytes(data, "little")


class Decision(NamedTuple):
    """Depth, in pages, at which all ranks begin a request, and why it is not deeper."""

    depth: int
    reason: Reason = Reason.NONE
    is_refused: bool = False
    """Whether a rank could not admit the request, so that no rank begins it."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Facts that the ranks of a group must have in common, as one rank says them."""

    size: int
    """Number of ranks."""
    page_size: int
    namespace: bytes
    pools: Mapping[str, tuple[Shard, bytes]]
    """Shard that the rank holds of each pool, and the fingerprint of the pool's geometry."""

    def fields(self) -> list[Any]:
        """Return the facts as fields of a message."""
        pools = {name: [shard.rank, shard.size, print_] for name, (shard, print_) in self.pools.items()}
        return [self.size, self.page_size, self.namespace, pools]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> RankFacts:
        """Return the facts in the fields of a message. Raises WireError for fields that are none."""
        try:
            size, page_size, namespace, pools = fields
            shards = {str(name): (Shard(r, n), print_) for name, (r, n, print_) in pools.items()}
            if not all(isinstance(one, bytes) for one in (namespace, *(p for _, p in shards.values()))):
                raise TypeError("a namespace or a fingerprint is not of bytes")
            if not all(isinstance(one, int) for one in (size, page_size)):
                raise TypeError("a size is no integer")
            return cls(size, page_size, namespace, shards)
        except (ValueError, TypeError, AttributeError) as error:
            raise WireError(f"a rank sent facts that cannot be read: {error}") from None


def check_rank(rank: int, size: int) -> None:
    """Raise InputError for a group or a rank that is not possible."""
    if size < 1:
        raise InputError(f"a group of {size} ranks is not possible; use 1 or more")
    if not 0 <= rank < size:
        raise InputError(f"rank {rank} is outside the group of {size}; ranks go from 0 to {size - 1}")


def sizes_differ(ranks: Mapping[int, RankFacts]) -> str:
    """Return in one sentence why these ranks can never be all of one group; empty if they can."""
    size = ranks[LEADER].size
    for rank, facts in sorted(ranks.items()):
        if rank >= size:
            return f"rank {rank} is outside the group of {size} that rank 0 knows; give all the same size"
        if facts.size != size:
            return (
                f"rank {rank} was made for {facts.size} ranks and rank 0 for {size}; give all the same number"
            )
    return ""


def find_difference(ranks: Mapping[int, RankFacts]) -> str:
    """Return in one sentence why these ranks cannot work together; empty if they can.

    Some ranks may be missing.
    """
    leader = ranks[LEADER]
    if trouble := sizes_differ(ranks):
        return trouble
    for rank, facts in sorted(ranks.items()):
        if facts.page_size != leader.page_size:
            return f"rank {rank} has pages of {facts.page_size} tokens and rank 0 of {leader.page_size}"
        if facts.namespace != leader.namespace:
            return (
                f"rank {rank} has another namespace than rank 0; give all ranks the same identity (model,"
                " revision, dtypes, quantisation, tenant and salt)"
            )
        if set(facts.pools) != set(leader.pools):
            pools, others = (", ".join(sorted(each.pools)) for each in (facts, leader))
            return f"rank {rank} has the pools {pools} and rank 0 {others}; give all ranks the same"
    return next(filter(None, (_shards_differ(pool, ranks) for pool in leader.pools)), "")


def _shards_differ(pool: str, ranks: Mapping[int, RankFacts]) -> str:
    size, shards = ranks[LEADER].size, ranks[LEADER].pools[pool][0].size
    holders: dict[int, int] = {}
    for rank, facts in sorted(ranks.items()):
        shard, fingerprint = facts.pools[pool]
        if shard.size != shards:
            return (
                f"pool {pool} has {shard.size} shards on rank {rank} and {shards} on rank 0; give all ranks"
                " the same number"
            )
        first = holders.setdefault(shard.rank, rank)
        if fingerprint != ranks[first].pools[pool][1]:
            return (
                f"ranks {first} and {rank} hold the same part ({shard}) of pool {pool} in different"
                " geometries; make layers, shapes and dtypes equal"
            )
    counts = [sum(f.pools[pool][0].rank == part for f in ranks.values()) for part in range(shards)]
    if len(ranks) < size:
        return ""
    if size % shards or any(count * shards != size for count in counts):
        return (
            f"{size} ranks cannot hold the {shards} shards of pool {pool} evenly; their counts by shard are"
            f" {', '.join(map(str, counts))}"
        )
    return ""


def writers(ranks: Mapping[int, RankFacts], rank: int) -> list[str]:
    """Return the pools of which `rank` writes objects to storage: it is the first that holds its shard."""
    return [
        pool
        for pool, (shard, _) in ranks[rank].pools.items()
        if rank == min(other for other, facts in ranks.items() if facts.pools[pool][0] == shard)
    ]
